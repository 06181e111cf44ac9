"""What a request gives back in Python: `RequestOutput` with its `CompletionOutput`s, from `LLM` and from a client.

Plain data; token ids are Python ints, times are nanoseconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from octavo.lora_request import LoRARequest


class Logprob(NamedTuple):
    """Natural logarithm of a token's probability under the model's own logits."""

    logprob: float
    rank: int  # 1 is the most likely
    decoded_token: str  # the token's text by itself


PositionLogprobs: TypeAlias = dict[int, Logprob]
"""Of one position, by token id: the token that is there first, then the most likely ones, best first."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the n outputs of a request.

    `finish_reason` is None while it runs, then "stop", "length", "abort" or "error"; `stop_reason` is the token id or
    the stop string that ended it, None for the end-of-text token of the model and for other reasons. `error` says what
    happened where the reason is "error", and with "length" that the prompt itself was too long to begin with.
    """

    index: int
    text: str = ""
    token_ids: Sequence[int] = ()
    cumulative_logprob: float | None = None  # with logprobs, with `best_of`, and of beams
    logprobs: list[PositionLogprobs] | None = None  # one a token, when asked for
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None  # of a beam
    error: str | None = None  # one line

    def finished(self) -> bool:
        """Whether nothing more comes of it."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to one request, by the clock of the side that measured it."""

    arrival_ns: int = 0
    first_token_ns: int | None = None
    finished_ns: int | None = None
    token_times_ns: list[int] = field(default_factory=list)  # of output 0: one a delivery that brought tokens
    queue_ns: int | None = None  # waited before its first step
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # over all outputs, those not returned included
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    times_preempted: int = 0
    times_moved: int = 0

    @property
    def arrival_time(self) -> float:
        """Seconds, by the names of other libraries. Only differences of these mean anything."""
        return self.arrival_ns / 1e9

    @property
    def first_token_time(self) -> float | None:
        """As `arrival_time`; None before there is a token."""
        return None if self.first_token_ns is None else self.first_token_ns / 1e9

    @property
    def finished_time(self) -> float | None:
        """As `arrival_time`; None before the end."""
        return None if self.finished_ns is None else self.finished_ns / 1e9

    @property
    def time_in_queue(self) -> float | None:
        """Seconds before the first step; known at the end."""
        return None if self.queue_ns is None else self.queue_ns / 1e9


@dataclass(slots=True)
class RequestOutput:
    """A request as far as it has come: the whole of it in `LLM.generate`, what is new in a client's stream."""

    request_id: str
    prompt: str | None = None
    prompt_token_ids: Sequence[int] = ()
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_logprobs: list[PositionLogprobs | None] | None = (
        None  # with `prompt_logprobs`: one a token; None for the first
    )
    seed: int | None = None
    model: str = ""
    lora_request: LoRARequest | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache; known at the end."""
        return self.metrics.num_cached_tokens
