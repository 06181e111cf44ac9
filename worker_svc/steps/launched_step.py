"""A step whose rows have been sent to the device: what it draws is on its way to the host."""

from __future__ import annotations

from dataclasses import dataclass

from protos import worker_pb2
from worker_svc.host.device_marks import DeviceMarks
from worker_svc.host.output_copies import HostOutput, OutputCopy
from worker_svc.mirror.sequence_states import AppliedRows, SequenceStates
from worker_svc.mirror.step_columns import Ints
from worker_svc.sampling.prompt_logprobs import PromptLogprobs
from worker_svc.sampling.row_samples import RowSamples
from worker_svc.sampling.sequence_outputs import pack_outputs
from worker_svc.steps.step_timer import StepTimer


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """`wait` may be called on any thread, `outputs` once, on the one that owns the mirror."""

    states: SequenceStates
    rows: AppliedRows
    drawn: RowSamples | None  # None: no row samples
    tenancies: Ints  # [N], of the samples, from `SequenceStates.expect_samples`
    of_prompts: PromptLogprobs | None
    copy: OutputCopy  # of `drawn.tensors`
    marks: DeviceMarks | None  # before, after the forward pass, after sampling; None: the host's clock is right

    @classmethod
    def of_nothing(cls, states: SequenceStates, rows: AppliedRows) -> LaunchedStep:
        """A step without rows."""
        return cls(states, rows, None, rows.sample_slots, None, HostOutput(()), None)

    def wait(self) -> None:
        """Returns when the outputs are on the host; raises what the device has run into."""
        self.copy.wait()

    def outputs(self, timer: StepTimer) -> worker_pb2.SequenceOutputs:
        """The answer, packed; its tokens are recorded in the mirror."""
        self.wait()
        outputs = worker_pb2.SequenceOutputs()
        if self.drawn is not None:
            sampled = self.drawn.on_host(self.copy.arrays())
            self.states.fill_in_samples(self.rows, sampled.token_ids, self.tenancies)
            outputs = pack_outputs(self.rows, sampled)
        if self.of_prompts is not None:
            self.of_prompts.pack(outputs)
        if self.marks is not None:
            for name, duration_ns in zip(("forward_ns", "sample_ns"), self.marks.gaps_ns(), strict=True):
                timer.set_phase(name, duration_ns)
        return outputs
