// For a demonstration: how many blocks of a worker's cache may be used. The others are withheld, until it says otherwise.
import { withhold } from "./api.js";
import { element, setText } from "./elements.js";

let count = 0;

export class CacheSlider {
  #worker; #key; #range; #output; #problem; #isHeld = false; #numBlocks = 0;

  constructor(worker, key) {
    this.#worker = worker;
    this.#key = key;
    const id = `cache-slider-${count++}`;
    this.#range = element("input", { type: "range", id, step: 1 });
    this.#output = element("output", { for: id });
    this.#problem = element("span", { class: "error", role: "status" });
    this.root = element("p", { class: "slider" }, element("label", { for: id }, "Blocks that may be used"), this.#range, this.#output, this.#problem);
    this.#range.addEventListener("input", () => { this.#isHeld = true; this.#say(); });
    this.#range.addEventListener("change", () => this.#set());
  }

  show(pool) {
    this.root.hidden = !pool.max_withheld;
    this.#numBlocks = pool.num_blocks;
    this.#range.min = pool.num_blocks - pool.max_withheld;
    this.#range.max = pool.num_blocks;
    if (this.#isHeld) return; // somebody moves it: it follows the server again when they let go
    this.#range.value = pool.num_blocks - pool.to_withhold;
    this.#say();
  }

  #say() {
    const text = `${this.#range.value} of ${this.#numBlocks}`;
    setText(this.#output, text);
    this.#range.setAttribute("aria-valuetext", text);
  }

  async #set() {
    let problem = "";
    try {
      await withhold(this.#worker, this.#numBlocks - Number(this.#range.value), this.#key.value);
    } catch (error) {
      problem = error.status ? error.message : "the server does not answer";
    }
    setText(this.#problem, problem);
    this.#isHeld = false;
  }
}
