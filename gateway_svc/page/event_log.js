// What happened between two frames, in words. It is read out, so it says at most one thing a second.
import { element } from "./elements.js";

const MOST_LINES = 50, AT_MOST_EVERY_MS = 1000;
const WORDS = { preempted: "was preempted, to be computed again", swapped: "was preempted, its blocks swapped to the host" };

export class EventLog {
  #list; #states = null; #workers = new Map(); #held = []; #timer = null; #saidAt = -Infinity;

  constructor(list) { this.#list = list; }

  take(frame, copies) {
    const states = new Map(frame.requests.map((request) => [request.key, request]));
    for (const [key, request] of this.#states ? states : []) {
      const before = this.#states.get(key), { id } = request;
      const wasAway = before && WORDS[before.state], isAway = WORDS[request.state];
      if (isAway && !wasAway) this.#add(`${id} ${isAway}`);
      else if (before && request.times_preempted > before.times_preempted) this.#add(`${id} was preempted and came back`);
      else if (wasAway && !isAway) this.#add(`${id} came back`);
    }
    this.#states = states;
    for (const { worker, source, destination } of copies) {
      this.#add(`block ${source} was copied to ${destination} before it was written, at ${worker}`);
    }
    for (const { address, state } of frame.workers) {
      const before = this.#workers.get(address);
      if (before && before !== state) this.#add(`worker ${address} is ${state}`);
      this.#workers.set(address, state);
    }
  }

  #add(text) {
    this.#held.push(text);
    const wait = this.#saidAt + AT_MOST_EVERY_MS - performance.now();
    this.#timer ??= setTimeout(() => this.#say(), Math.max(0, wait));
  }

  #say() {
    const lines = this.#held.splice(0);
    this.#timer = null;
    this.#saidAt = performance.now();
    const time = new Date().toLocaleTimeString();
    const more = lines.length > 3 ? `; and ${lines.length - 3} more` : "";
    this.#list.prepend(element("li", {}, `${time}: ${lines.slice(0, 3).join("; ")}${more}`));
    while (this.#list.childElementCount > MOST_LINES) this.#list.lastElementChild.remove();
  }
}
