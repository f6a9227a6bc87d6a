// Tracks whether the server answers. It is polled only after a failure, until it answers again.

import { ApiError } from "./api.js";

const PAUSES_MS = [500, 1000, 2000, 4000]; // between polls; the last pause repeats

export class Connection {
  // `onChange` receives the problem, or null when there is none.
  constructor(api, onChange) {
    this.api = api;
    this.onChange = onChange;
    this.back = null; // resolves when the server answers again
  }

  // Reports that the server did not answer; resolves when it answers again.
  lost(reason) {
    this.back ??= this.wait(reason);
    return this.back;
  }

  async wait(reason) {
    this.onChange(reason);
    for (let attempt = 0; ; attempt += 1) {
      await new Promise((resolve) => setTimeout(resolve, PAUSES_MS[Math.min(attempt, PAUSES_MS.length - 1)]));
      try {
        await this.api.health();
        break;
      } catch (error) {
        this.onChange(error instanceof ApiError ? `The server is not ready: ${error.message}` : error.message);
      }
    }
    this.back = null;
    this.onChange(null);
  }
}
