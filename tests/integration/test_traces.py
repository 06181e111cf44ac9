"""A request's trace over gateway, scheduler and worker, and of what happens to it on the way."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from octavo import AsyncClient, SamplingParams
from octavo.errors import RequestFailed
from octavo.retrying import RetryPolicy
from octavo.shared.tracing.context import TraceContext
from tests.collector import Collected, Collector
from tests.fakes import FakeWorker
from tests.gateway.running import gateway
from tests.integration.scheduler_process import Service, scheduler
from tests.tiny_models import write_byte_tokenizer
from tests.worker.fake_model import FakeModel, fake_config
from worker_svc.config import WorkerConfig
from worker_svc.server import WorkerServer
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.worker import Worker
from worker_svc.tokenizers.tokenizer_files import TokenizerFiles

SECRET = "secret"  # in every prompt here, or its parameters, and in no attribute
OWN = "octavo."
MILLISECOND_NS = 1_000_000


@contextlib.asynccontextmanager
async def traced_worker(collector: Collector) -> AsyncIterator[str]:
    """A worker with a fake model that makes spans of its steps."""
    config = WorkerConfig(
        port=0,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        kv_cache_memory=0.001,
        otlp_traces_endpoint=collector.endpoint,
    )
    model = FakeModel(fake_config(256))
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(folder, 400)
        files = TokenizerFiles.from_folder(Path(folder))
    server = WorkerServer(Worker(ModelRunner(model, model.config, config.block_size), config), model.config, files)
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop()


def flags(collector: Collector, *workers: str, sampling: float = 0.0) -> list[str]:
    """Of a scheduler that traces, by itself none: only what its clients have it trace."""
    own = [f"--otlp-traces-endpoint={collector.endpoint}", f"--trace-sampling={sampling}", "--metrics-port=0"]
    return [*own, *(f"--worker={worker}" for worker in workers)]


def client_of(service: Service) -> AsyncClient:
    return AsyncClient(service.address, retry=RetryPolicy(window_s=0.0), own_connection=True)


async def ready(service: Service) -> None:
    await asyncio.to_thread(service.wait_until_ready)


async def collected(collector: Collector, names: str, num_requests: int = 1) -> None:
    def all_there() -> bool:
        return len([span for span in list(collector.spans) if is_of_request(span)]) >= num_requests

    await asyncio.to_thread(collector.wait_for, names, all_there)


def is_of_request(span: Collected) -> bool:
    return span.service == "octavo-scheduler" and span.message.kind == span.message.SPAN_KIND_SERVER


def request_span(collector: Collector, request_id: str) -> Collected:
    (span,) = [
        span
        for span in collector.spans
        if is_of_request(span) and span.attributes.get("gen_ai.response.id") == request_id
    ]
    return span


def assert_tells_nothing(collector: Collector) -> None:
    told = [str(value) for span in collector.spans for value in span.attributes.values()]
    assert told and not any(SECRET in each for each in told)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms between two exports


@pytest.fixture
def parent() -> TraceContext:
    return TraceContext.new_root()


async def test_a_request_through_gateway_scheduler_and_worker(parent: TraceContext) -> None:
    with Collector() as collector:
        async with traced_worker(collector) as worker:
            with scheduler(*flags(collector, worker)) as service:
                await ready(service)
                with gateway(service.address, otlp_traces_endpoint=collector.endpoint, trace_sampling=0.0) as http:
                    body = {"prompt": [3] * 38, "max_tokens": 4, "temperature": 0.2, "stop": SECRET}
                    for context in (parent, TraceContext(parent.trace_id, parent.span_id, False), None):
                        headers = {} if context is None else dict(context.fields())
                        answer = await asyncio.to_thread(http.post, "/v1/completions", body, **headers)
                        assert answer[0] == 200
                await collected(collector, "POST text_completion admission tokenize queue prefill decode step")
        num_steps = len(collector.named("step"))
    assert len(collector.named("POST /v1/completions")) == 1, "what the client does not trace is not traced"
    outer = collector.one("POST /v1/completions")
    assert outer.service == "octavo-gateway" and outer.attributes["http.response.status_code"] == 200
    assert (outer.trace_id, outer.parent_id) == (f"{parent.trace_id:032x}", f"{parent.span_id:016x}")
    whole = collector.one("text_completion fake")
    assert (whole.trace_id, whole.parent_id, whole.error) == (outer.trace_id, outer.span_id, "")
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.2,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 38,
        "gen_ai.usage.output_tokens": 4,
    }
    assert wanted.items() <= whole.attributes.items()
    assert 0 < whole.attributes["gen_ai.latency.time_to_first_token"] < whole.attributes["gen_ai.latency.e2e"]  # type: ignore[operator]  # numbers
    chunks = collector.named("prefill")
    assert collector.below(whole) == ["admission", "queue", *(["prefill"] * len(chunks)), "decode"]
    assert collector.below(collector.one("admission")) == ["tokenize"]
    assert [chunk.attributes[OWN + "num_tokens"] for chunk in chunks] == [16, 16, 6]
    assert [chunk.attributes[OWN + "context_len"] for chunk in chunks] == [0, 16, 32]
    steps = {step.span_id: step for step in collector.named("step")}
    of_request = [link for span in (*chunks, collector.one("decode")) for link in span.links]
    assert len(of_request) == num_steps == 6 and steps.keys() == set(of_request)
    assert all(step.links == [whole.span_id] and step.service == "octavo-worker" for step in steps.values())
    assert all(step.trace_id != whole.trace_id and not step.parent_id for step in steps.values())
    # Each export looks at the wall clock for itself, which may be set meanwhile.
    earliest_ns = whole.start_ns - MILLISECOND_NS
    assert all(earliest_ns <= span.start_ns <= span.end_ns for span in collector.spans if span is not outer)
    assert_tells_nothing(collector)


async def test_a_worker_that_is_lost_and_one_that_goes_on(parent: TraceContext) -> None:
    with Collector() as collector, FakeWorker(delay_s=0.01) as first, FakeWorker(delay_s=0.01) as second:
        with scheduler(*flags(collector, first.address, second.address)) as service:
            await ready(service)
            async with client_of(service) as client:
                params = SamplingParams(max_tokens=60, ignore_eos=True)
                num_seen = 0
                async for _ in client.generate(SECRET, params, request_id="r", traceparent=parent.traceparent):
                    num_seen += 1
                    if num_seen == 10:
                        lost, other = (first, second) if first.answered else (second, first)
                        await asyncio.to_thread(lost.kill)
            await collected(collector, "text_completion move")
    whole, move = request_span(collector, "r"), collector.one("move")
    assert whole.trace_id == f"{parent.trace_id:032x}" and whole.attributes[OWN + "num_moves"] == 1
    told = {name: move.attributes[OWN + name] for name in ("from_worker", "worker")}
    assert told == {"from_worker": lost.address, "worker": other.address} and move.attributes[OWN + "reason"]
    assert collector.below(whole) == ["admission", "queue", "prefill", "decode", "move", "prefill"]
    assert [span.attributes[OWN + "worker"] for span in collector.named("prefill")] == [lost.address, other.address]
    assert_tells_nothing(collector)


async def test_what_else_may_happen_to_a_request(parent: TraceContext) -> None:
    """It is preempted, refused, cancelled, comes again under its id, or is not traced."""
    with Collector() as collector, FakeWorker(delay_s=0.005, num_blocks=18) as worker:
        with scheduler(*flags(collector, worker.address), "--preemption-mode=recompute") as service:
            await ready(service)
            async with client_of(service) as client:
                traceparent, params = parent.traceparent, SamplingParams(max_tokens=40, ignore_eos=True)

                async def run(name: str) -> None:
                    async for _ in client.generate(SECRET, params, request_id=name, traceparent=traceparent):
                        pass

                await asyncio.gather(run("one"), run("two"))
                with pytest.raises(RequestFailed):
                    bad = SamplingParams(max_tokens=400, temperature=1.5)
                    async for _ in client.generate("x" * 999, bad, request_id="bad", traceparent=traceparent):
                        pass
                given_up = client.generate(SECRET, params, request_id="gone", traceparent=traceparent)
                assert not (await anext(given_up)).finished
                await given_up.aclose()
                unsampled = TraceContext(parent.trace_id, parent.span_id, False).traceparent
                for other in (None, unsampled, "00-nonsense"):
                    await client.complete(SECRET, SamplingParams(max_tokens=1), traceparent=other, request_id="two")
            await collected(collector, "preemption", 4)
    names = [span.attributes["gen_ai.response.id"] for span in collector.spans if is_of_request(span)]
    assert sorted(map(str, names)) == ["bad", "gone", "one", "two"]
    preempted, *again = collector.named("preemption")
    assert preempted.attributes[OWN + "mode"] == "recompute"
    whole = next(span for span in collector.spans if span.span_id == preempted.parent_id)
    assert whole.attributes[OWN + "num_preemptions"] == 1 + len(again) and not whole.error
    computed_again = [span for span in collector.named("prefill") if span.parent_id == whole.span_id]
    assert len(computed_again) >= 2 and computed_again[1].start_ns >= preempted.start_ns
    assert preempted.end_ns <= computed_again[-1].end_ns
    refused, gone = request_span(collector, "bad"), request_span(collector, "gone")
    assert refused.error == "INVALID_ARGUMENT" and collector.below(refused) == ["admission"]
    assert gone.error == "CANCELLED" and "decode" in collector.below(gone)
    assert_tells_nothing(collector)


@pytest.mark.parametrize("processes", ["--frontends=2", "--shards=2"])
async def test_traces_go_from_process_to_process(processes: str, parent: TraceContext) -> None:
    with Collector() as collector, FakeWorker() as first, FakeWorker() as second:
        with scheduler(*flags(collector, first.address, second.address), processes) as service:
            await ready(service)
            async with client_of(service) as client:
                params = SamplingParams(max_tokens=4, ignore_eos=True)
                await client.complete(SECRET, params, request_id="r", traceparent=parent.traceparent)
            await collected(collector, "text_completion queue prefill decode")
    whole = request_span(collector, "r")
    assert (whole.trace_id, whole.parent_id) == (f"{parent.trace_id:032x}", f"{parent.span_id:016x}")
    assert collector.below(whole) == ["admission", "queue", "prefill", "decode"]
    processes_of = {
        attribute.value.string_value
        for span in collector.spans
        for attribute in span.message.attributes
        if attribute.key == OWN + "worker"
    }
    assert processes_of <= {first.address, second.address}
    assert_tells_nothing(collector)
