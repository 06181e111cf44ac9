// One output as a list of tokens: one of them is active, by the pointer or by the arrow keys.
import { percent, spelled } from "./drawn_token.js";
import { element, setText } from "./elements.js";

const DOUBTS = [0.9, 0.6, 0.3, 0.1]; // below which probability the ground is stronger by one
let count = 0;

export class Answer {
  isEnded = false;
  #tokens = []; #active = -1; #list; #spoken; #title; #name; #show;

  // show: (token) => void, of the one that is active.
  constructor(name, show) {
    this.#name = name;
    this.#show = show;
    this.#title = element("h3", {}, name);
    this.#list = element("div", { class: "tokens", role: "listbox", tabindex: 0, "aria-label": `Tokens of ${name}` });
    this.#spoken = element("p", { class: "spoken", "aria-live": "polite" });
    this.root = element("article", { class: "answer", "aria-label": name }, this.#title, this.#list, this.#spoken);
    this.#list.addEventListener("keydown", (event) => this.#onKey(event));
    this.#list.addEventListener("focus", () => this.#tokens.length && this.#goTo(Math.max(this.#active, 0)));
    this.#list.addEventListener("pointerover", (event) => {
      const place = this.#tokens.findIndex((token) => token.shown === event.target);
      if (place >= 0) this.#activate(place);
    });
  }

  add(token) {
    const doubt = token.logprob === null ? 0 : DOUBTS.filter((share) => Math.exp(token.logprob) < share).length;
    const said = token.logprob === null ? "" : `, ${percent(token.logprob)}`;
    token.shown = element(
      "span",
      { class: `token doubt${doubt}`, role: "option", id: `token-${count++}`, "aria-label": spelled(token.text) + said, "aria-selected": "false" },
      token.text,
    );
    this.#tokens.push(token);
    this.#list.append(token.shown);
  }

  // The text is read out once, when it is whole: in parts nobody could follow it.
  end(why) {
    this.isEnded = true;
    setText(this.#title, `${this.#name}: ${this.#tokens.length} tokens, ${why}`);
    setText(this.#spoken, this.#tokens.map((token) => token.text).join(""));
  }

  #onKey(event) {
    const last = this.#tokens.length - 1;
    const goes = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -last, End: last }[event.key];
    if (goes === undefined || last < 0) return;
    event.preventDefault();
    this.#goTo(Math.min(Math.max(this.#active + goes, 0), last));
  }

  // By keys: the focus stays at the list, so no browser brings the token into sight by itself.
  #goTo(place) {
    this.#activate(place);
    this.#tokens[place].shown.scrollIntoView({ block: "nearest" });
  }

  #activate(place) {
    const before = this.#tokens[this.#active], now = this.#tokens[place];
    before?.shown.classList.remove("active");
    before?.shown.setAttribute("aria-selected", "false");
    now.shown.classList.add("active");
    now.shown.setAttribute("aria-selected", "true");
    this.#list.setAttribute("aria-activedescendant", now.shown.id);
    this.#active = place;
    this.#show(now);
  }
}
