// The browser's storage of conversations, titles, files, drafts and generated images. Several tabs may have the same
// conversation open: each writes only its own changes.

import { attachmentsOf, mergedMessages, titleRow } from "./conversation.js";
import { DiskTables, MemoryTables, OlderPageOpen, TABLE_NAMES } from "./tables.js";

const NAME = "tilewright";

export class Store {
  // `problem` is the reason why data is lost after this visit; null if it is stored.
  constructor(tables, problem = null) {
    this.tables = tables;
    this.problem = problem;
    this.turn = Promise.resolve(); // of the last change of conversations, which run one after another
    this.bases = new WeakMap(); // conversation -> ids of its stored messages when this tab last read or wrote it
    this.own = new WeakSet(); // messages made in this tab, which only this tab changes
    this.unkept = new Map(); // conversations that could not be stored, by id: kept for this visit
    this.files = new Map(); // of this visit: a file that does not fit on disk can still be sent
    this.urls = new Map(); // of these files, for showing them
    this.channel = openChannel();
  }

  // Opens a persistent store, or one for this visit if the browser stores nothing.
  static async open() {
    try {
      return new Store(await DiskTables.open(NAME));
    } catch (error) {
      return new Store(new MemoryTables(), error instanceof OlderPageOpen ? error.message : "perhaps a private window");
    }
  }

  read(table, use) {
    return this.tables.within([table], "readonly", use);
  }

  write(table, use) {
    return this.tables.within([table], "readwrite", use);
  }

  inTurn(does) {
    const result = this.turn.then(does);
    this.turn = result.catch(() => {});
    return result;
  }

  // Sends { id, change } to other tabs: "asked", "changed" or "deleted" of a conversation (no id: all), or "images"
  // for a change of the gallery.
  tell(change, id = null) {
    this.channel.postMessage({ id, change });
  }

  // Resolves to [{ id, title, changedAt }] of all conversations, the latest change first.
  async titles() {
    const kept = await this.read("titles", (table) => table.getAll());
    const all = new Map(kept.map((row) => [row.id, row]));
    for (const conversation of this.unkept.values()) all.set(conversation.id, titleRow(conversation));
    return [...all.values()].sort((one, other) => other.changedAt - one.changedAt);
  }

  // Resolves to a conversation, undefined if there is none.
  async conversation(id) {
    if (this.unkept.has(id)) return this.unkept.get(id);
    const conversation = await this.read("conversations", (table) => table.get(id));
    if (conversation) this.adopted(conversation);
    return conversation;
  }

  // Records that a conversation in memory has the stored messages.
  adopted(conversation) {
    this.bases.set(conversation, idsOf(conversation.messages));
  }

  // Records that this tab changes a stored message from now on.
  takeOver(message) {
    this.own.add(message);
  }

  // Stores a conversation in its state when its turn comes. Resolves to the stored messages, those of other tabs
  // included; null if another tab deleted it.
  keep(conversation) {
    return this.inTurn(async () => {
      const base = this.bases.get(conversation);
      const mine = [...conversation.messages]; // more may be added before this is written
      for (const message of mine) if (!base?.has(message.id)) this.own.add(message);
      try {
        const messages = await this.tables.within(["conversations", "titles"], "readwrite", (conversations, titles) =>
          this.merge(conversation, base, mine, conversations, titles),
        );
        this.bases.set(conversation, new Set([...(base ?? []), ...idsOf(mine)]));
        this.unkept.delete(conversation.id);
        return messages;
      } catch (error) {
        this.unkept.set(conversation.id, conversation);
        throw error;
      }
    });
  }

  async merge(conversation, base, mine, conversations, titles) {
    const kept = await conversations.get(conversation.id);
    if (base && !kept) return null;
    if (kept) conversation.title = kept.title; // it may have been renamed elsewhere
    const isOwn = (message) => this.own.has(message);
    const messages = mergedMessages(base ?? new Set(), mine, kept?.messages ?? [], isOwn);
    const merged = { ...conversation, messages };
    await conversations.put(merged);
    await titles.put(titleRow(merged));
    return messages;
  }

  async rename(id, title) {
    if (this.unkept.has(id)) this.unkept.get(id).title = title;
    await this.inTurn(() =>
      this.tables.within(["conversations", "titles"], "readwrite", async (conversations, titles) => {
        const conversation = await conversations.get(id);
        if (!conversation) return;
        conversation.title = title;
        await conversations.put(conversation);
        await titles.put(titleRow(conversation));
      }),
    );
    this.tell("changed", id);
  }

  async forget(id) {
    const attachments = await this.inTurn(() =>
      this.tables.within(TABLE_NAMES, "readwrite", async (conversations, titles, drafts, files) => {
        const messages = ((await conversations.get(id)) ?? this.unkept.get(id))?.messages ?? [];
        const draft = await drafts.get(id);
        const found = attachmentsOf(draft ? [...messages, draft] : messages);
        for (const table of [conversations, titles, drafts]) await table.delete(id);
        for (const attachment of found) await files.delete(attachment.id);
        return found;
      }),
    );
    this.unkept.delete(id);
    for (const attachment of attachments) this.letGo(attachment.id);
    this.tell("deleted", id);
  }

  async forgetAll() {
    await this.inTurn(() =>
      this.tables.within(TABLE_NAMES, "readwrite", async (...tables) => {
        for (const table of tables) await table.clear();
      }),
    );
    this.unkept.clear();
    for (const id of [...this.files.keys()]) this.letGo(id);
    this.tell("deleted");
  }

  async keepFile(id, blob) {
    this.files.set(id, blob);
    await this.write("files", (table) => table.put(blob, id));
  }

  async file(id) {
    if (!this.files.has(id)) {
      const blob = await this.read("files", (table) => table.get(id));
      if (!blob) return null;
      this.files.set(id, blob);
    }
    return this.files.get(id);
  }

  // Resolves to a URL of a file; null if it is not stored.
  async url(id) {
    if (!this.urls.has(id)) {
      const blob = await this.file(id);
      if (!blob) return null;
      this.urls.set(id, URL.createObjectURL(blob));
    }
    return this.urls.get(id);
  }

  async forgetFiles(attachments) {
    for (const { id } of attachments) {
      this.letGo(id);
      await this.write("files", (table) => table.delete(id));
    }
  }

  letGo(id) {
    this.files.delete(id);
    if (this.urls.has(id)) URL.revokeObjectURL(this.urls.get(id));
    this.urls.delete(id);
  }

  // Resolves to the stored images, the latest first: { id, createdAt, settings, seconds }; `file(id)` has the bytes.
  async images() {
    const kept = await this.read("pictures", (table) => table.getAll());
    return kept.sort((one, other) => other.createdAt - one.createdAt);
  }

  async keepImage(image, blob) {
    this.files.set(image.id, blob);
    await this.tables.within(["pictures", "files"], "readwrite", async (images, files) => {
      await images.put(image);
      await files.put(blob, image.id);
    });
    this.tell("images");
  }

  async forgetImage(id) {
    this.letGo(id);
    await this.tables.within(["pictures", "files"], "readwrite", async (images, files) => {
      await images.delete(id);
      await files.delete(id);
    });
    this.tell("images");
  }

  // Resolves to the draft of a conversation, undefined if there is none.
  draft(id) {
    return this.read("drafts", (table) => table.get(id));
  }

  keepDraft({ id, text, attachments }) {
    const isEmpty = !text && !attachments.length;
    return this.write("drafts", (table) => (isEmpty ? table.delete(id) : table.put({ id, text, attachments })));
  }
}

function idsOf(messages) {
  return new Set(messages.map(({ id }) => id));
}

// Opens a channel to other tabs; to none if the browser stores nothing.
function openChannel() {
  try {
    return new BroadcastChannel(NAME);
  } catch {
    return { postMessage() {} };
  }
}

// Returns an error of storing in plain words.
export function storageProblem(error) {
  if (error?.name === "QuotaExceededError") {
    return (
      "The browser has no room left to keep this conversation. You can continue, but a reload loses what is new; " +
      "deleting old conversations makes room."
    );
  }
  const reason = error?.message || error?.name || error;
  return `The browser could not keep this conversation (${reason}). You can continue, but a reload loses what is new.`;
}
