"""What callers give as prompts, read into one shape: text, token ids, or a dict of either; one of them or several.

Errors name the place as Python writes it, `prompts[2]["prompt_token_ids"][0]`. Knows nothing of models: whether a
prompt fits one is the frontend's to say.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from octavo.errors import InvalidPrompt

ACCEPTED = 'text, token ids, {"prompt": text} or {"prompt_token_ids": ids}'
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_TEXT_ALONE, _NO_ENCODER = "models here read text alone", "no model here has an encoder"
_ELSEWHERE = {  # keys of vLLM's prompts, and why none of them may say anything
    **dict.fromkeys(("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "media_io_kwargs"), _TEXT_ALONE),
    **dict.fromkeys(("encoder_prompt", "decoder_prompt", "token_type_ids"), _NO_ENCODER),
    "prompt_embeds": "models here begin with token ids",
}
_MAX_TOKEN_ID = 2**32 - 1  # what the wire carries


class SupportsToList(Protocol):
    """An array of numpy or torch."""

    def tolist(self) -> Any:
        """Its numbers, in lists."""


PromptLike: TypeAlias = str | Sequence[int] | Mapping[str, Any] | SupportsToList
"""A text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`."""


class Prompt(NamedTuple):
    """Has ids, or text, or both: then the ids are what is computed, and the text is only shown."""

    text: str | None
    token_ids: list[int] | None = None
    cache_salt: str | None = None


def read_prompts(prompts: Any, prompt_token_ids: Any = None) -> list[Prompt]:
    """All of them: `prompts` is one prompt or several of any accepted shape, `prompt_token_ids` ids of one or several.

    Raises InvalidPrompt, which names the first that is none.

    >>> read_prompts(["Hello", [1, 2]])
    [Prompt(text='Hello', token_ids=None, cache_salt=None), Prompt(text=None, token_ids=[1, 2], cache_salt=None)]
    >>> read_prompts(["Hello", [1, "2"]])
    Traceback (most recent call last):
    octavo.errors.InvalidPrompt: prompts[1][1] is '2' (str); accepted: a token id
    """
    if (prompts is None) == (prompt_token_ids is None):
        raise InvalidPrompt("give either prompts or prompt_token_ids")
    if prompts is None:
        return [_of_ids(ids, place) for place, ids in _each(prompt_token_ids, "prompt_token_ids")]
    return [read_prompt(prompt, place) for place, prompt in _each(prompts, "prompts")]


def read_prompt(prompt: Any, place: str = "prompt") -> Prompt:
    """One of them. Raises InvalidPrompt."""
    if isinstance(prompt, str):
        return Prompt(checked_text(prompt, place))
    if isinstance(prompt, Mapping):
        return _of_mapping(prompt, place)
    if _is_list(prompt):
        return _of_ids(prompt, place)
    raise InvalidPrompt(f"{place} is {shown(prompt)}; accepted: {ACCEPTED}")


def _each(given: Any, name: str) -> list[tuple[str, Any]]:
    """The prompts of `given`, which may be a single one, each with its place."""
    if isinstance(given, (str, Mapping)):
        return [(name, given)]
    if not _is_list(given) and (not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray, set))):
        raise InvalidPrompt(f"{name} is {shown(given)}; accepted: {ACCEPTED}, or a list of such")
    entries = _listed(given)
    if entries and all(_is_int(entry) for entry in entries):
        return [(name, entries)]
    return [(f"{name}[{index}]", entry) for index, entry in enumerate(entries)]


def _of_mapping(prompt: Mapping[str, Any], place: str) -> Prompt:
    text, token_ids, salt = (prompt.get(key) for key in _KEYS)
    for key, reason in _ELSEWHERE.items():
        if (value := prompt.get(key)) is not None and not (isinstance(value, Mapping) and not value):
            raise InvalidPrompt(f'{place}["{key}"]: {reason}; accepted: {ACCEPTED}')
    unknown = [key for key in prompt if key not in _KEYS and key not in _ELSEWHERE]
    if unknown or (text is None and token_ids is None):
        raise InvalidPrompt(f"{place} is a dict with {', '.join(map(repr, prompt)) or 'nothing'}; accepted: {ACCEPTED}")
    for key, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise InvalidPrompt(f'{place}["{key}"] is {shown(value)}; accepted: text')
        if value is not None:
            checked_text(value, f'{place}["{key}"]')
    ids = None if token_ids is None else _of_ids(token_ids, f'{place}["prompt_token_ids"]').token_ids
    return Prompt(text, ids, salt)


def _of_ids(given: Any, place: str) -> Prompt:
    if not _is_list(given):
        raise InvalidPrompt(f"{place} is {shown(given)}; accepted: a list of token ids")
    entries = _listed(given)
    for index, entry in enumerate(entries):
        if not _is_int(entry) or not 0 <= entry <= _MAX_TOKEN_ID:
            raise InvalidPrompt(f"{place}[{index}] is {shown(entry)}; accepted: a token id")
    return Prompt(None, [int(entry) for entry in entries])


def checked_text(text: str, place: str) -> str:
    """`text`, where UTF-8 can hold it. Raises InvalidPrompt."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"{text[error.start]!r} as character {error.start}, which no text has"
        raise InvalidPrompt(f"{place} has {what}: half of a surrogate pair") from None
    return text


def _is_list(given: Any) -> bool:
    """Lists and tuples, and arrays of numpy or torch, which are no Sequences."""
    return (isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray))) or hasattr(given, "tolist")


def _listed(given: Any) -> list[Any]:
    listed = given.tolist() if hasattr(given, "tolist") else list(given)
    return listed if isinstance(listed, list) else [listed]


def _is_int(entry: Any) -> bool:
    return isinstance(entry, numbers.Integral) and not isinstance(entry, bool)


def shown(value: Any) -> str:
    """A value and its type, on one short line."""
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:40] + ' ...'} ({type(value).__name__})".replace("\n", " ")
