// Makes DOM elements: text is always text, never markup.

const SVG = "http://www.w3.org/2000/svg";

// element("button", { class: "plain", onclick: send, "aria-label": "Send" }, "text", node, ...)
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// Returns an icon of the sprite in index.html, hidden from screen readers.
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

// Returns a button with only an icon; `label` is its name and its tooltip.
export function iconButton(name, label, onclick, properties = {}) {
  return element(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...properties },
    icon(name),
  );
}

export function byId(id) {
  return document.getElementById(id);
}

// Copies a text, through a selection if the page may not use the clipboard (plain http from another machine).
export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const holder = element("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  holder.value = text;
  document.body.append(holder);
  holder.select();
  const isCopied = document.execCommand("copy");
  holder.remove();
  if (!isCopied) throw new Error("the browser did not copy");
}

// Returns a button that copies the result of `text()` and confirms it briefly.
export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    let said = "Copied";
    try {
      await copyText(text());
      button.replaceChildren(icon("check"));
    } catch {
      said = "The browser did not allow copying";
    }
    button.setAttribute("aria-label", said);
    button.title = said;
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", label);
      button.title = label;
    }, 1600);
  });
  return button;
}
