// Tokens as chunks bring them: { text, logprob, top: [[text, logprob], ...] }, best first.

// The tokens of one choice of a chunk, of chats and of texts. Without logprobs a chunk is one token of no probability.
export function tokensOf(choice) {
  const content = choice.delta ? choice.delta.content ?? "" : choice.text;
  const found = choice.delta ? ofChat(choice.logprobs) : ofText(choice.logprobs);
  if (!found.length) return content ? [{ text: content, logprob: null, top: [] }] : [];
  // A character may be made of several tokens: it is shown with the last of them, which completed it.
  if (found.map((token) => token.text).join("") !== content) {
    found.forEach((token, place) => { token.text = place === found.length - 1 ? content : ""; });
  }
  return found;
}

export function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return `${share >= 99.95 ? "100" : share >= 0.05 ? share.toFixed(1) : "< 0.1"} %`;
}

// As it can be read and said: a space and a line break have names.
export function spelled(text) {
  const named = { "": "a part of a character", " ": "a space", "\n": "a line break", "\n\n": "two line breaks" };
  return named[text] ?? `“${text}”`;
}

function ofChat(logprobs) {
  return (logprobs?.content ?? []).map((entry) => ({
    text: entry.token,
    logprob: entry.logprob,
    top: entry.top_logprobs.map((other) => [other.token, other.logprob]),
  }));
}

function ofText(logprobs) {
  return (logprobs?.tokens ?? []).map((text, place) => ({
    text,
    logprob: logprobs.token_logprobs[place],
    top: Object.entries(logprobs.top_logprobs?.[place] ?? {}).sort((one, other) => other[1] - one[1]),
  }));
}
