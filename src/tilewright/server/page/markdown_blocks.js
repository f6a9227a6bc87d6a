// Splits Markdown into blocks. Each line is read once, in order.

const MAX_RULE = 200; // characters of a line of dashes
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:([ \t]+)|$)/;

// Returns the lines of `source` from `start` on: [{ text, start, end }], without line feeds.
function linesOf(source, start) {
  const lines = [];
  while (start < source.length) {
    let end = source.indexOf("\n", start);
    if (end < 0) end = source.length;
    lines.push({ text: source.slice(start, source[end - 1] === "\r" ? end - 1 : end), start, end });
    start = end + 1;
  }
  return lines;
}

const isBlank = (line) => line.text.trim() === "";

function isRule(text) {
  if (text.length > MAX_RULE) return false;
  const bare = text.replace(/[ \t]/g, "");
  return bare.length >= 3 && "-*_".includes(bare[0]) && bare === bare[0].repeat(bare.length);
}

export function cellsOf(text) {
  const cells = [];
  let cell = "";
  for (let index = 0; index < text.length; index += 1) {
    if (text[index] === "\\" && text[index + 1] === "|") {
      cell += "|";
      index += 1;
    } else if (text[index] === "|") {
      cells.push(cell);
      cell = "";
    } else {
      cell += text[index];
    }
  }
  cells.push(cell);
  if (cells.length > 1 && cells[0].trim() === "") cells.shift();
  if (cells.length > 1 && cells[cells.length - 1].trim() === "") cells.pop();
  return cells.map((one) => one.trim());
}

function isTable(lines, index) {
  const next = lines[index + 1];
  if (!next || !lines[index].text.includes("|") || !/^[ \t|:-]+$/.test(next.text) || !next.text.includes("-"))
    return false;
  const rules = cellsOf(next.text);
  return rules.every((rule) => /^:?-+:?$/.test(rule)) && rules.length === cellsOf(lines[index].text).length;
}

// Returns the kind of block that begins with a line; "paragraph" if no other kind does.
function kindAt(lines, index) {
  const { text } = lines[index];
  if (FENCE.test(text)) return "fence";
  if (HEADING.test(text)) return "heading";
  if (isRule(text)) return "rule";
  if (QUOTE.test(text)) return "quote";
  if (ITEM.test(text)) return "list";
  return isTable(lines, index) ? "table" : "paragraph";
}

// Returns whether a line ends the paragraph before it. A number other than 1, or an empty item, is text.
function interrupts(lines, index) {
  const kind = kindAt(lines, index);
  if (kind !== "list") return kind !== "paragraph";
  const [whole, , marker, gap] = ITEM.exec(lines[index].text);
  return Boolean(gap) && lines[index].text.length > whole.length && (!/\d/.test(marker) || /^1[.)]$/.test(marker));
}

const ENDS = {
  heading: (lines, index) => index + 1,
  rule: (lines, index) => index + 1,
  fence(lines, index) {
    const mark = FENCE.exec(lines[index].text)[1];
    const close = new RegExp(`^ {0,3}${mark[0] === "~" ? "~" : "`"}{${mark.length},}[ \\t]*$`);
    for (let end = index + 1; end < lines.length; end += 1) if (close.test(lines[end].text)) return end + 1;
    return lines.length;
  },
  quote(lines, index) {
    let end = index + 1;
    while (end < lines.length && !isBlank(lines[end]) && (QUOTE.test(lines[end].text) || !interrupts(lines, end)))
      end += 1;
    return end;
  },
  table(lines, index) {
    let end = index + 2;
    while (end < lines.length && !isBlank(lines[end]) && lines[end].text.includes("|")) end += 1;
    return end;
  },
  paragraph(lines, index) {
    let end = index + 1;
    while (end < lines.length && !isBlank(lines[end]) && !interrupts(lines, end)) end += 1;
    return end;
  },
  list(lines, index) {
    const first = itemAt(lines[index]);
    let end = index + 1;
    for (let next = end; next < lines.length; next += 1) {
      if (isBlank(lines[next])) continue;
      const item = itemAt(lines[next]);
      const goesOn =
        indentOf(lines[next].text) >= first.width ||
        (item ? item.family === first.family && !isRule(lines[next].text) : next === end && !interrupts(lines, next));
      if (!goesOn) break;
      end = next + 1;
    }
    return end;
  },
};

function indentOf(text) {
  return text.length - text.trimStart().length;
}

// Returns the indentation of a list item's text and the family of its marker; null for other lines.
function itemAt(line) {
  const match = ITEM.exec(line.text);
  if (!match) return null;
  const [, indent, marker, gap = " "] = match;
  const width = indent.length + marker.length + (gap.length > 4 ? 1 : gap.length);
  return { width, marker, family: /\d/.test(marker) ? marker.at(-1) : marker };
}

// Returns the blocks of a text from an offset on: [{ kind, lines, start }], without blank lines.
export function blocksOf(source, start = 0) {
  const lines = linesOf(source, start);
  const blocks = [];
  for (let index = 0; index < lines.length;) {
    if (isBlank(lines[index])) {
      index += 1;
      continue;
    }
    const kind = kindAt(lines, index);
    const end = ENDS[kind](lines, index);
    blocks.push({ kind, lines: lines.slice(index, end).map((line) => line.text), start: lines[index].start });
    index = end;
  }
  return blocks;
}

// Returns { language, text, isClosed } of a fence's lines.
export function fenceParts(lines) {
  const [, mark, info] = FENCE.exec(lines[0]);
  const last = lines[lines.length - 1].trim();
  const isClosed = lines.length > 1 && last.length >= mark.length && last === mark[0].repeat(last.length);
  const indent = indentOf(lines[0]);
  const body = lines.slice(1, isClosed ? -1 : undefined).map((line) => line.slice(Math.min(indent, indentOf(line))));
  return { language: info.trim().split(/\s/)[0], text: body.join("\n"), isClosed };
}

export function headingParts(line) {
  const level = HEADING.exec(line)[1].length;
  return {
    level,
    text: line
      .trim()
      .slice(level)
      .replace(/[ \t]#+[ \t]*$/, "")
      .trim(),
  };
}

export function quoteText(lines) {
  return lines.map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n");
}

// Returns { isOrdered, first, isLoose, items: [text] } of a list's lines.
export function listParts(lines) {
  const items = [];
  const head = itemAt({ text: lines[0] });
  let current = head;
  let isLoose = false;
  let afterBlank = false;
  for (const text of lines) {
    const isEmpty = text.trim() === "";
    const item = isEmpty || indentOf(text) >= current.width ? null : itemAt({ text });
    if (item && item.family === head.family) {
      current = item;
      items.push([text.slice(item.width)]);
      isLoose ||= afterBlank;
    } else {
      items[items.length - 1].push(text.slice(Math.min(current.width, indentOf(text))));
    }
    afterBlank = isEmpty;
  }
  const isOrdered = /\d/.test(head.marker);
  return {
    isOrdered,
    first: isOrdered ? parseInt(head.marker, 10) : 1,
    isLoose,
    items: items.map((one) => one.join("\n").trimEnd()),
  };
}
