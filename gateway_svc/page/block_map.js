// One pool of blocks, a square each. Only squares that have changed are touched.
import { element } from "./elements.js";

const KINDS = { ".": "free", c: "cached", w: "withheld" };
const MANY = 1024; // blocks, from which on squares are small

export class BlockMap {
  #squares = []; #shown = [];

  constructor() {
    this.root = element("div", { class: "map", role: "img" });
  }

  // blocks: a character each, see gateway_svc/live/frames.py; hasMark: (block) => whether it was copied just now.
  show(blocks, hasMark, chosen) {
    if (this.#squares.length !== blocks.length) this.#rebuild(blocks.length);
    for (let block = 0; block < blocks.length; block++) {
      const sign = blocks[block];
      const looks = sign + (hasMark(block) ? "!" : "") + (chosen.has(block) ? "?" : "");
      if (looks === this.#shown[block]) continue;
      this.#shown[block] = looks;
      const kind = kindOf(sign), square = this.#squares[block];
      square.className = `block ${kind}${hasMark(block) ? " copied" : ""}${chosen.has(block) ? " chosen" : ""}`;
      square.textContent = kind === "shared" ? sign : "";
    }
  }

  #rebuild(count) {
    this.#squares = Array.from({ length: count }, () => element("i", { class: "block free" }));
    this.#shown = Array(count).fill(".");
    this.root.classList.toggle("small", count > MANY);
    this.root.replaceChildren(...this.#squares);
  }
}

export function kindOf(sign) {
  return KINDS[sign] ?? (sign === "1" ? "used" : "shared");
}

// How many blocks are of which kind: { free, cached, used, shared, withheld }.
export function countKinds(blocks) {
  const counts = { free: 0, cached: 0, used: 0, shared: 0, withheld: 0 };
  for (const sign of blocks) counts[kindOf(sign)]++;
  return counts;
}
