"""What the three kinds of answers have in common: one object a call, which is told everything that comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from gateway_svc.answers.gathered import Gathered
from gateway_svc.errors import HttpError
from protos import inference_pb2 as pb


class Answer(Protocol):
    """To one call. `prompt` is the number of a request within it."""

    def begin(self, admissions: Sequence[pb.GenerateResponse]) -> bytes:
        """The first events of a stream; one admission a prompt."""

    def events(self, prompt: int, response: pb.GenerateResponse) -> bytes:
        """Those of one message; none where it brings nothing to show. Raises HttpError for an output that failed."""

    def end(self) -> bytes:
        """The last ones."""

    def failed(self, error: HttpError) -> bytes:
        """The last ones of a stream that has begun and cannot go on."""

    def whole(self, gathered: Sequence[Gathered]) -> Iterator[str]:
        """The JSON of an answer in one piece, by parts of it."""
