"""Logprobs in the shapes of chats, completions and responses, as JSON in parts: a long prompt has many of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gateway_svc.answers.json_text import array, logprob, quoted
from gateway_svc.answers.text_places import NOT_TEXT, TextPlaces
from protos import inference_pb2 as pb

_NO_TOKEN = pb.Logprob()


def chat_entries(entries: Iterable[pb.TokenLogprobs], as_ids: bool = False) -> Iterator[str]:
    """A list, an entry a token, as `logprobs.content` of a chat and `logprobs` of a response's text."""
    return array(entries, lambda entry: _chat_entry(entry, as_ids))


def _chat_entry(entry: pb.TokenLogprobs, as_ids: bool) -> str:
    top = ",".join(f"{{{_token(each, as_ids)}}}" for each in entry.top)
    return f'{{{_token(entry.token, as_ids)},"top_logprobs":[{top}]}}'


def _token(entry: pb.Logprob, as_ids: bool) -> str:
    return f'"token":{quoted(name_of(entry, as_ids))},"logprob":{logprob(entry.logprob)},"bytes":{_bytes(entry.text)}'


def _bytes(text: str) -> str:
    """None are known of a token that is a part of a character."""
    return "null" if NOT_TEXT in text else f"[{','.join(map(str, text.encode()))}]"


def name_of(entry: pb.Logprob, as_ids: bool) -> str:
    """A token's text, or `token_id:ID`."""
    return f"token_id:{entry.token_id}" if as_ids else entry.text


class CompletionLogprobs:
    """Of one output of a completion, whose offsets go on from one part to the next."""

    def __init__(self, as_ids: bool = False) -> None:
        self._as_ids, self._places = as_ids, TextPlaces()

    def part(self, entries: Sequence[pb.TokenLogprobs], text: str, first: pb.Logprob = _NO_TOKEN) -> Iterator[str]:
        """Four lists, an entry a token. A prompt's first token has no probability.

        Args:
            text: what this part shows.
            first: id and text of the prompt's first token.
        """

        def place(entry: pb.TokenLogprobs) -> str:
            return str(self._places.next((entry.token if entry.HasField("token") else first).text))

        self._places.add(text)
        yield '{"tokens":'
        yield from array(entries, lambda entry: quoted(self._name(entry.token if entry.HasField("token") else first)))
        yield ',"token_logprobs":'
        yield from array(entries, lambda entry: logprob(entry.token.logprob) if entry.HasField("token") else "null")
        yield ',"top_logprobs":'
        yield from array(entries, lambda entry: self._top(entry) if entry.HasField("token") else "null")
        yield ',"text_offset":'
        yield from array(entries, place)
        yield "}"

    def _name(self, entry: pb.Logprob) -> str:
        return name_of(entry, self._as_ids)

    def _top(self, entry: pb.TokenLogprobs) -> str:
        """The most likely tokens, and the one that was drawn; of others with one text the likeliest."""
        found: dict[str, float] = {}
        for each in entry.top:
            found.setdefault(self._name(each), each.logprob)
        found[self._name(entry.token)] = entry.token.logprob
        return "{" + ",".join(f"{quoted(name)}:{logprob(value)}" for name, value in found.items()) + "}"


def prompt_entries(entries: Iterable[pb.TokenLogprobs]) -> Iterator[str]:
    """vLLM's `prompt_logprobs`: a token id to what is known of it, at each position; null for the first."""
    return array(entries, _prompt_entry)


def _prompt_entry(entry: pb.TokenLogprobs) -> str:
    if not entry.HasField("token"):
        return "null"
    found = {each.token_id: each for each in (entry.token, *entry.top)}
    parts = (
        f'"{token_id}":{{"logprob":{logprob(each.logprob)},"rank":{each.rank},"decoded_token":{quoted(each.text)}}}'
        for token_id, each in found.items()
    )
    return "{" + ",".join(parts) + "}"
