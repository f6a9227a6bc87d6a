// The page: puts the parts together, and keeps track of what is shown: a conversation or pictures, and by which model.

import { Api, ApiError, Unreachable, keyProblem } from "./api.js";
import { kindsOf } from "./attachments.js";
import { Connection } from "./connection.js";
import { comingConversation, hasBegun, newConversation, titleOf } from "./conversation.js";
import { askDialog, button } from "./dialogs.js";
import { byId, element } from "./dom.js";
import { PANES } from "./panes.js";
import { currentSettings, openSettings } from "./settings.js";
import { listenForKeys } from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";
import { lastingValues } from "./small_values.js";
import { Store, storageProblem } from "./store.js";

const MODEL = "tilewright-model"; // the one chosen last
const PICTURES = "?pictures"; // the address of that pane

class App {
  constructor(store) {
    this.store = store;
    this.api = new Api(askForKey);
    this.connection = new Connection(this.api, (reason) => this.serverChanged(reason));
    this.models = [];
    this.modelChoice = byId("model");
    this.modelChoice.addEventListener("change", () => {
      lastingValues.set(MODEL, this.modelChoice.value);
      this.pane.modelChanged();
    });
    this.sidebar = new Sidebar({
      open: (id) => this.open(id),
      create: () => this.create(),
      draw: () => this.showPictures(),
      rename: (id, title) => this.rename(id, title),
      remove: (id) => this.remove(id),
      removeAll: () => this.removeAll(),
      changeKey: () => this.changeKey(),
    });
    this.pane = new PANES.chat(this);
    this.pictures = new PANES.pictures(this);
    this.pictures.node.hidden = true;
    byId("pane").append(this.pane.node); // the other one when there is something to draw with
    const settings = () => openSettings(() => this.showSettings());
    byId("settings").addEventListener("click", settings);
    listenForKeys({
      newConversation: () => this.create(),
      stop: () => this.shown.stop(),
      focusQuestion: () => (this.shown === this.pane ? this.pane.composer.text : this.pictures.prompt).focus(),
      settings,
    });
    addEventListener("popstate", () => this.urlChanged());
    store.channel.onmessage = ({ data }) => this.changedElsewhere(data);
    this.showSettings();
  }

  async start() {
    this.pane.focus(); // at once: typing does not wait for what the browser has stored
    const loading = this.loadModels(); // whatever the address leads to
    await this.openFromUrl();
    const { problem } = this.store;
    if (problem)
      this.pane.tell(`This browser keeps nothing for this page (${problem}): a reload loses the conversations.`);
    else if (!lastingValues.isKept)
      this.pane.tell("This browser keeps no settings for this page: a reload loses them.");
    await loading;
  }

  // The models, as soon as the server sends them.
  async loadModels() {
    for (;;) {
      try {
        this.showModels(await this.api.models());
        this.sidebar.showKey(this.api.wantsKey);
        return;
      } catch (error) {
        const isPassing = error instanceof Unreachable || (error instanceof ApiError && error.status >= 500);
        this.sidebar.showKey(this.api.wantsKey);
        if (!isPassing) {
          const again = error.status === 401 ? button("Enter the API key", () => this.changeKey()) : null;
          this.showBanner(`The server's models cannot be had: ${error.message}`, again);
          return;
        }
        await this.connection.lost(error.message);
      }
    }
  }

  // Asks for another API key, and for the models with it.
  async changeKey() {
    if (!(await this.api.changeKey(false))) return;
    this.showBanner(null);
    await this.loadModels();
  }

  showModels(models) {
    this.models = models;
    const chosen = this.modelChoice.value || lastingValues.get(MODEL);
    const talkers = this.talkers();
    this.modelChoice.replaceChildren(...talkers.map(({ id }) => element("option", { value: id }, id)));
    if (talkers.some(({ id }) => id === chosen)) this.modelChoice.value = chosen;
    this.modelChoice.disabled = talkers.length < 2;
    this.pane.modelChanged();
    this.pictures.modelChanged();
    if (!talkers.length && this.pictureModel()) this.show(null);
    else if (!this.pictureModel() && this.shown === this.pictures) this.create();
    else this.showPane();
  }

  // The models that answer in words.
  talkers() {
    return this.models.filter((model) => model.output_modalities?.includes("text") ?? true);
  }

  // The one that makes pictures; null if there is none.
  pictureModel() {
    return this.models.find((model) => model.output_modalities?.includes("image")) ?? null;
  }

  canAskAbout() {
    return kindsOf(this.model()).includes("image");
  }

  // Puts a picture into a new question.
  askAbout(blob, name) {
    this.create();
    this.pane.composer.add([new File([blob], name, { type: blob.type })]);
  }

  // A picture was made, or was not: after the first one the server knows what its model takes.
  pictureMade() {
    if (this.pictureModel() && !this.pictureModel().limits) this.loadModels();
  }

  // The pane that is shown.
  get shown() {
    return this.pictures.node.hidden ? this.pane : this.pictures;
  }

  showPictures() {
    this.show(null);
    if (location.search !== PICTURES) history.pushState(null, "", PICTURES);
  }

  showPane(pane = this.shown) {
    const isChat = pane === this.pane;
    const isNeeded = !isChat || this.pictureModel();
    if (isNeeded && !this.pictures.node.isConnected) byId("pane").append(this.pictures.node);
    this.pane.node.hidden = !isChat;
    this.pictures.node.hidden = isChat;
    this.modelChoice.hidden = byId("settings").hidden = !isChat;
    this.sidebar.showPanes({
      canChat: this.talkers().length > 0 || !this.models.length,
      canDraw: Boolean(this.pictureModel()),
      current: isChat ? "chat" : "pictures",
    });
  }

  model() {
    return this.models.find(({ id }) => id === this.modelChoice.value) ?? null;
  }

  announce(text) {
    byId("announcer").textContent = text;
  }

  // Says something above everything, with a button where something can be done about it; null takes it away.
  showBanner(reason, action = null) {
    byId("banner").hidden = !reason;
    byId("banner").replaceChildren(...[reason, action].filter(Boolean));
  }

  // Called by the connection. After the server was away another model may answer.
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
    this.showTitle();
    const { id } = this.pane.conversation;
    const isChat = this.shown === this.pane;
    this.sidebar.show(await this.kept(() => this.store.titles(), []), isChat ? id : null);
  }

  showTitle() {
    const { conversation } = this.pane;
    if (this.shown === this.pictures) {
      document.title = "Pictures · Tilewright";
      return;
    }
    if (conversation.isComing) return; // it has none yet
    document.title = hasBegun(conversation) ? `${titleOf(conversation)} · Tilewright` : "Tilewright";
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
    const query = hasBegun(conversation) ? `?c=${conversation.id}` : "";
    if (location.search !== query) history.pushState(null, "", query || location.pathname);
    this.listChanged();
  }

  // By the browser's own buttons, or a link within the page: that leads to what is open already.
  async urlChanged() {
    const { conversation } = this.pane;
    const isThere = idOfUrl() === (hasBegun(conversation) ? conversation.id : null);
    if (!isThere || isPicturesUrl() !== (this.shown === this.pictures)) await this.openFromUrl();
  }

  async openFromUrl() {
    if (isPicturesUrl()) {
      this.show(null);
      return;
    }
    this.showPane(this.pane);
    const id = idOfUrl();
    const conversation = id ? comingConversation(id) : newConversation();
    this.pane.show(conversation);
    this.listChanged();
    if (id) await this.fill(conversation);
  }

  async open(id) {
    const conversation = comingConversation(id);
    this.show(conversation);
    await this.fill(conversation);
  }

  create() {
    this.show(newConversation());
  }

  // A conversation, or without one the pictures. All at once: the user may write, send or navigate before the browser
  // has read anything.
  show(conversation) {
    this.showPane(conversation ? this.pane : this.pictures);
    if (!conversation) {
      this.listChanged();
      this.pictures.focus();
      return;
    }
    this.pane.show(conversation);
    this.opened(conversation);
    this.pane.focus();
  }

  // Puts what is kept in the place of a conversation that is coming, unless something else was opened meanwhile.
  async fill(coming) {
    let problem = null;
    try {
      const kept = await this.store.conversation(coming.id);
      if (this.pane.conversation !== coming) return;
      if (kept) {
        this.pane.showMessages(kept);
        this.showTitle();
        return;
      }
    } catch (error) {
      if (this.pane.conversation.id !== coming.id) return;
      problem = `This conversation cannot be shown: ${error.message}`;
    }
    this.leave();
    this.pane.tell(problem);
  }

  // The open conversation is not there any more.
  leave() {
    this.pane.replace();
    if (this.shown === this.pane) history.replaceState(null, "", location.pathname);
    this.listChanged();
  }

  async rename(id, title) {
    const open = this.pane.conversation;
    if (open.id === id) open.title = title;
    await this.kept(() => this.store.rename(id, title));
    this.listChanged();
  }

  async remove(id) {
    this.pane.drop(id);
    await this.kept(() => this.store.forget(id));
    if (this.pane.conversation.id === id) this.create();
    else this.listChanged();
  }

  async removeAll() {
    this.pane.dropAll();
    await this.kept(() => this.store.forgetAll());
    this.pictures.load();
    this.create();
  }

  // Another tab changed or deleted a conversation, or all. An answer that comes there is shown here when it is done.
  async changedElsewhere({ id, change }) {
    if (change === "pictures" || (change === "deleted" && id === null)) this.pictures.load();
    if (change === "pictures") return;
    const { conversation, composer } = this.pane;
    const isOpen = id === conversation.id;
    if (change === "deleted") await this.gone(id);
    else if (change === "changed" && isOpen) await this.look(id);
    // One draft is kept per conversation: the other tab may have put its own in the place of what is written here.
    if (!composer.isEmpty) composer.keep();
    this.listChanged();
  }

  // Shows what is kept of a conversation, if that is open then and at rest.
  async look(id) {
    const kept = await this.kept(() => this.store.conversation(id), null);
    const { conversation, isBusy } = this.pane;
    if (!kept || conversation.id !== id || conversation.isComing || isBusy) return;
    conversation.title = kept.title;
    this.pane.adopt(kept.messages);
  }

  // A conversation was deleted in another tab, or all were where there is no id: what is under way for it ends.
  async gone(id) {
    if (id === null) this.pane.dropAll();
    else this.pane.drop(id);
    const { conversation } = this.pane;
    if (!conversation.messages.length || (id !== null && id !== conversation.id)) return;
    this.leave();
  }
}

// Of the conversation that the address names; null for a new one.
function idOfUrl() {
  return new URLSearchParams(location.search).get("c");
}

function isPicturesUrl() {
  return location.search === PICTURES;
}

async function askForKey(wasRefused) {
  const text = wasRefused
    ? "The server refused that key."
    : "This server wants an API key. It is kept until this tab is closed.";
  return askDialog({ title: "API key", label: "Key", text, yes: "Use it", type: "password", check: keyProblem });
}

new App(await Store.open()).start();
