// What the browser keeps: conversations, their files, and drafts, in IndexedDB. Pictures are too large for localStorage.

const NAME = "tilewright";
const TABLES = { conversations: { keyPath: "id" }, drafts: { keyPath: "id" }, files: {} };

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

// What stands in for a table where the browser keeps nothing, as some do in private windows.
class MemoryTable {
  constructor({ keyPath }) {
    this.keyPath = keyPath;
    this.rows = new Map();
  }

  get(key) {
    return this.rows.get(key);
  }

  getAll() {
    return [...this.rows.values()];
  }

  put(value, key) {
    this.rows.set(key ?? value[this.keyPath], value);
  }

  delete(key) {
    this.rows.delete(key);
  }

  clear() {
    this.rows.clear();
  }
}

export class Store {
  constructor(database) {
    this.database = database; // null: nothing outlives this visit
    this.memory = Object.fromEntries(Object.entries(TABLES).map(([name, options]) => [name, new MemoryTable(options)]));
    this.files = new Map(); // of this visit: what does not fit the disk can still be sent
    this.urls = new Map(); // of these files, for showing them
    this.channel = new BroadcastChannel(NAME);
  }

  static async open() {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      for (const [name, options] of Object.entries(TABLES)) request.result.createObjectStore(name, options);
    };
    return new Store(await promised(request));
  }

  // Runs `use` on a table; resolves when what it wrote is kept.
  async within(table, mode, use) {
    if (!this.database) return use(this.memory[table]);
    const transaction = this.database.transaction(table, mode);
    const done = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error ?? new DOMException("", "QuotaExceededError"));
    });
    const result = promised(use(transaction.objectStore(table)));
    await Promise.all([result, done]);
    return result;
  }

  // All conversations, the one changed last first.
  async conversations() {
    const all = await this.within("conversations", "readonly", (table) => table.getAll());
    return all.sort((one, other) => other.changedAt - one.changedAt);
  }

  conversation(id) {
    return this.within("conversations", "readonly", (table) => table.get(id));
  }

  async keep(conversation) {
    await this.within("conversations", "readwrite", (table) => table.put(conversation));
    this.channel.postMessage(conversation.id);
  }

  async forget(conversation) {
    const draft = await this.draft(conversation.id);
    await this.within("conversations", "readwrite", (table) => table.delete(conversation.id));
    await this.within("drafts", "readwrite", (table) => table.delete(conversation.id));
    await this.forgetFiles([
      ...draft.attachments,
      ...conversation.messages.flatMap((message) => message.attachments ?? []),
    ]);
    this.channel.postMessage(conversation.id);
  }

  async forgetAll() {
    for (const table of Object.keys(TABLES)) await this.within(table, "readwrite", (one) => one.clear());
    this.files.clear();
    this.urls.forEach((url) => URL.revokeObjectURL(url));
    this.urls.clear();
    this.channel.postMessage(null);
  }

  async keepFile(id, blob) {
    this.files.set(id, blob);
    await this.within("files", "readwrite", (table) => table.put(blob, id));
  }

  async file(id) {
    if (!this.files.has(id)) {
      const blob = await this.within("files", "readonly", (table) => table.get(id));
      if (!blob) return null;
      this.files.set(id, blob);
    }
    return this.files.get(id);
  }

  // An address that shows a file; null if it is not kept.
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
      this.files.delete(id);
      if (this.urls.has(id)) URL.revokeObjectURL(this.urls.get(id));
      this.urls.delete(id);
      await this.within("files", "readwrite", (table) => table.delete(id));
    }
  }

  async draft(id) {
    return (await this.within("drafts", "readonly", (table) => table.get(id))) ?? { id, text: "", attachments: [] };
  }

  keepDraft(draft) {
    const isEmpty = !draft.text && !draft.attachments.length;
    return this.within("drafts", "readwrite", (table) => (isEmpty ? table.delete(draft.id) : table.put(draft)));
  }
}

// What went wrong with keeping something, in plain words.
export function storageProblem(error) {
  if (error?.name === "QuotaExceededError") {
    return (
      "The browser has no room left to keep this conversation. It goes on, but a reload loses what is new; " +
      "deleting old conversations makes room."
    );
  }
  const reason = error?.message || error?.name || error;
  return `The browser could not keep this conversation (${reason}). It goes on, but a reload loses what is new.`;
}
