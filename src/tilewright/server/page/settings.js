// The sampling settings; an empty field means the server's default. Stored in localStorage.

import { actions, button, openDialog } from "./dialogs.js";
import { element } from "./dom.js";
import { lastingValues } from "./small_values.js";

const KEY = "tilewright-settings";
const MAX_STOPS = 32; // and the characters of one: the server's limits
const MAX_STOP_LENGTH = 1024;

const between = (low, high) => (value) => (value >= low && value <= high ? null : `expected ${low} to ${high}`);
const wholeFrom = (low) => (value) =>
  Number.isSafeInteger(value) && value >= low ? null : `expected a whole number, ${low} or more`;

function checkStops(stops) {
  const isShort = stops.every((stop) => stop.length <= MAX_STOP_LENGTH);
  return isShort && stops.length <= MAX_STOPS
    ? null
    : `expected at most ${MAX_STOPS} lines of ${MAX_STOP_LENGTH} characters`;
}

// The label, input and request value of each field.
const FIELDS = [
  {
    name: "system",
    label: "System prompt",
    hint: "System message, sent before the conversation",
    rows: 3,
    read: (text) => text,
  },
  {
    name: "temperature",
    label: "Temperature",
    hint: "0 takes the likeliest token, 2 is wild",
    check: between(0, 2),
    read: Number,
  },
  {
    name: "top_p",
    label: "Top p",
    hint: "Likeliest tokens up to this probability, 0 to 1",
    check: between(0, 1),
    read: Number,
  },
  {
    name: "top_k",
    label: "Top k",
    hint: "This many of the likeliest tokens; 0: all",
    check: wholeFrom(0),
    read: Number,
  },
  { name: "max_tokens", label: "Longest answer", hint: "In tokens", check: wholeFrom(1), read: Number },
  {
    name: "seed",
    label: "Seed",
    hint: "The same seed gives the same answer",
    check: (value) => (Number.isSafeInteger(value) ? null : "expected a whole number"),
    read: Number,
  },
  {
    name: "stop",
    label: "Stop at",
    hint: `Texts that end an answer, one per line, at most ${MAX_STOPS}`,
    rows: 2,
    check: checkStops,
    read: (text) => text.split("\n").filter(Boolean),
  },
];

// Returns the texts of the fields, by name.
function written() {
  try {
    return JSON.parse(lastingValues.get(KEY)) ?? {};
  } catch {
    return {};
  }
}

// Returns the request's fields that are filled in; `system` is the system prompt.
export function currentSettings() {
  const texts = written();
  const filled = FIELDS.filter(({ name }) => texts[name]?.trim());
  return Object.fromEntries(filled.map(({ name, read }) => [name, read(texts[name])]));
}

export function openSettings(onChange) {
  return openDialog(
    "Settings",
    (body, close) => {
      const texts = written();
      const rows = FIELDS.map((field) => new FieldRow(field, texts[field.name] ?? ""));
      const clear = () => rows.forEach((row) => row.set(""));
      const save = () => {
        const wrong = rows.filter((row) => !row.check());
        if (wrong.length) {
          wrong[0].input.focus();
          return;
        }
        lastingValues.set(
          KEY,
          JSON.stringify(Object.fromEntries(rows.map((row) => [row.field.name, row.input.value]))),
        );
        onChange();
        close();
      };
      body.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" || event.target.localName !== "input") return;
        event.preventDefault();
        save();
      });
      body.append(
        element("p", { class: "hint" }, "What is left empty is up to the server and the model."),
        element("div", { class: "fields" }, ...rows.map((row) => row.node)),
        actions(
          button("Defaults", clear),
          element("span", { class: "grow" }),
          button("Cancel", () => close()),
          button("Save", save, "primary"),
        ),
      );
    },
    { class: "wide" },
  );
}

class FieldRow {
  constructor(field, text) {
    this.field = field;
    const { name, label, hint, rows } = field;
    const described = { id: `field-${name}`, name, "aria-describedby": `hint-${name} wrong-${name}` };
    this.input = element(
      rows ? "textarea" : "input",
      rows
        ? { ...described, rows }
        : { ...described, inputmode: "decimal", autocomplete: "off", placeholder: "default" },
    );
    this.input.value = text;
    this.input.addEventListener("input", () => this.check());
    this.wrong = element("span", { class: "wrong", id: `wrong-${name}`, role: "alert" });
    this.node = element(
      "div",
      { class: rows ? "field tall" : "field" },
      element("label", { for: `field-${name}` }, label),
      this.input,
      element("span", { class: "hint", id: `hint-${name}` }, hint),
      this.wrong,
    );
  }

  set(text) {
    this.input.value = text;
    this.check();
  }

  // Returns whether the text is valid; if not, the row shows the reason.
  check() {
    const { field, input } = this;
    const text = input.value.trim();
    const problem = text && field.check ? field.check(field.read(text)) : null;
    this.wrong.textContent = problem ? `${field.label} is ${text.slice(0, 40)}, ${problem}` : "";
    input.setAttribute("aria-invalid", String(Boolean(problem)));
    return !problem;
  }
}
