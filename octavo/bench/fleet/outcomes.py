"""The losses planned for a pool, and what a run observed of the pool and of each request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from octavo.bench.fleet.requests import Request
from octavo.bench.fleet.worker import VirtualWorker


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that is lost, and comes back with an empty cache."""

    worker: int
    at_s: float
    return_s: float | None = None


@dataclass(eq=False, slots=True)
class Outcome:
    """What became of one request, in ns of virtual time."""

    request: Request
    ended_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    longest_gap_ns: int = 0
    num_moves: int = 0  # from one worker to another, or to none, after it was there
    error: str = ""

    @property
    def ttft_ns(self) -> int:
        """From arrival to the first token, in virtual time; meaningless for a request without a token."""
        return self.first_token_ns - self.request.at_ns


@dataclass(slots=True)
class Run:
    """What a run of one pool observed."""

    outcomes: list[Outcome] = field(default_factory=list)  # of all requests that came
    gaps_ns: array[int] = field(default_factory=lambda: array("q"))  # between the tokens of each
    workers: list[VirtualWorker] = field(default_factory=list)  # every lease
    ended_ns: int = 0
    num_steps: int = 0
    engine_cpu_ns: int = 0  # of the step loops' threads
    decision_cpu_ns: int = 0  # of that, all but taking answers
    num_begun: int = 0  # requests that steps began, or began again
    plain_cpu_ns: int = 0  # of deciding steps that begin no request
    num_plain_steps: int = 0  # those that this was measured of
    front_cpu_ns: int = 0  # of choosing shards
    num_shards: int = 1
    num_cached_tokens: int = 0  # of prompts, when they were begun first
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
