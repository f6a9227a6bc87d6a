// Sends requests to this server, with the API key if it needs one, and turns failures into errors in plain words.
// Addresses are relative, since a proxy may add a prefix.

import { eventsOf } from "./event_stream.js";
import { tabValues } from "./small_values.js";

const KEY = "tilewright-api-key";
const POSSIBLE_KEY = /^[\x20-\x7e]+$/; // characters allowed in a header
const BROKE_OFF = "The connection was lost in mid-answer.";

export class ApiError extends Error {
  // `code` is OpenAI's error code, if any.
  constructor(status, message, { retryAfterS = null, code = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
    this.code = code;
  }
}

// The server did not answer, or (`isMidAnswer`) the connection was lost during the answer.
export class Unreachable extends Error {
  constructor(message, isMidAnswer = false) {
    super(message);
    this.isMidAnswer = isMidAnswer;
  }
}

// Returns the problem of a key that the user entered; null if it is valid.
export function keyProblem(key) {
  return POSSIBLE_KEY.test(key) ? null : "A key has letters, digits and signs of ASCII only.";
}

export class Api {
  // `askForKey` asks the user, and resolves to a key or null.
  constructor(askForKey) {
    this.askForKey = askForKey;
    this.asking = null;
    this.wantsKey = this.key() !== null; // the server is known to need one
  }

  async models() {
    return (await (await this.request("v1/models")).json()).data;
  }

  // Resolves if the server would answer a request now. No key is needed.
  async health() {
    const response = await reach("health", { cache: "no-store" });
    if (!response.ok) throw await apiError(response);
  }

  // Yields the events of an image while it is made.
  async *drawing(body, signal) {
    const response = await this.post("v1/images/generations", body, signal);
    let isComplete = false;
    try {
      for await (const data of eventsOf(response)) {
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(500, event.error.message);
        isComplete ||= event.type.endsWith(".completed");
        yield event;
      }
    } catch (error) {
      throw error instanceof TypeError ? new Unreachable(BROKE_OFF, true) : error;
    }
    if (!isComplete) throw new Unreachable(BROKE_OFF, true);
  }

  post(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    return this.request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  // Yields the chunks of an answer as they arrive.
  async *chat(body, signal) {
    const response = await this.post("v1/chat/completions", body, signal);
    try {
      for await (const data of eventsOf(response)) {
        if (data === "[DONE]") return; // errors of the connection after this do not matter
        const chunk = JSON.parse(data);
        if (chunk.error) {
          const { code, message } = chunk.error;
          throw new ApiError(code === "engine_unavailable" ? 503 : 500, message, { code });
        }
        yield chunk;
      }
    } catch (error) {
      throw error instanceof TypeError ? new Unreachable(BROKE_OFF, true) : error;
    }
    throw new Unreachable(BROKE_OFF, true);
  }

  async request(path, options = {}) {
    for (;;) {
      const key = this.key();
      const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
      const response = await reach(path, { ...options, headers: new Headers(headers), cache: "no-store" });
      if (response.ok) return response;
      if (response.status === 401) this.wantsKey = true;
      if (response.status !== 401 || !(await this.renewKey(key))) throw await apiError(response);
    }
  }

  // Returns the key of this tab, or null.
  key() {
    const key = tabValues.get(KEY);
    return key && !keyProblem(key) ? key : null;
  }

  // Resolves to whether there is a key to try other than the refused one. Concurrent requests ask the user once.
  async renewKey(refused) {
    return this.key() !== refused || this.changeKey(refused !== null);
  }

  // Asks for a key and keeps it for this tab; resolves to whether the user entered one.
  async changeKey(wasRefused) {
    this.asking ??= this.askForKey(wasRefused).finally(() => (this.asking = null));
    const key = await this.asking;
    if (key) tabValues.set(KEY, key);
    return Boolean(key);
  }
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new Unreachable("The server cannot be reached.");
  }
}

async function apiError(response) {
  const wait = Number(response.headers.get("retry-after"));
  let message = `The server answered with status ${response.status}.`;
  let code = null;
  try {
    const body = await response.json();
    message = body.error?.message ?? body.reason ?? message;
    code = body.error?.code ?? null;
  } catch {
    // The body is not this server's, for example a proxy's page: show the status.
  }
  return new ApiError(response.status, message, { retryAfterS: wait > 0 ? wait : null, code });
}
