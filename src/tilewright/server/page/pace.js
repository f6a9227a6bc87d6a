// Draws what changes, at most once a frame. What takes long to draw is drawn less often: a long list or table is made
// anew as a whole, and would take all of the browser's time.

const MAX_SHARE = 0.2; // of the time, once drawing takes longer than a frame may; painting comes on top
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
