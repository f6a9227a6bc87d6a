// One answer being fetched: streamed, waited for, tried again where that is of use, stopped.

import { ApiError, Unreachable } from "./api.js";

const MAX_WAIT_S = 120;

export class Answering {
  // `request` resolves to the body; `onChange` is called whenever `answer` has changed.
  constructor({ api, connection, answer, request, onChange }) {
    Object.assign(this, { api, connection, answer, request, onChange });
    this.controller = new AbortController();
  }

  stop() {
    this.controller.abort();
  }

  // Resolves when the answer is complete, stopped or failed; its status says which.
  async run() {
    for (;;) {
      try {
        await this.stream();
        this.end("complete");
        return;
      } catch (error) {
        if (this.controller.signal.aborted) {
          this.end("stopped");
          return;
        }
        if (!(await this.canTryAgain(error))) return;
      }
    }
  }

  async stream() {
    const { answer } = this;
    const body = await this.request();
    const began = performance.now();
    Object.assign(answer, { status: "asking", error: null });
    this.onChange();
    for await (const chunk of this.api.chat(body, this.controller.signal)) {
      const choice = chunk.choices[0];
      const text = choice?.delta.content ?? "";
      const reasoning = choice?.delta.reasoning_content ?? "";
      if (text || reasoning) {
        answer.figures ??= { time_to_first_token_s: (performance.now() - began) / 1000 };
        answer.text += text;
        answer.reasoning += reasoning;
        answer.status = "streaming";
        this.onChange();
      }
      if (choice?.finish_reason === "length") answer.isCut = true;
      if (chunk.usage)
        answer.figures = { ...answer.figures, ...chunk.timings, num_tokens: chunk.usage.completion_tokens };
    }
  }

  // Waits if the error is one that passes, and nothing of the answer has come; otherwise ends with it.
  async canTryAgain(error) {
    const { answer } = this;
    const isGone = error instanceof Unreachable;
    const hasBegun = Boolean(answer.text || answer.reasoning);
    if (isGone) {
      const back = this.connection.lost(error.message);
      if (!hasBegun) {
        this.wait({ message: error.message });
        await Promise.race([back, this.whenStopped()]);
        return this.goesOn();
      }
    } else if (error instanceof ApiError && error.retryAfterS && !hasBegun) {
      await this.countDown(error);
      return this.goesOn();
    }
    answer.error = { message: error.message };
    this.end("failed");
    return false;
  }

  async countDown(error) {
    const endsAt = performance.now() + Math.min(error.retryAfterS, MAX_WAIT_S) * 1000;
    for (;;) {
      const leftS = Math.ceil((endsAt - performance.now()) / 1000);
      if (leftS <= 0 || this.controller.signal.aborted) return;
      this.wait({ message: error.message, retryInS: leftS });
      await Promise.race([new Promise((resolve) => setTimeout(resolve, 250)), this.whenStopped()]);
    }
  }

  whenStopped() {
    const { signal } = this.controller;
    if (signal.aborted) return Promise.resolve();
    return new Promise((resolve) => signal.addEventListener("abort", resolve, { once: true }));
  }

  goesOn() {
    if (this.controller.signal.aborted) this.end("stopped");
    return !this.controller.signal.aborted;
  }

  wait(error) {
    Object.assign(this.answer, { status: "waiting", error });
    this.onChange();
  }

  end(status) {
    this.answer.status = status;
    if (status !== "failed") this.answer.error = null;
    this.onChange();
  }
}
