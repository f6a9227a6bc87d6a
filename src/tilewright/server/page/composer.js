// The editor of a question: its text, its files, and the stored draft of both.

import { KINDS, Refused, attach, kindsOf, nounsOf } from "./attachments.js";
import { takePhoto } from "./camera.js";
import { element, icon, iconButton } from "./dom.js";
import { recordSound } from "./microphone.js";
import { previewNode, unreadNode } from "./previews.js";
import { VoiceChoice } from "./voice_choice.js";

const MAX_HEIGHT = 0.4; // share of the window, above which the text scrolls

export class Composer {
  // host: { store, model(), tell(text), failed(error), send(question), stop(), editLast() }
  constructor(host) {
    this.host = host;
    this.draft = newDraft("new");
    this.reading = new Set(); // drafts that wait for their files, shown or not
    this.isBusy = false;
    this.isHeld = false;
    this.build();
    this.listen();
  }

  build() {
    this.text = element("textarea", {
      id: "question",
      rows: 1,
      "aria-label": "Question",
      placeholder: "Ask anything",
      autocomplete: "off",
    });
    this.tray = element("div", { class: "tray", role: "group", "aria-label": "Files to send", hidden: true });
    this.picker = element("input", {
      type: "file",
      multiple: true,
      hidden: true,
      "aria-label": "Files",
      tabindex: "-1",
    });
    this.attachButton = iconButton("attach", "Add images or video", () => this.picker.click());
    this.cameraButton = iconButton("camera", "Take a photo", () => this.useCamera());
    this.microphoneButton = iconButton("microphone", "Record a sound", () => this.useMicrophone(), { hidden: true });
    this.voiceChoice = new VoiceChoice();
    this.sendButton = iconButton("send", "Send", () => (this.isBusy ? this.host.stop() : this.send()), {
      class: "send",
    });
    this.hint = element("span", { class: "composer-hint" });
    this.node = element(
      "div",
      { class: "composer", role: "group", "aria-label": "Write a question" },
      this.tray,
      this.text,
      element(
        "div",
        { class: "tools" },
        this.attachButton,
        this.cameraButton,
        this.microphoneButton,
        this.voiceChoice.node,
        this.picker,
        this.hint,
        this.sendButton,
      ),
    );
    this.drop = element(
      "div",
      { class: "drop", hidden: true, "aria-hidden": "true" },
      element("p", {}, icon("attach"), "Drop to add to your question"),
    );
    document.body.append(this.drop);
  }

  listen() {
    this.text.addEventListener("input", () => this.changed());
    this.text.addEventListener("keydown", (event) => this.pressed(event));
    this.picker.addEventListener("change", () => {
      this.add([...this.picker.files]);
      this.picker.value = "";
    });
    document.addEventListener("paste", (event) => {
      const { clipboardData } = event;
      // Office programs add an image of the text: paste the text.
      const isText = clipboardData?.types.includes("text/plain");
      if (!clipboardData?.files.length || isText || document.querySelector("dialog[open]") || this.isAway) return;
      event.preventDefault();
      this.add([...clipboardData.files]);
    });
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files") && !this.isAway;
    document.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.drop.hidden = false;
    });
    document.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) this.drop.hidden = true;
    });
    document.addEventListener("drop", (event) => {
      this.drop.hidden = true;
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  pressed(event) {
    if (event.isComposing) return;
    // On a phone, Enter adds a line: sending by mistake is worse, and there is a button.
    const isTouch = matchMedia("(pointer: coarse)").matches;
    if (event.key === "Enter" && !event.shiftKey && !isTouch) {
      event.preventDefault();
      this.send();
    } else if (event.key === "ArrowUp" && !this.text.value && this.isEmpty) {
      if (this.host.editLast()) event.preventDefault();
    }
  }

  // Shows what the model accepts, before anything is sent.
  showModel() {
    const model = this.host.model();
    const kinds = kindsOf(model);
    const isUnable = Boolean(model) && !kinds.length;
    this.picker.accept = kinds.map((kind) => KINDS[kind].accept).join(",");
    for (const [button, canUse] of [
      [this.attachButton, kinds.length > 0],
      [this.cameraButton, kinds.includes("image")],
    ]) {
      button.disabled = !canUse;
      button.title = canUse
        ? button.getAttribute("aria-label")
        : isUnable
          ? `${model.id} takes text only`
          : "The model is not known yet";
    }
    this.attachButton.setAttribute("aria-label", `Add ${nounsOf(model) || "files"}`);
    this.microphoneButton.hidden = !kinds.includes("audio");
    this.voiceChoice.show(model?.voices ?? []);
    this.isTextOnly = isUnable;
    this.update();
  }

  setBusy(isBusy) {
    this.isBusy = isBusy;
    this.update();
  }

  // Holds the question while its conversation is being loaded.
  setHeld(isHeld) {
    this.isHeld = isHeld;
    this.sendIfReady();
  }

  update() {
    const label = this.isBusy ? "Stop" : "Send";
    this.sendButton.replaceChildren(icon(this.isBusy ? "stop" : "send"));
    this.sendButton.setAttribute("aria-label", label);
    this.sendButton.title = label;
    this.sendButton.disabled = !this.isBusy && (this.isEmpty || !this.host.model() || this.draft.isSending);
    const isWaiting = this.draft.isSending && this.draft.unread.length > 0;
    this.hint.textContent = isWaiting ? "sent when its files are read" : this.isTextOnly ? "text only" : "";
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(this.text.scrollHeight, innerHeight * MAX_HEIGHT)}px`;
  }

  // True if another pane is shown.
  get isAway() {
    return Boolean(this.node.closest("[hidden]"));
  }

  get isEmpty() {
    return !this.text.value.trim() && !this.draft.attachments.length && !this.draft.unread.length;
  }

  changed() {
    this.draft.text = this.text.value;
    this.update();
    this.keep();
  }

  keep(draft = this.draft) {
    return this.host.store.keepDraft(draft).catch((error) => this.host.failed(error));
  }

  // Shows the draft of a conversation.
  async load(id) {
    const live = [...this.reading].find((draft) => draft.id === id && !draft.isDropped);
    const draft = live ?? newDraft(id);
    this.draft = draft;
    this.show();
    const kept = live ? null : await this.host.store.draft(id).catch(() => null);
    if (!kept || draft !== this.draft) return; // no draft, or another one was opened meanwhile
    draft.text = kept.text + draft.text;
    draft.attachments = [...kept.attachments, ...draft.attachments];
    this.keep(); // text written meanwhile has replaced the stored draft
    this.show();
  }

  show() {
    if (this.text.value !== this.draft.text) this.text.value = this.draft.text;
    this.showFiles();
  }

  // Prepares and stores files; reports and leaves out those that cannot be sent.
  async attach(files) {
    const attachments = [];
    for (const file of files) {
      try {
        const { attachment, blob, note } = await attach(file, this.host.model());
        await this.host.store.keepFile(attachment.id, blob).catch((error) => this.host.failed(error));
        attachments.push(attachment);
        if (note) this.host.tell(note);
      } catch (error) {
        const isRefused = error instanceof Refused;
        this.host.tell(isRefused ? error.message : `${file.name} cannot be read: ${error.message}`);
      }
    }
    return attachments;
  }

  // Adds files to the current draft, which may not be the shown one when they are read.
  async add(files) {
    const { draft } = this;
    const unread = files.map(({ name }) => ({ name }));
    draft.unread = [...draft.unread, ...unread];
    this.reading.add(draft);
    this.showFiles();
    this.text.focus();
    const attachments = await this.attach(files);
    draft.unread = draft.unread.filter((one) => !unread.includes(one));
    draft.attachments = [...draft.attachments, ...attachments];
    if (attachments.length < files.length) draft.isSending = false; // the user sees why, and decides
    if (!draft.unread.length) this.reading.delete(draft);
    if (draft.isDropped) {
      await this.host.store.forgetFiles(attachments);
      return;
    }
    this.keep(draft);
    if (draft !== this.draft) return;
    this.showFiles();
    this.sendIfReady();
  }

  // Drops the files being read for a deleted conversation, or for all without an id.
  dropReading(id = null) {
    for (const draft of this.reading) if (id === null || draft.id === id) draft.isDropped = true;
  }

  // Moves the draft to another conversation: one that has just begun, or a new one. It is not sent there automatically.
  moveDraft(id) {
    this.keep(newDraft(this.draft.id));
    Object.assign(this.draft, { id, isDropped: false, isSending: false });
    this.keep();
  }

  async useCamera() {
    const file = await takePhoto();
    if (file) await this.add([file]);
    this.text.focus();
  }

  async useMicrophone() {
    const file = await recordSound();
    if (file) await this.add([file]);
    this.text.focus();
  }

  showFiles() {
    const { attachments, unread } = this.draft;
    this.tray.replaceChildren(
      ...attachments.map((one) => previewNode(one, this.host.store, () => this.remove(one))),
      ...unread.map(({ name }) => unreadNode(name)),
    );
    this.tray.hidden = !this.tray.children.length;
    this.update();
  }

  remove(attachment) {
    this.draft.attachments = this.draft.attachments.filter((one) => one !== attachment);
    this.host.store.forgetFiles([attachment]);
    this.showFiles();
    this.keep();
    this.text.focus();
  }

  // Sends the question, after its conversation and its files are loaded.
  send() {
    const { draft } = this;
    if (this.isEmpty || this.isBusy || !this.host.model()) return;
    draft.isSending = this.isHeld || draft.unread.length > 0;
    if (draft.isSending) {
      this.update();
      return;
    }
    const text = this.text.value.trim();
    const { attachments } = draft;
    Object.assign(draft, { text: "", attachments: [] }); // the same object, which may still be being stored
    this.show();
    this.keep();
    this.host.send({ text, attachments });
  }

  sendIfReady() {
    const { draft } = this;
    if (!draft.isSending || this.isHeld || draft.unread.length) return;
    draft.isSending = false;
    this.send();
  }
}

// Returns the draft of a conversation, "new" for one that has not begun. `unread`: { name } of files being read.
function newDraft(id) {
  return { id, text: "", attachments: [], unread: [], isSending: false, isDropped: false };
}
