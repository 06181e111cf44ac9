"""How long prompts and answers are: always the same, uniform or lognormal."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

LONGEST = 1 << 20
FORMS = "N, LOW-HIGH or lognormal:MEDIAN:SIGMA[:MOST]"
_UNIFORM = re.compile(r"(\d+)(?:-(\d+))?")
_LOGNORMAL = re.compile(r"lognormal:(\d+):(\d+(?:\.\d+)?)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens from `low` to `high`: uniform, or lognormal where there is a `median`."""

    low: int
    high: int
    median: int | None = None
    sigma: float = 0.0  # of the logarithm

    def draw(self, rng: random.Random) -> int:
        """The next length."""
        if self.median is None:
            return rng.randint(self.low, self.high)
        return max(self.low, min(self.high, round(self.median * rng.lognormvariate(0, self.sigma))))


def parse(text: str) -> Lengths:
    """Reads what the command line takes (`FORMS`). Raises ValueError."""
    if found := _UNIFORM.fullmatch(text):
        low, high = int(found[1]), int(found[2] or found[1])
        lengths = Lengths(low, high)
    elif found := _LOGNORMAL.fullmatch(text):
        lengths = Lengths(1, int(found[3] or LONGEST), int(found[1]), float(found[2]))
    else:
        raise ValueError(f"{text!r} is none of {FORMS}")
    if not 1 <= lengths.low <= lengths.high <= LONGEST or lengths.median == 0 or lengths.sigma > 10:
        raise ValueError(f"{text!r} is no length from 1 to {LONGEST} tokens")
    return lengths
