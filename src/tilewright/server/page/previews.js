// Files shown small: in the question being written with a button that takes them out, in the conversation without.

import { KINDS } from "./attachments.js";
import { element, icon, iconButton } from "./dom.js";

// A node for one file; it is filled when the file has been read.
export function previewNode(attachment, store, onRemove = null) {
  const node = element("div", { class: `preview ${attachment.kind}` });
  store.url(attachment.id).then((url) => {
    node.prepend(url ? KINDS[attachment.kind].preview(url, attachment.name) : missing(attachment));
    if (url && !onRemove && attachment.kind === "video") node.querySelector("video").controls = true;
  });
  if (onRemove) node.append(iconButton("close", `Remove ${attachment.name}`, onRemove));
  return node;
}

function missing({ name }) {
  return element("span", { class: "missing" }, icon("picture"), `${name} is no longer kept`);
}
