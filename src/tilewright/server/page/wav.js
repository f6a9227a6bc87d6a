// Makes WAV files.

const HEADER_BYTES = 44;

// Returns a WAV Blob of mono 16-bit samples (an Int16Array), `rate` per second.
export function wavBlob(samples, rate) {
  const header = new DataView(new ArrayBuffer(HEADER_BYTES));
  const text = (offset, letters) => [...letters].forEach((one, i) => header.setUint8(offset + i, one.charCodeAt(0)));
  text(0, "RIFF");
  header.setUint32(4, HEADER_BYTES - 8 + samples.byteLength, true);
  text(8, "WAVEfmt ");
  header.setUint32(16, 16, true); // bytes of the format that follows: PCM, one channel
  header.setUint16(20, 1, true);
  header.setUint16(22, 1, true);
  header.setUint32(24, rate, true);
  header.setUint32(28, 2 * rate, true);
  header.setUint16(32, 2, true);
  header.setUint16(34, 16, true);
  text(36, "data");
  header.setUint32(40, samples.byteLength, true);
  return new Blob([header, samples], { type: "audio/wav" });
}

// Converts samples in [-1, 1] to 16 bits.
export function toInt16(samples) {
  return Int16Array.from(samples, (one) => Math.round(Math.max(-1, Math.min(1, one)) * 32767));
}
