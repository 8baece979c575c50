// What the page remembers. A browser may deny storage; the page then remembers it until it is left.

const memory = new Map();

/** `localStorage` or `sessionStorage`, by name, without their exceptions. */
export class Storage {
  constructor(name) {
    this.name = name;
  }

  get(key) {
    return memory.get(key) ?? this.tried((storage) => storage.getItem(key)) ?? null;
  }

  set(key, value) {
    memory.set(key, value);
    this.tried((storage) => storage.setItem(key, value));
  }

  remove(key) {
    memory.delete(key);
    this.tried((storage) => storage.removeItem(key));
  }

  tried(use) {
    try {
      return use(globalThis[this.name]);
    } catch {
      return undefined;
    }
  }
}

export const lasting = new Storage("localStorage");
export const ofTab = new Storage("sessionStorage");
