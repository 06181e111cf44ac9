// The key of this server's keys file, where it has one: kept until the tab is closed, and sent as a header, never in an
// address.
const KEPT_AS = "octavo-key";

export class KeptKey {
  #value; #told = [];

  constructor() { this.#value = kept(); }

  get value() { return this.#value; }

  set value(value) {
    this.#value = value.trim();
    keep(this.#value);
    this.#told.forEach((told) => told());
  }

  // told: () => void, after each change.
  onChange(told) { this.#told.push(told); }
}

// A browser may refuse to keep anything; then it holds for this visit.
function kept() {
  try { return sessionStorage.getItem(KEPT_AS) ?? ""; } catch { return ""; }
}

function keep(value) {
  try { sessionStorage.setItem(KEPT_AS, value); } catch { /* as said */ }
}
