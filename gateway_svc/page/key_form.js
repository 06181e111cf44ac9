// Asks for a key where the server shows nothing without, and says what was wrong with the one that it got.
import { setText } from "./elements.js";

export class KeyForm {
  #form; #why; #field; #key;

  constructor(form, key) {
    this.#form = form;
    this.#why = form.querySelector("p");
    this.#field = form.elements.live_key;
    this.#key = key;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      key.value = this.#field.value;
    });
    key.onChange(() => this.hide());
  }

  // error: of the refusal, with its status.
  ask(error) {
    setText(this.#why, this.#said(error));
    this.#field.value = "";
    this.#form.hidden = false;
  }

  hide() { this.#form.hidden = true; }

  #said({ status, message }) {
    if (status === 403) return `Not with this key: ${message}`;
    return this.#key.value ? "The server does not know this key." : "This server wants a key, with role control or metrics.";
  }
}
