"""Both clients against a server of known answers: streaming, resuming, refusals, cancelling."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from octavo import AsyncClient, Client, Logprob, SamplingParams
from octavo.calls.generation import Generation, build_request
from octavo.client import _Call, channel_credentials
from octavo.errors import RequestFailed
from octavo.outputs import RequestOutput
from octavo.retrying import RetryPolicy, Waiting
from protos import inference_pb2 as pb
from tests.integration.fake_inference import Answer, FakeServer, expected_tokens, text_of

QUICK = RetryPolicy(window_s=1.0, first_delay_s=0.01, max_delay_s=0.05)
LOST = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture(params=["sync", "async"])
def generate(request: pytest.FixtureRequest, server: FakeServer) -> Any:
    """Collects a whole stream, through either client."""

    def with_client(*args: Any, **kwargs: Any) -> list[RequestOutput]:
        with Client(server.address, retry=QUICK, api_key="secret") as client:
            return list(client.generate(*args, **kwargs))

    def with_async_client(*args: Any, **kwargs: Any) -> list[RequestOutput]:
        async def collect() -> list[RequestOutput]:
            async with AsyncClient(server.address, retry=QUICK, api_key="secret") as client:
                return [output async for output in client.generate(*args, **kwargs)]

        return asyncio.run(collect())

    return with_client if request.param == "sync" else with_async_client


def tokens_of(outputs: list[RequestOutput], index: int = 0) -> list[int]:
    return [t for output in outputs for part in output.outputs if part.index == index for t in part.token_ids]


def text_in(outputs: list[RequestOutput], index: int = 0) -> str:
    return "".join(part.text for output in outputs for part in output.outputs if part.index == index)


def test_streams_deltas_and_ends_with_the_figures(server: FakeServer, generate: Any) -> None:
    outputs = generate("hello", SamplingParams(seed=5, max_tokens=6), request_id="r1", priority=-2, model="fake")
    assert tokens_of(outputs) == expected_tokens(5, 0, 6)
    assert [output.finished for output in outputs] == [False] * 6 + [True]
    assert [part.finish_reason for output in outputs for part in output.outputs] == [None] * 5 + ["length"]
    last = outputs[-1]
    assert (last.request_id, last.seed, last.model, last.prompt) == ("r1", 5, "fake", "hello")
    metrics = last.metrics
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens, metrics.num_cached_tokens) == (3, 6, 1)
    assert metrics.first_token_ns is not None and metrics.finished_ns is not None
    assert metrics.arrival_ns <= metrics.first_token_ns <= metrics.finished_ns
    assert len(metrics.token_times_ns) == 6
    (request,) = server.inference.requests
    assert (request.priority, request.model, request.HasField("stream")) == (-2, "fake", False)
    assert server.inference.metadata[0]["authorization"] == "Bearer secret"


def test_every_kind_of_prompt(server: FakeServer, generate: Any) -> None:
    generate(prompt_token_ids=[1, 2])
    generate(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=False)
    by_ids, by_messages = server.inference.requests
    assert list(by_ids.prompt_token_ids.ids) == [1, 2]
    assert by_messages.messages.messages[0] == pb.ChatMessage(role="user", content="hi")
    assert by_messages.messages.HasField("add_generation_prompt")


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"prompt": "a", "prompt_token_ids": [1]},
        {"prompt_token_ids": [-1]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "image": "x"}]},
        {"prompt": "a", "mood": "good"},
        {"prompt": "a", "traceparent": "00-aa\n"},
        {"prompt": "a", "traceparent": "00-é"},
    ],
    ids=str,
)
def test_what_cannot_be_sent_is_a_value_error(server: FakeServer, generate: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        generate(**arguments)
    assert server.inference.requests == []


@pytest.mark.parametrize("field", [("x", "a\nb"), ("x-bin", "text"), ("X", "a"), ("x", None)], ids=str)
async def test_metadata_that_grpc_does_not_send_are_refused(server: FakeServer, field: Any) -> None:
    async with AsyncClient(server.address, retry=QUICK) as client:
        with pytest.raises(ValueError, match=r"(?i)^(metadata: )?'?x"):
            client.stream(pb.GenerateRequest(prompt="a"), metadata=[field])
        with pytest.raises(ValueError):
            await asyncio.wait_for(client.load_adapter("a", "/a", metadata=[field]), 20)
        with pytest.raises(ValueError):
            await anext(client.follow(lambda at: at.control.WatchSteps, pb.WatchStepsRequest(), metadata=[field]))
    assert server.inference.requests == []


@pytest.mark.parametrize("status", [LOST, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN], ids=str)
def test_a_broken_stream_goes_on_where_it_stopped(server: FakeServer, generate: Any, status: grpc.StatusCode) -> None:
    server.inference.losses = [(5, status), (0, status), (1, status)]
    outputs = generate("hello", SamplingParams(n=2, max_tokens=6))
    seed = outputs[-1].seed
    assert seed is not None
    for index in (0, 1):
        assert tokens_of(outputs, index) == expected_tokens(seed, index, 6)
        assert text_in(outputs, index) == text_of(expected_tokens(seed, index, 6))
    attempts = server.inference.requests
    assert [attempt.attempt for attempt in attempts] == [0, 1, 2, 3]
    assert {attempt.request_id for attempt in attempts} == {outputs[0].request_id}
    assert {attempt.sampling_params.seed for attempt in attempts} == {seed}
    assert [[len(held.token_ids) for held in attempt.resume] for attempt in attempts] == [[], [3, 2], [3, 2], [3, 3]]


def test_an_output_that_had_ended_is_resumed_as_ended(server: FakeServer, generate: Any) -> None:
    server.inference.losses = [(7, LOST)]
    outputs = generate("hello", SamplingParams(n=2, max_tokens=4))
    reasons = [held.finish_reason for held in server.inference.requests[1].resume]
    assert reasons == [pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_UNSPECIFIED]
    assert len(tokens_of(outputs, 1)) == 4 and outputs[-1].finished


def test_the_logprobs_of_all_attempts_are_summed_up(server: FakeServer, generate: Any) -> None:
    server.inference.losses = [(2, LOST)]
    outputs = generate("hello", SamplingParams(max_tokens=4, logprobs=0))
    assert outputs[-2].outputs[0].cumulative_logprob == -0.5 * 4
    assert [one.cumulative_logprob for output in outputs[:-2] for one in output.outputs] == [None] * 3


def test_the_loss_is_raised_where_the_server_cannot_resume(server: FakeServer, generate: Any) -> None:
    server.inference.losses = [(2, LOST)]
    server.inference.can_resume = False
    with pytest.raises(RequestFailed, match="lost on purpose") as caught:
        generate("hello", SamplingParams(max_tokens=4))
    assert caught.value.code is LOST


def test_gives_up_when_the_timeout_or_the_window_is_over(server: FakeServer, generate: Any) -> None:
    server.inference.losses = [(0, LOST)] * 50
    with pytest.raises(RequestFailed, match="9 schedulers were lost before anything came of it"):
        generate("hello", SamplingParams(max_tokens=4), timeout=20)
    assert len(server.inference.requests) == 1 + QUICK.max_losses
    server.inference.token_delay_s = 1.0
    server.inference.losses = [(0, LOST)]
    with pytest.raises(RequestFailed, match="lost on purpose"):  # though it is the second attempt that runs out of time
        generate("hello", SamplingParams(max_tokens=4), timeout=0.5)
    server.inference.requests.clear()
    server.inference.refusal = (LOST, "no worker yet", ())
    started_s = time.monotonic()
    with pytest.raises(RequestFailed, match=r"no worker yet \(nobody went on with it for 1\.\d s\)"):
        generate("hello")
    assert QUICK.window_s <= time.monotonic() - started_s < 20 and len(server.inference.requests) > 10


def test_a_scheduler_that_comes_back_is_found(server: FakeServer) -> None:
    """Nobody listens for a while; then another process's worth of scheduler has the port."""
    server.inference.token_delay_s = 0.02
    received: list[RequestOutput] = []

    def restart() -> FakeServer:
        server.stop()
        time.sleep(0.5)
        return stack.enter_context(FakeServer(server.port))

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool, Client(server.address) as client:
        for output in client.generate("hello", SamplingParams(max_tokens=30, seed=1)):
            received.append(output)
            if len(received) == 5:
                restarted = pool.submit(restart)
    assert tokens_of(received) == expected_tokens(1, 0, 30)
    assert restarted.result().inference.requests[0].attempt >= 1


def test_refusals_carry_status_fields_and_hint(server: FakeServer, generate: Any) -> None:
    bad = error_details_pb2.BadRequest(
        field_violations=[{"field": "sampling_params.top_p", "description": "got 7; accepted: above 0, up to 1"}]
    )
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000))
    details = status_pb2.Status(code=3, message="no")
    for detail in (bad, retry):
        packed = any_pb2.Any()
        packed.Pack(detail)
        details.details.append(packed)
    trailing = (("grpc-status-details-bin", details.SerializeToString()),)
    server.inference.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "no", trailing)
    with pytest.raises(RequestFailed, match="INVALID_ARGUMENT: no") as caught:
        generate("hello")
    assert caught.value.violations[0].field == "sampling_params.top_p"
    assert caught.value.retry_after_s == 1.5
    assert len(server.inference.requests) == 1


@pytest.mark.parametrize(
    "params", [SamplingParams(n=2, best_of=3), SamplingParams(n=2, best_of=3, use_beam_search=True, temperature=0)]
)
def test_ranked_outputs_begin_anew_after_a_loss_between_their_messages(params: SamplingParams) -> None:
    generation = Generation(build_request("hello", params), QUICK, now_ns=0)
    messages = [
        pb.GenerateResponse(admission=pb.Admission(), model="fake"),
        pb.GenerateResponse(outputs=[pb.OutputDelta(index=0, token_ids=[1, 2], text="ab")]),
        pb.GenerateResponse(
            outputs=[
                pb.OutputDelta(index=0, token_ids=[3], text="c", finish_reason=pb.FINISH_REASON_LENGTH),
                pb.OutputDelta(index=1, token_ids=[4], text="d", finish_reason=pb.FINISH_REASON_STOP),
            ],
            usage=pb.Usage(completion_tokens=4),
        ),
    ]
    for message in messages[:2]:
        assert generation.receive(message, now_ns=1) is None
    generation.retry_delay_s(RequestFailed(LOST, "gone"), now_ns=2)
    assert not generation.request.resume and generation.request.attempt == 1
    received = [output for message in messages if (output := generation.receive(message, now_ns=2))]
    assert (text_in(received, 0), text_in(received, 1), tokens_of(received, 0)) == ("abc", "d", [1, 2, 3])
    assert generation.finished and received[-1].model == "fake"


def test_a_full_queue_found_after_a_loss_is_tried_again_when_it_says() -> None:
    patient = dataclasses.replace(QUICK, window_s=10.0)  # a hint beyond the window ends it: see test_retrying.py
    generation = Generation(build_request("hello", None), patient, now_ns=0)
    generation.receive(pb.GenerateResponse(admission=pb.Admission()), now_ns=1)
    assert generation.retry_delay_s(RequestFailed(LOST, "gone"), now_ns=2) <= 0.05
    full = RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_s=7.0)
    assert 7.0 <= generation.retry_delay_s(full, now_ns=3) <= 7.05


@pytest.mark.parametrize(
    "messages",
    [
        [pb.OutputDelta(index=0, token_ids=[1, 2], text="ab")],
        [pb.OutputDelta(index=0, token_ids=[1, 2], text="ab"), pb.OutputDelta(index=1, token_ids=[3], text="c")],
    ],
    ids=["one output begun", "two"],
)
def test_what_comes_whole_begins_anew_after_a_loss_between_its_messages(messages: list[pb.OutputDelta]) -> None:
    """A server refuses to resume it, and the caller has been shown nothing."""
    generation = Generation(build_request("hello", SamplingParams(n=2, seed=3), stream=False), QUICK, now_ns=0)
    generation.receive(pb.GenerateResponse(admission=pb.Admission(), model="fake", model_fingerprint="f"), now_ns=1)
    for delta in messages:
        assert generation.receive(pb.GenerateResponse(outputs=[delta]), now_ns=2) is None
    generation.retry_delay_s(RequestFailed(LOST, "gone"), now_ns=3)
    again = generation.request
    assert not again.resume and again.sampling_params.seed == 3 and again.attempt == 1 and not again.model_fingerprint
    whole = [
        pb.OutputDelta(index=index, token_ids=[1], text="a", finish_reason=pb.FINISH_REASON_STOP) for index in (0, 1)
    ]
    output = generation.receive(pb.GenerateResponse(outputs=whole, usage=pb.Usage(completion_tokens=2)), now_ns=4)
    assert output is not None and output.finished and [one.text for one in output.outputs] == ["a", "a"]


def test_a_full_queue_is_the_caller_s_business(server: FakeServer, generate: Any) -> None:
    server.inference.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full", ())
    with pytest.raises(RequestFailed) as caught:
        generate("hello")
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(server.inference.requests) == 1


def test_a_pause_ends_within_the_timeout_or_is_not_begun() -> None:
    slow = RetryPolicy(first_delay_s=60.0, max_delay_s=60.0)
    for _ in range(20):
        call = _Call(build_request("hello", None), slow, timeout=2.0)
        assert call.pause_after(RequestFailed(LOST, "gone")) <= 2.0
    call = _Call(build_request("hello", None), slow, timeout=2.0)
    with pytest.raises(RequestFailed, match=r"DEADLINE_EXCEEDED: no time for another attempt after: UNAVAILABLE: gone"):
        call.pause_after(RequestFailed(LOST, "gone", retry_after_s=3.0))


def test_timeout_covers_the_whole_call(server: FakeServer, generate: Any) -> None:
    server.inference.token_delay_s = 0.1
    started = time.monotonic()
    with pytest.raises(RequestFailed) as caught:
        generate("hello", SamplingParams(max_tokens=100), timeout=0.35)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - started < 8, "the answer takes 10 s"


def test_leaving_the_iterator_cancels_the_request(server: FakeServer) -> None:
    server.inference.token_delay_s = 0.02
    with Client(server.address) as client:
        stream = client.generate("hello", SamplingParams(max_tokens=1000))
        next(stream)
        stream.close()
        assert server.inference.cancelled.wait(20)


async def test_cancelling_the_task_cancels_the_request(server: FakeServer) -> None:
    server.inference.token_delay_s = 0.02
    async with AsyncClient(server.address) as client:

        async def consume() -> None:
            async for _ in client.generate("hello", SamplingParams(max_tokens=1000)):
                pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.inference.cancelled.wait, 2)


async def test_the_other_calls(server: FakeServer) -> None:
    async with AsyncClient(server.address) as client:
        assert (await client.model_info()).model == "fake"
        assert await client.tokenize("ab") == [97, 98]
        assert await client.tokenize([{"role": "user", "content": "c"}]) == [99]
        assert await client.detokenize([97, 98]) == "ab"
        assert await client.abort("known") and not await client.abort("unknown")
    with Client(server.address) as client:
        assert client.model_info().model == "fake"
        assert client.detokenize(client.tokenize("héllo")) == "héllo"
        assert client.abort("known") and not client.abort("unknown")


def test_complete_gives_the_whole_at_once(server: FakeServer) -> None:
    server.inference.script = [
        pb.GenerateResponse(
            admission=pb.Admission(num_prompt_tokens=2),
            request_id="r1",
            outputs=[
                pb.OutputDelta(index=0, text="ab", token_ids=[1, 2], finish_reason=pb.FINISH_REASON_STOP,
                               matched_stop=pb.MatchedStop(text="c"), cumulative_logprob=-1.5,
                               logprobs=[pb.TokenLogprobs(token=pb.Logprob(token_id=1, logprob=-0.5, rank=1))]),
                pb.OutputDelta(index=1, token_ids=[3], finish_reason=pb.FINISH_REASON_STOP,
                               matched_stop=pb.MatchedStop(token_id=0), score=-2),
            ],
            usage=pb.Usage(prompt_tokens=2, completion_tokens=3),
        )
    ]  # fmt: skip
    with Client(server.address) as client:
        output = client.complete("x", SamplingParams(n=2))
    assert not server.inference.requests[0].stream and server.inference.requests[0].HasField("stream")
    first, second = output.outputs
    assert output.finished and (first.text, list(first.token_ids), first.stop_reason) == ("ab", [1, 2], "c")
    assert first.cumulative_logprob == -1.5 and first.logprobs == [{1: Logprob(-0.5, 1, "")}]
    assert (second.stop_reason, second.score, second.cumulative_logprob, second.logprobs) == (0, -2, None, None)


def test_over_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*make.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with FakeServer(tls=(key.read_bytes(), certificate.read_bytes())) as server:
        address = f"localhost:{server.port}"
        with Client(address, credentials=channel_credentials(certificate)) as client:
            assert client.model_info().model == "fake"
        with Client(address, retry=QUICK) as client, pytest.raises(RequestFailed) as caught:
            client.model_info()
        assert caught.value.code is LOST


def test_nobody_there_is_unavailable() -> None:
    with Client("127.0.0.1:1", retry=QUICK) as client:
        with pytest.raises(RequestFailed) as caught:
            client.model_info()
        assert caught.value.code is LOST
        with pytest.raises(RequestFailed) as caught:
            list(client.generate("hello"))
        assert caught.value.code is LOST


def test_whoever_waits_is_told_once_an_outage(server: FakeServer) -> None:
    told: list[Waiting] = []
    policy = RetryPolicy(first_delay_s=0.001, max_delay_s=0.001, on_wait=told.append)
    server.inference.losses = [(1, LOST), (0, LOST), (2, LOST)]
    with Client(server.address, retry=policy) as client:
        list(client.generate("hello", SamplingParams(max_tokens=6), request_id="r"))
    assert [(waiting.request_id, waiting.is_first) for waiting in told] == [("r", True), ("r", False), ("r", True)]
    assert all("lost on purpose" in str(waiting.failure) and 119 < waiting.left_s <= 120 for waiting in told)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("as_list", [True, False], ids=["list", "commas"])
def test_the_next_address_goes_on_when_one_is_gone(kind: str, as_list: bool) -> None:
    with FakeServer() as first, FakeServer() as second:
        addresses = [first.address, second.address]
        address = addresses if as_list else ",".join(addresses)
        first.inference.losses = [(2, LOST)]
        params = SamplingParams(max_tokens=5, seed=1)

        def run() -> list[RequestOutput]:
            with Client(address, retry=QUICK) as client:
                received = list(client.generate("hello", params))
                first.stop()
                assert client.model_info().model == "fake" and tokens_of(list(client.generate("again", params)))
                return received

        async def run_async() -> list[RequestOutput]:
            async with AsyncClient(address, retry=QUICK) as client:
                received = [output async for output in client.generate("hello", params)]
                await asyncio.to_thread(first.stop)
                assert (await client.model_info()).model == "fake"
                assert tokens_of([output async for output in client.generate("again", params)])
                return received

        outputs = run() if kind == "sync" else asyncio.run(run_async())
        assert tokens_of(outputs) == expected_tokens(1, 0, 5)
        assert len(first.inference.requests) == 1 and len(second.inference.requests) == 2
        assert list(second.inference.requests[0].resume[0].token_ids) == expected_tokens(1, 0, 2)


@pytest.mark.parametrize("method", ["generate", "model_info"])
async def test_nobody_who_asks_in_the_instant_of_a_stop_is_failed(method: str) -> None:
    """gRPC says CANCELLED to calls that a server has got and will not hand out any more: most of these, here."""
    num_answers = 0

    async def ask(client: AsyncClient) -> None:
        nonlocal num_answers
        while first_runs:
            if method == "generate":
                assert tokens_of([output async for output in client.generate("hello", SamplingParams(max_tokens=2))])
            else:
                assert (await client.model_info()).model == "fake"
            num_answers += 1

    with FakeServer() as first, FakeServer() as second:
        first_runs = True
        async with contextlib.AsyncExitStack() as clients:
            asking = []
            for _ in range(16):
                addresses = [first.address, second.address]
                client = await clients.enter_async_context(AsyncClient(addresses, retry=QUICK))
                asking.append(asyncio.create_task(ask(client)))
            while num_answers < 50:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(first.stop)
            first_runs = False
            await asyncio.gather(*asking)


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, LOST])
@pytest.mark.parametrize("share_calls", [False, True])
async def test_a_call_that_has_failed_is_held_by_nothing(
    server: FakeServer, code: grpc.StatusCode, share_calls: bool
) -> None:
    """Its request may be large, and the collector late."""
    server.inference.refusal = (code, "no", ())
    retry = RetryPolicy(window_s=0.0)
    async with AsyncClient(server.address, retry=retry, share_calls=share_calls) as client:
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                with pytest.raises(RequestFailed):
                    await client.complete("hello")
                with pytest.raises(RequestFailed):
                    await anext(client.stream(pb.GenerateRequest(prompt="hello")))
            await asyncio.sleep(0.6)  # what is given up early lasts a while
            assert not [each for each in gc.get_objects() if isinstance(each, Generation)]
        finally:
            gc.enable()


def _silent(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    while context.is_active():
        time.sleep(0.02)
    yield from ()


def test_a_client_that_is_closed_meanwhile_waits_for_no_scheduler(server: FakeServer) -> None:
    told: list[Waiting] = []
    server.inference.answer = _silent
    with ThreadPoolExecutor(1) as pool, Client(server.address, retry=RetryPolicy(on_wait=told.append)) as client:
        asked = pool.submit(lambda: list(client.generate("hello")))
        while not server.inference.requests:
            time.sleep(0.01)
        client.close()
        with pytest.raises(RequestFailed, match="CANCELLED"):
            asked.result(20)
    assert not told


def _begun(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    yield pb.GenerateResponse(admission=pb.Admission(num_prompt_tokens=3))
    yield pb.GenerateResponse(outputs=[pb.OutputDelta(text="t", token_ids=[1])])
    yield from _silent(request, context)


@pytest.mark.parametrize("answer", [_silent, _begun])
async def test_an_async_client_that_is_closed_meanwhile_waits_for_no_scheduler(
    server: FakeServer, answer: Answer
) -> None:
    told: list[Waiting] = []
    came = asyncio.Event()

    async def ask() -> None:
        async for _ in client.generate("hello"):
            came.set()

    server.inference.answer = answer
    client = AsyncClient(server.address, retry=RetryPolicy(on_wait=told.append))
    asked = asyncio.create_task(ask())
    while not (came.is_set() if answer is _begun else server.inference.requests):
        await asyncio.sleep(0.01)
    await client.close()
    with pytest.raises(RequestFailed):
        await asyncio.wait_for(asked, 20)
    assert not told


async def test_who_asks_a_client_that_is_closed_can_be_cancelled(server: FakeServer) -> None:
    server.inference.answer = _silent
    client = AsyncClient(server.address)
    asked = asyncio.create_task(client.complete("hello"))
    while not server.inference.requests:
        await asyncio.sleep(0.01)
    asked.cancel()
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asked, 20)


def test_a_client_that_is_closed_while_it_waits_says_what_it_has_waited_for(server: FakeServer) -> None:
    server.inference.refusal = (LOST, "gone", ())
    client = Client(server.address, retry=RetryPolicy(on_wait=lambda _: client.close()))
    with pytest.raises(RequestFailed, match="gone"):
        list(client.generate("hello"))
    assert len(server.inference.requests) == 1


async def test_an_async_client_that_is_closed_while_it_waits_says_so_too(server: FakeServer) -> None:
    closing: list[asyncio.Task[None]] = []
    server.inference.refusal = (LOST, "gone", ())
    policy = RetryPolicy(on_wait=lambda _: closing.append(asyncio.create_task(client.close())))
    client = AsyncClient(server.address, retry=policy)
    with pytest.raises(RequestFailed, match="gone"):
        await client.complete("hello")
    await closing[0]
    assert len(server.inference.requests) == 1


@pytest.mark.parametrize("shares", [False, True])
def test_an_async_client_may_be_made_before_its_loop_and_used_in_the_next_one(server: FakeServer, shares: bool) -> None:
    client = AsyncClient(server.address, retry=QUICK, share_calls=shares)

    async def ask() -> list[int]:
        params = SamplingParams(max_tokens=2, seed=7)
        return tokens_of([output async for output in client.generate("a", params)])

    for _ in range(2):
        assert asyncio.run(ask()) == expected_tokens(7, 0, 2)
        assert asyncio.run(client.is_ready())

    async def use_in_two() -> None:
        assert await client.is_ready()
        with pytest.raises(RuntimeError, match="for one event loop"):
            await asyncio.to_thread(asyncio.run, client.is_ready())
        await client.close()

    asyncio.run(use_in_two())
    asyncio.run(AsyncClient(server.address).close())


async def test_a_client_that_was_closed_says_so(server: FakeServer) -> None:
    client, other = Client(server.address), AsyncClient(server.address)
    client.close()
    await other.close()
    for ask in (client.complete, client.tokenize, client.abort):
        with pytest.raises(RequestFailed, match="CANCELLED: the client was closed"):
            ask("hello")
    for ask_other in (other.complete, other.tokenize, other.abort):
        with pytest.raises(RequestFailed, match="CANCELLED: the client was closed"):
            await ask_other("hello")


async def test_a_time_without_end_is_no_deadline(server: FakeServer) -> None:
    params = SamplingParams(max_tokens=2, seed=1)
    with Client(server.address) as client:
        assert client.complete("hello", params, timeout=math.inf).finished
        client.load_adapter("a", "/a", timeout=math.inf)
    async with AsyncClient(server.address) as other:
        assert (await other.complete("hello", params, timeout=math.inf)).finished
        await other.load_adapter("b", "/b", timeout=math.inf)
    assert set(server.control.adapters) == {"a", "b"}


@pytest.mark.parametrize("timeout", [9e9, 1e15, 2**63 - 1, math.nan], ids=str)
async def test_a_time_that_no_clock_counts_to_is_no_deadline(server: FakeServer, timeout: float) -> None:
    params = SamplingParams(max_tokens=1)
    with Client(server.address, retry=QUICK) as client:
        if math.isnan(timeout):
            for call in (
                lambda: list(client.generate("a", timeout=timeout)),
                lambda: client.load_adapter("a", "/a", timeout),
            ):
                with pytest.raises(ValueError, match="timeout is nan"):
                    call()
        else:
            assert client.complete("hello", params, timeout=timeout).finished
            client.load_adapter("a", "/a", timeout=timeout)


def test_what_is_meant_for_all_schedulers_reaches_all() -> None:
    with FakeServer() as first, FakeServer() as second, Client([first.address, second.address]) as client:
        client.flush_prefix_cache()
        assert (first.control.num_flushes, second.control.num_flushes) == (1, 1)
        first.stop()
        client.flush_prefix_cache()
        assert second.control.num_flushes == 2 and client.abort("known")


def test_a_refusal_is_not_taken_to_the_next_address() -> None:
    with FakeServer() as first, FakeServer() as second, Client([first.address, second.address]) as client:
        first.inference.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "no", ())
        with pytest.raises(RequestFailed, match="INVALID_ARGUMENT"):
            list(client.generate("hello"))
        assert not second.inference.requests
