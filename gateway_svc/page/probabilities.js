// The table beside the answers: what else the model might have drawn in place of one token.
import { percent, spelled } from "./drawn_token.js";
import { element } from "./elements.js";

export class Probabilities {
  #section; #hint; #table;

  constructor(section) {
    this.#section = section;
    this.#hint = section.querySelector("p");
    this.#table = section.querySelector("table");
  }

  show(token) {
    this.#hint.hidden = true;
    this.#table.hidden = false;
    this.#table.caption.textContent = `${spelled(token.text)} was drawn`;
    const rows = token.top.slice();
    if (token.logprob !== null && !rows.some(([, logprob]) => logprob === token.logprob)) {
      rows.push([token.text, token.logprob]);
    }
    const drawn = rows.findIndex(([, logprob]) => logprob === token.logprob);
    this.#table.tBodies[0].replaceChildren(...rows.map(([text, logprob], place) => row(text, logprob, place === drawn)));
    // It stays at the lower edge of the screen, so a token that is scrolled into sight has to be above it.
    document.documentElement.style.setProperty("--probabilities-height", `${this.#section.offsetHeight}px`);
  }

  // As before the first token: the table of one that is gone would cover what stands above it.
  forget() {
    this.#hint.hidden = false;
    this.#table.hidden = true;
    document.documentElement.style.removeProperty("--probabilities-height");
  }
}

function row(text, logprob, isDrawn) {
  const share = Math.exp(logprob);
  const bar = element("meter", { min: 0, max: 1, value: share, "aria-hidden": "true" });
  return element(
    "tr",
    { class: isDrawn ? "drawn" : undefined },
    element("td", {}, spelled(text)),
    element("td", {}, percent(logprob), " ", bar),
    element("td", {}, isDrawn ? "drawn" : ""),
  );
}
