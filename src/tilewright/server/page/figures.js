// Makes the line below an answer: its speed, and the share of the machine's limit.

import { element } from "./dom.js";

export function figuresNode(figures) {
  const items = [];
  const add = (text, title) => items.push(element("span", { title }, text));
  if (figures.time_to_first_token_s !== undefined) {
    add(
      `${seconds(figures.time_to_first_token_s)} to first token`,
      "From the question to the first token: waiting and reading the prompt",
    );
  }
  if (figures.tokens_per_s !== undefined) add(`${rate(figures.tokens_per_s)} tokens/s`, "After the first token");
  if (figures.num_tokens !== undefined)
    add(`${figures.num_tokens} token${figures.num_tokens === 1 ? "" : "s"}`, "Of this answer");
  if (figures.bandwidth_share !== undefined) {
    const title =
      "Bytes of weights, keys and values read per second while this answer was written, as a share of the read bandwidth " +
      "measured when the server started. Small models are read from the caches and may pass 100 %.";
    add(`${percent(figures.bandwidth_share)} of the machine’s memory bandwidth`, title);
  }
  return items.length ? element("p", { class: "figures" }, ...items) : null;
}

function seconds(value) {
  return value < 0.0995 ? `${Math.max(1, Math.round(value * 1000))} ms` : `${value.toFixed(value < 9.95 ? 2 : 0)} s`;
}

function rate(value) {
  return value.toFixed(value < 9.95 ? 1 : 0);
}

function percent(share) {
  return share < 0.0095 ? "<1 %" : `${Math.round(share * 100)} %`;
}
