"""What the last stage of a pipeline draws, told to all stages before it: each keeps the tokens in its mirror, and rank
0 answers the scheduler."""

from __future__ import annotations

from concurrent.futures import Future

from protos import ranks_pb2
from worker_svc.host.model_thread import ModelThread
from worker_svc.parallel.step_channel import StepChannel


class StageAnswers:
    """One rank's end. Answers are given, and expected, in the order of the steps that have rows."""

    def __init__(self, channel: StepChannel | None, *, is_last: bool) -> None:
        """
        Args:
            channel: from the first rank of the last stage to all ranks of the stages before; None: this is a further
                rank of the last stage, which draws the same for itself.
            is_last: whether this rank is of the last stage.
        """
        self._channel, self.is_last = channel, is_last
        self._thread = None if is_last else ModelThread("answers of the last stage")

    def give(self, answer: ranks_pb2.StageAnswer) -> None:
        """On the last stage: the oldest step that has not been answered."""
        if self._channel is not None:
            self._channel.send(answer.SerializeToString())

    def expect(self) -> Future[ranks_pb2.StageAnswer]:
        """On the others: that of the step that was begun last."""
        assert self._thread is not None, "the last stage waits for nobody"
        return self._thread.call(self._receive)

    def _receive(self) -> ranks_pb2.StageAnswer:
        assert self._channel is not None, "every rank before the last stage has a channel"
        return ranks_pb2.StageAnswer.FromString(self._channel.receive())
