// The pane of a conversation: its messages, and the editor of the next question.

import { Answering } from "./answering.js";
import { Composer } from "./composer.js";
import {
  FileProblem,
  NoRoom,
  canDoWithout,
  checkRoom,
  filesOf,
  hasBegun,
  isLeftOut,
  isUnderWay,
  newAnswer,
  newConversation,
  newQuestion,
  oldestTurns,
  requestMessages,
  sentTurns,
  turnsOf,
} from "./conversation.js";
import { element, icon, iconButton } from "./dom.js";
import { AnswerView, QuestionView } from "./message_views.js";
import { Scroller } from "./scroller.js";
import { currentSettings } from "./settings.js";
import { Speaker } from "./speaker.js";
import { storageProblem } from "./store.js";
import { welcomeNode } from "./welcome.js";

const KEEP_EVERY_MS = 1000; // while an answer arrives
const MAX_ANNOUNCED = 2000;
const FULL = "context_length_exceeded"; // the server's code
const NAMED_FILE = /^(image|video|audio) (\d+)\b/; // a file in the server's errors: kind and number

export class ChatPane {
  // app: { api, connection, store, model(), announce(text), listChanged(), opened(conversation), gone(id) }
  constructor(app) {
    this.app = app;
    this.speaker = null; // of the last answer
    this.underWay = new Map(); // conversation id -> { conversation, answering, isDropped, keptAtMs }
    this.build();
    this.show(newConversation());
  }

  build() {
    const { app } = this;
    this.column = element("div", { class: "column", role: "log", "aria-live": "off", "aria-label": "Conversation" });
    this.scrolling = element("div", { class: "scrolling", tabindex: "-1" }, this.column);
    const jump = element(
      "button",
      { type: "button", class: "jump", hidden: true, "aria-label": "To the end" },
      icon("down"),
    );
    this.notice = element("div", { class: "notice", role: "alert", hidden: true });
    this.composer = new Composer({
      store: app.store,
      model: () => app.model(),
      tell: (text) => this.tell(text),
      failed: (error) => this.tell(storageProblem(error)),
      send: (question) => this.ask(question),
      stop: () => this.stop(),
      editLast: () => this.editLast(),
    });
    this.node = element(
      "div",
      { class: "chat" },
      this.scrolling,
      element("div", { class: "dock" }, jump, this.notice, this.composer.node),
    );
    this.scroller = new Scroller(this.scrolling, jump);
  }

  // Shows a conversation, with its draft.
  show(conversation) {
    this.composer.load(hasBegun(conversation) ? conversation.id : "new");
    this.showMessages(conversation);
  }

  // Shows a conversation and keeps the draft.
  showMessages(conversation) {
    this.conversation = this.underWay.get(conversation.id)?.conversation ?? conversation;
    settle(this.conversation, this.underWay.has(conversation.id));
    this.tell(null);
    this.views = new Map();
    this.column.replaceChildren();
    for (const message of this.conversation.messages) this.addView(message);
    this.changedMessages();
    this.composer.setBusy(this.isBusy);
    if (this.conversation.messages.length) this.scroller.toEnd();
    else this.scroller.toTop();
    this.composer.setHeld(Boolean(this.conversation.isComing));
  }

  // Replaces the messages from the first that differs from those of other tabs; keeps the draft.
  adopt(messages) {
    const { conversation } = this;
    settle({ messages }, false);
    const shown = conversation.messages;
    const isSame = (message, index) =>
      message.id === shown[index]?.id &&
      ["status", "text", "isLeftOut"].every((name) => message[name] === shown[index][name]);
    const numSame = messages.findIndex((message, index) => !isSame(message, index));
    if (numSame < 0 && messages.length === shown.length) return;
    this.removeFrom(numSame < 0 ? messages.length : numSame);
    for (const message of messages.slice(shown.length)) {
      shown.push(message);
      this.addView(message);
    }
    this.app.store.adopted(conversation);
    this.changedMessages();
    this.scroller.follow();
  }

  // Replaces the open conversation, which no longer exists, by an empty one with the same draft.
  replace() {
    if (this.composer.isEmpty) {
      this.show(newConversation());
      return;
    }
    this.composer.moveDraft("new");
    this.showMessages(newConversation());
  }

  get isBusy() {
    return this.underWay.has(this.conversation.id);
  }

  modelChanged() {
    this.composer.showModel();
    if (!hasBegun(this.conversation)) this.changedMessages();
  }

  // Shows a text above the question; null removes it.
  tell(text) {
    this.notice.hidden = !text;
    if (!text) return;
    const dismiss = iconButton("close", "Dismiss", () => this.tell(null));
    this.notice.replaceChildren(element("p", {}, text), dismiss);
  }

  focus() {
    if (!matchMedia("(pointer: coarse)").matches) this.composer.text.focus();
  }

  // Asks a question with the files of `files()`, in the conversation that is open now; keeps the draft.
  async askWith({ text, files }) {
    const { conversation } = this;
    let attachments;
    try {
      attachments = await this.composer.attach(await files());
    } catch (error) {
      this.tell(`This cannot be sent: ${error.message}`);
      return;
    }
    if (conversation !== this.conversation || conversation.messages.length) {
      await this.app.store.forgetFiles(attachments); // the user has moved on, or asked another question
      return;
    }
    this.ask({ text, attachments });
    this.focus();
  }

  ask(question) {
    const { conversation } = this;
    if (this.isBusy) return;
    const isNew = !conversation.messages.length;
    conversation.messages.push(newQuestion(question));
    this.addView(conversation.messages.at(-1));
    if (isNew) this.composer.moveDraft(conversation.id);
    this.answer();
    if (isNew) this.app.opened(conversation);
  }

  edit(message, text) {
    const index = this.conversation.messages.indexOf(message);
    if (this.isBusy || index < 0) return;
    this.removeFrom(index);
    this.ask({ text, attachments: message.attachments });
    this.focus();
  }

  editLast() {
    const last = this.conversation.messages.findLast((message) => message.role === "user");
    if (!last || this.isBusy) return false;
    this.views.get(last.id).edit();
    return true;
  }

  // Answers the question of an answer again: removes the last answer, or replaces a failed earlier one.
  retry(answer, shortens = false) {
    if (this.isBusy) return;
    const { messages } = this.conversation;
    const first = messages.findLastIndex((message) => message.role === "user") + 1;
    if (messages.indexOf(answer) >= first) {
      this.removeFrom(first);
      this.answer(null, shortens);
    } else {
      Object.assign(answer, { ...newAnswer(), id: answer.id });
      this.app.store.takeOver(answer);
      this.answer(answer, shortens);
    }
    this.focus();
  }

  // Repeats the question of a failed answer without a file.
  askWithout(answer, { id }) {
    if (this.isBusy) return;
    for (const message of this.conversation.messages) {
      const attachment = message.attachments?.find((one) => one.id === id);
      if (!attachment) continue;
      attachment.isLeftOut = true;
      this.app.store.takeOver(message);
      this.views.get(message.id).show();
    }
    this.retry(answer);
  }

  // Repeats the question of a failed answer without the oldest turns, until there is room.
  shorten(answer) {
    if (this.isBusy || !this.leaveOutOldest(this.conversation, answer)) return;
    this.retry(answer, true);
  }

  // Leaves out the oldest turns before an answer's question; returns whether there were any.
  leaveOutOldest(conversation, answer) {
    const oldest = oldestTurns(sentTurns(conversation, conversation.messages.indexOf(answer)));
    for (const { question } of oldest) {
      question.isLeftOut = true;
      this.app.store.takeOver(question);
    }
    return oldest.length > 0;
  }

  removeFrom(index) {
    for (const { id } of this.conversation.messages.splice(index)) {
      this.views.get(id).node.remove();
      this.views.delete(id);
    }
  }

  // Stops the running answer; returns false if there is none.
  stop() {
    const found = this.underWay.get(this.conversation.id);
    found?.answering.stop();
    return Boolean(found);
  }

  // Stops the running answer of a conversation that is being deleted, and stores no more of it.
  drop(id) {
    this.composer.dropReading(id);
    const found = this.underWay.get(id);
    if (!found) return;
    found.isDropped = true;
    found.answering.stop();
  }

  dropAll() {
    this.composer.dropReading();
    for (const id of [...this.underWay.keys()]) this.drop(id);
  }

  // Answers the last question, or replaces the failed answer `again`. With `shortens`, leaves out the oldest turns
  // until there is room.
  async answer(again = null, shortens = false) {
    const { conversation, app } = this;
    const answer = again ?? newAnswer();
    if (!again) {
      conversation.messages.push(answer);
      this.addView(answer);
    }
    const entry = { conversation, isDropped: false, keptAtMs: 0, files: [] };
    this.speaker?.stop(); // the previous answer may still be playing
    const speaker = (this.speaker = new Speaker());
    entry.answering = new Answering({
      api: app.api,
      connection: app.connection,
      answer,
      request: () => this.request(entry, conversation.messages.indexOf(answer)),
      onChange: () => this.answerChanged(entry, answer),
      mend: (error) => shortens && isFull(error) && this.leaveOutOldest(conversation, answer),
      explain: (error) => explanation(error, entry, answer),
      speaker,
    });
    this.underWay.set(conversation.id, entry);
    this.composer.setBusy(true);
    this.changedMessages();
    if (!again) this.scroller.toEnd();
    this.keep(entry, "asked");
    await entry.answering.run();
    if (!entry.isDropped) await this.keepSound(answer, speaker);
    // Busy until it is stored, which also returns changes of other tabs, before the next question.
    const messages = await this.keep(entry, "changed");
    this.underWay.delete(conversation.id);
    if (entry.isDropped || conversation !== this.conversation) return;
    if (messages) this.adopt(messages);
    this.composer.setBusy(false);
    this.changedMessages();
    this.announce(answer);
  }

  // Returns the body of a request; tells the user which files of earlier turns are not sent.
  async request(entry, end) {
    const { system, ...sampling } = currentSettings();
    const model = this.app.model();
    const turns = sentTurns(entry.conversation, end);
    const { sent, unsent } = await filesOf(turns, model, (id) => this.app.store.file(id));
    entry.files = sent.map(({ attachment }) => attachment);
    if (unsent.length && entry.conversation === this.conversation) this.tell(unsent.join(" "));
    checkRoom(sent, model.limits);
    const messages = await requestMessages(turns, system, sent);
    const { voice } = this.composer.voiceChoice;
    const spoken = voice ? { modalities: ["text", "audio"], audio: { voice, format: "pcm16" } } : {};
    return { model: model.id, messages, stream: true, stream_options: { include_usage: true }, ...sampling, ...spoken };
  }

  // Stores the speech of an answer for replay.
  async keepSound(answer, speaker) {
    const said = speaker.file();
    if (!said) return;
    try {
      await this.app.store.keepFile(said.attachment.id, said.blob);
      answer.attachments = [said.attachment];
    } catch (error) {
      this.tell(storageProblem(error));
    }
    this.views.get(answer.id)?.changed();
  }

  answerChanged(entry, answer) {
    if (entry.conversation === this.conversation) this.views.get(answer.id)?.changed();
    if (answer.text && performance.now() - entry.keptAtMs > KEEP_EVERY_MS) this.keep(entry);
  }

  // Stores a conversation that is being answered; the list and other tabs are notified of a `change`, not of each
  // token. Resolves to the stored messages, null if there are none.
  async keep(entry, change = null) {
    const { conversation } = entry;
    if (entry.isDropped) return null;
    entry.keptAtMs = performance.now();
    conversation.changedAt = Date.now();
    let messages = null;
    try {
      messages = await this.app.store.keep(conversation);
      if (!messages) this.app.gone(conversation.id);
    } catch (error) {
      this.tell(storageProblem(error));
    }
    if (!change || entry.isDropped) return messages;
    this.app.store.tell(change, conversation.id);
    this.app.listChanged();
    return messages;
  }

  announce(answer) {
    const view = this.views.get(answer.id);
    if (!view) return; // another tab removed it
    view.update();
    const said = { complete: "Answer: ", stopped: "Stopped: ", failed: "" }[answer.status];
    if (answer.status !== "failed") this.app.announce(said + view.body.textContent.slice(0, MAX_ANNOUNCED));
  }

  addView(message) {
    const host = {
      store: this.app.store,
      edit: (one, text) => this.edit(one, text),
      retry: () => this.retry(message),
      askWithout: (file) => this.askWithout(message, file),
      shorten: () => this.shorten(message),
      drawn: () => this.scroller.follow(),
    };
    const view = message.role === "user" ? new QuestionView(message, host) : new AnswerView(message, host);
    this.views.set(message.id, view);
    this.column.append(view.node);
  }

  // Allows editing of the last question only, and regenerating of the last and of failed answers; shows a welcome in an
  // empty conversation.
  changedMessages() {
    const { messages } = this.conversation;
    const turns = turnsOf(messages);
    for (const turn of turns) {
      const isLast = turn === turns.at(-1);
      const isUnsent = isLeftOut(turn);
      const view = this.views.get(turn.question.id);
      view.setLast(isLast && !this.isBusy);
      view.setUnsent(isUnsent);
      for (const answer of turn.answers) {
        const canRetry = (isLast && answer === turn.answers.at(-1)) || (isUnsent && answer.status === "failed");
        this.views.get(answer.id).setRetry(canRetry && !this.isBusy);
      }
    }
    this.column.querySelector(".welcome")?.remove();
    const isEmpty = !hasBegun(this.conversation);
    this.column.classList.toggle("empty", isEmpty);
    if (isEmpty) this.column.append(welcomeNode(this.app.model(), { ask: (asked) => this.askWith(asked) }));
  }
}

// Marks answers that were running when the page was closed as stopped.
function settle(conversation, isAnswered) {
  if (isAnswered) return;
  for (const message of conversation.messages) {
    if (isUnderWay(message)) Object.assign(message, { status: "stopped", error: null });
  }
}

function isFull(error) {
  return error.code === FULL || error instanceof NoRoom;
}

// Returns an answer's error: the message, and the file or the long conversation that caused it if the question can be
// repeated without.
function explanation(error, { conversation, files }, answer) {
  const { message } = error;
  const turns = sentTurns(conversation, conversation.messages.indexOf(answer));
  if (isFull(error)) return { message, isFull: turns.length > 1 };
  const [named, kind, number] = message.match(NAMED_FILE) ?? [];
  const attachment =
    error instanceof FileProblem ? error.attachment : files.filter((one) => one.kind === kind)[Number(number) - 1];
  if (!attachment) return { message };
  const { id, name } = attachment;
  const text = named ? message.replace(named, `“${name}”`) : message;
  const { question } = turns.at(-1);
  const isOwn = question.attachments.includes(attachment);
  return { message: text, file: !isOwn || canDoWithout(question, attachment) ? { id, name } : null };
}
