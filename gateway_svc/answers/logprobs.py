"""Logprobs in the shapes of chats, completions and responses, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gateway_svc.answers.json_text import logprob, quoted
from protos import inference_pb2 as pb

_NOT_TEXT = "\N{REPLACEMENT CHARACTER}"  # where a token is a part of a character


def chat_entries(entries: Iterable[pb.TokenLogprobs], as_ids: bool = False) -> str:
    """A list, an entry a token, as `logprobs.content` of a chat and `logprobs` of a response's text."""
    return f"[{','.join(_chat_entry(entry, as_ids) for entry in entries)}]"


def _chat_entry(entry: pb.TokenLogprobs, as_ids: bool) -> str:
    top = ",".join(f"{{{_token(each, as_ids)}}}" for each in entry.top)
    return f'{{{_token(entry.token, as_ids)},"top_logprobs":[{top}]}}'


def _token(entry: pb.Logprob, as_ids: bool) -> str:
    return f'"token":{quoted(name_of(entry, as_ids))},"logprob":{logprob(entry.logprob)},"bytes":{_bytes(entry.text)}'


def _bytes(text: str) -> str:
    """None are known of a token that is a part of a character."""
    return "null" if _NOT_TEXT in text else f"[{','.join(map(str, text.encode()))}]"


def name_of(entry: pb.Logprob, as_ids: bool) -> str:
    """A token's text, or `token_id:ID`."""
    return f"token_id:{entry.token_id}" if as_ids else entry.text


class CompletionLogprobs:
    """Of one output of a completion, whose offsets go on from one part to the next.

    Args:
        offset: characters before the first token.
    """

    def __init__(self, as_ids: bool = False, offset: int = 0) -> None:
        self._as_ids, self._offset = as_ids, offset

    def part(self, entries: Sequence[pb.TokenLogprobs], first_text: str = "") -> str:
        """Four lists, an entry a token. `first_text`: of a prompt's first token, which has no probability."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for entry in entries:
            offsets.append(str(self._offset))
            if not entry.HasField("token"):
                tokens.append(quoted(first_text))
                logprobs.append("null")
                tops.append("null")
                self._offset += len(first_text)
                continue
            tokens.append(quoted(name_of(entry.token, self._as_ids)))
            logprobs.append(logprob(entry.token.logprob))
            tops.append(self._top(entry))
            self._offset += len(entry.token.text)
        return (
            f'{{"tokens":[{",".join(tokens)}],"token_logprobs":[{",".join(logprobs)}],'
            f'"top_logprobs":[{",".join(tops)}],"text_offset":[{",".join(offsets)}]}}'
        )

    def _top(self, entry: pb.TokenLogprobs) -> str:
        """The most likely tokens, and the one that was drawn; of two with one text the likelier."""
        found: dict[str, float] = {}
        for each in (*entry.top, entry.token):
            found.setdefault(name_of(each, self._as_ids), each.logprob)
        return "{" + ",".join(f"{quoted(name)}:{logprob(value)}" for name, value in found.items()) + "}"


def prompt_entries(entries: Iterable[pb.TokenLogprobs]) -> str:
    """vLLM's `prompt_logprobs`: a token id to what is known of it, at each position; null for the first."""
    return f"[{','.join(map(_prompt_entry, entries))}]"


def _prompt_entry(entry: pb.TokenLogprobs) -> str:
    if not entry.HasField("token"):
        return "null"
    found = {each.token_id: each for each in (entry.token, *entry.top)}
    parts = (
        f'"{token_id}":{{"logprob":{logprob(each.logprob)},"rank":{each.rank},"decoded_token":{quoted(each.text)}}}'
        for token_id, each in found.items()
    )
    return "{" + ",".join(parts) + "}"
