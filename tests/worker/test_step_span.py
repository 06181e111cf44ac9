"""The worker's span of a step: whose it is linked to, and that no message makes it fail."""

from __future__ import annotations

import pytest

from octavo.shared.tracing.context import CONTEXT_BYTES, TraceContext
from octavo.shared.tracing.span import MAX_LINKS
from protos import worker_pb2
from tests.worker.fake_model import prefill
from worker_svc.service.step_span import StepSpan


def step_of(context: bytes, requests: bytes) -> worker_pb2.Step:
    step = prefill(7, [[1, 2, 3], [4, 5]])
    step.trace.context, step.trace.requests = context, requests
    return step


def test_a_span_has_the_ids_that_the_step_brings() -> None:
    own, *others = [TraceContext.new_root() for _ in range(3)]
    span = StepSpan.of(step_of(own.to_bytes(), b"".join(each.to_bytes() for each in others)), "me", 100)
    assert span is not None
    timings = worker_pb2.StepTimings(forward_ns=2_000_000_000)
    ended = span.ended(worker_pb2.StepResult(timings=timings), 900)
    assert (ended.context, ended.parent, list(ended.links), ended.error) == (own, None, others, "")
    told = {name.partition(".")[2]: value for name, value in ended.attributes.items()}
    assert (told["step"], told["num_rows"], told["num_tokens"], told["forward_s"]) == (7, 2, 5, 2.0)
    failed = span.ended(worker_pb2.StepResult(status=worker_pb2.STEP_STATUS_FAILED), 900)
    assert failed.error == "step_failed"


@pytest.mark.parametrize(("context", "requests"), [(b"", b""), (b"x" * 23, b""), (b"x" * CONTEXT_BYTES, b"x" * 25)])
def test_what_is_no_trace_makes_no_span(context: bytes, requests: bytes) -> None:
    assert StepSpan.of(step_of(context, requests), "me", 1) is None


def test_links_are_bounded() -> None:
    span = StepSpan.of(step_of(b"x" * CONTEXT_BYTES, b"y" * CONTEXT_BYTES * 1000), "me", 1)
    assert span is not None and len(span.links) == MAX_LINKS
