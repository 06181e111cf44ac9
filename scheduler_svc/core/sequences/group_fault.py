"""A fault that names the group it came over: one request pays for it, and not all that run beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup

Method = TypeVar("Method", bound=Callable[..., Any])


class GroupFault(Exception):
    """A fault while nothing but one group was worked on. What was half done is undone by whoever catches it."""

    def __init__(self, group: SequenceGroup, why: str) -> None:
        super().__init__(why)
        self.group = group


def names_group(method: Method) -> Method:
    """Turns what a method raises into a GroupFault over the first group, or sequence, among its arguments.

    For methods that work on one group. Where one calls another, the innermost names the group.
    """

    @wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return method(*arguments, **options)
        except GroupFault:
            raise
        except Exception as error:
            subject = next(each for each in arguments if isinstance(each, (Sequence, SequenceGroup)))
            group = subject.group if isinstance(subject, Sequence) else subject
            raise GroupFault(group, f"{type(error).__name__}: {error}") from error

    return call  # type: ignore[return-value]  # of the same signature
