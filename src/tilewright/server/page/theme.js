// Switches between light, dark and the system's theme.

import { element, icon } from "./dom.js";
import { lastingValues } from "./small_values.js";

const NEXT = { system: "light", light: "dark", dark: "system" };
const LABELS = { system: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
const ICONS = { system: "theme", light: "sun", dark: "moon" };

export function themeButton() {
  const root = document.documentElement;
  const button = element("button", {
    type: "button",
    class: "quiet row",
    onclick: () => set(NEXT[root.dataset.theme]),
  });
  const set = (theme) => {
    root.dataset.theme = theme;
    lastingValues.set("tilewright-theme", theme);
    button.replaceChildren(icon(ICONS[theme]), LABELS[theme]);
  };
  set(root.dataset.theme in NEXT ? root.dataset.theme : "system");
  return button;
}
