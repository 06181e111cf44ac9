// OpenAI's API of the server that this page came from.
import { Silence } from "./silence.js";

export async function listModels(key) {
  const response = await fetch("/v1/models", { headers: headers(key) });
  if (!response.ok) throw await failure(response);
  return (await response.json()).data.map((model) => model.id);
}

// The ids of a conversation's tokens, as the model's template has it.
export async function tokenize(model, messages, key, signal) {
  const response = await post("/tokenize", { model, messages }, key, signal);
  return (await response.json()).tokens;
}

// The chunks of a streamed answer. Throws an Error with the server's own words.
export async function* generate(path, body, key, signal) {
  const response = await post(path, { ...body, stream: true, stream_options: { include_usage: true } }, key, signal);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
  throw new Error("the stream ended before the answer did");
}

// What comes of a stream of events without an end, until the signal or the server ends it. Throws an Error, of a refusal
// with `status`; also where nothing at all comes for so long that the connection must be dead.
export async function* follow(path, key, signal) {
  const silence = new Silence();
  try {
    const response = await fetch(path, { headers: headers(key), cache: "no-store", signal: AbortSignal.any([signal, silence.signal]) });
    if (!response.ok) throw await failure(response);
    silence.expectComments(response.headers.get("x-comment-interval"));
    yield* events(response.body, () => silence.heard());
  } finally {
    silence.stop();
  }
}

// Withholds so many blocks of a worker.
export async function withhold(worker, numBlocks, key) {
  await post("/live/withhold", { worker, num_blocks: numBlocks }, key);
}

async function post(path, body, key, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { ...headers(key), "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failure(response);
  return response;
}

// Throws an Error as for a key that the server refuses where no header can carry it, which the server would not know either.
function headers(key) {
  const given = key ? { authorization: `Bearer ${key}` } : {};
  try {
    new Headers(given);
  } catch {
    throw Object.assign(new Error("the key has a character that no key has"), { status: 401 });
  }
  return given;
}

async function failure(response) {
  const text = await response.text(), { status } = response;
  let message = `the server answered with status ${status}`;
  try {
    ({ message } = JSON.parse(text).error);
  } catch { /* not the server's own words: of a proxy, say */ }
  return Object.assign(new Error(message), { status });
}

// What follows `data: ` in each event of a stream. heard: () => void, whenever anything comes, comments too.
async function* events(stream, heard = () => {}) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    heard();
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield part.slice(6);
    }
  }
}
