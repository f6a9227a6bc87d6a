// The list of conversations, and what is done with them.

import { askDialog, confirmDialog } from "./dialogs.js";
import { byId, element, icon, iconButton } from "./dom.js";
import { titleOf } from "./conversation.js";
import { themeButton } from "./theme.js";
import { openShortcuts } from "./shortcuts.js";

export class Sidebar {
  // host: { open(id), create(), rename(id, title), remove(id), removeAll() }
  constructor(host) {
    this.host = host;
    this.node = byId("sidebar");
    this.stage = byId("stage");
    this.list = element("ul", { class: "conversations" });
    this.deleteAll = element(
      "button",
      { type: "button", class: "quiet row", onclick: () => this.askDeleteAll() },
      icon("trash"),
      "Delete all",
    );
    const create = element(
      "button",
      { type: "button", class: "quiet row new", onclick: () => this.pick(() => host.create()) },
      icon("plus"),
      "New conversation",
    );
    const keys = element(
      "button",
      { type: "button", class: "quiet row", onclick: openShortcuts },
      icon("keyboard"),
      "Keys",
    );
    this.node.append(
      create,
      element("nav", { "aria-label": "Conversations" }, this.list),
      element("footer", {}, this.deleteAll, themeButton(), keys),
    );
    byId("menu").addEventListener("click", () => this.toggle());
    byId("veil").addEventListener("click", () => this.toggle(false));
    this.node.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.isOpen) {
        event.stopPropagation();
        this.toggle(false);
      }
    });
    this.narrow = matchMedia("(max-width: 52rem)");
    this.narrow.addEventListener("change", () => this.toggle(false));
    this.toggle(false);
  }

  // On a narrow screen it lies over the rest, which cannot be used meanwhile; on a wide one it stays.
  toggle(isOpen = !this.isOpen) {
    const had = this.isOpen;
    this.isOpen = isOpen && this.narrow.matches;
    document.body.classList.toggle("sidebar-open", this.isOpen);
    this.stage.inert = this.isOpen;
    this.node.inert = this.narrow.matches && !this.isOpen;
    byId("menu").setAttribute("aria-expanded", String(this.isOpen));
    if (this.isOpen) this.node.querySelector("button").focus();
    else if (had) byId("menu").focus();
  }

  show(conversations, currentId) {
    this.list.replaceChildren(...conversations.map((one) => this.row(one, one.id === currentId)));
    this.deleteAll.hidden = !conversations.length;
  }

  row(conversation, isCurrent) {
    const title = titleOf(conversation);
    const open = element(
      "button",
      {
        type: "button",
        class: "title",
        title,
        "aria-current": isCurrent ? "page" : null,
        onclick: () => this.pick(() => this.host.open(conversation.id)),
      },
      title,
    );
    const rename = iconButton("edit", `Rename ${title}`, () => this.askRename(conversation.id, title));
    const remove = iconButton("trash", `Delete ${title}`, () => this.askDelete(conversation.id, title));
    return element("li", { class: isCurrent ? "current" : null }, open, rename, remove);
  }

  pick(does) {
    this.toggle(false);
    does();
  }

  async askRename(id, value) {
    const title = await askDialog({ title: "Rename", label: "Title", value, yes: "Rename" });
    if (title) this.host.rename(id, title);
  }

  async askDelete(id, title) {
    if (
      await confirmDialog("Delete conversation?", `“${title}” and its files will be gone from this browser.`, "Delete")
    )
      this.host.remove(id);
  }

  async askDeleteAll() {
    const text = "All conversations, drafts and files of this page will be gone from this browser.";
    if (await confirmDialog("Delete everything?", text, "Delete all")) this.host.removeAll();
  }
}
