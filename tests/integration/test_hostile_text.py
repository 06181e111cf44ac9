"""Requests made to be costly to read, render or tokenise: nobody else waits for them, and they hold little memory.

Health is answered by the very event loop and interpreter that a request could occupy, so its answers are what is timed:
within a second, where they took many before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.chaos.memory import MIB, Process
from tests.fakes import FakeWorker, spell
from tests.integration.scheduler_process import Service, scheduler
from tests.tiny_models import write_byte_tokenizer

MOST_SILENCE_S = 3.0  # with every core taken by others, too; on a quiet machine it is a tenth of that
MOST_GROWTH_BYTES = 256 * MIB  # what is admitted, what gRPC still has of those refused, and what the allocator keeps
REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
LIMIT = 1 << 20


def _field(number: int, body: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _filled(piece: bytes, *fields: int) -> bytes:
    """As many of a piece as a request may have, inside of these fields, the outermost first."""
    body = piece * ((LIMIT - 32) // len(piece))
    for number in reversed(fields):
        body = _field(number, body)
    return body


def _chat(content: str, count: int) -> bytes:
    messages = [pb.ChatMessage(role="user", content=content) for _ in range(count)]
    return pb.GenerateRequest(messages=pb.Messages(messages=messages)).SerializeToString()


GENERATE, TOKENIZE, DETOKENIZE = "Generate", "Tokenize", "Detokenize"
HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a scalar again and again": (GENERATE, lambda: _filled(b"\x58\x00")),
    "unknown fields": (GENERATE, lambda: _filled(b"\xf8\x06\x00")),
    "unknown fields of messages": (GENERATE, lambda: _filled(_field(1, b"\xf8\x06\x00"), 5)),
    "empty messages": (GENERATE, lambda: _filled(b"\x0a\x00", 5)),
    "messages of one letter": (GENERATE, lambda: _chat("a", 8192)),
    "control tokens": (GENERATE, lambda: _chat("<|im_end|>" * 30, 2700)),
    "beginnings of control tokens": (GENERATE, lambda: _chat("<" * 100, 8192)[: LIMIT - 9]),
    "empty outputs to resume": (GENERATE, lambda: _filled(b"\x72\x00")),
    "ids to stop at": (GENERATE, lambda: _filled(b"\x01", 8, 12)),
    "empty stop strings": (GENERATE, lambda: _filled(b"\x5a\x00", 8)),
    "biases": (GENERATE, lambda: _filled(b"\xaa\x01\x02\x08\x01", 8)),
    "ids of a prompt": (GENERATE, lambda: _filled(b"\x01", 4, 1)),
    "a long prompt": (GENERATE, lambda: pb.GenerateRequest(prompt="word " * 160_000).SerializeToString()),
    "a long text to tokenise": (TOKENIZE, lambda: pb.TokenizeRequest(prompt="word " * 160_000).SerializeToString()),
    "many ids to make text of": (DETOKENIZE, lambda: _filled(b"\x41", 2)),
    "many scalars to tokenise": (TOKENIZE, lambda: _filled(b"\x20\x00")),
}


@pytest.fixture(scope="module", params=["--frontends=1", pytest.param("--frontends=2", marks=pytest.mark.chaos)])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with FakeWorker(spell("fine"), max_model_len=8192, num_blocks=4096) as worker:
        flags = ["--log-level=warning", "--text-processes=2", request.param]
        with scheduler(f"--worker={worker.address}", *flags) as service:
            service.wait_until_ready()
            yield service


@pytest.mark.parametrize("num_requests", [3, pytest.param(128, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("name", HOSTILE)
async def test_nobody_waits_for_a_costly_request(service: Service, name: str, num_requests: int) -> None:
    """Of a mebibyte each, all at once."""
    method, make = HOSTILE[name]
    data = make()
    assert len(data) <= LIMIT
    process = Process(service.process.pid)
    before = process.resident_bytes
    peak = 0
    silences: list[float] = []
    async with (
        grpc.aio.insecure_channel(service.address) as channel,
        grpc.aio.insecure_channel(service.address, options=(("grpc.use_local_subchannel_pool", 1),)) as hostile,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        sending = asyncio.gather(*(_ends(hostile, method, data) for _ in range(num_requests)))
        while not sending.done():
            asked_s = time.monotonic()
            await health.Check(health_pb2.HealthCheckRequest(), timeout=20)
            silences.append(time.monotonic() - asked_s)
            peak = max(peak, process.resident_bytes)
            await asyncio.sleep(0.01)
        codes = set(await sending)
        plain = pb.GenerateRequest(prompt="say|", sampling_params=pb.SamplingParams(max_tokens=4))
        async for answer in inference_pb2_grpc.InferenceStub(channel).Generate(plain, timeout=20):
            assert not any(output.error.code for output in answer.outputs)
    grown = (peak - before) / MIB
    print(f"{codes}: longest silence {max(silences) * 1e3:.0f} ms of {len(silences)}, grown by {grown:.0f} MiB")
    assert codes <= {grpc.StatusCode.OK, *REFUSED}
    assert max(silences) < MOST_SILENCE_S
    assert peak - before < MOST_GROWTH_BYTES


async def _ends(channel: grpc.aio.Channel, method: str, data: bytes) -> grpc.StatusCode:
    call = channel.unary_stream(f"/octavo.v1.Inference/{method}")(data, timeout=60)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError:
        pass
    return await call.code()


# Does not end for a content that says so: some 10^10 turns.
ENDLESS = (
    "{% for m in messages %}{{ m.content }}{% if m.content == 'endless' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("frontends", ["--frontends=1", "--frontends=2"])
async def test_sigterm_ends_a_scheduler_at_once_whatever_is_rendered(tmp_path: Path, frontends: str) -> None:
    """Those whose text is not done are sent elsewhere, and no process stays behind: each as it is at a terminal."""
    write_byte_tokenizer(tmp_path, 400)
    (tmp_path / "chat_template.jinja").write_text(ENDLESS)
    flags = (f"--tokenizer={tmp_path}", "--text-timeout=300", frontends, "--log-level=warning", "--text-processes=2")
    with (
        FakeWorker(spell("fine")) as worker,
        scheduler(f"--worker={worker.address}", *flags, is_forked=False) as service,
    ):
        service.wait_until_ready()
        async with grpc.aio.insecure_channel(service.address) as channel:
            children = psutil.Process(service.process.pid).children(recursive=True)
            before_s = {each.pid: each.cpu_times().user for each in children}  # starting alone takes a second
            calls = [asyncio.create_task(_ends(channel, GENERATE, _chat("endless", 1))) for _ in range(6)]
            calls.append(asyncio.create_task(_ends(channel, TOKENIZE, _chat_to_tokenize("endless"))))
            async with asyncio.timeout(20):
                while not any(each.cpu_times().user - before_s.get(each.pid, 0.0) > 0.5 for each in children):
                    await asyncio.sleep(0.05)
                    children = psutil.Process(service.process.pid).children(recursive=True)
            assert not any(call.done() for call in calls)
            told_s = time.monotonic()
            service.process.terminate()
            assert set(await asyncio.gather(*calls)) == {grpc.StatusCode.UNAVAILABLE}
            await asyncio.to_thread(service.process.wait, 15)
            took_s = time.monotonic() - told_s
    assert took_s < 10, "it waited for what nobody wants any more"  # of --drain-timeout's 20 s
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 5)
    assert not alive


def _chat_to_tokenize(content: str) -> bytes:
    messages = pb.Messages(messages=[pb.ChatMessage(role="user", content=content)])
    return pb.TokenizeRequest(messages=messages).SerializeToString()
