// OpenAI's API of the server that this page came from.

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

// What comes of a stream of events without an end, until the signal or the server ends it. Throws an Error with `status`.
export async function* follow(path, key, signal) {
  const response = await fetch(path, { headers: headers(key), cache: "no-store", signal });
  if (!response.ok) throw await failure(response);
  yield* events(response.body);
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

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function failure(response) {
  const text = await response.text(), { status } = response;
  let message = `the server answered with status ${status}`;
  try {
    ({ message } = JSON.parse(text).error);
  } catch { /* not the server's own words: of a proxy, say */ }
  return Object.assign(new Error(message), { status });
}

// What follows `data: ` in each event of a stream.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield part.slice(6);
    }
  }
}
