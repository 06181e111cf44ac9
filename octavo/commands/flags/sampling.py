"""Flags that say how text is sampled, and the `SamplingParams` they give.

The defaults here are for reading at a terminal (a bounded length, little randomness); the API has its own.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.sampling_params import SamplingParams

_TEMPERATURE = 0.2
_NUMBERS = (
    ("--min-tokens", int, "fewest tokens before an output may end"),
    ("--top-k", int, "draw from the K most likely tokens"),
    ("--min-p", float, "drop tokens less likely than this share of the most likely one"),
    ("--presence-penalty", float, "-2 to 2, for tokens that were generated before"),
    ("--frequency-penalty", float, "-2 to 2, for each time a token was generated before"),
    ("--repetition-penalty", float, "divides the odds of tokens that are there already"),
    ("--seed", int, "the same seed draws the same tokens"),
)


def add_model(group: argparse._ActionsContainer) -> None:
    """The model to use, and the adapter; empty: the server's default, and none."""
    group.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="which model, where the server has several (`octavo model list --address ...` lists them)",
    )
    group.add_argument(
        "--adapter", default="", metavar="NAME", help="with this adapter (`octavo adapter list` lists them)"
    )


def add_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """For one output; `max_tokens` is the default, there being no bound in the API."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help="most tokens of an output (default: %(default)s)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help=f"0 is greedy, at most 2 (default: {_TEMPERATURE})",
    )
    group.add_argument("--top-p", type=float, default=0.9, metavar="X", help="default: %(default)s")
    for flag, kind, text in _NUMBERS:
        group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    group.add_argument("--ignore-eos", action="store_true", help="continue after the model's end token")


def add_several_outputs(parser: argparse.ArgumentParser) -> None:
    """Flags for more than one answer to one request; without them there is one."""
    group = parser.add_argument_group("several outputs")
    group.add_argument("--n", type=int, metavar="N", help="number of outputs")
    group.add_argument("--best-of", type=int, metavar="N", help="the best of so many; with beam search the beam width")
    group.add_argument(
        "--use-beam-search", action="store_true", help="search for the likeliest texts, best first, with temperature 0"
    )
    group.add_argument("--length-penalty", type=float, metavar="X", help="beam search: above 0 prefers longer outputs")
    group.add_argument(
        "--early-stopping",
        type=str.upper,
        choices=("NO", "YES", "NEVER"),
        help="beam search: NO ends by an estimate, YES once enough outputs have ended, NEVER when none can improve",
    )


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Raises OptionError for what no server accepts."""
    from octavo.sampling_params import SamplingParams
    from octavo.shared.options import OptionError

    names = ["max_tokens", "temperature", "top_p", "stop", *(flag[2:].replace("-", "_") for flag, _, _ in _NUMBERS)]
    names += ["n", "best_of", "use_beam_search", "length_penalty", "early_stopping"]
    values = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
    values.setdefault("temperature", 0.0 if values.get("use_beam_search") else _TEMPERATURE)
    try:
        return SamplingParams(ignore_eos=arguments.ignore_eos, **values)
    except ValueError as error:
        raise OptionError(str(error)) from None
