// Fetches one answer: streams it, waits and retries after passing errors, and can be stopped.

import { ApiError, Unreachable } from "./api.js";

const MAX_WAIT_S = 120;
const MAX_REPEATS = 3; // automatic retries; after that there is a button
// The engine may have crashed because of the request: such a request is repeated only once. The pattern matches the
// error of remote.py.
const MAX_REPEATS_OF_LOST = 1;
const WAS_LOST = /send the request again/;

export class Answering {
  // `request` resolves to the body; `onChange` is called whenever `answer` changes. `speaker` receives its sound.
  // `mend(error)` returns whether it has changed the next request, so that a retry may succeed; `explain(error)`
  // returns the error to show.
  constructor({ api, connection, answer, request, onChange, speaker, mend, explain }) {
    Object.assign(this, { api, connection, answer, request, onChange, speaker, mend, explain });
    this.controller = new AbortController();
    this.numRepeats = 0;
  }

  stop() {
    this.controller.abort();
    this.speaker.stop();
  }

  // Resolves when the answer is complete, stopped or failed, as its status says.
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
    this.speaker.reset();
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
      if (choice?.delta.audio?.data) this.speaker.add(choice.delta.audio.data);
      if (choice?.finish_reason === "length") answer.isCut = true;
      if (chunk.usage)
        answer.figures = { ...answer.figures, ...chunk.timings, num_tokens: chunk.usage.completion_tokens };
    }
  }

  // Waits after a passing error if no part of the answer has arrived; otherwise ends with the error.
  async canTryAgain(error) {
    const { answer } = this;
    if (!answer.text && !answer.reasoning && this.mend(error)) return true;
    const back = error instanceof Unreachable ? this.connection.lost(error.message) : null;
    const isPassing = back || (error instanceof ApiError && error.retryAfterS);
    const limit = error.isMidAnswer || WAS_LOST.test(error.message) ? MAX_REPEATS_OF_LOST : MAX_REPEATS;
    if (!isPassing || answer.text || answer.reasoning || this.numRepeats >= limit) {
      answer.error = this.explain(error);
      this.end("failed");
      return false;
    }
    if (back) {
      this.wait({ message: error.message });
      await Promise.race([back, this.whenStopped()]);
    } else {
      await this.countDown(error);
    }
    this.numRepeats += 1;
    return this.goesOn();
  }

  // Waits for the time that the server asks for, twice as long at each repetition.
  async countDown(error) {
    const waitS = Math.min(error.retryAfterS * 2 ** this.numRepeats, MAX_WAIT_S);
    const endsAt = performance.now() + waitS * 1000;
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
