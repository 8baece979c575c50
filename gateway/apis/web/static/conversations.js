// The conversations of this browser: a database in IndexedDB for each gateway and tenant.
//
// A conversation is {id, title, createdMs, changedMs, isAnswering}. A turn is {conversation, number, role, …}: what the
// user said, an answer, or the result of a call. `answer.js` says what an answer has.

const VERSION = 1;
const CONVERSATIONS = "conversations";
const TURNS = "turns";

/** Open the database of a tenant. A browser that denies it gets a store that lasts as long as the page. */
export async function openStore(tenant) {
  const name = `penstock ${new URL(".", location.href).href} ${tenant}`;
  try {
    return new BrowserStore(name, await opened(name));
  } catch {
    return new PageStore(name);
  }
}

function opened(name) {
  const asked = indexedDB.open(name, VERSION);
  asked.onupgradeneeded = () => {
    asked.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
    asked.result.createObjectStore(TURNS, { keyPath: ["conversation", "number"] });
  };
  return done(asked);
}

function done(asked) {
  return new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = asked.onblocked = () => reject(asked.error ?? new Error("the browser's database is blocked"));
  });
}

/** The keys of a conversation's turns, from a number on. */
const keysFrom = (id, number = 0) => IDBKeyRange.bound([id, number], [id, Infinity]);

/** Conversations in IndexedDB. They stay when the tab is closed or the browser crashes. */
class BrowserStore {
  isLasting = true;

  constructor(name, database) {
    this.name = name;
    this.database = database;
    // Another tab deletes the database, or a later page has another version of it.
    database.onversionchange = () => database.close();
  }

  use(mode, ...names) {
    const transaction = this.database.transaction(names, mode);
    return names.map((name) => transaction.objectStore(name));
  }

  /** Return all conversations, the last changed one first. */
  async all() {
    const [conversations] = this.use("readonly", CONVERSATIONS);
    const found = await done(conversations.getAll());
    return found.sort((one, other) => other.changedMs - one.changedMs);
  }

  async turnsOf(id) {
    const [turns] = this.use("readonly", TURNS);
    return done(turns.getAll(keysFrom(id)));
  }

  async save(conversation) {
    const [conversations] = this.use("readwrite", CONVERSATIONS);
    await done(conversations.put(conversation));
  }

  async saveTurn(turn) {
    const [turns] = this.use("readwrite", TURNS);
    await done(turns.put(turn));
  }

  /** Delete the turns of a conversation from a number on. */
  async cut(id, number) {
    const [turns] = this.use("readwrite", TURNS);
    await done(turns.delete(keysFrom(id, number)));
  }

  async remove(id) {
    const [conversations, turns] = this.use("readwrite", CONVERSATIONS, TURNS);
    await Promise.all([done(conversations.delete(id)), done(turns.delete(keysFrom(id)))]);
  }

  async clear() {
    await Promise.all(this.use("readwrite", CONVERSATIONS, TURNS).map((store) => done(store.clear())));
  }

  close() {
    this.database.close();
  }
}

/** The same in memory. */
class PageStore {
  isLasting = false;

  constructor(name) {
    this.name = name;
    this.conversations = new Map();
    this.turns = new Map(); // conversation → its turns by number
  }

  async all() {
    return [...this.conversations.values()].sort((one, other) => other.changedMs - one.changedMs);
  }

  async turnsOf(id) {
    return [...(this.turns.get(id) ?? [])];
  }

  async save(conversation) {
    this.conversations.set(conversation.id, conversation);
  }

  async saveTurn(turn) {
    const turns = this.turns.get(turn.conversation) ?? [];
    turns[turn.number] = turn;
    this.turns.set(turn.conversation, turns);
  }

  async cut(id, number) {
    this.turns.get(id)?.splice(number);
  }

  async remove(id) {
    this.conversations.delete(id);
    this.turns.delete(id);
  }

  async clear() {
    this.conversations.clear();
    this.turns.clear();
  }

  close() {}
}
