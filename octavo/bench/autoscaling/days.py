"""Made-up days of requests: a curve over 24 hours, random bursts, and a step that nobody announced."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from octavo.bench.fleet.requests import OWN_TEXT, SECOND_NS, Request

DAY_S = 86_400.0
SIGMA = 0.6  # of the logarithms of lengths
LONGEST = 4.0  # times the mean


@dataclass(frozen=True, slots=True)
class Day:
    """What arrives within a day.

    Attributes:
        peak_rate: arrivals a second at the top of the curve, bursts and step aside.
        prompt_tokens, output_tokens: means of lognormal lengths.
        humps: (hour of its middle, hours from there to 60 % of it, height) of the curve, over a floor of `night`.
        step: (hour, hours, times the curve), from one second to the next.
        bursts: how many within the day, at random; each is of BURST_S and `burst_factor` times the curve.
        at_once: requests that always arrive together, as an agent's do.
    """

    name: str
    peak_rate: float
    prompt_tokens: int
    output_tokens: int
    humps: tuple[tuple[float, float, float], ...]
    night: float
    step: tuple[float, float, float]
    bursts: int = 8
    burst_factor: float = 1.8
    at_once: int = 1

    def rate(self, at_s: float) -> float:
        """Arrivals a second at that time, bursts aside."""
        hour = at_s / 3600
        height = max(tall * math.exp(-(((hour - middle) / wide) ** 2) / 2) for middle, wide, tall in self.humps)
        begins, lasts, times = self.step
        return self.peak_rate * max(self.night, height) * (times if begins <= hour < begins + lasts else 1.0)

    def requests(self, seed: int, tokens_each: int = 1) -> list[Request]:
        """In order of arrival, the same for the same seed. `tokens_each`: real tokens for each of theirs."""
        rng = random.Random(f"day/{self.name}/{seed}")
        starts = sorted(rng.uniform(0, DAY_S - BURST_S) for _ in range(self.bursts))
        most = self.peak_rate * max(1.0, self.step[2]) * self.burst_factor / self.at_once
        made: list[Request] = []
        at_s = rng.expovariate(most)
        while at_s < DAY_S:
            is_burst = any(start <= at_s < start + BURST_S for start in starts)
            rate = self.rate(at_s) * (self.burst_factor if is_burst else 1.0) / self.at_once
            if rng.random() < rate / most:
                made += [self._request(rng, at_s, len(made) + n, tokens_each) for n in range(self.at_once)]
            at_s += rng.expovariate(most)
        return made

    def _request(self, rng: random.Random, at_s: float, number: int, tokens_each: int) -> Request:
        prompt, output = (
            max(1, round(_length(rng, mean) / tokens_each)) for mean in (self.prompt_tokens, self.output_tokens)
        )
        return Request(round(at_s * SECOND_NS), ((OWN_TEXT + number, prompt),), max(2, output))


BURST_S = 180.0
DAYS = {
    day.name: day
    for day in (
        # Offices from nine on, the evening at home, and an evening's event.
        Day("chat", 0.3, 1500, 1600, ((10.5, 2.0, 0.8), (15.5, 2.5, 1.0), (20.5, 1.5, 0.85)), 0.1, (20.0, 0.67, 1.6)),
        # Agents over long documents: four calls at a time, office hours with steep ends, and a batch at two.
        Day("documents", 0.35, 6000, 400, ((11.0, 1.5, 0.9), (15.0, 1.5, 1.0)), 0.08, (13.0, 0.5, 1.8), at_once=4),
    )
}


def coarser(requests: list[Request], tokens_each: int) -> list[Request]:
    """Requests of a trace whose tokens each stand for so many, rounded up."""
    return [
        replace(
            request,
            content=tuple((text, -(-length // tokens_each)) for text, length in request.content),
            num_output_tokens=max(2, -(-request.num_output_tokens // tokens_each)),
        )
        for request in requests
    ]


def _length(rng: random.Random, mean: float) -> float:
    return min(LONGEST, rng.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)) * mean
