"""32 requests at once, of every kind, and what comes back of each: the answer that no fault may change."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field

import grpc

from octavo import SamplingParams
from octavo.shared.rpc import CHANNEL_OPTIONS
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.chaos.step_tracker import Drawn

SYSTEM = list(b"You are a lighthouse keeper who answers in as few words as the weather allows. ")
NUM_REQUESTS = 32
LIMIT_S = 90.0


@dataclass
class Output:
    """One index of a request, put together from its deltas."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: int = pb.FINISH_REASON_UNSPECIFIED
    error: str = ""


@dataclass
class Received:
    """A request's stream.

    Attributes:
        token_times_s: of the messages that brought tokens, by `time.monotonic`.
        borders: tokens and characters of output 0 that had come after each message.
    """

    outputs: dict[int, Output] = field(default_factory=dict)
    token_times_s: list[float] = field(default_factory=list)
    borders: list[tuple[int, int]] = field(default_factory=list)
    times_moved: int = 0

    @property
    def content(self) -> list[tuple[int, list[int], str, int]]:
        """What has to be equal, whatever happens."""
        outputs = sorted(self.outputs.items())
        return [(index, output.token_ids, output.text, output.finish_reason) for index, output in outputs]


@dataclass
class Work:
    """Requests, what they answer when nothing happens, and tokens that bring a part of a stop string."""

    requests: list[pb.GenerateRequest]
    undisturbed: dict[str, Received]
    half_held: list[Drawn]


async def make_work(address: str, seed: int) -> Work:
    """Runs the requests twice: stop strings are cut out of what the first run gave."""
    requests = make_requests(seed)
    first = await run_requests(address, requests)
    half_held = [
        drawn
        for request in requests[4::8]
        if (drawn := _stop_in_the_middle(request, first[request.request_id])) is not None
    ]
    assert half_held, "no answer has a stop string in it"
    return Work(requests, await run_requests(address, requests), half_held)


def _stop_in_the_middle(request: pb.GenerateRequest, received: Received) -> Drawn | None:
    """Gives the request a stop string that begins some way into its answer and takes several tokens; one of those."""
    borders, text = received.borders, received.outputs[0].text
    for (first_tokens, first), (last_tokens, last) in itertools.combinations(borders[len(borders) // 3 :], 2):
        stop = text[first:last]
        if 3 <= last_tokens - first_tokens <= 6 and len(stop) >= 3 and text.find(stop) == first:
            request.sampling_params.stop.append(stop)
            return Drawn(request.request_id, 0, (first_tokens + last_tokens) // 2 - 1)
    return None


def make_requests(seed: int) -> list[pb.GenerateRequest]:
    """Greedy and seeded, `n`, best_of, beams; half of the prompts share a beginning, some are longer than a step."""
    numbers = random.Random(seed)
    requests = []
    for number in range(NUM_REQUESTS):
        own = [numbers.randrange(33, 126) for _ in range(numbers.randrange(4, 40))]
        prompt = SYSTEM + own if number % 2 else own * (5 if number % 8 == 0 else 1)
        max_tokens = numbers.randrange(16, 44)
        match number % 8:
            case 0 | 1 | 4:
                params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            case 2 | 5:
                params = SamplingParams(temperature=0.9, top_p=0.95, seed=number, max_tokens=max_tokens)
            case 3:
                params = SamplingParams(temperature=1, n=3, seed=number, max_tokens=max_tokens)
            case 6:
                params = SamplingParams(temperature=1, n=2, best_of=3, seed=number, max_tokens=max_tokens)
            case _:
                params = SamplingParams(temperature=0, use_beam_search=True, n=2, best_of=3, max_tokens=max_tokens // 2)
        request_id = f"{seed}-{number}"
        request = pb.GenerateRequest(request_id=request_id, prompt_token_ids=pb.TokenIds(ids=prompt))
        request.sampling_params.CopyFrom(params.to_proto())
        requests.append(request)
    return requests


async def run_requests(address: str, requests: list[pb.GenerateRequest]) -> dict[str, Received]:
    """All at once, by request id. Raises AssertionError where a stream is not as API.md has it."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        received = await asyncio.gather(*(_receive(stub, request) for request in requests))
    return {request.request_id: one for request, one in zip(requests, received, strict=True)}


async def _receive(stub: inference_pb2_grpc.InferenceStub, request: pb.GenerateRequest) -> Received:
    received, name, is_over = Received(), request.request_id, False
    call = stub.Generate(request, timeout=LIMIT_S)
    admission = await call.read()
    assert admission.HasField("admission") and admission.request_id == name
    while (response := await call.read()) is not grpc.aio.EOF:
        assert not is_over, f"{name}: a message after the last"
        if any(delta.token_ids for delta in response.outputs):
            received.token_times_s.append(time.monotonic())
        for delta in response.outputs:
            _take(received.outputs.setdefault(delta.index, Output()), delta, f"{name}, output {delta.index}")
        if 0 in received.outputs:
            received.borders.append((len(received.outputs[0].token_ids), len(received.outputs[0].text)))
        if response.HasField("usage"):
            is_over, received.times_moved = True, response.timings.times_moved
    assert is_over, f"{name}: the stream ended without its last message"
    num_outputs = request.sampling_params.n or 1
    assert sorted(received.outputs) == list(range(num_outputs)), f"{name}: outputs {sorted(received.outputs)}"
    assert all(output.finish_reason for output in received.outputs.values()), f"{name}: an output did not end"
    return received


def _take(output: Output, delta: pb.OutputDelta, name: str) -> None:
    assert not output.finish_reason, f"{name}: more of it after its end"
    output.token_ids += delta.token_ids
    output.text += delta.text
    output.finish_reason, output.error = delta.finish_reason, delta.error.message


def assert_same(got: dict[str, Received], undisturbed: dict[str, Received]) -> None:
    assert got.keys() == undisturbed.keys()
    for request_id, received in got.items():
        errors = [output.error for output in received.outputs.values() if output.error]
        assert not errors, f"{request_id}: {errors}"
        assert received.content == undisturbed[request_id].content, f"{request_id} differs from the undisturbed run"
