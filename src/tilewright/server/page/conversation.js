// A conversation: its questions and answers, and the part of them that is sent to the model.

import { KINDS, kindsOf, sizeText } from "./attachments.js";
import { randomId } from "./ids.js";

const MAX_TITLE = 60;
const BODY_ROOM = 1 << 20; // bytes of a request beside its files
const FILE_CHARACTERS = 4000; // as long a text has about as many tokens as a file

export function newConversation() {
  return { id: randomId(), title: "", changedAt: Date.now(), messages: [] };
}

// Returns a placeholder while the browser loads a conversation; questions sent meanwhile belong to it.
export function comingConversation(id) {
  return { ...newConversation(), id, isComing: true };
}

// Returns whether the conversation is not empty, and so has an address and a draft of its own.
export function hasBegun({ messages, isComing }) {
  return Boolean(isComing || messages.length);
}

// isLeftOut of a question or an attachment: no longer sent with later questions.
export function newQuestion({ text, attachments }) {
  return { id: randomId(), role: "user", text, attachments };
}

// status: asking, streaming, waiting, complete, stopped, failed
export function newAnswer() {
  return { id: randomId(), role: "assistant", text: "", reasoning: "", status: "asking", error: null, figures: null };
}

export function isUnderWay({ status }) {
  return ["asking", "streaming", "waiting"].includes(status);
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.messages.find((message) => message.role === "user");
  const text = first?.text.trim().split("\n")[0] || first?.attachments[0]?.name || "New conversation";
  return text.length > MAX_TITLE ? `${text.slice(0, MAX_TITLE - 1).trimEnd()}…` : text;
}

// Returns the row of a conversation in the list.
export function titleRow(conversation) {
  return { id: conversation.id, title: titleOf(conversation), changedAt: conversation.changedAt };
}

export function attachmentsOf(messages) {
  return messages.flatMap((message) => message.attachments ?? []);
}

// Returns the merged messages of a conversation that two tabs changed: `mine` of this tab, `kept` in the store. `base`
// has the ids in the store when this tab last read it: ids missing in `mine` were removed here, in `kept` there.
export function mergedMessages(base, mine, kept, isOwn) {
  const here = new Map(mine.map((message) => [message.id, message]));
  const there = new Set(kept.map(({ id }) => id));
  const stay = kept.filter(({ id }) => here.has(id) || !base.has(id));
  return [
    ...stay.map((message) => (isOwn(here.get(message.id)) ? here.get(message.id) : message)),
    ...mine.filter(({ id }) => !there.has(id) && !base.has(id)),
  ];
}

// A request is too large for the server; the message is the reason.
export class NoRoom extends Error {}

// A file of the current question cannot be sent; the message is the reason.
export class FileProblem extends Error {
  constructor(message, attachment) {
    super(message);
    this.attachment = attachment;
  }
}

// Returns the questions with their answers: [{ question, answers }].
export function turnsOf(messages) {
  const turns = [];
  for (const message of messages) {
    if (message.role === "user") turns.push({ question: message, answers: [] });
    else turns.at(-1)?.answers.push(message);
  }
  return turns;
}

// Returns whether later questions omit a turn: it failed, there was no room for it, or it had only files that are left
// out.
export function isLeftOut({ question, answers }) {
  const isFailed = answers.length > 0 && answers.every(({ status, text }) => status === "failed" && !text);
  return Boolean(question.isLeftOut) || isFailed || isEmpty(question);
}

// Returns whether a question is empty without the files that are not sent.
function isEmpty({ text, attachments }) {
  return !text && attachments.length > 0 && attachments.every((one) => one.isLeftOut);
}

// Returns whether a question can be asked without one of its files.
export function canDoWithout({ text, attachments }, { id }) {
  return Boolean(text) || attachments.some((one) => one.id !== id && !one.isLeftOut);
}

// Returns the turns to send for the answer at `end`; the last is its own.
export function sentTurns({ messages }, end) {
  const turns = turnsOf(messages.slice(0, end));
  return turns.filter((turn, index) => index === turns.length - 1 || !isLeftOut(turn));
}

// Returns the oldest turns that make up at least a quarter of the whole; never the last one.
export function oldestTurns(turns) {
  const sizes = turns.map(({ question, answers }) =>
    [question, ...answers].reduce(
      (sum, { text }) => sum + text.length,
      1 + FILE_CHARACTERS * question.attachments.length,
    ),
  );
  const enough = sizes.reduce((sum, size) => sum + size, 0) / 4;
  let size = 0;
  const count = sizes.findIndex((one) => (size += one) >= enough) + 1;
  return turns.slice(0, Math.min(count, turns.length - 1));
}

// Returns { sent, unsent }: the turns' files as [{ attachment, blob }] in order, and the reasons why other files of
// earlier turns are not sent. Throws FileProblem for a file of the last turn. `file(id)` reads files.
export async function filesOf(turns, model, file) {
  const sent = [];
  const unsent = [];
  for (const turn of turns) {
    for (const attachment of turn.question.attachments.filter((one) => !one.isLeftOut)) {
      const isTaken = kindsOf(model).includes(attachment.kind);
      const blob = isTaken ? await file(attachment.id) : null;
      const why = isTaken
        ? "the browser does not keep it any more"
        : `${model.id} takes no ${KINDS[attachment.kind].noun}`;
      if (blob) sent.push({ attachment, blob });
      else if (turn === turns.at(-1)) throw new FileProblem(`${attachment.name} cannot be sent: ${why}.`, attachment);
      else unsent.push(`${attachment.name} is not sent: ${why}.`);
    }
  }
  return { sent, unsent };
}

// Throws NoRoom if the files exceed the server's limits for one request.
export function checkRoom(files, limits = {}) {
  const sizeBytes = files.reduce((sum, { blob }) => sum + blob.size, 0);
  const encodedBytes = files.reduce((sum, { blob }) => sum + Math.ceil(blob.size / 3) * 4, BODY_ROOM);
  const check = (what, value, limit, text) => {
    if (value > limit)
      throw new NoRoom(`The files of this conversation ${what} ${text(value)}, this server takes ${text(limit)}.`);
  };
  check("are", files.length, limits.max_media ?? Infinity, String);
  check("have", sizeBytes, limits.max_media_total_bytes ?? Infinity, sizeText);
  check("take in a request", encodedBytes, limits.max_body_bytes ?? Infinity, sizeText);
}

// Returns the messages of some turns in the server's form, with their files in `files`.
export async function requestMessages(turns, system, files) {
  const blobs = new Map(files.map(({ attachment, blob }) => [attachment.id, blob]));
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { question, answers } of turns) {
    const content = await questionContent(question, blobs);
    if (!content.length) continue; // it had only files
    messages.push({ role: "user", content });
    for (const { text } of answers) if (text) messages.push({ role: "assistant", content: text });
  }
  return messages;
}

async function questionContent({ text, attachments }, blobs) {
  const parts = [];
  for (const { id, kind } of attachments) {
    if (blobs.has(id)) parts.push(KINDS[kind].part(await dataUrl(blobs.get(id))));
  }
  if (!parts.length) return text;
  return text ? [...parts, { type: "text", text }] : parts;
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("A file could not be read."));
    reader.readAsDataURL(blob);
  });
}
