"""What stands behind the `Inference` service where a test says itself what comes of requests."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from protos import inference_pb2 as pb
from protos import worker_pb2
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step_plan import NewTokens
from scheduler_svc.errors import QueueFull, RequestRefused
from scheduler_svc.output.mailboxes import Mailboxes
from scheduler_svc.output.output_processor import take_tokens
from scheduler_svc.requests.request_text import PreparedText, RequestText


class InlineTexts:
    """Prepares at once."""

    def __init__(self, text: RequestText) -> None:
        self._text = text

    async def prepare(self, data: bytes) -> PreparedText:
        return self._text.prepare(pb.GenerateRequest.FromString(data))

    def close(self, refusal: RequestRefused) -> None:
        return


class ScriptedCore:
    """Takes every request but those named `full`; answers what the test says."""

    def __init__(self) -> None:
        self.groups: dict[str, SequenceGroup] = {}
        self.abandoned: list[str] = []
        self.forgotten: list[str] = []
        self.boxes: Mailboxes

    async def check_room(self, request: pb.GenerateRequest, num_preparing: int, num_bytes: int = 0) -> None:
        if request.request_id == "full":
            raise QueueFull("no room", 2.5)

    def refused(self, refusal: RequestRefused) -> None:
        return

    async def submit(self, group: SequenceGroup, *, replaces: bool) -> None:
        self.groups[group.request_id] = group

    def forget(self, group: SequenceGroup) -> None:
        self.forgotten.append(group.request_id)

    def abandon(self, group: SequenceGroup) -> None:
        self.abandoned.append(group.request_id)

    def say(self, letters: dict[str, str], reason: FinishReason = FinishReason.NONE) -> None:
        """One step's answer: a token for each request."""
        groups = [self.groups[name] for name in letters]
        sequences = np.array([group.sequences[0] for group in groups] + [None], object)[:-1]
        ids = np.array([ord(letter) for letter in letters.values()], np.int32)
        tokens = NewTokens(sequences, ids, np.arange(len(ids)), np.full(len(ids), reason, np.uint8))
        self.boxes.ring(partial(take_tokens, tokens, worker_pb2.SequenceOutputs(), time.monotonic_ns()))
