"""Flags that say how text is sampled, and the `SamplingParams` they give.

The defaults here are for reading at a terminal (a bounded length, little randomness); the API has its own.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.sampling_params import SamplingParams

_NUMBERS = (
    ("--min-tokens", int, "no end before so many tokens"),
    ("--top-k", int, "draw from the K most likely tokens"),
    ("--min-p", float, "drop tokens less likely than this share of the most likely one"),
    ("--presence-penalty", float, "-2 to 2, for tokens that were generated before"),
    ("--frequency-penalty", float, "-2 to 2, for each time a token was generated before"),
    ("--repetition-penalty", float, "divides the odds of tokens that are there already"),
    ("--seed", int, "the same seed draws the same tokens"),
)


def add_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help="at most so many tokens (default: %(default)s)"
    )
    group.add_argument(
        "--temperature", type=float, default=0.2, metavar="X", help="0 is greedy, at most 2 (default: %(default)s)"
    )
    group.add_argument("--top-p", type=float, default=0.9, metavar="X", help="default: %(default)s")
    for flag, kind, text in _NUMBERS:
        group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Raises OptionError for what no server accepts."""
    from octavo.options import OptionError
    from octavo.sampling_params import SamplingParams

    names = ["max_tokens", "temperature", "top_p", "stop", *(flag[2:].replace("-", "_") for flag, _, _ in _NUMBERS)]
    values = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    try:
        return SamplingParams(ignore_eos=arguments.ignore_eos, **values)
    except ValueError as error:
        raise OptionError(str(error)) from None
