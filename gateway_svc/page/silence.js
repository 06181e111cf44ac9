// Tells that a connection is dead whose other side says nothing of it: after sleep, or where the network has lost it.

const SLACK_MS = 2000; // for a network and a server that are slow
const UNTIL_ANSWER_MS = 40000;
const MOST_MS = 2 ** 31 - 1; // a browser's longest timer

export class Silence {
  #controller = new AbortController(); #timer; #limitMs = UNTIL_ANSWER_MS;

  constructor() { this.heard(); }

  // Aborts once it has been silent for too long.
  get signal() { return this.#controller.signal; }

  // Something has come: silence begins anew.
  heard() {
    clearTimeout(this.#timer);
    if (this.#limitMs) this.#timer = setTimeout(() => this.#abort(), this.#limitMs);
  }

  // interval: seconds after which the server sends a comment where it has nothing else to send. 0: it sends none, and
  // silence tells nothing. One comment may be lost.
  expectComments(interval) {
    this.#limitMs = Number(interval) && Math.min(2500 * Number(interval) + SLACK_MS, MOST_MS);
    this.heard();
  }

  stop() { clearTimeout(this.#timer); }

  #abort() {
    this.#controller.abort(new Error(`nothing has come for ${this.#limitMs / 1000} s`));
  }
}
