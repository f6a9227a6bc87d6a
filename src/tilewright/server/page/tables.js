// Tables in the browser's IndexedDB, or in memory if it stores nothing.

import { titleRow } from "./conversation.js";

const VERSION = 3;
const TABLES = {
  conversations: { keyPath: "id" },
  titles: { keyPath: "id" }, // rows of the list, read without the texts
  drafts: { keyPath: "id" },
  files: {},
  pictures: { keyPath: "id" }, // settings of generated pictures; the bytes are in the files table
};

export const TABLE_NAMES = Object.keys(TABLES);

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

class DiskTable {
  constructor(table) {
    this.table = table;
  }

  get(key) {
    return promised(this.table.get(key));
  }

  getAll() {
    return promised(this.table.getAll());
  }

  put(value, key) {
    return promised(this.table.put(value, key));
  }

  delete(key) {
    return promised(this.table.delete(key));
  }

  clear() {
    return promised(this.table.clear());
  }
}

class MemoryTable {
  constructor({ keyPath }) {
    this.keyPath = keyPath;
    this.rows = new Map();
  }

  async get(key) {
    return structuredClone(this.rows.get(key));
  }

  async getAll() {
    return structuredClone([...this.rows.values()]);
  }

  async put(value, key) {
    this.rows.set(key ?? value[this.keyPath], structuredClone(value));
  }

  async delete(key) {
    this.rows.delete(key);
  }

  async clear() {
    this.rows.clear();
  }
}

export class OlderPageOpen extends Error {}

export class DiskTables {
  constructor(database) {
    this.database = database;
    database.onversionchange = () => database.close(); // a newer page waits for it in another tab
  }

  static async open(name) {
    const request = indexedDB.open(name, VERSION);
    request.onupgradeneeded = ({ oldVersion }) => upgrade(request, oldVersion);
    const blocked = new Promise((resolve, reject) => {
      request.onblocked = () => reject(new OlderPageOpen("an older page is open in another tab"));
    });
    return new DiskTables(await Promise.race([promised(request), blocked]));
  }

  // Runs `use` on tables in one transaction; resolves to its result when all writes are stored.
  async within(names, mode, use) {
    const transaction = this.database.transaction(names, mode);
    const done = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error ?? new DOMException("", "QuotaExceededError"));
    });
    try {
      const result = await use(...names.map((name) => new DiskTable(transaction.objectStore(name))));
      await done;
      return result;
    } catch (error) {
      done.catch(() => {}); // it is the same error, or comes of it
      abort(transaction);
      throw error;
    }
  }
}

function abort(transaction) {
  try {
    transaction.abort();
  } catch {
    // The transaction has already ended.
  }
}

// The first version had no table of titles.
function upgrade(request, oldVersion) {
  const { result: database, transaction } = request;
  for (const name of TABLE_NAMES) {
    if (!database.objectStoreNames.contains(name)) database.createObjectStore(name, TABLES[name]);
  }
  if (oldVersion !== 1) return;
  const titles = transaction.objectStore("titles");
  transaction.objectStore("conversations").openCursor().onsuccess = ({ target: { result: cursor } }) => {
    if (!cursor) return;
    titles.put(titleRow(cursor.value));
    cursor.continue();
  };
}

// Tables in memory, for browsers that store nothing, as in some private windows.
export class MemoryTables {
  constructor() {
    this.tables = Object.fromEntries(TABLE_NAMES.map((name) => [name, new MemoryTable(TABLES[name])]));
  }

  within(names, mode, use) {
    return use(...names.map((name) => this.tables[name]));
  }
}
