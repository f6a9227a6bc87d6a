// Draws changes at most once per frame, and less often if drawing takes long: a long list or table is made again as a
// whole, and would take all of the browser's time.

const MAX_SHARE = 0.2; // of the time, if drawing takes longer than a frame; without painting
const FRAME_MS = 16;

export class Pace {
  constructor(draw) {
    this.draw = draw;
    this.isDue = false;
    this.pauseEndsMs = 0;
  }

  changed() {
    if (this.isDue) return;
    this.isDue = true;
    const pauseMs = this.pauseEndsMs - performance.now();
    if (pauseMs > 0) setTimeout(() => requestAnimationFrame(() => this.run()), pauseMs);
    else requestAnimationFrame(() => this.run());
  }

  run() {
    this.isDue = false;
    const beganMs = performance.now();
    this.draw();
    const tookMs = performance.now() - beganMs;
    this.pauseEndsMs = tookMs > FRAME_MS ? beganMs + tookMs / MAX_SHARE : 0;
  }
}
