// The page: connects its parts, and tracks the open pane (a conversation or images) and the model.

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

const MODEL = "tilewright-model"; // the model chosen last
const IMAGES = "?pictures"; // address of the images pane

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
      draw: () => this.showImages(),
      rename: (id, title) => this.rename(id, title),
      remove: (id) => this.remove(id),
      removeAll: () => this.removeAll(),
      changeKey: () => this.changeKey(),
    });
    this.pane = new PANES.chat(this);
    this.images = new PANES.images(this);
    this.images.node.hidden = true;
    byId("pane").append(this.pane.node); // the images pane is added when a model makes images
    const settings = () => openSettings(() => this.showSettings());
    byId("settings").addEventListener("click", settings);
    listenForKeys({
      newConversation: () => this.create(),
      stop: () => this.shown.stop(),
      focusQuestion: () => (this.shown === this.pane ? this.pane.composer.text : this.images.prompt).focus(),
      settings,
    });
    addEventListener("popstate", () => this.urlChanged());
    store.channel.onmessage = ({ data }) => this.changedElsewhere(data);
    this.showSettings();
  }

  async start() {
    this.pane.focus(); // at once, so that typing does not wait for stored data
    const loading = this.loadModels(); // in parallel, for any address
    await this.openFromUrl();
    const { problem } = this.store;
    if (problem)
      this.pane.tell(`This browser keeps nothing for this page (${problem}): a reload loses the conversations.`);
    else if (!lastingValues.isKept)
      this.pane.tell("This browser keeps no settings for this page: a reload loses them.");
    await loading;
  }

  // Loads the models, and retries until the server sends them.
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

  // Asks the user for another API key, and loads the models with it.
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
    this.images.modelChanged();
    if (!talkers.length && this.imageModel()) this.show(null);
    else if (!this.imageModel() && this.shown === this.images) this.create();
    else this.showPane();
  }

  // Returns the models that answer with text.
  talkers() {
    return this.models.filter((model) => model.output_modalities?.includes("text") ?? true);
  }

  // Returns the model that makes images; null if there is none.
  imageModel() {
    return this.models.find((model) => model.output_modalities?.includes("image")) ?? null;
  }

  canAskAbout() {
    return kindsOf(this.model()).includes("image");
  }

  // Puts an image into a new question.
  askAbout(blob, name) {
    this.create();
    this.pane.composer.add([new File([blob], name, { type: blob.type })]);
  }

  // Called after an image is made or fails: from the first one on, the server knows the model's limits.
  imageMade() {
    if (this.imageModel() && !this.imageModel().limits) this.loadModels();
  }

  // The pane that is shown.
  get shown() {
    return this.images.node.hidden ? this.pane : this.images;
  }

  showImages() {
    this.show(null);
    if (location.search !== IMAGES) history.pushState(null, "", IMAGES);
  }

  showPane(pane = this.shown) {
    const isChat = pane === this.pane;
    const isNeeded = !isChat || this.imageModel();
    if (isNeeded && !this.images.node.isConnected) byId("pane").append(this.images.node);
    this.pane.node.hidden = !isChat;
    this.images.node.hidden = isChat;
    this.modelChoice.hidden = byId("settings").hidden = !isChat;
    this.sidebar.showPanes({
      canChat: this.talkers().length > 0 || !this.models.length,
      canDraw: Boolean(this.imageModel()),
      current: isChat ? "chat" : "images",
    });
  }

  model() {
    return this.models.find(({ id }) => id === this.modelChoice.value) ?? null;
  }

  announce(text) {
    byId("announcer").textContent = text;
  }

  // Shows a text at the top of the page, with a button if given; null removes it.
  showBanner(reason, action = null) {
    byId("banner").hidden = !reason;
    byId("banner").replaceChildren(...[reason, action].filter(Boolean));
  }

  // Called by the connection. After an outage the server may have another model.
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
    if (this.shown === this.images) {
      document.title = "Images · Tilewright";
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

  // Gives a conversation its address when it begins.
  opened(conversation) {
    const query = hasBegun(conversation) ? `?c=${conversation.id}` : "";
    if (location.search !== query) history.pushState(null, "", query || location.pathname);
    this.listChanged();
  }

  // Called for the browser's buttons, and for links within the page, whose target is already open.
  async urlChanged() {
    const { conversation } = this.pane;
    const isThere = idOfUrl() === (hasBegun(conversation) ? conversation.id : null);
    if (!isThere || isImagesUrl() !== (this.shown === this.images)) await this.openFromUrl();
  }

  async openFromUrl() {
    if (isImagesUrl()) {
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

  // Shows a conversation, or the images if there is none. Synchronous: the user may write, send or navigate before
  // the browser has read anything.
  show(conversation) {
    this.showPane(conversation ? this.pane : this.images);
    if (!conversation) {
      this.listChanged();
      this.images.focus();
      return;
    }
    this.pane.show(conversation);
    this.opened(conversation);
    this.pane.focus();
  }

  // Replaces the placeholder of a conversation by the stored one, unless another was opened meanwhile.
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

  // Called when the open conversation no longer exists.
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
    this.images.load();
    this.create();
  }

  // Called when another tab changed or deleted one or all conversations. Its answers are shown here when complete.
  async changedElsewhere({ id, change }) {
    if (change === "images" || (change === "deleted" && id === null)) this.images.load();
    if (change === "images") return;
    const { conversation, composer } = this.pane;
    const isOpen = id === conversation.id;
    if (change === "deleted") await this.gone(id);
    else if (change === "changed" && isOpen) await this.look(id);
    // One draft is stored per conversation: the other tab may have replaced the draft of this tab.
    if (!composer.isEmpty) composer.keep();
    this.listChanged();
  }

  // Shows the stored messages of a conversation if it is still open and not being answered.
  async look(id) {
    const kept = await this.kept(() => this.store.conversation(id), null);
    const { conversation, isBusy } = this.pane;
    if (!kept || conversation.id !== id || conversation.isComing || isBusy) return;
    conversation.title = kept.title;
    this.pane.adopt(kept.messages);
  }

  // Called when another tab deleted a conversation, or all without an id: ends its running answers.
  async gone(id) {
    if (id === null) this.pane.dropAll();
    else this.pane.drop(id);
    const { conversation } = this.pane;
    if (!conversation.messages.length || (id !== null && id !== conversation.id)) return;
    this.leave();
  }
}

// Returns the id of the conversation in the address; null for a new one.
function idOfUrl() {
  return new URLSearchParams(location.search).get("c");
}

function isImagesUrl() {
  return location.search === IMAGES;
}

async function askForKey(wasRefused) {
  const text = wasRefused
    ? "The server refused that key."
    : "This server wants an API key. It is kept until this tab is closed.";
  return askDialog({ title: "API key", label: "Key", text, yes: "Use it", type: "password", check: keyProblem });
}

new App(await Store.open()).start();
