// Sends what the form asks for, as often at once as it says, and shows what comes.
import { Answer } from "./answer.js";
import { generate, listModels, tokenize } from "./api.js";
import { tokensOf } from "./drawn_token.js";
import { element, setText } from "./elements.js";
import { Probabilities } from "./probabilities.js";
import { readRequest, repeated } from "./request_form.js";

const NO_MODELS = "No models: ";
const ENDS = { stop: "the model ended it", length: "as long as it may be" };

export class Playground {
  #form; #stop; #status; #answers; #probabilities; #running = null;

  // key: a KeptKey.
  constructor(key, form, stop, status, answers, probabilities) {
    this.#form = form;
    this.#stop = stop;
    this.#status = status;
    this.#answers = answers;
    this.#probabilities = new Probabilities(probabilities);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    form.elements.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    const field = form.elements.key;
    field.value = key.value;
    field.addEventListener("change", () => { key.value = field.value; });
    key.onChange(() => {
      field.value = key.value;
      if (this.#status.classList.contains("error")) this.#say(""); // of the key before
      this.learnModels();
    });
    form.elements.model.addEventListener("focus", () => this.learnModels());
    stop.addEventListener("click", () => this.#running?.abort());
    this.learnModels();
  }

  // Models come and go while the page is open: asked for again whenever others may be served.
  async learnModels() {
    try {
      this.#offer(await listModels(this.#form.elements.key.value));
      if (this.#status.textContent.startsWith(NO_MODELS)) this.#say("");
    } catch (error) {
      if (this.#stop.disabled) this.#say(NO_MODELS + error.message, true);
    }
  }

  // What was chosen stays so while it is there, and a list that is open is left alone where nothing has changed.
  #offer(names) {
    const { model } = this.#form.elements, chosen = model.value;
    if (names.join("\n") === Array.from(model.options, (option) => option.value).join("\n")) return;
    model.replaceChildren(...names.map((name) => element("option", { value: name, selected: name === chosen }, name)));
  }

  async #send() {
    this.#running?.abort();
    const running = this.#running = new AbortController();
    const started = performance.now();
    this.#answers.replaceChildren();
    this.#probabilities.forget();
    this.#stop.disabled = false;
    this.#say("Waiting for the first token");
    let end;
    try {
      const usage = await this.#follow(readRequest(this.#form), running.signal);
      end = [summary(usage, (performance.now() - started) / 1000)];
    } catch (error) {
      end = running.signal.aborted ? ["Stopped"] : [error.message, true];
      if (error.status === 404) this.learnModels(); // the model is not there any more
    }
    if (this.#running !== running) return; // another one has begun
    this.#stop.disabled = true;
    this.#say(...end);
  }

  // Usage, once all outputs have ended.
  async #follow(asked, signal) {
    if (asked.copies > 1) {
      const { model, messages } = asked.body;
      asked = repeated(asked, messages && await tokenize(model, messages, asked.key, signal));
    }
    const outputs = new Map();
    let usage = null;
    try {
      for await (const chunk of generate(asked.path, asked.body, asked.key, signal)) {
        usage = chunk.usage ?? usage;
        for (const choice of chunk.choices) {
          if (!outputs.has(choice.index)) outputs.set(choice.index, this.#newAnswer(asked, choice.index));
          const answer = outputs.get(choice.index);
          tokensOf(choice).forEach((token) => answer.add(token));
          if (choice.finish_reason) answer.end(ENDS[choice.finish_reason] ?? choice.finish_reason);
        }
      }
    } catch (error) {
      for (const answer of outputs.values()) if (!answer.isEnded) answer.end(signal.aborted ? "stopped" : "broken off");
      throw error;
    }
    return usage;
  }

  #newAnswer(asked, index) {
    const ofRequest = asked.copies > 1 ? `request ${Math.floor(index / asked.outputs) + 1}, ` : "";
    const answer = new Answer(`${ofRequest}answer ${(index % asked.outputs) + 1}`, (token) => this.#probabilities.show(token));
    this.#answers.append(answer.root);
    if (this.#answers.childElementCount === 1) this.#say("Answering");
    return answer;
  }

  #say(text, isError = false) {
    this.#status.classList.toggle("error", isError);
    setText(this.#status, text);
  }
}

function summary(usage, seconds) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return `${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s, ` +
    `of prompts of ${usage.prompt_tokens} tokens (${cached} found in the cache)`;
}
