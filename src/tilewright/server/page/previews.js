// Shows small previews of files: in the editor with a button that removes them, in the conversation without.

import { KINDS } from "./attachments.js";
import { element, icon, iconButton } from "./dom.js";

// Returns a node for one file, which is filled when the file is read.
export function previewNode(attachment, store, onRemove = null) {
  const node = element("div", { class: `preview ${attachment.kind}` });
  store.url(attachment.id).then((url) => {
    if (!url) {
      node.prepend(named(`${attachment.name} is no longer kept`));
      return;
    }
    const shown = KINDS[attachment.kind].preview(url, attachment.name);
    shown.controls = !onRemove || attachment.kind === "audio"; // there is nothing to see of a sound but these
    // This browser cannot show the file, but the server may be able to read it.
    shown.addEventListener("error", () => shown.replaceWith(named(attachment.name)));
    node.prepend(shown);
  });
  if (onRemove) node.append(iconButton("close", `Remove ${attachment.name}`, onRemove));
  return node;
}

// Returns a node for a file that is still being read.
export function unreadNode(name) {
  return element("div", { class: "preview unread", role: "status" }, named(`Reading ${name || "a file"}…`));
}

function named(text) {
  return element("span", { class: "named" }, icon("image"), text);
}
