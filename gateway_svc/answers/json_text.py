"""JSON put together by hand, where it is the same for every token but for a few values.

All of it is ASCII: who reads lines of an event stream as text may take U+2028 or U+0085 for the end of one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from json.encoder import encode_basestring_ascii as quoted  # of CPython, in C
from typing import Any, TypeVar

__all__ = ["LOWEST_LOGPROB", "array", "event", "logprob", "quoted", "text_of", "token_ids"]

LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this for what is all but impossible
DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


def text_of(value: Any) -> str:
    """Of anything that is not made once a token."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def event(data: str, kind: str = "") -> bytes:
    """One of a stream of events."""
    head = f"event: {kind}\n" if kind else ""
    return f"{head}data: {data}\n\n".encode("ascii")


def logprob(value: float) -> str:
    """A number of JSON, whatever a model gives."""
    return repr(value) if value > LOWEST_LOGPROB else repr(LOWEST_LOGPROB)  # also for what is no number


def array(entries: Iterable[T], write: Callable[[T], str]) -> Iterator[str]:
    """A list in parts, each made when it is taken. `write` gives the JSON of an entry."""
    comma = ""
    yield "["
    for entry in entries:
        yield comma + write(entry)
        comma = ","
    yield "]"


def token_ids(ids: Iterable[int]) -> str:
    """A list of them."""
    return f"[{','.join(map(str, ids))}]"
