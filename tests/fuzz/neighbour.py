"""The client who does nothing wrong: `python -m tests.fuzz.neighbour ADDRESS`.

A process of its own, so that nothing but the server and the machine can hold it up. It streams the same few requests
again and again, compares every answer with the first one, and says at the end (of its standard input) how it fared, as
one line of JSON. What the machine itself took from it is seen by a clock on its own event loop and not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import asdict, dataclass, field

import grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc

TICK_S = 0.02
CALL_S = 120.0
BUSY = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
_TURNS = [pb.ChatMessage(role="user", content="What is a tide?"), pb.ChatMessage(role="assistant", content="Water")]


def requests() -> list[pb.GenerateRequest]:
    """Greedy, drawn, with a stop string, of two outputs, of a conversation."""
    params = pb.SamplingParams
    chat = pb.Messages(messages=_TURNS, continue_final_message=True)
    return [
        pb.GenerateRequest(prompt="The sea is", sampling_params=params(temperature=0, max_tokens=60, ignore_eos=True)),
        pb.GenerateRequest(prompt="Once upon a time", sampling_params=params(seed=7, max_tokens=60, top_p=0.9)),
        pb.GenerateRequest(
            prompt="A list: " * 40, sampling_params=params(seed=3, n=2, max_tokens=40, stop=["e", "qu"])
        ),
        pb.GenerateRequest(messages=chat, sampling_params=params(temperature=0, max_tokens=40)),
        pb.GenerateRequest(
            prompt="beams", sampling_params=params(temperature=0, use_beam_search=True, best_of=3, max_tokens=20)
        ),
    ]


@dataclass
class Fared:
    """Times in seconds; `longest_gap` between two messages of one stream, less what the machine took."""

    num_answers: int = 0
    num_refused: int = 0
    longest_gap: float = 0.0
    longest_gap_at: float = 0.0  # Unix time of its end
    longest_wait: float = 0.0  # for the first message
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Neighbour:
    def __init__(self, address: str) -> None:
        self.fared = Fared()
        self._address = address
        self._expected: dict[int, list[tuple[int, list[int], str, int]]] = {}
        self._gaps: list[tuple[float, float]] = []  # (begin, end)
        self._late: list[tuple[float, float]] = []  # (when, by how much) the clock was late
        self._is_over = False

    async def run(self) -> None:
        clock = asyncio.create_task(self._tick())
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for number, request in enumerate(requests()):  # undisturbed
                self._expected[number] = await self._stream(stub, request)
            print("ready", flush=True)
            over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
            over.add_done_callback(lambda _: self.end())
            await asyncio.gather(*(self._client(stub, start) for start in (0, 3)))
        clock.cancel()
        self._find_longest_gap()
        print(json.dumps(asdict(self.fared)), flush=True)

    def end(self) -> None:
        self._is_over = True

    async def _client(self, stub: inference_pb2_grpc.InferenceStub, number: int) -> None:
        kinds = requests()
        while not self._is_over:
            number = (number + 1) % len(kinds)
            try:
                got = await self._stream(stub, kinds[number])
            except grpc.aio.AioRpcError as error:
                if error.code() in BUSY:
                    self.fared.num_refused += 1
                    await asyncio.sleep(0.1)
                else:
                    self.fared.errors.append(f"{error.code().name}: {error.details()}")
                    await asyncio.sleep(0.5)
                continue
            self.fared.num_answers += 1
            if got != self._expected[number]:
                self.fared.wrong.append(f"request {number}: {got} in place of {self._expected[number]}"[:2000])

    async def _stream(
        self, stub: inference_pb2_grpc.InferenceStub, request: pb.GenerateRequest
    ) -> list[tuple[int, list[int], str, int]]:
        outputs: dict[int, tuple[list[int], list[str], list[int]]] = {}
        sent, last = time.monotonic(), 0.0
        call = stub.Generate(request, timeout=CALL_S)
        while (message := await call.read()) is not grpc.aio.EOF:
            now = time.monotonic()
            if message.outputs:
                if last:
                    self._gaps.append((last, now))
                else:
                    self.fared.longest_wait = max(self.fared.longest_wait, now - sent)
                last = now
            for delta in message.outputs:
                ids, text, reasons = outputs.setdefault(delta.index, ([], [], []))
                ids += delta.token_ids
                text.append(delta.text)
                reasons += [delta.finish_reason] if delta.finish_reason else []
        return [(index, ids, "".join(text), sum(reasons)) for index, (ids, text, reasons) in sorted(outputs.items())]

    def _find_longest_gap(self) -> None:
        """At the end, when the clock has told of everything that the machine took."""
        for begin, end in self._gaps:
            taken = sum(late for when, late in self._late if begin < when <= end + 2 * TICK_S)
            if (gap := end - begin - taken) > self.fared.longest_gap:
                self.fared.longest_gap, self.fared.longest_gap_at = gap, time.time() - time.monotonic() + end

    async def _tick(self) -> None:
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            if (late := time.monotonic() - due) > TICK_S:
                self._late.append((time.monotonic(), late))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Neighbour(sys.argv[1]).run())
