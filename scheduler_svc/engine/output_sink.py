"""What the step loop hands out: tokens, logprobs, beams and ends."""

from __future__ import annotations

from typing import Protocol

from protos import worker_pb2
from scheduler_svc.core.sequences.beam_search import BeamHypothesis
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step_plan import NewTokens


class OutputSink(Protocol):
    """Where tokens and ends go, in order. Called on the step loop's thread: must not block.

    The id of a request that ends so is free before: its client may use it again at once.
    """

    def put_prompt_logprobs(self, group: SequenceGroup, logprobs: worker_pb2.SequenceOutputs) -> None:
        """Of a group that asked for them; before its first token, and a part at a time."""

    def put_tokens(self, tokens: NewTokens, outputs: worker_pb2.SequenceOutputs) -> None:
        """One answer's tokens and ends of outputs; `outputs`: the logprobs that came with it."""

    def put_beams(self, group: SequenceGroup, hypotheses: list[BeamHypothesis]) -> None:
        """The result of a search, best first, with which the group ends."""

    def put_end(self, group: SequenceGroup, reason: FinishReason, message: str, is_invalid: bool) -> None:
        """Every output that has not ended ends with `reason`; nothing follows for the group.

        `is_invalid`: where that is ERROR, the request's own parameters are why, and it would end so again.
        """
