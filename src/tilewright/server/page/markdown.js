// Renders Markdown as DOM nodes, block by block while its text arrives. docs/page.md lists the supported syntax.

import { copyButton, element } from "./dom.js";
import { blocksOf, cellsOf, fenceParts, headingParts, listParts, quoteText } from "./markdown_blocks.js";
import { appendInline } from "./markdown_inline.js";

const MAX_DEPTH = 8; // of nested lists and quotes; deeper ones are text

// A view of a growing text. Blocks that can no longer change are kept; the last one is made again.
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.isPlain = false; // true after an error: the text is shown as it is
    this.settled = 0; // offset of the first block that may still change
    this.tail = []; // nodes of the blocks from there on
    this.code = null; // the open fence at the end of the text, from `openFence`
  }

  update(text) {
    try {
      if (!this.isPlain) this.draw(text);
    } catch (error) {
      console.error("This answer is shown as it is written, its Markdown could not be:", error);
      this.isPlain = true;
      this.root.classList.add("plain");
    }
    if (this.isPlain) this.root.textContent = text;
  }

  draw(text) {
    if (this.growCode(text)) return;
    const blocks = blocksOf(text, this.settled);
    const nodes = blocks.map((block) => blockNode(block, 0));
    this.tail.forEach((node) => node.remove());
    appendAll(this.root, nodes);
    const numOpen = isUnsure(blocks, text) ? 2 : 1;
    this.tail = nodes.slice(-numOpen);
    if (blocks.length) this.settled = blocks[Math.max(0, blocks.length - numOpen)].start;
    this.code = openFence(blocks, nodes, text);
  }

  // Within a long fence only its text is updated, until a line looks like its end.
  growCode(text) {
    if (!this.code || /^[ \t]*(?:``|~~)/m.test(text.slice(this.code.line))) return false;
    this.code.node.data = text.slice(this.code.begin);
    this.code.line = text.lastIndexOf("\n") + 1;
    return true;
  }

  finish(text) {
    this.code = null;
    this.update(text);
    this.code = null;
  }
}

// Returns whether the last block may still become part of the previous one, since its deciding line is incomplete.
function isUnsure(blocks, text) {
  const last = blocks[blocks.length - 1];
  const beginsInLastLine = last && last.start > text.lastIndexOf("\n");
  return beginsInLastLine || (last?.kind === "table" && last.lines.length === 2);
}

// Returns the open fence at the end of the text: its text node, and the offsets of its text and its last line.
function openFence(blocks, nodes, text) {
  const last = blocks[blocks.length - 1];
  if (last?.kind !== "fence" || fenceParts(last.lines).isClosed || /^\s/.test(last.lines[0])) return null;
  const begin = text.indexOf("\n", last.start) + 1;
  if (begin === 0) return null; // its first line is incomplete
  const node = document.createTextNode(text.slice(begin));
  nodes[nodes.length - 1].querySelector("code").replaceChildren(node);
  return { node, begin, line: text.lastIndexOf("\n") + 1 };
}

export function renderMarkdown(root, text) {
  root.replaceChildren();
  new MarkdownView(root).finish(text);
}

function blockNode({ kind, lines }, depth) {
  return NODES[kind](lines, depth);
}

// One by one: tens of thousands of nodes as arguments of one call would overflow the stack.
function appendAll(parent, nodes) {
  for (const node of nodes) parent.append(node);
  return parent;
}

function appendBlocks(parent, text, depth) {
  if (depth >= MAX_DEPTH) parent.append(text);
  else for (const block of blocksOf(text)) parent.append(blockNode(block, depth));
}

function withInline(tag, text, properties) {
  const node = element(tag, properties);
  appendInline(node, text);
  return node;
}

const NODES = {
  paragraph: (lines) => withInline("p", lines.join("\n").trim()),
  rule: () => element("hr"),
  heading(lines) {
    const { level, text } = headingParts(lines[0]);
    // The page has headings of its own: an answer's begin at the third level.
    return withInline(`h${Math.min(6, level + 2)}`, text, { class: `heading-${level}` });
  },
  fence(lines) {
    const { language, text } = fenceParts(lines);
    const code = element("code", {}, text);
    const head = element(
      "figcaption",
      {},
      element("span", {}, language || "text"),
      copyButton(() => code.textContent, "Copy code"),
    );
    // Focusable, so that wide content can be scrolled with keys.
    return element(
      "figure",
      { class: "code" },
      head,
      element("pre", { tabindex: "0", role: "region", "aria-label": `Code, ${language || "text"}` }, code),
    );
  },
  quote(lines, depth) {
    const node = element("blockquote");
    appendBlocks(node, quoteText(lines), depth + 1);
    return node;
  },
  list(lines, depth) {
    const { isOrdered, first, isLoose, items } = listParts(lines);
    const list = element(isOrdered ? "ol" : "ul", {
      start: isOrdered && first !== 1 ? first : null,
      class: isLoose ? "loose" : null,
    });
    for (const text of items) {
      const item = element("li");
      appendBlocks(item, text, depth + 1);
      list.append(item);
    }
    return list;
  },
  table(lines) {
    const sides = cellsOf(lines[1]).map((rule) =>
      rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "end") : null,
    );
    const row = (line, tag) => {
      const cells = cellsOf(line).slice(0, sides.length);
      return appendAll(
        element("tr"),
        cells.map((cell, column) => withInline(tag, cell, { class: sides[column] && `to-${sides[column]}` })),
      );
    };
    const head = element("thead", {}, row(lines[0], "th"));
    const rows = lines.slice(2).map((line) => row(line, "td"));
    const body = appendAll(element("tbody"), rows);
    return element(
      "div",
      { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
      element("table", {}, head, body),
    );
  },
};
