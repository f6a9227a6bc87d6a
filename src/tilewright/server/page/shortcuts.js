// Keyboard shortcuts of the whole page, and their list.

import { openDialog } from "./dialogs.js";
import { element } from "./dom.js";

const isMac = /Mac|iPhone|iPad/.test(navigator.platform);
const MODIFIER = isMac ? "⌘" : "Ctrl";

const KEYS = [
  ["Enter", "Send"],
  ["Shift Enter", "New line"],
  ["Esc", "Stop the answer"],
  ["↑", "Edit the last question, from an empty one"],
  [`${MODIFIER} Shift O`, "New conversation"],
  [`${MODIFIER} ,`, "Settings"],
  ["/", "Go to the question"],
  ["?", "This list"],
];

export function openShortcuts() {
  return openDialog("Keys", (body) => {
    const rows = KEYS.map(([keys, does]) =>
      element(
        "div",
        {},
        element("dt", {}, ...keys.split(" ").map((key) => element("kbd", {}, key))),
        element("dd", {}, does),
      ),
    );
    body.append(element("dl", { class: "keys" }, ...rows));
  });
}

// `does` has newConversation, stop, focusQuestion and settings.
export function listenForKeys(does) {
  document.addEventListener("keydown", (event) => {
    const hasModifier = event.ctrlKey || event.metaKey;
    const isWriting = event.target.closest?.("input, textarea, select, [contenteditable]");
    if (document.querySelector("dialog[open]")) return;
    let action = null;
    if (hasModifier && event.shiftKey && event.key.toLowerCase() === "o") action = does.newConversation;
    else if (hasModifier && event.key === ",") action = does.settings;
    else if (event.key === "Escape" && !event.isComposing) action = does.stop;
    else if (event.key === "?" && !isWriting) action = openShortcuts;
    else if (event.key === "/" && !isWriting && !hasModifier) action = does.focusQuestion;
    if (action && action() !== false) event.preventDefault();
  });
}
