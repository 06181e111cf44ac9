"""The span of a step in which requests are traced, linked to theirs. Who decided the step has chosen its ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.shared.tracing.context import CONTEXT_BYTES, TraceContext
from octavo.shared.tracing.span import MAX_LINKS, Attribute, Kind, Span, own
from protos import worker_pb2

_ERRORS = {worker_pb2.STEP_STATUS_FAILED: "step_failed", worker_pb2.STEP_STATUS_SKIPPED: "step_skipped"}


@dataclass(slots=True)
class StepSpan:
    """From a step's arrival to its answer. Times are in ns on the monotonic clock."""

    context: TraceContext
    links: Sequence[TraceContext]
    arrived_ns: int
    attributes: dict[str, Attribute]

    @staticmethod
    def of(step: worker_pb2.Step, instance_id: str, arrived_ns: int) -> StepSpan | None:
        """None where the step's trace is none: tracing fails no step."""
        context, requests = step.trace.context, step.trace.requests
        if len(context) != CONTEXT_BYTES or len(requests) % CONTEXT_BYTES:
            return None
        first_bytes = range(0, min(len(requests), MAX_LINKS * CONTEXT_BYTES), CONTEXT_BYTES)
        links = [TraceContext.of_bytes(requests[first : first + CONTEXT_BYTES]) for first in first_bytes]
        rows = step.rows
        num_known = int(np.frombuffer(rows.query_lens_u32[: len(rows.query_lens_u32) // 4 * 4], "<u4").sum())
        attributes = own(
            step=step.step_id,
            instance=instance_id,
            num_rows=len(rows.slots_u16) // 2,
            num_tokens=rows.num_decode_rows + num_known,
        )
        return StepSpan(TraceContext.of_bytes(context), links, arrived_ns, attributes)

    def ended(self, result: worker_pb2.StepResult, now_ns: int) -> Span:
        """With the phases that the answer tells of, in seconds."""
        timings = result.timings
        phases = own(
            queue_s=timings.queue_ns / 1e9,
            cache_ops_s=timings.cache_ops_ns / 1e9,
            prepare_s=timings.prepare_ns / 1e9,
            forward_s=timings.forward_ns / 1e9,
            sample_s=timings.sample_ns / 1e9,
        )
        error, kind = _ERRORS.get(result.status, ""), Kind.CONSUMER
        attributes = self.attributes | phases
        return Span("step", self.context, None, self.arrived_ns, now_ns, attributes, self.links, error, kind)
