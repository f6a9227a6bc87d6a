// A conversation: questions and answers, and what of them is sent to the model.

import { KINDS } from "./attachments.js";
import { randomId } from "./ids.js";

const MAX_TITLE = 60;

export function newConversation() {
  return { id: randomId(), title: "", changedAt: Date.now(), messages: [] };
}

// A placeholder while the browser loads a conversation: what is written and sent meanwhile goes to it.
export function comingConversation(id) {
  return { ...newConversation(), id, isComing: true };
}

// Whether it is more than an empty one, and so has an address and a draft of its own.
export function hasBegun({ messages, isComing }) {
  return Boolean(isComing || messages.length);
}

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

// What the list of conversations shows of one.
export function titleRow(conversation) {
  return { id: conversation.id, title: titleOf(conversation), changedAt: conversation.changedAt };
}

// The files that are sent with a conversation; those of answers are not.
export function questionFiles({ messages }) {
  return attachmentsOf(messages.filter(({ role }) => role === "user"));
}

export function attachmentsOf(messages) {
  return messages.flatMap((message) => message.attachments ?? []);
}

// The messages of a conversation that two tabs changed: `mine` here, `kept` by both. `base` has the ids of those that
// were kept when this tab last looked: what it lacks now was taken out here, what `kept` lacks was taken out there.
export function mergedMessages(base, mine, kept, isOwn) {
  const here = new Map(mine.map((message) => [message.id, message]));
  const there = new Set(kept.map(({ id }) => id));
  const stay = kept.filter(({ id }) => here.has(id) || !base.has(id));
  return [
    ...stay.map((message) => (isOwn(here.get(message.id)) ? here.get(message.id) : message)),
    ...mine.filter(({ id }) => !there.has(id) && !base.has(id)),
  ];
}

// The messages as the server takes them, up to `end`. Files are read by `file(id)`.
export async function requestMessages(conversation, end, system, file) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const message of conversation.messages.slice(0, end)) {
    if (message.role === "user") messages.push({ role: "user", content: await questionContent(message, file) });
    else if (message.text) messages.push({ role: "assistant", content: message.text });
  }
  return messages;
}

async function questionContent({ text, attachments }, file) {
  if (!attachments.length) return text;
  const parts = [];
  for (const { id, kind, name } of attachments) {
    const blob = await file(id);
    if (!blob) throw new Error(`${name} is no longer kept by the browser. Edit the question to send it without.`);
    parts.push(KINDS[kind].part(await dataUrl(blob)));
  }
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

// How many bytes the files of a conversation have in a request, where three bytes take four characters.
export function encodedBytes(conversation) {
  return questionFiles(conversation).reduce((sum, { sizeBytes }) => sum + Math.ceil(sizeBytes / 3) * 4, 0);
}
