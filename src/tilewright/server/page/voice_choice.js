// The choice of the voice that speaks answers, if any, for models that speak. Stored in localStorage.

import { element } from "./dom.js";
import { lastingValues } from "./small_values.js";

const KEY = "tilewright-voice";
const SILENT = "";

export class VoiceChoice {
  constructor() {
    this.voices = [];
    this.node = element("select", { class: "voice", "aria-label": "Voice", title: "Voice", hidden: true });
    this.node.addEventListener("change", () => lastingValues.set(KEY, this.node.value));
  }

  // The voice of the next answer; null for text only.
  get voice() {
    return this.voices.includes(this.node.value) ? this.node.value : null;
  }

  show(voices) {
    this.voices = voices;
    this.node.hidden = !voices.length;
    const options = [[SILENT, "Text only"], ...voices.map((voice) => [voice, `Spoken by ${voice}`])];
    this.node.replaceChildren(...options.map(([value, label]) => element("option", { value }, label)));
    const kept = lastingValues.get(KEY);
    this.node.value = voices.includes(kept) ? kept : SILENT;
  }
}
