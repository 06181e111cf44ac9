"""Which request a slot belongs to, and which token a result brings: read off the messages of one `Execute` stream.

Knows the protocol as PROTOCOL.md tells it and nothing of either side's code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from protos import worker_pb2


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sampled token: of which request, output index and place among the generated ones, counted from 0."""

    request_id: str
    index: int
    place: int


@dataclass(slots=True)
class _Tenant:
    """Who a slot belongs to. `num_generated` counts the draws that were asked for."""

    request_id: str
    index: int
    num_generated: int


class StepTracker:
    """Follows one lease. `steps` are those sent and not answered, by id, with the draws that their answers bring."""

    def __init__(self) -> None:
        self.steps: dict[int, list[Drawn]] = {}
        self._tenants: dict[int, _Tenant] = {}
        self._beams: set[str] = set()

    @property
    def request_ids(self) -> set[str]:
        """Requests that hold a slot."""
        return {tenant.request_id for tenant in self._tenants.values()}

    def sent(self, step: worker_pb2.Step) -> None:
        for slot in np.frombuffer(step.released_slots_u16, "<u2").tolist():
            self._tenants.pop(slot, None)
        pairs = np.frombuffer(step.forks_u16, "<u2").reshape(-1, 2).tolist()
        indices = np.frombuffer(step.fork_indices_u16, "<u2").tolist()
        for (parent, child), index in zip(pairs, indices, strict=True):
            tenant = self._tenants[parent]
            self._tenants[child] = _Tenant(tenant.request_id, index, tenant.num_generated)
        for group in step.groups:
            self._introduce(group)
        self.steps[step.step_id] = self._draws(step.rows)

    def answered(self, result: worker_pb2.StepResult) -> list[Drawn]:
        """The draws that a result brings; none where its step failed."""
        draws = self.steps.pop(result.step_id, [])
        return draws if result.status == worker_pb2.STEP_STATUS_OK else []

    def _introduce(self, group: worker_pb2.SequenceGroupMetadata) -> None:
        if group.sampling_params.use_beam_search:
            self._beams.add(group.request_id)
        for sequence in group.sequences:
            if sequence.HasField("same_as_slot"):
                generated = self._tenants[sequence.same_as_slot].num_generated
            else:
                generated = len(sequence.token_ids) - group.num_prompt_tokens
            self._tenants[sequence.slot] = _Tenant(group.request_id, sequence.index, generated)

    def _draws(self, rows: worker_pb2.Rows) -> list[Drawn]:
        """Of the rows that sample one token a slot; beams answer candidates, of which none is a token yet."""
        slots = np.frombuffer(rows.slots_u16, "<u2").tolist()
        first = rows.num_decode_rows
        num_samples = [1] * first + np.frombuffer(rows.num_samples_u16, "<u2").tolist()
        children = iter(np.frombuffer(rows.child_slots_u16, "<u2").tolist())
        draws = []
        for slot, count in zip(slots, num_samples, strict=True):
            if not count or self._tenants[slot].request_id in self._beams:
                continue
            for drawn_slot in [slot] if count == 1 else [next(children) for _ in range(count)]:
                tenant = self._tenants[drawn_slot]
                draws.append(Drawn(tenant.request_id, tenant.index, tenant.num_generated))
                tenant.num_generated += 1
        return draws
