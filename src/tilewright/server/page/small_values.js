// Stores small values by name in the browser, or in memory until a reload if the browser stores nothing.

class SmallValues {
  // `area` returns the browser's storage, or throws if it is blocked.
  constructor(area) {
    this.area = area;
    this.memory = new Map();
    this.isKept = true; // false after the browser has refused
  }

  get(name) {
    if (this.memory.has(name)) return this.memory.get(name);
    return this.attempt((area) => area.getItem(name)) ?? null;
  }

  set(name, value) {
    this.memory.delete(name);
    this.attempt((area) => area.setItem(name, value));
    if (!this.isKept) this.memory.set(name, value);
  }

  attempt(use) {
    try {
      const result = use(this.area());
      this.isKept = true;
      return result;
    } catch {
      this.isKept = false;
      return null;
    }
  }
}

export const lastingValues = new SmallValues(() => localStorage);
export const tabValues = new SmallValues(() => sessionStorage); // gone with the tab
