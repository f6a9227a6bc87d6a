// The sound of one answer: played as it comes, and kept as a file.

import { randomId } from "./ids.js";
import { wavBlob } from "./wav.js";

const RATE = 24_000; // of the samples that come
const LEAD_S = 0.15; // before the first piece, so that the next ones are there in time

export class Speaker {
  constructor() {
    this.context = null;
    this.reset();
  }

  // Forgets what came: the answer begins anew.
  reset() {
    this.stop();
    this.isSilent = false;
    this.pieces = [];
    this.endsAt = 0; // by the context's clock
  }

  // The next samples, base64 of 16-bit ones.
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

  // Silence, at once and from now on.
  stop() {
    this.isSilent = true;
    this.context?.close();
    this.context = null;
  }

  // { attachment, blob } of all that came; null if nothing did.
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
