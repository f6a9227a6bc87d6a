// The page: puts the parts together, and keeps track of which conversation is open and which model answers.

import { Api, ApiError, Unreachable } from "./api.js";
import { Connection } from "./connection.js";
import { isUnderWay, newConversation, titleOf } from "./conversation.js";
import { askDialog } from "./dialogs.js";
import { byId, element } from "./dom.js";
import { PANES } from "./panes.js";
import { currentSettings, openSettings } from "./settings.js";
import { listenForKeys } from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";
import { Store, storageProblem } from "./store.js";

const MODEL = "tilewright-model"; // in localStorage: the one chosen last

class App {
  constructor(store) {
    this.store = store;
    this.api = new Api(askForKey);
    this.connection = new Connection(this.api, (reason) => this.serverChanged(reason));
    this.models = [];
    this.modelChoice = byId("model");
    this.modelChoice.addEventListener("change", () => {
      localStorage.setItem(MODEL, this.modelChoice.value);
      this.pane.modelChanged();
    });
    this.sidebar = new Sidebar({
      open: (id) => this.open(id),
      create: () => this.create(),
      rename: (id, title) => this.rename(id, title),
      remove: (id) => this.remove(id),
      removeAll: () => this.removeAll(),
    });
    this.pane = new PANES.chat(this);
    byId("pane").append(this.pane.node);
    const settings = () => openSettings(() => this.showSettings());
    byId("settings").addEventListener("click", settings);
    listenForKeys({
      newConversation: () => this.create(),
      stop: () => this.pane.stop(),
      focusQuestion: () => this.pane.composer.text.focus(),
      settings,
    });
    addEventListener("popstate", () => this.openFromUrl());
    store.channel.onmessage = ({ data }) => this.changedElsewhere(data);
    this.showSettings();
  }

  async start() {
    await this.openFromUrl();
    this.pane.focus();
    await this.loadModels();
  }

  // The models, as soon as the server tells them.
  async loadModels() {
    for (;;) {
      try {
        this.showModels(await this.api.models());
        return;
      } catch (error) {
        const isPassing = error instanceof Unreachable || (error instanceof ApiError && error.status >= 500);
        if (!isPassing) {
          this.showBanner(`The server's models cannot be had: ${error.message}`);
          return;
        }
        await this.connection.lost(error.message);
      }
    }
  }

  showModels(models) {
    this.models = models;
    const chosen = this.modelChoice.value || localStorage.getItem(MODEL);
    this.modelChoice.replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
    if (models.some(({ id }) => id === chosen)) this.modelChoice.value = chosen;
    this.modelChoice.disabled = models.length < 2;
    this.pane.modelChanged();
  }

  model() {
    return this.models.find(({ id }) => id === this.modelChoice.value) ?? null;
  }

  announce(text) {
    byId("announcer").textContent = text;
  }

  showBanner(reason) {
    byId("banner").hidden = !reason;
    byId("banner").textContent = reason ?? "";
  }

  // Told by the connection. After the server was away another model may answer.
  serverChanged(reason) {
    this.showBanner(reason);
    if (!reason && this.models.length) this.loadModels();
  }

  showSettings() {
    const count = Object.keys(currentSettings()).length;
    byId("settings").classList.toggle("in-use", count > 0);
    byId("settings").title = count ? `Settings: ${count} changed` : "Settings";
  }

  async listChanged() {
    const { conversation } = this.pane;
    document.title = conversation.messages.length ? `${titleOf(conversation)} · Tilewright` : "Tilewright";
    this.sidebar.show(await this.kept(() => this.store.conversations(), []), conversation.id);
  }

  async kept(use, otherwise) {
    try {
      return await use();
    } catch (error) {
      this.pane.tell(storageProblem(error));
      return otherwise;
    }
  }

  // A conversation that began has its address from then on.
  opened(conversation) {
    const query = conversation.messages.length ? `?c=${conversation.id}` : "";
    if (location.search !== query) history.pushState(null, "", query || location.pathname);
    this.listChanged();
  }

  async openFromUrl() {
    const id = new URLSearchParams(location.search).get("c");
    const conversation = id ? await this.kept(() => this.store.conversation(id), null) : null;
    if (id && !conversation) history.replaceState(null, "", location.pathname);
    await this.pane.show(conversation ?? newConversation());
    await this.listChanged();
  }

  async open(id) {
    const conversation = await this.kept(() => this.store.conversation(id), null);
    if (conversation) await this.show(conversation);
  }

  create() {
    this.show(newConversation());
  }

  async show(conversation) {
    await this.pane.show(conversation);
    this.opened(conversation);
    this.pane.focus();
  }

  async rename(id, title) {
    const open = this.pane.conversation;
    const conversation = open.id === id ? open : await this.kept(() => this.store.conversation(id), null);
    if (!conversation) return;
    conversation.title = title;
    await this.kept(() => this.store.keep(structuredClone(conversation)));
    this.listChanged();
  }

  async remove(id) {
    this.pane.drop(id);
    const conversation = await this.kept(() => this.store.conversation(id), null);
    if (conversation) await this.kept(() => this.store.forget(conversation));
    if (this.pane.conversation.id === id) this.create();
    else this.listChanged();
  }

  async removeAll() {
    this.pane.dropAll();
    await this.kept(() => this.store.forgetAll());
    this.create();
  }

  // Another tab changed a conversation, or deleted all. An answer that comes there is shown here when it is done.
  async changedElsewhere(id) {
    const { conversation, isBusy } = this.pane;
    const isShown = (id === null || id === conversation.id) && !isBusy && conversation.messages.length;
    const changed = isShown && id !== null ? await this.kept(() => this.store.conversation(id), null) : null;
    if (isShown && !changed?.messages.some(isUnderWay)) await this.openFromUrl();
    else this.listChanged();
  }
}

async function askForKey(wasRefused) {
  const text = wasRefused
    ? "The server refused that key."
    : "This server wants an API key. It is kept until this tab is closed.";
  return askDialog({ title: "API key", label: "Key", text, yes: "Use it", type: "password" });
}

async function begin() {
  let problem = null;
  const store = await Store.open().catch((error) => {
    problem = error;
    return new Store(null);
  });
  const app = new App(store);
  await app.start();
  if (problem)
    app.pane.tell(
      "This browser keeps nothing for this page (perhaps a private window): a reload loses the conversations.",
    );
}

begin();
