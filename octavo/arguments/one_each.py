"""Arguments that stand for all prompts of a call, or are a list with one for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from octavo.arguments.prompts import shown

T = TypeVar("T")


def one_each(given: Any, kind: type[T], name: str, count: int) -> list[T | None]:
    """`given` for each of `count` prompts; None, alone or in a list, for those that bring none.

    Raises ValueError, which names the place: for an entry of another kind, and for a list of another length.

    >>> one_each(5, int, "priority", count=2)
    [5, 5]
    >>> one_each([1, "2"], int, "priority", count=2)
    Traceback (most recent call last):
    ValueError: priority[1] is '2' (str); accepted: int
    """
    if given is None or _is(given, kind):
        return [given] * count
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, Mapping)):
        raise ValueError(f"{name} is {shown(given)}; accepted: one {kind.__name__}, or a list with one for each prompt")
    entries = list(given)
    for index, entry in enumerate(entries):
        if entry is not None and not _is(entry, kind):
            raise ValueError(f"{name}[{index}] is {shown(entry)}; accepted: {kind.__name__}")
    if len(entries) != count:
        raise ValueError(f"{len(entries)} {name} for {count} prompts")
    return entries


def _is(entry: Any, kind: type) -> bool:
    return isinstance(entry, kind) and not isinstance(entry, bool)
