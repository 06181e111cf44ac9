"""A step whose rows have been sent to the device: what it draws is on its way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from protos import ranks_pb2, worker_pb2
from worker_svc.host.device_marks import DeviceMarks
from worker_svc.host.output_copies import HostOutput, OutputCopy
from worker_svc.mirror.sequence_states import AppliedRows, SequenceStates
from worker_svc.mirror.step_columns import Ints
from worker_svc.sampling.prompt_logprobs import PromptLogprobs
from worker_svc.sampling.row_samples import RowSamples
from worker_svc.sampling.sequence_outputs import pack_outputs
from worker_svc.steps.step_timer import StepTimer


class Launched(Protocol):
    """A step on its way."""

    def wait(self) -> None:
        """Returns when the outputs are on the host; raises what the device has run into. On any thread."""

    def outputs(self, timer: StepTimer) -> worker_pb2.SequenceOutputs:
        """The answer, packed; its tokens are recorded in the mirror. Once, on the thread that owns the mirror."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """See `Launched`."""

    states: SequenceStates
    rows: AppliedRows
    drawn: RowSamples | None  # None: no row samples
    tenancies: Ints  # [N], of the samples, from `SequenceStates.expect_samples`
    of_prompts: PromptLogprobs | None
    copy: OutputCopy  # of `drawn.tensors`
    marks: DeviceMarks | None  # before, after the forward pass, after sampling; None: the host's clock is right
    tell: Callable[[ranks_pb2.StageAnswer], None] | None = None  # stages that wait for what is drawn; None: nobody does

    @classmethod
    def of_nothing(cls, states: SequenceStates, rows: AppliedRows) -> LaunchedStep:
        """A step without rows."""
        return cls(states, rows, None, rows.sample_slots, None, HostOutput(()), None)

    def wait(self) -> None:
        """See `Launched`."""
        self.copy.wait()

    def outputs(self, timer: StepTimer) -> worker_pb2.SequenceOutputs:
        """See `Launched`."""
        self.wait()
        outputs, token_ids = worker_pb2.SequenceOutputs(), b""
        if self.drawn is not None:
            sampled = self.drawn.on_host(self.copy.arrays())
            self.states.fill_in_samples(self.rows, sampled.token_ids, self.tenancies)
            outputs = pack_outputs(self.rows, sampled)
            token_ids = sampled.token_ids.astype("<i4").tobytes() if self.tell else b""
        if self.of_prompts is not None:
            self.of_prompts.pack(outputs)
        if self.tell is not None:
            self.tell(ranks_pb2.StageAnswer(token_ids_i32=token_ids, outputs=outputs))
        if self.marks is not None:
            for name, duration_ns in zip(("forward_ns", "sample_ns"), self.marks.gaps_ns(), strict=True):
                timer.set_phase(name, duration_ns)
        return outputs
