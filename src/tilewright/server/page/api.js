// Requests to this server, with the API key where it wants one, and errors in plain words. Addresses are relative: a
// proxy may give the server a prefix.

import { eventsOf } from "./event_stream.js";

const KEY = "tilewright-api-key"; // in sessionStorage: gone with the tab

export class ApiError extends Error {
  constructor(status, message, retryAfterS = null) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

// Nobody answered, or the answer broke off.
export class Unreachable extends Error {}

export class Api {
  // `askForKey` asks the user, and resolves to a key or null.
  constructor(askForKey) {
    this.askForKey = askForKey;
    this.asking = null;
  }

  async models() {
    return (await (await this.request("v1/models")).json()).data;
  }

  // Resolves if the server would answer a request now.
  async health() {
    await this.request("health");
  }

  // The chunks of an answer as they come.
  async *chat(body, signal) {
    const options = {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    };
    const response = await this.request("v1/chat/completions", options);
    let isComplete = false;
    try {
      for await (const data of eventsOf(response)) {
        if (data === "[DONE]") {
          isComplete = true;
          continue;
        }
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.code === "engine_unavailable" ? 503 : 500, chunk.error.message);
        yield chunk;
      }
    } catch (error) {
      throw error instanceof TypeError ? new Unreachable("The connection was lost in mid-answer.") : error;
    }
    if (!isComplete) throw new Unreachable("The connection was lost in mid-answer.");
  }

  async request(path, options = {}) {
    for (;;) {
      const key = sessionStorage.getItem(KEY);
      const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
      let response;
      try {
        response = await fetch(path, { ...options, headers, cache: "no-store" });
      } catch (error) {
        throw error.name === "AbortError" ? error : new Unreachable("The server cannot be reached.");
      }
      if (response.ok) return response;
      if (response.status !== 401 || !(await this.renewKey(key))) throw await apiError(response);
    }
  }

  // Whether there is another key to try than the one that was refused. Several requests ask the user once.
  async renewKey(refused) {
    if (sessionStorage.getItem(KEY) !== refused) return true;
    this.asking ??= this.askForKey(refused !== null).finally(() => (this.asking = null));
    const key = await this.asking;
    if (!key) return false;
    sessionStorage.setItem(KEY, key);
    return true;
  }
}

async function apiError(response) {
  const wait = Number(response.headers.get("retry-after"));
  let message = `The server answered with status ${response.status}.`;
  try {
    const body = await response.json();
    message = body.error?.message ?? body.reason ?? message;
  } catch {
    // Not of this server's making, such as a proxy's page: the status says it.
  }
  return new ApiError(response.status, message, wait > 0 ? wait : null);
}
