"""What `LLM.beam_search` gives: for each prompt its likeliest sequences, by the names that vLLM has them under."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.outputs import PositionLogprobs, RequestOutput

if TYPE_CHECKING:
    from octavo.lora_request import LoRARequest


@dataclass(slots=True)
class BeamSearchSequence:
    """A prompt and what follows it.

    `tokens` are those of the prompt and the generated ones, the end token included, and `text` is the text of both, as
    in vLLM. `logprobs` has a dict for each generated token, with that token alone.
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None  # "stop", "length", or "error"
    stop_reason: int | str | None = None
    score: float | None = None  # what sequences are ranked by: `cum_logprob`, with the length penalty
    error: str | None = None  # why the prompt was not taken, in one line


@dataclass(slots=True)
class BeamSearchOutput:
    """Of one prompt: as many sequences as the beam is wide, best first."""

    sequences: list[BeamSearchSequence]


def beams_of(output: RequestOutput, decode: Callable[[Sequence[int]], str]) -> BeamSearchOutput:
    """The outputs of a request with the prompt before each. `decode` makes text of the prompt's tokens."""
    prompt = list(output.prompt_token_ids)
    prompt_text = decode(prompt)
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                tokens=prompt + list(each.token_ids),
                logprobs=each.logprobs or [],
                lora_request=output.lora_request,
                cum_logprob=each.cumulative_logprob or 0.0,
                text=prompt_text + each.text,
                finish_reason=each.finish_reason,
                stop_reason=each.stop_reason,
                score=each.score,
                error=each.error,
            )
            for each in output.outputs
        ]
    )
