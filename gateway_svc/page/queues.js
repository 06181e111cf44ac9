// Numbers of the whole server. Speeds are what the sums of steps grew by over the last second or so.
import { element, setText } from "./elements.js";

const OVER_MS = 1000;

export class Queues {
  #values = new Map(); #list; #past = [];

  constructor(list) { this.#list = list; }

  show(frame) {
    const now = performance.now(), { steps } = frame;
    this.#past.push([now, steps]);
    while (this.#past.length > 2 && this.#past[1][0] <= now - OVER_MS) this.#past.shift();
    const [then, before] = this.#past[0];
    const speed = (name) => ((steps[name] - before[name]) / Math.max((now - then) / 1000, OVER_MS / 1000)).toFixed(0);
    this.#write("Running", frame.running);
    this.#write("Waiting", frame.waiting);
    this.#write("Tokens waiting", frame.waiting_tokens);
    if (frame.load_alone) return; // of steps nothing is told
    this.#write("Steps/s", speed("num_steps"));
    this.#write("Tokens/s in", speed("num_prefill_tokens"));
    this.#write("Tokens/s out", speed("num_decode_tokens"));
    this.#write("Preempted", `${steps.num_preempted}, ${steps.num_swapped_out} of them swapped`);
    this.#write("Copied on write", steps.blocks_copied);
  }

  // Sums begin anew: with another connection, say.
  forget() { this.#past = []; }

  #write(name, value) {
    let shown = this.#values.get(name);
    if (!shown) {
      this.#values.set(name, shown = element("dd"));
      this.#list.append(element("div", {}, element("dt", {}, name), shown));
    }
    setText(shown, String(value));
  }
}
