// The list of conversations, with their actions.

import { askDialog, confirmDialog } from "./dialogs.js";
import { byId, element, icon, iconButton } from "./dom.js";
import { themeButton } from "./theme.js";
import { openShortcuts } from "./shortcuts.js";

export class Sidebar {
  // host: { open(id), create(), draw(), rename(id, title), remove(id), removeAll(), changeKey() }
  constructor(host) {
    this.host = host;
    this.node = byId("sidebar");
    this.stage = byId("stage");
    this.list = element("ul", { class: "conversations" });
    this.rows = new Map(); // by conversation id
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
    this.images = element(
      "button",
      { type: "button", class: "quiet row", hidden: true, onclick: () => this.pick(() => host.draw()) },
      icon("image"),
      "Images",
    );
    this.create = create;
    const keys = element(
      "button",
      { type: "button", class: "quiet row", onclick: openShortcuts },
      icon("keyboard"),
      "Keys",
    );
    this.key = element(
      "button",
      { type: "button", class: "quiet row", hidden: true, onclick: () => this.pick(() => host.changeKey()) },
      icon("key"),
      "API key",
    );
    this.node.append(
      create,
      this.images,
      element("nav", { "aria-label": "Conversations" }, this.list),
      element("footer", {}, this.deleteAll, this.key, themeButton(), keys),
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

  // On a narrow screen the sidebar covers the page, which cannot be used meanwhile; on a wide one it stays.
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

  // Offers to change the API key if the server needs one.
  showKey(isWanted) {
    this.key.hidden = !isWanted;
  }

  // Shows the available panes and the current one: "chat" or "images".
  showPanes({ canChat, canDraw, current }) {
    this.create.hidden = !canChat;
    this.images.hidden = !canDraw;
    this.images.classList.toggle("current", current === "images");
    if (current === "images") this.images.setAttribute("aria-current", "page");
    else this.images.removeAttribute("aria-current");
  }

  // Shows { id, title } of conversations. Existing rows are kept: one may have the focus, or be under a finger.
  show(conversations, currentId) {
    const focused = document.activeElement;
    const ids = new Set(conversations.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    let next = this.list.firstElementChild;
    for (const { id, title } of conversations) {
      if (!this.rows.has(id)) this.rows.set(id, new Row(id, this));
      const row = this.rows.get(id);
      row.update(title, id === currentId);
      if (row.node === next) next = next.nextElementSibling;
      else this.list.insertBefore(row.node, next);
    }
    this.deleteAll.hidden = !conversations.length;
    // A row that moved has lost the focus.
    if (this.list.contains(focused) && focused !== document.activeElement) focused.focus({ preventScroll: true });
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
    const text = "All conversations, drafts, images and files of this page will be gone from this browser.";
    if (await confirmDialog("Delete everything?", text, "Delete all")) this.host.removeAll();
  }
}

class Row {
  constructor(id, sidebar) {
    this.open = element("button", {
      type: "button",
      class: "title",
      onclick: () => sidebar.pick(() => sidebar.host.open(id)),
    });
    this.rename = iconButton("edit", "Rename", () => sidebar.askRename(id, this.title));
    this.remove = iconButton("trash", "Delete", () => sidebar.askDelete(id, this.title));
    this.node = element("li", {}, this.open, this.rename, this.remove);
  }

  update(title, isCurrent) {
    this.node.classList.toggle("current", isCurrent);
    if (isCurrent) this.open.setAttribute("aria-current", "page");
    else this.open.removeAttribute("aria-current");
    if (this.title === title) return;
    this.title = title;
    this.open.title = title;
    this.open.textContent = title;
    for (const [button, verb] of [
      [this.rename, "Rename"],
      [this.remove, "Delete"],
    ]) {
      button.setAttribute("aria-label", `${verb} ${title}`);
      button.title = `${verb} ${title}`;
    }
  }
}
