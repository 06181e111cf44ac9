"""A client whose streams share a call: who shares, who does not, and that each is served as by a call of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from octavo.calls import shared_calls
from octavo.client import AsyncClient
from octavo.errors import RequestFailed
from octavo.retrying import RetryPolicy, Waiting
from octavo.shared.rpc import bind
from octavo.shared.tracing.context import TraceContext
from octavo.shared.tracing.span import Span
from octavo.shared.tracing.tracer import Tracer
from protos import inference_pb2 as pb
from scheduler_svc.api.inference_service import InferenceService
from scheduler_svc.api.public_server import public_server
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.output.mailboxes import Mailboxes
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.frontend import Frontend
from scheduler_svc.requests.request_checks import TextSettings
from scheduler_svc.requests.request_text import RequestText
from tests.integration.fake_inference import FakeServer, expected_tokens
from tests.scheduler.scripted_core import InlineTexts, ScriptedCore
from tests.scheduler.tiny_served_model import tiny_served_model
from tests.waiting import until

Messages = AsyncGenerator[pb.GenerateResponse, None]
NO_PAUSE = RetryPolicy(first_delay_s=0.0, max_delay_s=0.0, on_wait=lambda waiting: None)


class Scheduler:
    """A real server before a core that answers what the test says. Counts the calls of `Generate` itself."""

    def __init__(self, service: InferenceService, core: ScriptedCore, server: grpc.aio.Server, port: int) -> None:
        self.service, self.core, self.server, self.port = service, core, server, port
        self.num_own_calls = 0
        self.num_shared_calls = 0


async def _start(folder: Any, port: int = 0) -> Scheduler:
    model, core = tiny_served_model(folder), ScriptedCore()
    core.boxes = Mailboxes(asyncio.get_running_loop())
    any_texts: Any = InlineTexts(RequestText(model, TextSettings()))
    any_core: Any = core
    frontend = Frontend(lambda: ServedModels.of(model), lambda _: None)
    tracer = Tracer(0.0, NowhereExporter)  # of which a request is only where its client says so
    service = InferenceService(frontend, any_texts, any_core, core.boxes, Admission(100, 1 << 24), tracer=tracer)
    own, many = service.Generate, service.GenerateMany

    async def generate(data: bytes, context: Any) -> None:
        started.num_own_calls += 1
        await own(data, context)

    async def generate_many(requests: Any, context: Any) -> None:
        started.num_shared_calls += 1
        await many(requests, context)

    service.Generate, service.GenerateMany = generate, generate_many  # type: ignore[method-assign]  # to count them
    server, _ = public_server(SchedulerConfig(), service, lambda server: None)
    started = Scheduler(service, core, server, bind(server, "127.0.0.1", port))
    await server.start()
    return started


@pytest.fixture
async def scheduler(tmp_path: Any) -> AsyncIterator[Scheduler]:
    started = await _start(tmp_path)
    yield started
    await started.server.stop(None)


@pytest.fixture
async def client(scheduler: Scheduler) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"127.0.0.1:{scheduler.port}", own_connection=True, share_calls=True) as client:
        yield client


class NowhereExporter:
    def export(self, spans: Sequence[Span]) -> str:
        return ""

    def close(self) -> None: ...


def request(name: str, **fields: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(seed=1, max_tokens=150, **fields.pop("params", {}))
    return pb.GenerateRequest(request_id=name, sampling_params=params, **{"prompt": "abc", **fields})


def text_of(messages: Iterable[pb.GenerateResponse]) -> str:
    return "".join(delta.text for message in messages for delta in message.outputs)


async def read_all(messages: Messages) -> list[pb.GenerateResponse]:
    return [message async for message in messages]


async def begin(scheduler: Scheduler, client: AsyncClient, *names: str) -> list[Messages]:
    """Streams that have been admitted."""
    streams = [client.stream(request(name)) for name in names]
    for stream in streams:
        assert (await anext(stream)).HasField("admission")
    return streams


async def test_streams_share_a_call_and_each_gets_its_own(scheduler: Scheduler, client: AsyncClient) -> None:
    streams = await begin(scheduler, client, "r1", "r2", "r3")
    for letters in ("axk", "byl", "czm"):
        scheduler.core.say(dict(zip(("r1", "r2", "r3"), letters, strict=True)))
    scheduler.core.say(dict.fromkeys(("r1", "r2", "r3"), "!"), FinishReason.LENGTH)
    came = [await read_all(stream) for stream in streams]
    assert [text_of(each) for each in came] == ["abc!", "xyz!", "klm!"]
    assert all(each[-1].usage.completion_tokens == 4 for each in came)
    assert (scheduler.num_shared_calls, scheduler.num_own_calls) == (1, 0)
    await until(lambda: sorted(scheduler.core.forgotten) == ["r1", "r2", "r3"], seconds=20)


async def test_refusals_are_as_those_of_calls(scheduler: Scheduler, client: AsyncClient) -> None:
    (other,) = await begin(scheduler, client, "r1")
    with pytest.raises(RequestFailed) as failed:
        await read_all(client.stream(request("r2", params={"temperature": 9.0})))
    with pytest.raises(RequestFailed) as full:
        await read_all(client.stream(request("full")))
    async with AsyncClient(f"127.0.0.1:{scheduler.port}") as plain:
        for found, asked in ((failed, request("r2", params={"temperature": 9.0})), (full, request("full"))):
            with pytest.raises(RequestFailed) as alone:
                await read_all(plain.stream(asked))
            assert vars(found.value) == vars(alone.value)
    assert failed.value.violations[0].field == "sampling_params.temperature" and full.value.retry_after_s == 2.5
    scheduler.core.say({"r1": "a"}, FinishReason.LENGTH)
    assert text_of(await read_all(other)) == "a"


async def test_who_leaves_ends_one_request(scheduler: Scheduler, client: AsyncClient) -> None:
    leaving, staying = await begin(scheduler, client, "r1", "r2")
    await leaving.aclose()
    await until(lambda: scheduler.core.abandoned == ["r1"], seconds=20)
    scheduler.core.say({"r1": "x", "r2": "y"}, FinishReason.LENGTH)
    assert text_of(await read_all(staying)) == "y"


async def test_who_leaves_at_once_has_nobody_else_refused(
    scheduler: Scheduler, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler takes no more requests of a call on which many are begun and given up: that one lasts a while."""
    monkeypatch.setattr(shared_calls, "LEAST_S", 2.0)
    leaving, staying = await begin(scheduler, client, "r1", "r2")
    await leaving.aclose()
    scheduler.core.say({"r1": "x", "r2": "y"})
    assert text_of([await anext(staying)]) == "y"
    (late,) = await begin(scheduler, client, "r3")
    assert not scheduler.core.abandoned
    await until(lambda: scheduler.core.abandoned == ["r1"], seconds=20)
    scheduler.core.say({"r2": "y", "r3": "z"}, FinishReason.LENGTH)
    assert [text_of(await read_all(stream)) for stream in (staying, late)] == ["y", "z"]


async def test_what_a_slow_reader_leaves_is_put_together_at_the_scheduler(
    scheduler: Scheduler, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_calls, "MAX_BACKLOG", 3)
    slow, quick = await begin(scheduler, client, "r1", "r2")
    for number in range(100):
        scheduler.core.say({"r1": chr(97 + number % 26), "r2": "y"})
        assert text_of([await anext(quick)]) == "y"
    scheduler.core.say({"r1": "!", "r2": "!"}, FinishReason.LENGTH)
    messages = await read_all(slow)
    assert text_of(messages) == "".join(chr(97 + number % 26) for number in range(100)) + "!"
    assert len(messages) < 50, "the last ones came together"
    assert text_of(await read_all(quick)) == "!"


@pytest.mark.parametrize("fields", [{"stream": False}, {"prompt": "a" * 120}], ids=["whole", "long"])
async def test_some_have_a_call_of_their_own(
    scheduler: Scheduler, client: AsyncClient, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(shared_calls, "MAX_REQUEST_BYTES", 100)
    reading = asyncio.create_task(read_all(client.stream(request("r1", **fields))))
    await until(lambda: "r1" in scheduler.core.groups, seconds=20)
    scheduler.core.say({"r1": "a"}, FinishReason.LENGTH)
    assert text_of(await reading) == "a"
    assert (scheduler.num_shared_calls, scheduler.num_own_calls) == (0, 1)


async def test_traces_of_their_own_do_not_part_requests(scheduler: Scheduler, client: AsyncClient) -> None:
    parents = {name: TraceContext.new_root() for name in ("r1", "r2")}
    endless = [("traceparent", "0" * 100_000), ("tracestate", "a" * 100_000)]  # more than a message may have
    twice = [*parents["r1"].fields(), *parents["r1"].fields()]  # as a client of HTTP may send it
    reading = [
        asyncio.create_task(read_all(client.stream(request(name), metadata=metadata)))
        for name, metadata in (("r1", twice), ("r2", parents["r2"].fields()), ("r3", endless))
    ]
    await until(lambda: len(scheduler.core.groups) == 3, seconds=20)
    traces = {name: group.trace for name, group in scheduler.core.groups.items()}
    assert traces["r3"] is None
    for name, parent in parents.items():
        of_group = traces[name]
        assert of_group is not None and of_group.context.trace_id == parent.trace_id
    scheduler.core.say(dict.fromkeys(traces, "a"), FinishReason.LENGTH)
    assert [text_of(await each) for each in reading] == ["a"] * 3
    assert (scheduler.num_shared_calls, scheduler.num_own_calls) == (1, 0)


async def test_with_a_timeout_and_without_sharing_calls_are_their_own(scheduler: Scheduler) -> None:
    for sharing, timeout in ((True, 20.0), (False, None)):
        async with AsyncClient(f"127.0.0.1:{scheduler.port}", share_calls=sharing) as client:
            async with aclosing(client.stream(request("r1"), timeout=timeout)) as messages:
                assert (await anext(messages)).HasField("admission")
    assert (scheduler.num_shared_calls, scheduler.num_own_calls) == (0, 2)


async def test_other_metadata_go_over_another_call(scheduler: Scheduler, client: AsyncClient) -> None:
    for number, key in enumerate(("one", "two", "one")):
        messages = client.stream(request(f"r{number}"), metadata=[("authorization", key)])
        assert (await anext(messages)).HasField("admission")
        await messages.aclose()
    assert scheduler.num_shared_calls == 2


async def test_a_call_that_is_full_or_old_takes_no_more(
    scheduler: Scheduler, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_calls, "MAX_REQUESTS", 2)
    streams = await begin(scheduler, client, "r1", "r2", "r3")
    assert scheduler.num_shared_calls == 2
    monkeypatch.setattr(shared_calls, "MAX_AGE_S", 0.0)
    streams += await begin(scheduler, client, "r4")
    assert scheduler.num_shared_calls == 3
    scheduler.core.say(dict.fromkeys(("r1", "r2", "r3", "r4"), "a"), FinishReason.LENGTH)
    assert [text_of(await read_all(stream)) for stream in streams] == ["a"] * 4


async def test_a_call_without_requests_is_ended_and_the_next_one_begun(
    scheduler: Scheduler, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_calls, "IDLE_S", 0.01)
    for number in (1, 2):
        (stream,) = await begin(scheduler, client, f"r{number}")
        await asyncio.sleep(0.03)
        scheduler.core.say({f"r{number}": "a"}, FinishReason.LENGTH)
        assert text_of(await read_all(stream)) == "a"
        assert scheduler.num_shared_calls == number
        await until(lambda: not scheduler.service._shared_calls, seconds=20)


async def test_of_calls_without_requests_the_oldest_are_ended(
    scheduler: Scheduler, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes with another key each time would have as many as a connection takes."""
    monkeypatch.setattr(shared_calls, "MAX_IDLE", 2)
    for number in range(6):
        stream = client.stream(request(f"r{number}"), metadata=[("authorization", f"Bearer {number}")])
        await anext(stream)
        await until(lambda: len(scheduler.service._shared_calls) <= 3, seconds=5)
        scheduler.core.say({f"r{number}": "a"}, FinishReason.LENGTH)
        assert text_of(await read_all(stream)) == "a"
    for number, num_calls in ((5, 6), (0, 7)):
        stream = client.stream(request(f"s{number}"), metadata=[("authorization", f"Bearer {number}")])
        await anext(stream)
        assert scheduler.num_shared_calls == num_calls


async def test_a_scheduler_that_is_lost_is_a_pause_for_each(tmp_path: Any) -> None:
    first = await _start(tmp_path)
    address = f"127.0.0.1:{first.port}"
    async with AsyncClient(address, retry=NO_PAUSE, own_connection=True, share_calls=True) as client:
        streams = await begin(first, client, "r1", "r2")
        first.core.say({"r1": "a", "r2": "x"})
        assert [text_of([await anext(stream)]) for stream in streams] == ["a", "x"]
        reading = [asyncio.create_task(read_all(stream)) for stream in streams]
        await first.server.stop(None)
        second = await _start(tmp_path, first.port)
        await until(lambda: {"r1", "r2"} <= set(second.core.groups), seconds=20)
        second.core.say({"r1": "b", "r2": "y"}, FinishReason.LENGTH)
        assert [text_of(await each) for each in reading] == ["b", "y"]
        groups = second.core.groups
        assert [groups[name].sequences[0].token_ids[-1] for name in ("r1", "r2")] == [ord("a"), ord("x")]
        assert second.num_own_calls == 0
        await second.server.stop(None)


async def test_a_scheduler_without_the_method_is_called_as_before() -> None:
    with FakeServer() as older:
        async with AsyncClient(older.address, retry=NO_PAUSE, share_calls=True) as client:
            asked = [pb.GenerateRequest(prompt="abc", sampling_params=pb.SamplingParams(seed=7, max_tokens=3))] * 2
            answers = await asyncio.gather(*(read_all(client.stream(each)) for each in asked))
            for messages in answers:
                got = [token_id for message in messages for delta in message.outputs for token_id in delta.token_ids]
                assert got == expected_tokens(7, 0, 3)


async def test_closing_a_client_ends_its_requests(scheduler: Scheduler) -> None:
    told: list[Waiting] = []
    policy = RetryPolicy(on_wait=told.append)
    client = AsyncClient(f"127.0.0.1:{scheduler.port}", retry=policy, share_calls=True)
    (stream,) = await begin(scheduler, client, "r1")
    await client.close()
    with pytest.raises(RequestFailed, match=r"^CANCELLED: the client was closed$"):
        await anext(stream)
    assert not told
    await until(lambda: scheduler.core.abandoned == ["r1"], seconds=20)
