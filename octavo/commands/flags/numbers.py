"""Numbers on the command line: types of argparse whose refusals say what is accepted."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def count(most: int, least: int = 1) -> Callable[[str], int]:
    """A type of argparse: a whole number within these bounds."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = -1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} to {most}")
        return value

    return read


def counts(most: int) -> Callable[[str], list[int]]:
    """The same for several, with commas between them."""
    read = count(most)
    return lambda text: [read(part) for part in text.split(",")]


def number(
    least: float = -math.inf, most: float = math.inf, above: float = -math.inf, *, or_inf: bool = False
) -> Callable[[str], float]:
    """The same for any number; `or_inf`: `inf` is one."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not ((math.isfinite(value) or (or_inf and value == math.inf)) and least <= value <= most and value > above):
            raise argparse.ArgumentTypeError(f"{text!r} is no number that is accepted here")
        return value

    return read


def numbers(text: str) -> list[float]:
    """Several numbers above 0, with commas between them."""
    read = number(above=0)
    return [read(part) for part in text.split(",")]
