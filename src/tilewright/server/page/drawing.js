// One image being made: its place in the queue, its steps and previews as they arrive, and its end.

export class Drawing {
  // `onChange` is called whenever something has changed.
  constructor({ api, body, onChange }) {
    Object.assign(this, { api, body, onChange });
    this.controller = new AbortController();
    this.numBefore = null; // requests before it in the queue, while it waits
    this.step = 0;
    this.numSteps = null; // null: not begun
    this.preview = null; // a data: URL
    this.error = null;
  }

  stop() {
    this.controller.abort();
  }

  // Resolves to the images, { blob, settings, timings } each; null if it was stopped, or failed with `error`.
  async run() {
    const images = [];
    try {
      for await (const event of this.api.drawing(this.body, this.controller.signal)) {
        this.see(event, images);
        this.onChange();
      }
    } catch (error) {
      if (!this.controller.signal.aborted) this.error = error.message;
      return null;
    }
    return images;
  }

  see(event, images) {
    if (event.type === "image_generation.progress") {
      this.numBefore = event.num_before ?? null;
      this.step = event.step ?? 0;
      this.numSteps = event.num_steps ?? null;
    } else if (event.type === "image_generation.partial_image") {
      this.preview = `data:image/${event.output_format};base64,${event.b64_json}`;
    } else if (event.type === "image_generation.completed") {
      const blob = blobOf(event.b64_json, `image/${event.output_format}`);
      images.push({ blob, settings: event.settings, timings: event.timings });
    }
  }

  // The current state as text.
  get state() {
    if (this.numSteps !== null) {
      return this.step < this.numSteps ? `Step ${this.step + 1} of ${this.numSteps}` : "Finishing";
    }
    if (this.numBefore) return `Waiting: ${this.numBefore} ${this.numBefore === 1 ? "image" : "images"} before it`;
    return "Starting";
  }
}

function blobOf(base64, type) {
  return new Blob([Uint8Array.from(atob(base64), (character) => character.charCodeAt(0))], { type });
}
