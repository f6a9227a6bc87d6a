// Shows questions and answers.

import { isUnderWay } from "./conversation.js";
import { actions, button } from "./dialogs.js";
import { copyButton, element, iconButton } from "./dom.js";
import { figuresNode } from "./figures.js";
import { MarkdownView } from "./markdown.js";
import { Pace } from "./pace.js";
import { previewNode } from "./previews.js";

export class QuestionView {
  // host: { store, edit(message, text) }
  constructor(message, host) {
    this.message = message;
    this.host = host;
    this.node = element("article", { class: "question", "aria-label": "Question" });
    this.show();
  }

  show() {
    const { message, host } = this;
    const files = message.attachments.map((one) => {
      const node = previewNode(one, host.store);
      if (one.isLeftOut) node.append(element("span", { class: "left-out" }, "Not sent"));
      return node;
    });
    this.editor = null;
    this.editButton = iconButton("edit", "Edit question", () => this.edit(), { hidden: !this.isLast });
    this.unsent = element("p", { class: "unsent", hidden: !this.isUnsent }, "Not sent with later questions");
    this.node.replaceChildren(
      ...(files.length ? [element("div", { class: "files" }, ...files)] : []),
      ...(message.text ? [element("div", { class: "bubble" }, message.text)] : []),
      this.unsent,
      element(
        "footer",
        {},
        element(
          "div",
          { class: "message-tools" },
          copyButton(() => message.text, "Copy question"),
          this.editButton,
        ),
      ),
    );
  }

  // Only the last question can be edited: its editor closes when there is another.
  setLast(isLast) {
    this.isLast = isLast;
    if (!isLast && this.editor) this.show();
    this.editButton.hidden = !isLast;
  }

  setUnsent(isUnsent) {
    this.isUnsent = isUnsent;
    this.unsent.hidden = !isUnsent;
  }

  edit() {
    if (this.editor) {
      this.editor.querySelector("textarea").focus();
      return;
    }
    const text = element("textarea", {
      "aria-label": "Edit question",
      rows: Math.min(12, this.message.text.split("\n").length + 1),
    });
    text.value = this.message.text;
    const cancel = () => {
      this.show();
      this.editButton.focus();
    };
    const send = () => {
      if (text.value.trim() || this.message.attachments.length) this.host.edit(this.message, text.value.trim());
    };
    text.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") cancel();
      else if (event.key === "Enter" && !event.shiftKey) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const bubble = this.node.querySelector(".bubble");
    this.editor = element(
      "div",
      { class: "editor" },
      text,
      actions(button("Cancel", cancel), button("Ask again", send, "primary")),
    );
    if (bubble) bubble.replaceWith(this.editor);
    else this.node.querySelector("footer").before(this.editor);
    this.node.querySelector("footer").hidden = true;
    text.focus();
  }
}

const STATES = { asking: "Reading", waiting: "", streaming: "", complete: "", stopped: "Stopped", failed: "" };

export class AnswerView {
  // host: { store, retry(), askWithout(file), shorten(), drawn() }
  constructor(message, host) {
    this.message = message;
    this.host = host;
    this.pace = new Pace(() => {
      this.update();
      host.drawn();
    });
    this.reasoningText = element("p", { class: "reasoning-text" });
    this.reasoning = element(
      "details",
      { class: "reasoning", hidden: true },
      element("summary", {}, "Reasoning"),
      this.reasoningText,
    );
    this.body = element("div", { class: "markdown" });
    this.markdown = new MarkdownView(this.body);
    this.state = element("p", { class: "state", hidden: true });
    this.errorText = element("p", {});
    this.remedies = element("div", { class: "remedies" });
    this.shownError = null;
    this.error = element("div", { class: "error", role: "alert", hidden: true }, this.errorText, this.remedies);
    this.figures = element("div", {});
    this.sound = element("div", { class: "files", hidden: true });
    this.retryButton = iconButton("retry", "Answer again", () => host.retry());
    this.tools = element(
      "div",
      { class: "message-tools" },
      copyButton(() => this.message.text, "Copy answer"),
      this.retryButton,
    );
    this.footer = element("footer", {}, this.tools, this.figures);
    this.node = element(
      "article",
      { class: "answer", "aria-label": "Answer" },
      this.reasoning,
      this.body,
      this.sound,
      this.state,
      this.error,
      this.footer,
    );
    this.update();
  }

  // Sets whether the question can be answered again now.
  setRetry(canRetry) {
    this.canRetry = canRetry;
    this.retryButton.hidden = !canRetry;
    this.showError();
  }

  // Shows new text at the next frame.
  changed() {
    this.pace.changed();
  }

  update() {
    const { message } = this;
    const isComing = isUnderWay(message);
    this.node.setAttribute("aria-busy", String(isComing));
    this.node.classList.toggle("under-way", isComing);
    this.node.classList.toggle("asking", message.status === "asking");
    this.reasoning.hidden = !message.reasoning;
    const { reasoningText: text } = this;
    if (text.textContent.length !== message.reasoning.length) text.textContent = message.reasoning;
    if (isComing) this.markdown.update(message.text);
    else this.markdown.finish(message.text);
    this.showSound();
    this.showState();
    this.showError();
    this.footer.hidden = isComing;
    this.figures.replaceChildren(...[message.figures && figuresNode(message.figures)].filter(Boolean));
  }

  // Shows the speech when it is complete.
  showSound() {
    const files = this.message.attachments ?? [];
    if (files.length === this.sound.children.length) return;
    this.sound.replaceChildren(...files.map((one) => previewNode(one, this.host.store)));
    this.sound.hidden = !files.length;
  }

  showState() {
    const { message } = this;
    const isComplete = message.status === "complete";
    let text = STATES[message.status];
    if (isComplete && message.isCut) text = "Cut off: the answer reached the most tokens it may have";
    else if (isComplete && !message.text && !message.reasoning) text = "The answer is empty";
    if (this.state.textContent !== text) this.state.textContent = text;
    this.state.hidden = !text;
  }

  showError() {
    const { error, status } = this.message;
    this.error.hidden = !error;
    this.remedies.hidden = !this.canRetry || status === "waiting";
    if (!error) return;
    this.showRemedies(error);
    const wait = error.retryInS
      ? ` Asking again in ${error.retryInS} s.`
      : status === "waiting"
        ? " Asking again as soon as it answers."
        : "";
    // The countdown is hidden from screen readers, which would read nothing else.
    this.error.setAttribute("role", status === "waiting" ? "group" : "alert");
    this.error.classList.toggle("waiting", status === "waiting");
    this.errorText.textContent = sentence(error.message) + wait;
  }

  // Shows the buttons for an error.
  showRemedies(error) {
    if (this.shownError === error) return;
    this.shownError = error;
    const { file, isFull } = error;
    this.remedies.replaceChildren(
      button("Try again", () => this.host.retry()),
      ...(file ? [button(`Ask without ${file.name}`, () => this.host.askWithout(file))] : []),
      ...(isFull ? [button("Continue without the oldest turns", () => this.host.shorten())] : []),
    );
  }
}

function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}
