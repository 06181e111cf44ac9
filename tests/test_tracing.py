"""Contexts, sampling, and the thread that exports: what is read, what is traced, and what a collector can do wrong."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import util
from typing import Any

import pytest
import structlog

from octavo.calls.tracing_context import current_trace
from octavo.cli import main
from octavo.shared.ports import free_port
from octavo.shared.tracing import tracer as tracer_module
from octavo.shared.tracing.context import TraceContext, of_fields, parse
from octavo.shared.tracing.otlp import OtlpExporter
from octavo.shared.tracing.span import Kind, Span, own
from octavo.shared.tracing.tracer import MAX_WAITING_SPANS, Tracer, new_tracer
from scheduler_svc.config import SchedulerConfig
from tests.collector import Collector
from tests.waiting import wait_until
from worker_svc.config import WorkerConfig

PARENT = TraceContext(0xABC, 0xDEF, True)


class Recorder:
    """An exporter that keeps what it gets, and says that `problem`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.problem = ""

    def export(self, spans: Sequence[Span]) -> str:
        self.spans += [] if self.problem else spans
        return self.problem

    def close(self) -> None: ...


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer_module, "INTERVAL_S", 0.005)


def span(name: str = "x", **more: Any) -> Span:
    now_ns = time.monotonic_ns()
    return Span(name, TraceContext.new_root(), None, now_ns - 1000, now_ns, **more)


# ---- contexts -------------------------------------------------------------------------------------------------------


def test_a_context_is_read_as_it_is_written() -> None:
    for context in (PARENT, replace(PARENT, is_sampled=False), replace(PARENT, state="a=b,c=d")):
        assert of_fields(context.fields()) == context
        assert TraceContext.of_bytes(context.to_bytes()) == replace(context, is_sampled=True, state="")
    child = PARENT.child()
    assert child.trace_id == PARENT.trace_id and child.span_id not in (0, PARENT.span_id)


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        f"00-{'0' * 32}-{'1' * 16}-01",
        f"00-{'1' * 32}-{'0' * 16}-01",
        f"00-{'1' * 31}-{'1' * 16}-01",
        f"00-{'A' * 32}-{'1' * 16}-01",
        f"00-{'1' * 32}-{'1' * 16}-01-more",
        f"ff-{'1' * 32}-{'1' * 16}-01",
        f"00-{'1' * 32}-{'1' * 16}-01\n",
    ],
)
def test_what_is_no_context(traceparent: str) -> None:
    assert parse(traceparent) is None


def test_later_versions_and_other_flags_are_read() -> None:
    found = parse(f"cc-{'1' * 32}-{'2' * 16}-03-more", "x" * 513)
    assert found == TraceContext(int("1" * 32, 16), int("2" * 16, 16), True)


def test_the_callers_own_span_is_what_a_request_belongs_to() -> None:
    from opentelemetry import trace

    assert current_trace() == ()
    state = trace.TraceState([("a", "b")])
    of_caller = trace.SpanContext(PARENT.trace_id, PARENT.span_id, False, trace.TraceFlags(1), state)
    with trace.use_span(trace.NonRecordingSpan(of_caller)):
        assert of_fields(current_trace()) == replace(PARENT, state="a=b")


# ---- sampling -------------------------------------------------------------------------------------------------------


def test_callers_decide_and_else_the_ratio() -> None:
    tracer = Tracer(0.25, Recorder)
    num_sampled = sum(tracer.begin(None).is_sampled for _ in range(4000))
    assert 850 < num_sampled < 1150
    for parent in (PARENT, replace(PARENT, is_sampled=False)):
        begun = tracer.begin(parent)
        assert (begun.trace_id, begun.is_sampled) == (parent.trace_id, parent.is_sampled)
    tracer.close()


@pytest.mark.parametrize(("sampling", "is_sampled"), [(0.0, False), (1.0, True)])
def test_callers_decide_nothing_where_they_must_not(sampling: float, is_sampled: bool) -> None:
    tracer = Tracer(sampling, Recorder, follows_parents=False)
    for parent in (PARENT, replace(PARENT, is_sampled=not is_sampled), None):
        begun = tracer.begin(parent)
        assert begun.is_sampled is is_sampled and (parent is None or begun.trace_id == parent.trace_id)
    tracer.close()


def test_all_services_sample_the_same_traces() -> None:
    """As OpenTelemetry's sampler by ratio does, which looks at the last 64 bits of the trace id."""
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    tracer, theirs = Tracer(0.3, Recorder), TraceIdRatioBased(0.3)
    for _ in range(500):
        begun = tracer.begin(None)
        decision = theirs.should_sample(None, begun.trace_id, "x").decision
        assert begun.is_sampled is (decision is Decision.RECORD_AND_SAMPLE)
    tracer.close()


def test_callers_that_are_not_followed_choose_nothing() -> None:
    """Whose trace id is one that a sampler by ratio always takes."""
    tracer = Tracer(0.1, Recorder, follows_parents=False)
    chosen = dataclasses.replace(TraceContext.new_root(), trace_id=1 << 64)
    begun = [tracer.begin(chosen) for _ in range(1000)]
    assert {each.trace_id for each in begun} == {chosen.trace_id}
    assert 10 < sum(each.is_sampled for each in begun) < 250  # 100 on average, 9 standard deviations from either
    tracer.close()


# ---- exporting ------------------------------------------------------------------------------------------------------


def test_what_waits_is_exported_at_the_end() -> None:
    exporter = Recorder()
    tracer = Tracer(1.0, lambda: exporter)
    for number in range(1500):
        tracer.emit(span(str(number)))
    tracer.close()
    assert [each.name for each in exporter.spans] == [str(number) for number in range(1500)]


def test_a_failing_collector_is_one_line_and_so_is_its_return(soon: None) -> None:
    exporter = Recorder()
    exporter.problem = "nobody listens"
    with structlog.testing.capture_logs() as lines:
        tracer = Tracer(1.0, lambda: exporter)
        for _ in range(5):
            tracer.emit(span())
            wait_until(lambda: not tracer._waiting)
        exporter.problem = ""
        tracer.emit(span())
        wait_until(lambda: exporter.spans)
        tracer.close()
    assert [(line["log_level"], line.get("why"), line.get("dropped")) for line in lines] == [
        ("warning", "nobody listens", None),
        ("info", None, 5),
    ]


def test_a_collector_that_hangs_holds_nobody_up(soon: None) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    class Hanging(Recorder):
        def export(self, spans: Sequence[Span]) -> str:
            has_begun.set()
            may_end.wait(20)
            return ""

        def close(self) -> None:
            may_end.set()

    tracer = Tracer(1.0, Hanging)
    tracer.emit(span())
    assert has_begun.wait(10)
    for _ in range(MAX_WAITING_SPANS + 100):
        tracer.emit(span())
    assert len(tracer._waiting) == MAX_WAITING_SPANS and tracer._num_dropped == 100
    started_s = time.monotonic()
    tracer.close(flush_s=0.05)
    assert time.monotonic() - started_s < 5


def test_spans_come_as_opentelemetry_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=of-the-operator")
    with Collector() as collector:
        exporter = OtlpExporter("octavo-test", collector.endpoint)
        whole, link = span("whole", error="FAILED", attributes=own(one=1, text="a")), TraceContext.new_root()
        part = Span("part", whole.context.child(), whole.context, whole.start_ns, whole.end_ns, links=[link])
        asked = replace(part, name="asked", kind=Kind.SERVER, attributes={"list": ["a", "b"]})
        assert exporter.export([whole, part, asked]) == ""
        exporter.close()
    first, second, third = collector.spans
    assert first.service == "of-the-operator"
    assert (first.error, first.parent_id, second.parent_id) == ("FAILED", "", first.span_id)
    assert first.attributes == {"octavo." + "one": 1, "octavo." + "text": "a", "error.type": "FAILED"}
    assert second.links == [f"{link.span_id:016x}"] and second.trace_id == first.trace_id
    assert third.attributes == {"list": ["a", "b"]} and third.message.kind == third.message.SPAN_KIND_SERVER
    assert abs(first.end_ns - time.time_ns()) < 5e9 and first.end_ns - first.start_ns == 1000


def test_nobody_listens_there(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    exporter = OtlpExporter("octavo-test", f"http://127.0.0.1:{free_port()}")
    assert "UNAVAILABLE" in exporter.export([span()])
    exporter.close()
    assert "Transient" not in capfd.readouterr().err, "the library's own lines stay out of the log"


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SchedulerConfig, WorkerConfig])
def test_what_is_no_collector(config: Any) -> None:
    for endpoint in ("127.0.0.1:4317", "http://", "ftp://a:1", "http://a:1/v1/traces"):
        with pytest.raises(ValueError, match="otlp_traces_endpoint is"):
            config(otlp_traces_endpoint=endpoint)
    assert config(otlp_traces_endpoint="https://collector:4317").otlp_traces_endpoint


def test_shares_that_cannot_be() -> None:
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="trace_sampling is"):
            SchedulerConfig(trace_sampling=share)


@pytest.mark.parametrize("command", ["scheduler --worker=127.0.0.1:1", "worker", "gateway", "serve"])
def test_missing_packages_are_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = util.find_spec
    monkeypatch.setattr(
        "octavo.shared.tracing.options.find_spec",
        lambda name: None if name.startswith("opentelemetry") else found(name),
    )
    assert main([*command.split(), "--port=0", "--otlp-traces-endpoint=http://127.0.0.1:4317"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "opentelemetry-sdk is not installed" in last and "pip install '.[tracing]'" in last


def test_nothing_of_it_is_imported_while_it_is_off() -> None:
    program = """
import sys
import gateway_svc.server, octavo.client, scheduler_svc.server, scheduler_svc.frontend_process
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.serving import Serving
serving = Serving(SchedulerConfig(), lambda delivery: None)
assert serving.tracer is None
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "[]\n", ended.stderr
    assert new_tracer("x", "") is None
