"""What is done to a server, drawn case by case: the same seed and number give the same case.

A case is a coroutine that does something to the targets and raises AssertionError where the answer itself is wrong.
Whatever it did to others (answers, blocks, memory, silence, the log) is looked at around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from protos import inference_pb2 as pb
from protos import worker_pb2
from tests.fuzz import http2_frames as h2
from tests.fuzz.wire_bytes import blown_up, entry, log_uniform, mangled, random_fields

LARGEST = 16 * 2**20
PATIENCE_S = 2.0  # for what was admitted; then the client leaves
ANSWER_S = 30.0  # for a refusal, under load
GENERATE = "/octavo.v1.Inference/Generate"
EXECUTE = "/octavo.v1.Worker/Execute"
FAULTS = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]

_CONTROL = pb.DESCRIPTOR.services_by_name["Control"]
_INFERENCE = pb.DESCRIPTOR.services_by_name["Inference"]
_WORKER = worker_pb2.DESCRIPTOR.services_by_name["Worker"]
_OTHERS = [
    ("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest.DESCRIPTOR),
    ("/grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest.DESCRIPTOR),
    ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", reflection_pb2.ServerReflectionRequest.DESCRIPTOR),
    (
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.DESCRIPTOR,
    ),
    ("/grpc.channelz.v1.Channelz/GetServers", channelz_pb2.GetServersRequest.DESCRIPTOR),
    ("/grpc.channelz.v1.Channelz/GetTopChannels", channelz_pb2.GetTopChannelsRequest.DESCRIPTOR),
]
# Drain and FlushPrefixCache would end or change the service to everybody, which is what they are for.
SCHEDULER_METHODS: list[tuple[str, Descriptor]] = [
    (f"/{service.full_name}/{method.name}", method.input_type)
    for service in (_INFERENCE, _CONTROL)
    for method in service.methods
    if method.name not in ("Drain", "FlushPrefixCache")
] + _OTHERS
WORKER_METHODS: list[tuple[str, Descriptor]] = [
    (f"/{_WORKER.full_name}/{method.name}", method.input_type) for method in _WORKER.methods
] + _OTHERS


@dataclass
class Targets:
    """Addresses. `free_worker` serves no scheduler: whoever comes may have its lease."""

    scheduler: str
    worker: str
    free_worker: str
    metrics: str
    statuses: Counter[str] = field(default_factory=Counter)
    broken_off: Counter[str] = field(default_factory=Counter)  # by address: calls whose connection ended as they began
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    def channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return self._channels[address]

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def send(self, address: str, method: str, data: bytes, **options: object) -> list[bytes]:
        """A call with these very bytes; what came back before it ended or patience did."""
        call = self.channel(address).unary_stream(method)(data, timeout=ANSWER_S, **options)
        answers: list[bytes] = []

        async def read() -> None:
            while (answer := await call.read()) is not grpc.aio.EOF:
                answers.append(answer)

        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            await asyncio.wait_for(read(), PATIENCE_S)
        if not call.done() and not answers and "WatchSteps" not in method and "Execute" not in method:
            with contextlib.suppress(grpc.aio.AioRpcError):  # what waits for nothing but a refusal
                answers.append(await call.read())
        call.cancel()
        self._took(await call.code(), await call.details() or "")
        return answers

    def _took(self, status: grpc.StatusCode, details: str) -> None:
        self.statuses[status.name] += 1
        assert status not in FAULTS, f"{status.name}: {details}"
        assert "Traceback" not in details and "<class" not in details, details


Case = Callable[[Targets, random.Random], Awaitable[None]]


async def extreme_fields(targets: Targets, chance: random.Random) -> None:
    """A good request with up to eight fields set to their extremes."""
    extra = random_fields(pb.GenerateRequest.DESCRIPTOR, chance) + entry(
        pb.GenerateRequest.DESCRIPTOR.fields_by_name["sampling_params"].number,
        random_fields(pb.SamplingParams.DESCRIPTOR, chance, 6),
    )
    await targets.send(targets.scheduler, GENERATE, _good(chance) + extra)


async def one_field_blown_up(targets: Targets, chance: random.Random) -> None:
    """Of a few bytes to more than any server takes; the rest of the request is good."""
    size = log_uniform(chance, 1000, LARGEST)
    if chance.random() < 0.5:
        params = blown_up(pb.SamplingParams.DESCRIPTOR, chance, size)
        number = pb.GenerateRequest.DESCRIPTOR.fields_by_name["sampling_params"].number
        data = _good(chance) + entry(number, params)
    else:
        data = _good(chance) + blown_up(pb.GenerateRequest.DESCRIPTOR, chance, size)
    await targets.send(targets.scheduler, GENERATE, data)


async def mangled_bytes(targets: Targets, chance: random.Random) -> None:
    data = _good(chance) + random_fields(pb.GenerateRequest.DESCRIPTOR, chance)
    await targets.send(targets.scheduler, GENERATE, mangled(data, chance))


async def any_method(targets: Targets, chance: random.Random) -> None:
    """Noise, extremes or too much of something, to any method of scheduler or worker."""
    address, methods = chance.choice([(targets.scheduler, SCHEDULER_METHODS), (targets.worker, WORKER_METHODS)])
    method, kind = chance.choice(methods)
    match chance.randrange(4):
        case 0:
            data = chance.randbytes(chance.randint(0, 64))
        case 1:
            data = blown_up(kind, chance, log_uniform(chance, 1000, LARGEST))
        case 2:
            data = mangled(random_fields(kind, chance), chance)
        case _:
            data = random_fields(kind, chance)
    await targets.send(address, method, data)


async def given_up(targets: Targets, chance: random.Random) -> None:
    """A good request whose client leaves, aborts, or comes again with its id."""
    request = pb.GenerateRequest.FromString(_good(chance))
    request.request_id = f"given-up-{chance.getrandbits(48)}"
    request.sampling_params.max_tokens = chance.randint(1, 200)
    channel = targets.channel(targets.scheduler)
    call = channel.unary_stream(GENERATE)(request.SerializeToString(), timeout=chance.choice([0.002, 0.05, 5]))
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        for _ in range(chance.randint(0, 6)):
            await call.read()
        match chance.randrange(3):
            case 0:
                data = pb.AbortRequest(request_id=request.request_id).SerializeToString()
                await targets.send(targets.scheduler, "/octavo.v1.Inference/Abort", data)
            case 1:
                request.attempt = 1
                await targets.send(targets.scheduler, GENERATE, request.SerializeToString())
            case _:
                pass
    call.cancel()


async def compressed(targets: Targets, chance: random.Random) -> None:
    """Few bytes on the wire, many behind them."""
    data = _good(chance) + blown_up(pb.GenerateRequest.DESCRIPTOR, chance, log_uniform(chance, 1000, 64 * 2**20))
    algorithm = chance.choice([grpc.Compression.Gzip, grpc.Compression.Deflate])
    address, method = chance.choice([(targets.scheduler, GENERATE), (targets.worker, EXECUTE)])
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS, compression=algorithm) as channel:
        call = channel.unary_stream(method)(data, timeout=ANSWER_S)
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            await asyncio.wait_for(call.read(), PATIENCE_S)
        call.cancel()


async def broken_http(targets: Targets, chance: random.Random) -> None:
    """Connections that say nothing, or nonsense; calls without an end; calls reset at once."""
    address = chance.choice([targets.scheduler, targets.worker])
    targets.broken_off[address] += await asyncio.to_thread(_break_http, address, chance)


def _break_http(address: str, chance: random.Random) -> int:
    """How many calls were begun at most."""
    count = 0
    with contextlib.suppress(OSError):
        with h2.connection(address) as socket:
            count = log_uniform(chance, 1, 2000)
            match chance.randrange(5):
                case 0:
                    socket.sendall(b"".join(h2.random_frame(chance) for _ in range(min(count, 50))))
                case 1:
                    for number in range(count):
                        socket.sendall(h2.call(2 * number + 1, GENERATE))
                case 2:
                    for number in range(count):
                        socket.sendall(h2.call(2 * number + 1, GENERATE) + h2.reset(2 * number + 1))
                case 3:
                    for number in range(min(count, 200)):
                        stream = 2 * number + 1
                        socket.sendall(h2.call(stream, GENERATE) + h2.begun_message(stream, chance.getrandbits(32)))
                case _:
                    socket.sendall(chance.randbytes(100))
            socket.settimeout(0.05)
            socket.recv(1)
    return count


async def half_open_metrics(targets: Targets, chance: random.Random) -> None:
    def ask() -> None:
        with contextlib.suppress(OSError):
            with h2.plain_connection(targets.metrics) as socket:
                socket.sendall(chance.choice([b"GET /met", b"GET /metrics HTTP/1.1\r\n", b"", chance.randbytes(500)]))
                socket.settimeout(0.02)
                socket.recv(1)

    await asyncio.to_thread(ask)


async def rogue_scheduler(targets: Targets, chance: random.Random) -> None:
    """The lease of a worker that is free, and steps that contradict all that it knows."""
    channel = targets.channel(targets.free_worker)
    sizes = await targets.send(targets.free_worker, "/octavo.v1.Worker/Initialize", b"")
    if not sizes:
        return  # others are there already
    settings_id = worker_pb2.InitializeResponse.FromString(sizes[0]).settings_id
    call = channel.stream_stream(EXECUTE)(timeout=ANSWER_S)
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
        if chance.random() < 0.2:
            await asyncio.wait_for(call.read(), 0.05)  # says nothing at all
            return
        opening = worker_pb2.StepRequest(open=worker_pb2.OpenLease(settings_id=settings_id))
        await call.write(opening.SerializeToString())
        granted = worker_pb2.StepResponse.FromString(await asyncio.wait_for(call.read(), PATIENCE_S))
        for number in range(1, chance.randint(2, 6)):
            step = _step(number, chance)
            head = worker_pb2.StepRequest(epoch=granted.epoch).SerializeToString()
            await call.write(head + entry(worker_pb2.StepRequest.DESCRIPTOR.fields_by_name["step"].number, step))
            await asyncio.wait_for(call.read(), 0.2)
    call.cancel()


def _step(number: int, chance: random.Random) -> bytes:
    """The first step that any scheduler might send, good or with something about it wrong."""
    token_ids = [chance.randrange(1031) for _ in range(chance.randint(1, 40))]
    params = pb.SamplingParams(seed=chance.getrandbits(64))
    with contextlib.suppress(DecodeError):
        params.MergeFromString(random_fields(pb.SamplingParams.DESCRIPTOR, chance, 3))
    slot = chance.choice([0, 0, 1, 31, 32, 70_000])
    step = worker_pb2.Step(step_id=number)
    group = step.groups.add(request_id="rogue", num_prompt_tokens=len(token_ids), sampling_params=params)
    group.sequences.add(slot=slot, token_ids=token_ids, block_table=range(chance.choice([0, 1, 3])))
    step.rows.slots_u16 = struct.pack("<H", slot % 2**16)
    step.rows.query_lens_u32 = struct.pack("<I", chance.choice([len(token_ids), 1, 0, 2**31]))
    step.rows.num_samples_u16 = struct.pack("<H", chance.choice([1, 0, 7, 65535]))
    data = step.SerializeToString()
    match chance.randrange(6):
        case 0:
            return data + random_fields(worker_pb2.Step.DESCRIPTOR, chance, 3)
        case 1:
            return mangled(data, chance)
        case 2:
            size = log_uniform(chance, 1000, LARGEST)
            return data + blown_up(worker_pb2.Step.DESCRIPTOR, chance, size)
        case _:
            return data


def _good(chance: random.Random) -> bytes:
    params = pb.SamplingParams(max_tokens=chance.choice([1, 4, 16]), seed=chance.getrandbits(32))
    if chance.random() < 0.2:
        params = pb.SamplingParams(max_tokens=16, use_beam_search=True, best_of=3, temperature=0)
    request = pb.GenerateRequest(prompt=chance.choice(["say|", "The sea is", "x" * 300]), sampling_params=params)
    if chance.random() < 0.1:
        request.messages.messages.add(role="user", content="hello")
    return request.SerializeToString()


# How often each comes, of the sum.
CASES: dict[Case, int] = {
    extreme_fields: 30,
    one_field_blown_up: 10,
    mangled_bytes: 15,
    any_method: 20,
    given_up: 10,
    compressed: 2,
    broken_http: 4,
    half_open_metrics: 2,
    rogue_scheduler: 5,
}


def drawn(seed: int, number: int) -> tuple[Case, random.Random]:
    """The case of that number, and what it draws from."""
    chance = random.Random(f"{seed}:{number}")
    return chance.choices(list(CASES), list(CASES.values()))[0], chance
