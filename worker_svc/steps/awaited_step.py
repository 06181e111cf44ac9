"""A step that another stage of the pipeline draws: its rows have been handed on, its answer is to come."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from protos import ranks_pb2, worker_pb2
from worker_svc.mirror.sequence_states import AppliedRows, SequenceStates
from worker_svc.mirror.step_columns import Ints
from worker_svc.steps.step_timer import StepTimer


@dataclass(frozen=True, slots=True)
class AwaitedStep:
    """See `Launched`."""

    states: SequenceStates
    rows: AppliedRows
    tenancies: Ints  # [N], of the samples, from `SequenceStates.expect_samples`
    answer: Future[ranks_pb2.StageAnswer]

    def wait(self) -> None:
        """See `Launched`."""
        self.answer.result()

    def outputs(self, timer: StepTimer) -> worker_pb2.SequenceOutputs:
        """See `Launched`."""
        answer = self.answer.result()
        token_ids = np.frombuffer(answer.token_ids_i32, "<i4")
        self.states.fill_in_samples(self.rows, token_ids, self.tenancies)
        timer.end_phase("sample_ns")  # the stages behind this one, and their way back
        return answer.outputs
