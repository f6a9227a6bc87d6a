// Files shown small: in the question being written with a button that takes them out, in the conversation without.

import { KINDS } from "./attachments.js";
import { element, icon, iconButton } from "./dom.js";

// A node for one file; it is filled when the file has been read.
export function previewNode(attachment, store, onRemove = null) {
  const node = element("div", { class: `preview ${attachment.kind}` });
  store.url(attachment.id).then((url) => {
    if (!url) {
      node.prepend(named(`${attachment.name} is no longer kept`));
      return;
    }
    const shown = KINDS[attachment.kind].preview(url, attachment.name);
    shown.controls = !onRemove || attachment.kind === "audio"; // there is nothing to see of a sound but these
    // A kind of file that this browser cannot show, but the server perhaps can read.
    shown.addEventListener("error", () => shown.replaceWith(named(attachment.name)));
    node.prepend(shown);
  });
  if (onRemove) node.append(iconButton("close", `Remove ${attachment.name}`, onRemove));
  return node;
}

// A node for a file that is still being read.
export function unreadNode(name) {
  return element("div", { class: "preview unread", role: "status" }, named(`Reading ${name || "a file"}…`));
}

function named(text) {
  return element("span", { class: "named" }, icon("picture"), text);
}
