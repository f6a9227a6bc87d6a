// Renders a line of Markdown as DOM nodes: emphasis, code, links. Time is linear in its length for any content.

import { element, icon } from "./dom.js";

const MAX_DEPTH = 24; // of nested emphasis
const MAX_URL = 2000;
const MAX_PARENTHESES = 32; // nested, in a link's address
const PUNCTUATION = /[\p{P}\p{S}]/u;
const ESCAPABLE = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";
const SPECIAL = /[\\`*_~[\]!<&\nh]/g;
const BARE_URL = /https?:\/\/[^\s<>"`]{1,2000}/y;
const ANGLE_URL = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|(amp|lt|gt|quot|apos|nbsp|copy|hellip|ndash|mdash));/y;
const ENTITIES = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  copy: "\u00a9",
  hellip: "\u2026",
  ndash: "\u2013",
  mdash: "\u2014",
};

// Returns a link's allowed address, or null: other schemes could run scripts, and addresses without one would lead to
// this server.
export function safeUrl(text) {
  let url;
  try {
    url = new URL(text);
  } catch {
    return null;
  }
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

export function link(url, ...children) {
  return element("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

// Appends the nodes of `source` to `parent`.
export function appendInline(parent, source) {
  build(parent, new Scanner(source).pieces());
}

// Splits a text into { text }, { node }, { run } of emphasis, { bracket } that may begin a link, { url, inner }.
class Scanner {
  constructor(source) {
    this.source = source;
    this.position = 0;
    this.out = [];
    this.plain = "";
    this.brackets = []; // indices in `out` of open brackets
    this.ticks = null; // offsets of runs of backticks by length, found on first use
  }

  pieces() {
    const { source } = this;
    while (this.position < source.length) {
      SPECIAL.lastIndex = this.position;
      const found = SPECIAL.exec(source);
      const next = found ? found.index : source.length;
      this.plain += source.slice(this.position, next);
      this.position = next;
      if (found) this.special(found[0]);
    }
    this.flush();
    emphasise(this.out);
    return this.out;
  }

  special(character) {
    if (character === "\\") this.escape();
    else if (character === "`") this.code();
    else if (character === "*" || character === "_" || character === "~") this.run(character);
    else if (character === "[") this.open(1, false);
    else if (character === "!") this.source[this.position + 1] === "[" ? this.open(2, true) : this.take(1);
    else if (character === "]") this.close();
    else if (character === "\n") this.lineBreak();
    else if (character === "&") this.entity();
    else this.url(character);
  }

  take(count) {
    this.plain += this.source.slice(this.position, this.position + count);
    this.position += count;
  }

  flush() {
    if (this.plain) this.out.push({ text: this.plain });
    this.plain = "";
  }

  add(piece, length) {
    this.flush();
    this.out.push(piece);
    this.position += length;
  }

  escape() {
    const next = this.source[this.position + 1];
    if (next === "\n") {
      this.position += 1;
    } else if (next && ESCAPABLE.includes(next)) {
      this.plain += next;
      this.position += 2;
    } else {
      this.take(1);
    }
  }

  lineBreak() {
    this.plain = this.plain.trimEnd();
    this.add({ node: element("br") }, 1);
    while (this.source[this.position] === " ") this.position += 1;
  }

  code() {
    const { source, position } = this;
    const length = runLength(source, position);
    const end = this.ticksOfLength(length).after(position + length);
    if (end === undefined) {
      this.take(length);
      return;
    }
    let text = source.slice(position + length, end).replaceAll("\n", " ");
    if (text.startsWith(" ") && text.endsWith(" ") && text.trim()) text = text.slice(1, -1);
    this.add({ node: element("code", {}, text) }, end + length - position);
  }

  ticksOfLength(length) {
    if (this.ticks === null) {
      this.ticks = new Map();
      for (const match of this.source.matchAll(/`+/g)) {
        const size = match[0].length;
        if (!this.ticks.has(size)) this.ticks.set(size, new Places());
        this.ticks.get(size).items.push(match.index);
      }
    }
    return this.ticks.get(length) ?? new Places();
  }

  run(character) {
    const { source, position } = this;
    const length = runLength(source, position);
    if (character === "~" && length !== 2) {
      this.take(length);
      return;
    }
    const before = characterBefore(source, position);
    const after = source.slice(position + length, position + length + 2);
    const leftFlanking = /^\S/.test(after) && (!startsPunctuation(after) || isBorder(before));
    const rightFlanking = /\S/.test(before) && (!PUNCTUATION.test(before) || isBorder(after));
    const isWordy = character === "_";
    const piece = {
      run: character,
      left: length, // its characters that belong to no pair
      canOpen: leftFlanking && (!isWordy || !rightFlanking || PUNCTUATION.test(before)),
      canClose: rightFlanking && (!isWordy || !leftFlanking || startsPunctuation(after)),
      opens: [],
      closes: [],
    };
    this.add(piece, length);
  }

  open(length, isImage) {
    this.flush();
    this.brackets.push(this.out.length);
    this.add({ bracket: this.source.substr(this.position, length), isImage }, length);
  }

  close() {
    const start = this.brackets.pop();
    const target = start === undefined ? null : destination(this.source, this.position + 1);
    if (!target) {
      this.take(1);
      return;
    }
    this.flush();
    const { isImage } = this.out[start];
    const inner = this.out.splice(start).slice(1);
    emphasise(inner);
    // An image contains text only, and a link no link, so that nesting is bounded.
    const plain = isImage && plainText(inner);
    const content = isImage ? (plain ? [{ text: plain }] : []) : inner;
    this.out.push({ url: safeUrl(target.url), isImage, inner: content, written: target.url });
    this.position = target.end;
    if (!isImage) this.brackets = [];
  }

  entity() {
    ENTITY.lastIndex = this.position;
    const match = ENTITY.exec(this.source);
    if (!match) {
      this.take(1);
      return;
    }
    const code = match[1] ? Number(match[1]) : match[2] ? parseInt(match[2], 16) : null;
    const isCharacter = code === null || (code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code < 0xe000));
    this.plain += code === null ? ENTITIES[match[3]] : isCharacter ? String.fromCodePoint(code) : "\ufffd";
    this.position += match[0].length;
  }

  url(character) {
    const pattern = character === "<" ? ANGLE_URL : BARE_URL;
    const isWithinWord = character !== "<" && /[\p{L}\p{N}]/u.test(characterBefore(this.source, this.position));
    pattern.lastIndex = this.position;
    const match = isWithinWord ? null : pattern.exec(this.source);
    const text = match && (character === "<" ? match[1] : withoutTail(match[0]));
    const url = text && safeUrl(text);
    if (!url) {
      this.take(1);
      return;
    }
    this.add({ node: link(url, text) }, character === "<" ? match[0].length : text.length);
  }
}

// Ascending numbers, queried with ascending bounds.
class Places {
  constructor() {
    this.items = [];
    this.next = 0;
  }

  after(bound) {
    while (this.next < this.items.length && this.items[this.next] < bound) this.next += 1;
    return this.items[this.next];
  }
}

function runLength(source, position) {
  let end = position;
  while (source[end] === source[position]) end += 1;
  return end - position;
}

function characterBefore(source, position) {
  const code = source.codePointAt(position - 2);
  return position > 1 && code > 0xffff ? String.fromCodePoint(code) : (source[position - 1] ?? "");
}

function startsPunctuation(text) {
  const code = text.codePointAt(0);
  return code !== undefined && PUNCTUATION.test(String.fromCodePoint(code));
}

function isBorder(text) {
  return text === "" || /^\s/.test(text) || startsPunctuation(text);
}

// The end of a sentence is not part of an address, nor is a bracket that was opened before it.
function withoutTail(url) {
  let end = url.length;
  let numUnopened = url.split(")").length - url.split("(").length;
  for (; ; end -= 1) {
    const last = url[end - 1];
    if (last === ")" && numUnopened > 0) numUnopened -= 1;
    else if (!".,:;!?'*_~]".includes(last)) return url.slice(0, end);
  }
}

// Returns { url, end } of the parentheses at `start`, or null.
function destination(source, start) {
  if (source[start] !== "(") return null;
  let position = start + 1;
  const limit = Math.min(source.length, position + MAX_URL);
  const isAngled = source[position] === "<";
  if (isAngled) position += 1;
  const begin = position;
  for (let depth = 0; position < limit; position += 1) {
    const character = source[position];
    if (isAngled ? character === ">" || character === "\n" : /\s/.test(character)) break;
    if (!isAngled && character === ")" && depth-- === 0) break;
    if (!isAngled && character === "(" && ++depth > MAX_PARENTHESES) return null;
    if (character === "<") return null;
  }
  const url = source.slice(begin, position);
  if (isAngled) {
    if (source[position] !== ">") return null;
    position += 1;
  }
  const end = /\s{0,20}(?:"[^"\n]{0,500}"|'[^'\n]{0,500}')?\s{0,20}\)/y;
  end.lastIndex = position;
  return end.test(source) ? { url, end: end.lastIndex } : null;
}

// Pairs the runs of * _ ~~ in `pieces`: each gets the tags that begin after it and end before it.
function emphasise(pieces) {
  const openers = [];
  const bottoms = {}; // below these there is no opener of a character, so that each is read once
  for (const closer of pieces) {
    if (!closer.run) continue;
    while (closer.canClose && closer.left > 0) {
      let index = openers.length - 1;
      const bottom = bottoms[closer.run] ?? 0;
      while (index >= bottom && openers[index].run !== closer.run) index -= 1;
      if (index < bottom) {
        bottoms[closer.run] = openers.length;
        break;
      }
      const opener = openers[index];
      openers.length = index + 1;
      const width = closer.run === "~" || (opener.left > 1 && closer.left > 1) ? 2 : 1;
      const tag = closer.run === "~" ? "del" : width === 2 ? "strong" : "em";
      opener.opens.unshift(tag);
      closer.closes.push(tag);
      opener.left -= width;
      closer.left -= width;
      if (opener.left === 0) openers.pop();
      for (const character of Object.keys(bottoms)) bottoms[character] = Math.min(bottoms[character], openers.length);
    }
    if (closer.canOpen && closer.left > 0) openers.push(closer);
  }
}

// Returns the text of pieces without their marks.
function plainText(pieces) {
  let text = "";
  for (const piece of pieces) {
    if (piece.inner) text += plainText(piece.inner);
    else if (piece.run) text += piece.run.repeat(piece.left);
    else text += piece.text ?? piece.bracket ?? piece.node.textContent;
  }
  return text;
}

function build(parent, pieces) {
  const path = [parent];
  let text = ""; // collected, so that a thousand unmatched brackets are one node
  const top = () => path[path.length - 1];
  const flush = () => {
    if (text) top().append(text);
    text = "";
  };
  for (const piece of pieces) {
    if (piece.text ?? piece.bracket) {
      text += piece.text ?? piece.bracket;
      continue;
    }
    if (!piece.run || piece.closes.length || piece.opens.length) flush();
    if (piece.node) top().append(piece.node);
    else if (piece.inner) appendLink(top(), piece);
    else {
      path.length -= piece.closes.length;
      text += piece.run.repeat(piece.left);
      if (piece.opens.length) flush();
      for (const tag of piece.opens) {
        const node = path.length < MAX_DEPTH ? element(tag) : top();
        if (node !== top()) top().append(node);
        path.push(node);
      }
    }
  }
  flush();
}

// An image is shown as a link: loading it would tell its owner that it was read.
function appendLink(parent, { url, isImage, inner, written }) {
  const node = url ? link(url) : element("span", { class: "dead-link", title: "This link leads nowhere safe" });
  if (isImage) node.append(icon("image"), " ");
  build(node, inner);
  if (!node.textContent.trim()) node.append(written || "link");
  parent.append(node);
}
