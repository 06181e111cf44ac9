"""Clients that open streams and do not read them: they cost bounded memory, hold no sequence, and slow nobody down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import grpc
import pytest

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.chaos.leftovers import wait_until_nothing_is_left
from tests.chaos.memory import MIB, Process
from tests.fakes import FakeWorker, say_forever
from tests.integration.scheduler_process import Service, scheduler

NUM_TOKENS = 1500
TEXT = "one two three four "
NUM_LOGPROBS = 20
MOST_BYTES_A_TOKEN = 8192  # that waits with its 20 alternatives
PLAIN_CLIENTS_TAKE_BYTES = 4 * MIB  # of a message, where nobody has raised gRPC's own limit
IDLE_WITHIN_S = 240.0
STALL_S = 20.0  # a plain request takes a fraction of a second; one that waited for the readers would wait for ever
MAX_NUM_SEQS = 8
SMALL_WINDOW = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65_536),
)  # the client takes in no more unread


@pytest.fixture
def service() -> Iterator[Service]:
    with FakeWorker(
        say_forever(TEXT), max_model_len=2048, num_blocks=2048, block_size=16, max_num_seqs=MAX_NUM_SEQS
    ) as worker:
        with scheduler(f"--worker={worker.address}", "--log-level=warning") as service:
            service.wait_until_ready()
            yield service


@pytest.mark.parametrize("num_readers", [4, pytest.param(16, marks=pytest.mark.chaos)])
async def test_those_that_do_not_read_harm_nobody(
    service: Service, capfd: pytest.CaptureFixture[str], num_readers: int
) -> None:
    process = Process(service.process.pid)
    async with (
        grpc.aio.insecure_channel(service.address) as channel,
        grpc.aio.insecure_channel(service.address, options=SMALL_WINDOW) as slow_channel,
    ):
        stub, control = inference_pb2_grpc.InferenceStub(channel), inference_pb2_grpc.ControlStub(channel)
        before = await _seconds_of_a_plain_request(stub)
        resident_before = process.resident_bytes
        slow_stub = inference_pb2_grpc.InferenceStub(slow_channel)
        unread = [slow_stub.Generate(_request(number)) for number in range(num_readers)]
        beside = await _seconds_of_a_plain_request(stub)
        await _wait_until_idle(control)
        after = await _seconds_of_a_plain_request(stub)
        grown = process.resident_bytes - resident_before
        print(
            f"{num_readers} unread streams of {NUM_TOKENS} tokens: {grown / MIB:.1f} MiB, "
            f"{grown / num_readers / NUM_TOKENS:.0f} bytes a token; a plain request takes {before * 1e3:.0f} ms "
            f"without them, {beside * 1e3:.0f} ms while they run, {after * 1e3:.0f} ms while they wait to be read"
        )
        assert after < STALL_S, "who is not read holds up the others"
        # With more readers than slots it stands behind them in the queue, as it would behind any.
        assert beside < STALL_S or num_readers >= MAX_NUM_SEQS, "who is not read holds up the others"
        assert grown < num_readers * NUM_TOKENS * MOST_BYTES_A_TOKEN
        assert not any(call.done() for call in unread)
        for call in unread[::2]:
            call.cancel()
        for number, call in list(enumerate(unread))[1::2]:
            await _check_all_of_it(number, call)
    wait_until_nothing_is_left(service.address)
    said = capfd.readouterr()
    assert '"level": "error"' not in said.err, f"that a client leaves is no fault: {said.err}"
    print(said.out)


def _request(number: int) -> pb.GenerateRequest:
    params = pb.SamplingParams(max_tokens=NUM_TOKENS, logprobs=NUM_LOGPROBS, temperature=0)
    return pb.GenerateRequest(prompt=f"{number}|", sampling_params=params)


async def _seconds_of_a_plain_request(stub: inference_pb2_grpc.InferenceStub) -> float:
    started_s = time.monotonic()
    text = ""
    params = pb.SamplingParams(max_tokens=100, temperature=0)
    async for response in stub.Generate(pb.GenerateRequest(prompt="say|", sampling_params=params), timeout=60):
        text += "".join(delta.text for delta in response.outputs)
    assert text == (TEXT * 100)[:100]
    return time.monotonic() - started_s


async def _wait_until_idle(control: inference_pb2_grpc.ControlStub) -> None:
    """The streams' sequences have ended, and their blocks are free, though nobody has read a word."""
    deadline = time.monotonic() + IDLE_WITHIN_S
    while True:
        load = await control.GetLoad(pb.GetLoadRequest())
        (worker,) = load.workers
        is_free = worker.num_free_device_blocks == worker.num_device_blocks
        if is_free and not load.num_requests_running and not load.num_requests_waiting:
            return
        assert time.monotonic() < deadline, f"it does not become idle: {load}"
        await asyncio.sleep(0.05)


async def _check_all_of_it(number: int, call: grpc.aio.UnaryStreamCall) -> None:
    """Read late, a stream says the same, in fewer messages than it has tokens, and none too large."""
    text, num_tokens, num_logprobs, sizes, reasons = "", 0, 0, [], []
    async for response in call:
        sizes.append(response.ByteSize())
        for delta in response.outputs:
            text += delta.text
            num_tokens += len(delta.token_ids)
            num_logprobs += sum(len(each.top) == NUM_LOGPROBS for each in delta.logprobs)
            reasons += [delta.finish_reason] if delta.finish_reason else []
    assert text == (TEXT * NUM_TOKENS)[:NUM_TOKENS], f"stream {number}"
    assert num_tokens == num_logprobs == NUM_TOKENS
    assert reasons == [pb.FINISH_REASON_LENGTH]
    assert len(sizes) < NUM_TOKENS // 2, "its messages were meant to wait and become one"
    assert max(sizes) < PLAIN_CLIENTS_TAKE_BYTES
