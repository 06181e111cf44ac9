// Frames from `/live`, while the page is seen and nobody has paused it: the server watches nothing for nobody.
import { follow } from "./api.js";

const RETRY_MS = 2000;
const REFUSALS = [400, 401, 403]; // asking again with the same key changes nothing

export class FrameStream {
  #running = null; #isPaused = false; #isRefused = false; #key; #told;

  // key: a KeptKey. told: { begins: () => void, take: (frame) => void, lost: (error?) => void, refused: (error) => void }:
  // while there is no connection it is tried again, and after a refusal once there is another key.
  constructor(key, told) {
    this.#key = key;
    this.#told = told;
    key.onChange(() => this.#begin());
    document.addEventListener("visibilitychange", () => this.#settle());
    addEventListener("pagehide", () => this.#close());
    this.#settle();
  }

  pause(isPaused) {
    this.#isPaused = isPaused;
    this.#settle();
  }

  #begin() {
    this.#close();
    this.#isRefused = false;
    this.#settle();
  }

  #settle() {
    if (this.#isPaused || document.hidden) {
      this.#close();
    } else if (!this.#running && !this.#isRefused) {
      this.#running = new AbortController();
      this.#run(this.#running.signal);
    }
  }

  #close() {
    this.#running?.abort();
    this.#running = null;
  }

  async #run(signal) {
    while (!signal.aborted) {
      let problem;
      this.#told.begins();
      try {
        for await (const data of follow("/live", this.#key.value, signal)) {
          if (!signal.aborted) this.#told.take(JSON.parse(data));
        }
      } catch (error) {
        if (signal.aborted) return;
        if (REFUSALS.includes(error.status)) {
          this.#isRefused = true;
          this.#close();
          this.#told.refused(error);
          return;
        }
        problem = error;
      }
      if (signal.aborted) return;
      this.#told.lost(problem);
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
  }
}
