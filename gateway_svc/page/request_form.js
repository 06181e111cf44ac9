// What the form asks for, as OpenAI's API has it. A field that is empty is left out: the server knows its default.

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "n",
  "presence_penalty", "frequency_penalty", "repetition_penalty",
];

// { path, body, copies, outputs, key }: so many outputs of each copy of the request.
export function readRequest(form) {
  const value = (name) => form.elements[name].value.trim();
  const number = (name) => (value(name) === "" ? undefined : Number(value(name)));
  const body = { model: value("model") || undefined };
  for (const name of NUMBERS) body[name] = number(name);
  if (value("stop")) body.stop = [form.elements.stop.value];
  if (form.elements.ignore_eos.checked) body.ignore_eos = true;
  const beams = number("beams");
  if (beams) {
    Object.assign(body, { use_beam_search: true, best_of: Math.max(beams, body.n ?? 1), temperature: 0 });
  }
  const shown = number("top_logprobs") ?? 0, isChat = value("kind") === "chat";
  return {
    path: isChat ? "/v1/chat/completions" : "/v1/completions",
    body: { ...body, ...(isChat ? chat(form, shown) : { prompt: form.elements.prompt.value, logprobs: shown }) },
    copies: number("copies") ?? 1,
    outputs: body.n ?? 1,
    key: form.elements.key.value,
  };
}

// The same several times over, as one call: a browser opens six connections to a server and lets all else wait. Of
// chats a call takes one, so `tokens`, those of the conversation, go in their place.
export function repeated(asked, tokens) {
  const { messages, logprobs, top_logprobs: shown, ...body } = asked.body;
  const prompt = Array(asked.copies).fill(messages ? tokens : body.prompt);
  return { ...asked, path: "/v1/completions", body: { ...body, prompt, logprobs: messages ? shown : logprobs } };
}

function chat(form, shown) {
  const messages = [{ role: "user", content: form.elements.prompt.value }];
  const system = form.elements.system.value.trim();
  if (system) messages.unshift({ role: "system", content: system });
  return { messages, logprobs: true, top_logprobs: shown };
}
