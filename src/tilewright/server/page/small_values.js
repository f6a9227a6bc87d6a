// Small values by name, kept by the browser; where it keeps nothing for this page, in memory until a reload.

class SmallValues {
  // `area` gives the browser's storage, or throws where that is blocked.
  constructor(area) {
    this.area = area;
    this.memory = new Map();
    this.isKept = true; // false once the browser refused
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
