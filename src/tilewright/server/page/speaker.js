// The sound of one answer: played as it arrives, and collected as a file.

import { randomId } from "./ids.js";
import { wavBlob } from "./wav.js";

const RATE = 24_000; // sample rate of the server
const LEAD_S = 0.15; // before the first piece, so that the next ones arrive in time

export class Speaker {
  constructor() {
    this.context = null;
    this.reset();
  }

  // Drops all samples: the answer starts again.
  reset() {
    this.stop();
    this.isSilent = false;
    this.pieces = [];
    this.endsAt = 0; // by the context's clock
  }

  // Appends 16-bit samples, in base64.
  add(data) {
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    const samples = new Int16Array(bytes.buffer);
    if (!samples.length) return;
    this.pieces.push(samples);
    if (!this.isSilent) this.play(samples);
  }

  play(samples) {
    this.context ??= new AudioContext();
    const buffer = this.context.createBuffer(1, samples.length, RATE);
    buffer.copyToChannel(Float32Array.from(samples, (one) => one / 32768), 0);
    const source = this.context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.context.destination);
    const startsAt = Math.max(this.endsAt, this.context.currentTime + (this.endsAt ? 0 : LEAD_S));
    source.start(startsAt);
    this.endsAt = startsAt + buffer.duration;
  }

  // Stops playing, now and for later samples.
  stop() {
    this.isSilent = true;
    this.context?.close();
    this.context = null;
  }

  // Returns { attachment, blob } of all samples; null if there are none.
  file() {
    if (!this.pieces.length) return null;
    const whole = new Int16Array(this.pieces.reduce((sum, piece) => sum + piece.length, 0));
    let offset = 0;
    for (const piece of this.pieces) {
      whole.set(piece, offset);
      offset += piece.length;
    }
    const blob = wavBlob(whole, RATE);
    const attachment = { id: randomId(), kind: "audio", name: "answer.wav", type: blob.type, sizeBytes: blob.size };
    return { attachment, blob };
  }
}
