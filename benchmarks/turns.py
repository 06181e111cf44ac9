"""Whose turn it is where several are measured beside each other."""

from __future__ import annotations

from collections.abc import Iterable


def rotated(names: Iterable[str], number: int) -> list[str]:
    """The order of round `number`, which begins with another of them than the round before: a machine that gets slower
    while it is busy would have the same ones pay in every round."""
    order = list(names)
    first = number % max(1, len(order))
    return order[first:] + order[:first]
