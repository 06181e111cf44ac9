"""What the step loop writes down of traced requests, and tells workers of them; and that others cost nothing."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.shared.tracing.context import CONTEXT_BYTES, TraceContext
from octavo.shared.tracing.span import Span
from protos import worker_pb2
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.engine.engine import Engine
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.tracing.group_trace import MAX_DECODE_LINKS, GroupTrace
from tests.scheduler.hand_turned_loop import FakeLink, Loop


class Traced(Loop):
    """Requests of it are traced; so are the steps of its workers, unless `traces_steps` is False."""

    def __init__(self, *, traces_steps: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        self.spans: list[Span] = []
        self._traces_steps = traces_steps

    def join(self, *arguments: Any, **options: Any) -> FakeLink:
        link = super().join(*arguments, **options)
        self.turn()
        (worker,) = (worker for worker in self.engine.workers if worker.link is link)
        worker.info.traces_steps = self._traces_steps
        return link

    def take(self, request_id: str, num_tokens: int = 3, *, max_new: int = 9) -> SequenceGroup:
        group = self.group(request_id, num_tokens)
        group.max_num_tokens = num_tokens + max_new
        group.trace = GroupTrace(TraceContext.new_root(), self.spans.append)
        self.engine.submit(group)
        return group

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]


def test_a_request_from_queue_to_end() -> None:
    loop = Traced()
    link = loop.join()
    group = loop.take("r")
    loop.run_to_end(link)
    assert loop.names == ["queue", "prefill", "decode"]
    assert group.trace is not None and all(span.parent == group.trace.context for span in loop.spans)
    queue, prefill, decode = loop.spans
    assert queue.start_ns <= queue.end_ns <= prefill.end_ns <= decode.end_ns and decode.start_ns >= prefill.start_ns
    steps = [TraceContext.of_bytes(step.trace.context) for step in link.steps if step.HasField("trace")]
    assert [*prefill.links, *decode.links] == steps and len(steps) == 9
    assert all(step.trace.requests == group.trace.key for step in link.steps if step.HasField("trace"))


def test_of_others_nothing_is_told_or_kept() -> None:
    loop = Traced()
    link = loop.join()
    loop.submit("other")
    loop.run_to_end(link)
    traced = loop.take("traced")
    loop.submit("beside")
    loop.run_to_end(link)
    assert loop.names == ["queue", "prefill", "decode"]
    assert traced.trace is not None
    assert {step.trace.requests for step in link.steps} == {b"", traced.trace.key}
    (worker,) = loop.engine.workers
    assert not worker.scheduler.columns.is_traced.any() and not loop.engine._traces._live


def test_a_worker_that_makes_no_spans_is_told_of_none() -> None:
    loop = Traced(traces_steps=False)
    link = loop.join()
    loop.take("r")
    loop.run_to_end(link)
    assert loop.names == ["queue", "prefill", "decode"]
    assert not any(step.HasField("trace") for step in link.steps)
    assert [list(span.links) for span in loop.spans] == [[], [], []]


def test_of_a_long_answer_the_first_tokens_are_looked_at() -> None:
    loop = Traced()
    link = loop.join()
    loop.take("r", max_new=MAX_DECODE_LINKS + 20)
    loop.run_to_end(link)
    assert len(loop.spans[-1].links) == MAX_DECODE_LINKS
    assert not link.steps[-1].HasField("trace")


def test_a_step_that_fails_is_an_error_of_its_chunks_alone() -> None:
    loop = Traced()
    link = loop.join()
    for name in ("one", "two"):  # of a step that failed with one request, that one would end
        loop.take(name)
    loop.turn()
    for step, status in zip(list(link.steps), ("FAILED", "SKIPPED"), strict=True):
        loop.answer(link, result=worker_pb2.StepResult(step_id=step.step_id, status=f"STEP_STATUS_{status}"))
        loop.turn()
    loop.run_to_end(link)
    errors = [span.error for span in loop.spans if span.name == "prefill"]
    assert errors[:2] == ["step_failed"] * 2 and errors[-2:] == ["", ""]


def test_a_request_that_ends_before_it_begins() -> None:
    loop = Traced()
    group = loop.take("r")
    loop.turn()
    loop.engine.abort("r")
    loop.turn()
    assert loop.ends["r"][0] is FinishReason.ABORT and loop.names == ["queue"]
    assert group.trace is not None
    group.trace.ended(None, 1, 0)
    assert loop.names == ["queue"], "it ends once"


def test_a_lost_worker_is_named_with_the_one_that_goes_on() -> None:
    loop = Traced()
    first = loop.join("first")
    loop.take("r")
    loop.turn()
    loop.engine.worker_lost(first, "it burns")
    loop.turn()
    second = loop.join("second")
    loop.run_to_end(second)
    assert loop.names == ["queue", "prefill", "move", "prefill", "decode"]
    assert loop.spans[1].error == "worker_lost"
    move = {name.partition(".")[2]: value for name, value in loop.spans[2].attributes.items()}
    assert move == {"from_worker": "first", "worker": "second", "reason": "it burns"}


def test_histograms_name_traced_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Traced()
    link = loop.join()
    loop.submit("other")
    loop.run_to_end(link)
    assert not _exemplars(loop.engine)
    group = loop.take("r")
    loop.run_to_end(link)
    assert group.trace is not None
    found = _exemplars(loop.engine)
    assert found.keys() == {
        "time_to_first_token_s",
        "inter_token_latency_s",
        "e2e_request_latency_s",
        "request_queue_time_s",
    }
    assert all(context == group.trace.context for context in found.values())


def _exemplars(engine: Engine) -> dict[str, TraceContext]:
    histograms = {name: each for name, each in vars(engine.metrics.total()).items() if hasattr(each, "exemplars")}
    for histogram in histograms.values():
        for bucket, exemplar in histogram.exemplars.items():
            ends = (*histogram.bounds, float("inf"))
            assert exemplar.value <= ends[bucket] and (not bucket or exemplar.value > ends[bucket - 1])
    return {name: each.context for name, of in histograms.items() for each in of.exemplars.values()}


def test_at_most_so_many_requests_are_told_of_a_step() -> None:
    loop = Traced()
    link = loop.join(max_num_seqs=4)
    for number in range(4):
        loop.take(str(number))
    loop.turn()
    assert len(link.steps[0].trace.requests) == 4 * CONTEXT_BYTES
    assert isinstance(loop.engine.workers[0], WorkerHandle)
