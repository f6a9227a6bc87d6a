// Where a question is written: its text, its files, and what is kept of both while it is a draft.

import { KINDS, Refused, attach, kindsOf, nounsOf } from "./attachments.js";
import { takePicture } from "./camera.js";
import { element, icon, iconButton } from "./dom.js";
import { previewNode } from "./previews.js";

const MAX_HEIGHT = 0.4; // of the window, before the text scrolls

export class Composer {
  // host: { store, model(), tell(text), failed(error), send(question), stop(), editLast() }
  constructor(host) {
    this.host = host;
    this.draft = { id: "new", text: "", attachments: [] };
    this.isBusy = false;
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
    this.attachButton = iconButton("attach", "Add pictures or video", () => this.picker.click());
    this.cameraButton = iconButton("camera", "Take a picture", () => this.useCamera());
    this.sendButton = iconButton("send", "Send", () => (this.isBusy ? this.host.stop() : this.send()), {
      class: "send",
    });
    this.hint = element("span", { class: "composer-hint" });
    this.node = element(
      "div",
      { class: "composer", role: "group", "aria-label": "Write a question" },
      this.tray,
      this.text,
      element("div", { class: "tools" }, this.attachButton, this.cameraButton, this.picker, this.hint, this.sendButton),
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
    this.picker.addEventListener("change", async () => {
      await this.add([...this.picker.files]);
      this.picker.value = "";
    });
    document.addEventListener("paste", (event) => {
      const { clipboardData } = event;
      // Office programs put a picture of the text beside it: the text is meant.
      const isText = clipboardData?.types.includes("text/plain");
      if (!clipboardData?.files.length || isText || document.querySelector("dialog[open]")) return;
      event.preventDefault();
      this.add([...clipboardData.files]);
    });
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
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
    // A key on a phone's keyboard that sends by mistake is worse than one more line; there is a button.
    const isTouch = matchMedia("(pointer: coarse)").matches;
    if (event.key === "Enter" && !event.shiftKey && !isTouch) {
      event.preventDefault();
      if (!this.isBusy) this.send();
    } else if (event.key === "ArrowUp" && !this.text.value && !this.draft.attachments.length) {
      if (this.host.editLast()) event.preventDefault();
    }
  }

  // Tells what the model takes, before anything is sent to it.
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
    this.hint.textContent = isUnable ? "text only" : "";
    this.update();
  }

  setBusy(isBusy) {
    this.isBusy = isBusy;
    this.update();
  }

  update() {
    const label = this.isBusy ? "Stop" : "Send";
    this.sendButton.replaceChildren(icon(this.isBusy ? "stop" : "send"));
    this.sendButton.setAttribute("aria-label", label);
    this.sendButton.title = label;
    this.sendButton.disabled = !this.isBusy && (this.isEmpty || !this.host.model());
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(this.text.scrollHeight, innerHeight * MAX_HEIGHT)}px`;
  }

  get isEmpty() {
    return !this.text.value.trim() && !this.draft.attachments.length;
  }

  changed() {
    this.draft.text = this.text.value;
    this.update();
    this.keep();
  }

  keep() {
    return this.host.store.keepDraft(structuredClone(this.draft)).catch((error) => this.host.failed(error));
  }

  // Shows the draft of a conversation.
  async load(id) {
    const draft = await this.host.store.draft(id).catch(() => ({ id, text: "", attachments: [] }));
    this.draft = draft;
    if (this.text.value !== draft.text) this.text.value = draft.text;
    this.showFiles();
  }

  // The files made ready to be sent, and kept; those that cannot be are told of and left out.
  async attach(files) {
    const attachments = [];
    for (const file of files) {
      try {
        const { attachment, blob, note } = await attach(file, this.host.model());
        await this.host.store.keepFile(attachment.id, blob).catch((error) => this.host.failed(error));
        attachments.push(attachment);
        if (note) this.host.tell(note);
      } catch (error) {
        if (!(error instanceof Refused)) throw error;
        this.host.tell(error.message);
      }
    }
    return attachments;
  }

  async add(files) {
    const { draft } = this;
    draft.attachments.push(...(await this.attach(files)));
    this.showFiles();
    this.keep();
    this.text.focus();
  }

  // The draft belongs to the conversation that has just begun.
  moveDraft(id) {
    this.host.store
      .keepDraft({ id: this.draft.id, text: "", attachments: [] })
      .catch((error) => this.host.failed(error));
    this.draft.id = id;
    this.keep();
  }

  async useCamera() {
    const file = await takePicture();
    if (file) await this.add([file]);
    this.text.focus();
  }

  showFiles() {
    const { attachments } = this.draft;
    this.tray.replaceChildren(...attachments.map((one) => previewNode(one, this.host.store, () => this.remove(one))));
    this.tray.hidden = !attachments.length;
    this.update();
  }

  remove(attachment) {
    this.draft.attachments = this.draft.attachments.filter((one) => one !== attachment);
    this.host.store.forgetFiles([attachment]);
    this.showFiles();
    this.keep();
    this.text.focus();
  }

  send() {
    if (this.isEmpty || !this.host.model()) return;
    const { id, attachments } = this.draft;
    const question = { text: this.text.value.trim(), attachments };
    this.draft = { id, text: "", attachments: [] };
    this.text.value = "";
    this.showFiles();
    this.keep();
    this.host.send(question);
  }
}
