// The welcome of an empty conversation: the model, the kinds of files it accepts, and example questions.

import { kindsOf, nounsOf } from "./attachments.js";
import { element, icon } from "./dom.js";

const EMBEDDED = "tilewright-tiny-vl";
const SAMPLE = "page/sample.png";
const SAMPLE_QUESTION = "What's in this picture?";
const EXAMPLES = [
  { verb: "Explain", text: "Why is the sky blue, and sunsets red?" },
  { verb: "Write", text: "Write a haiku about rain on a tin roof." },
  { verb: "Compare", text: "Compare tea and coffee in a small table." },
];
// The embedded model knows little but drawings, so most examples are about one.
const EMBEDDED_EXAMPLES = [
  { verb: "Count", text: "How many shapes are there?", files: sampleFiles },
  { verb: "Read", text: "What does it say?", files: sampleFiles },
  { verb: "Ask", text: "What can you do?" },
];

// host: { ask({ text, files() }) } that resolves when it is asked, or cannot be
export function welcomeNode(model, host) {
  const node = element("section", { class: "welcome", "aria-label": "Begin" }, mark());
  if (!model) {
    node.append(
      element("h2", {}, "Tilewright"),
      element("p", { class: "lead" }, "Waiting for the server to tell its model…"),
    );
    return node;
  }
  const nouns = nounsOf(model);
  const takes = `Takes text${nouns ? `, ${nouns}` : " only"}`;
  const context = model.max_model_len ? `, ${model.max_model_len.toLocaleString("en")} tokens at most` : "";
  node.append(
    element("h2", {}, model.id),
    element("p", { class: "lead" }, `${takes}${context}. Nothing leaves your browser and this server.`),
  );
  if (model.id === EMBEDDED) {
    node.append(
      element(
        "p",
        { class: "tiny" },
        "This tiny model comes with Tilewright and knows drawn shapes, short words and bar charts, nothing of the world. For real answers, start ",
        element("code", {}, "tilewright serve Qwen/Qwen3-VL-2B-Instruct"),
        ".",
      ),
    );
  }
  const ask = async (asked) => {
    cards.forEach((one) => (one.disabled = true)); // a second click would ask twice
    await host.ask(asked);
    cards.forEach((one) => (one.disabled = false));
  };
  const examples = model.id === EMBEDDED ? EMBEDDED_EXAMPLES : EXAMPLES;
  const cards = examples.map(({ verb, text, files = async () => [] }) =>
    card(element("b", {}, verb), text, () => ask({ text, files })),
  );
  if (kindsOf(model).includes("image")) cards.unshift(sampleCard(ask));
  node.append(element("div", { class: "examples" }, ...cards));
  return node;
}

function card(head, text, onclick) {
  return element("button", { type: "button", class: "card", onclick }, head, element("span", {}, text));
}

async function sampleFiles() {
  const response = await fetch(SAMPLE);
  if (!response.ok) throw new Error(`the sample image was answered with status ${response.status}`);
  const blob = await response.blob();
  return [new File([blob], "sample.png", { type: blob.type })];
}

function sampleCard(ask) {
  const node = card(element("b", {}, "Try a sample image"), SAMPLE_QUESTION, () =>
    ask({ text: SAMPLE_QUESTION, files: sampleFiles }),
  );
  node.classList.add("sample");
  node.prepend(element("img", { src: SAMPLE, alt: "", width: 56, height: 56 }));
  return node;
}

function mark() {
  const node = icon("mark");
  node.classList.add("mark");
  return node;
}
