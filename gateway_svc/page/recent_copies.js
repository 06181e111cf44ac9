// Blocks that were copied on write a moment ago: both ends of a copy are marked for a while.

const MARKED_MS = 2500;

export class RecentCopies {
  #last = 0; #marked = new Map(); // "worker/block": until when

  newest = []; // of the last frame: { worker, source, destination }

  take(steps) {
    const now = performance.now();
    const numbers = steps.copies.map(([number]) => number);
    if (Math.max(0, ...numbers) < this.#last) this.#last = 0; // another connection counts anew
    this.newest = steps.copies.filter(([number]) => number > this.#last)
      .map(([, worker, source, destination]) => ({ worker, source, destination }));
    this.#last = Math.max(this.#last, ...numbers);
    for (const { worker, source, destination } of this.newest) {
      this.#marked.set(`${worker}/${source}`, now + MARKED_MS).set(`${worker}/${destination}`, now + MARKED_MS);
    }
  }

  // Forgets marks that are old; how long until the next one is, or nothing where there is none.
  expire() {
    const now = performance.now();
    for (const [block, until] of this.#marked) if (until <= now) this.#marked.delete(block);
    return this.#marked.size ? Math.min(...this.#marked.values()) - now : undefined;
  }

  has(worker, block) { return this.#marked.has(`${worker}/${block}`); }
}
