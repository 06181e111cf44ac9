// Requests with the block tables of their sequences: what the maps draw, in words and numbers.
import { element, KeyedChildren, setText } from "./elements.js";

const MOST_ENTRIES = 96; // of a table that are written out
const SIGNS = { running: "▶", waiting: "…", preempted: "⏏", swapped: "⇄" };
const WORDS = { swapped: "swapped to the host" };

export class RequestTable {
  #rows; #chosen = null; #pointed = null;

  // redraw: () => void, after another request was chosen.
  constructor(body, redraw) {
    this.#rows = new KeyedChildren(body, (key) => new Row({
      choose: () => { this.#chosen = this.#chosen === key ? null : key; redraw(); },
      point: (isOver) => { this.#pointed = isOver ? key : null; redraw(); },
    }));
  }

  // The blocks of the request that is pointed at or chosen, for the maps.
  chosen(requests) {
    // A row that vanishes under the pointer is not told that the pointer leaves it.
    if (!requests.some((each) => each.key === this.#pointed)) this.#pointed = null;
    const request = requests.find((each) => each.key === (this.#pointed ?? this.#chosen));
    const blocks = (name) => new Set(request?.sequences.flatMap((sequence) => sequence[name]));
    return { worker: request?.worker, device: blocks("table"), host: blocks("host_table") };
  }

  show(frame, copies) {
    const maps = new Map(frame.workers.map((worker) => [worker.address, worker.pools.find((pool) => !pool.on_host)?.blocks ?? ""]));
    const rows = this.#rows.update(frame.requests.map((request) => request.key));
    rows.forEach((row, place) => {
      const request = frame.requests[place];
      row.show(request, maps.get(request.worker) ?? "", copies, request.key === this.#chosen);
    });
  }
}

class Row {
  #button; #state; #note; #tokens; #blocks; #shown = "";

  constructor({ choose, point }) {
    this.#button = element("button", { type: "button", "aria-pressed": "false" });
    this.#button.addEventListener("click", choose);
    this.#state = element("span", { class: "state" });
    this.#note = element("span", { class: "note" });
    this.#tokens = element("td");
    this.#blocks = element("td");
    this.root = element("tr", {}, element("td", {}, this.#button), element("td", {}, this.#state, this.#note), this.#tokens, this.#blocks);
    this.root.addEventListener("pointerenter", () => point(true));
    this.root.addEventListener("pointerleave", () => point(false));
  }

  show(request, map, copies, isChosen) {
    if (this.#button.title !== request.id) this.#button.title = request.id;
    setText(this.#button, shortened(request.id));
    this.#button.setAttribute("aria-pressed", String(isChosen));
    this.#state.className = `state ${request.state}`;
    setText(this.#state, `${SIGNS[request.state] ?? ""} ${WORDS[request.state] ?? request.state}`);
    setText(this.#note, note(request));
    setText(this.#tokens, request.sequences.map((sequence) => sequence.tokens).join(", "));
    // Tables are long and mostly the same: drawn again only where something of them has changed.
    const tables = request.sequences.map(({ table, host_table: hostTable }) => {
      const entries = [
        ...table.slice(0, MOST_ENTRIES).map((block) => entry(block, map[block], copies.has(request.worker, block))),
        ...hostTable.slice(0, MOST_ENTRIES).map((block) => ({ text: String(block), kind: "host", label: `host block ${block}` })),
      ].slice(0, MOST_ENTRIES);
      return { entries, numMore: table.length + hostTable.length - entries.length };
    });
    const drawn = JSON.stringify(tables);
    if (drawn === this.#shown) return;
    this.#shown = drawn;
    this.#blocks.replaceChildren(...tables.map((table, index) => list(table, index, tables.length)));
  }
}

// Ids of one client begin alike, and those of one call differ at their end.
function shortened(id) {
  return id.length > 20 ? `${id.slice(0, 9)}…${id.slice(-8)}` : id;
}

function note(request) {
  const notes = [];
  if (request.sequences.length > 1) notes.push(`forked, ${request.sequences.length} outputs`);
  if (request.times_preempted) notes.push(`preempted ${times(request.times_preempted)}`);
  if (request.times_moved) notes.push(`moved ${times(request.times_moved)}`);
  const cached = Math.max(0, ...request.sequences.map((sequence) => sequence.cached));
  if (cached) notes.push(`${cached} tokens found in the cache`);
  return notes.join("; ");
}

function times(count) {
  return count === 1 ? "once" : `${count} times`;
}

function entry(block, sign, isCopied) {
  const count = sign === "+" ? "10 or more" : Number(sign);
  const isShared = count === "10 or more" || count > 1;
  return {
    text: isShared ? `${block}×${sign}` : String(block),
    kind: `${isShared ? "shared" : ""}${isCopied ? " copied" : ""}`,
    label: `block ${block}${isShared ? `, shared by ${count}` : ""}${isCopied ? ", just copied" : ""}`,
  };
}

function list({ entries, numMore }, index, count) {
  const made = element("ul", { class: "table", "aria-label": count > 1 ? `Blocks of output ${index + 1}` : "Blocks" });
  for (const { text, kind, label } of entries) {
    made.append(element("li", { class: kind || undefined, title: label }, text));
  }
  if (numMore) made.append(element("li", {}, `and ${numMore} more`));
  return made;
}
