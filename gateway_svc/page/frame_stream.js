// Frames from `/live`, while the page is seen and nobody has paused it: the server watches nothing for nobody.

export class FrameStream {
  #source = null; #isPaused = false; #take; #lost;

  // take: (frame) => void; lost: () => void, while there is no connection. The browser connects anew by itself.
  constructor(take, lost) {
    this.#take = take;
    this.#lost = lost;
    document.addEventListener("visibilitychange", () => this.#settle());
    addEventListener("pagehide", () => this.#close());
    this.#settle();
  }

  pause(isPaused) {
    this.#isPaused = isPaused;
    this.#settle();
  }

  #settle() {
    if (this.#isPaused || document.hidden) {
      this.#close();
    } else if (!this.#source) {
      this.#source = new EventSource("/live");
      this.#source.addEventListener("message", (event) => this.#take(JSON.parse(event.data)));
      this.#source.addEventListener("error", () => this.#lost());
    }
  }

  #close() {
    this.#source?.close();
    this.#source = null;
  }
}
