// What the server does, frame by frame: queues, workers with their blocks, requests with their tables, events.
import { KeyedChildren, setText } from "./elements.js";
import { EventLog } from "./event_log.js";
import { FrameStream } from "./frame_stream.js";
import { KeyForm } from "./key_form.js";
import { Queues } from "./queues.js";
import { RecentCopies } from "./recent_copies.js";
import { RequestTable } from "./request_table.js";
import { WorkerCard } from "./worker_card.js";

export class LivePanel {
  #status; #more; #queues; #workers; #requests; #events; #copies = new RecentCopies(); #last = null;
  #redrawing = null; #models = ""; #changed;

  // named: (id) => the element of that id. key: a KeptKey. changed: () => void, when other models may be served.
  constructor(named, key, changed) {
    this.#changed = changed;
    this.#status = named("live-status");
    this.#more = named("more-requests");
    this.#queues = new Queues(named("queues"));
    this.#workers = new KeyedChildren(named("workers"), (address) => new WorkerCard(address, key));
    this.#requests = new RequestTable(named("requests").tBodies[0], () => this.#last && this.#draw(this.#last));
    this.#events = new EventLog(named("events"));
    const asking = new KeyForm(named("live-key"), key);
    const stream = new FrameStream(key, {
      take: (frame) => this.#take(frame),
      begins: () => this.#queues.forget(),
      lost: (error) => this.#lost(error),
      refused: (error) => this.#refused(error, asking),
    });
    const pause = named("pause");
    pause.addEventListener("click", () => {
      const isPaused = pause.getAttribute("aria-pressed") !== "true";
      pause.setAttribute("aria-pressed", String(isPaused));
      stream.pause(isPaused);
      setText(this.#status, isPaused ? "Paused" : "");
    });
  }

  #take(frame) {
    if (frame.problem) {
      setText(this.#status, `No news: ${frame.problem}`);
      this.#queues.forget();
      this.#models = "";
      return;
    }
    setText(this.#status, frame.load_alone ? "The load alone: requests and blocks take a key with role control" : "");
    this.#copies.take(frame.steps);
    this.#events.take(frame, this.#copies.newest);
    const models = JSON.stringify(frame.workers.map(({ model, state }) => [model, state]));
    if (models !== this.#models) this.#changed();
    this.#models = models;
    this.#last = frame;
    this.#queues.show(frame);
    this.#draw(frame);
  }

  #draw(frame) {
    const next = this.#copies.expire();
    clearTimeout(this.#redrawing);
    if (next !== undefined) this.#redrawing = setTimeout(() => this.#draw(this.#last), next);
    const cards = this.#workers.update(frame.workers.map((worker) => worker.address));
    const chosen = this.#requests.chosen(frame.requests);
    cards.forEach((card, place) => card.show(frame.workers[place], this.#copies, chosen, frame.demo));
    this.#requests.show(frame, this.#copies);
    setText(this.#more, frame.more_requests ? `The ${frame.requests.length} oldest requests are shown.` : "");
  }

  // error: of a server that answered has its status.
  #lost(error) {
    this.#models = "";
    setText(this.#status, error?.status ? `No news: ${error.message}; it is tried again` : "The connection is lost; it is tried again");
  }

  #refused(error, asking) {
    setText(this.#status, error.status === 400 ? `No news: ${error.message}` : "");
    if (error.status !== 400) asking.ask(error);
  }
}
