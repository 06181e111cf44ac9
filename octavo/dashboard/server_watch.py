"""Reads a server's state over `Control`: queues, workers and requests when asked, steps as they come.

Speeds are what happened between two looks. A step's tokens come from `WatchSteps`, of which a slow reader misses some;
how many steps there were comes from the workers' own counts. So tokens a second are steps a second times the mean of
the steps that were seen.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_TIMEOUT_S = 5.0
_RETRY_S = 1.0  # until a stream of steps that broke off is asked for again
_COUNTED = ("num_prefill_tokens", "num_decode_tokens", "blocks_copied", "blocks_swapped_in", "blocks_swapped_out")


@dataclass(frozen=True)
class Speed:
    """What one worker does in a second."""

    steps: float = 0.0
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0
    blocks_copied: float = 0.0
    blocks_swapped_in: float = 0.0
    blocks_swapped_out: float = 0.0


@dataclass(frozen=True)
class View:
    """A server at one moment. `speeds`: by address, of the workers that were there at the look before, too."""

    info: pb.ServerInfo
    load: pb.Load
    requests: list[pb.RequestState]  # the oldest ones, as many as were asked for
    speeds: dict[str, Speed] = field(default_factory=dict)


class ServerWatch:
    """Watches one server until closed; a context manager.

    Only `look` raises, and only grpc.RpcError: where steps cannot be watched (an older server, too many watchers)
    tokens a second are missing and the rest is there.
    """

    def __init__(self, channel: grpc.Channel, num_requests: int, metadata: Sequence[tuple[str, str]] = ()) -> None:
        """`metadata` are sent with each call: a key, where one is wanted."""
        self._metadata = metadata
        self._control = inference_pb2_grpc.ControlStub(channel)
        self._num_requests = num_requests
        self._lock = threading.Lock()
        self._seen: dict[str, Counter[str]] = {}  # by worker, since the last look
        self._num_steps: dict[str, int] = {}  # by worker, at the last look
        self._looked_s = time.monotonic()
        self._closed = threading.Event()
        self._stream: Iterator[pb.StepSummary] | None = None
        self._reader = threading.Thread(target=self._read_steps, name="watch-steps", daemon=True)

    def __enter__(self) -> ServerWatch:
        self._reader.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        if self._stream is not None:
            self._stream.cancel()  # type: ignore[attr-defined]  # a grpc.Call, too
        self._reader.join(_TIMEOUT_S)

    def look(self) -> View:
        """The state now. Raises grpc.RpcError where no server answers within 5 s."""
        info = self._control.GetServerInfo(pb.GetServerInfoRequest(), timeout=_TIMEOUT_S, metadata=self._metadata)
        load = self._control.GetLoad(pb.GetLoadRequest(), timeout=_TIMEOUT_S, metadata=self._metadata)
        requests: list[pb.RequestState] = []
        if self._num_requests:
            page = pb.ListRequestsRequest(page_size=self._num_requests)
            found = self._control.ListRequests(page, timeout=_TIMEOUT_S, metadata=self._metadata)
            requests.extend(found.requests)
        return View(info, load, requests, self._speeds(load))

    def _speeds(self, load: pb.Load) -> dict[str, Speed]:
        now_s = time.monotonic()
        seconds, self._looked_s = now_s - self._looked_s, now_s
        with self._lock:
            seen, self._seen = self._seen, {}
        before, self._num_steps = self._num_steps, {worker.address: worker.num_steps for worker in load.workers}
        return {
            address: _speed(seen.get(address, Counter()), (num_steps - before[address]) / max(seconds, 1e-9))
            for address, num_steps in self._num_steps.items()
            if num_steps >= before.get(address, num_steps + 1)  # else it is new, or has begun again
        }

    def _read_steps(self) -> None:
        while not self._closed.is_set():
            try:
                self._stream = self._control.WatchSteps(pb.WatchStepsRequest(), metadata=self._metadata)
                for step in self._stream:
                    self._count(step)
            except grpc.RpcError:
                self._closed.wait(_RETRY_S)

    def _count(self, step: pb.StepSummary) -> None:
        with self._lock:
            counts = self._seen.setdefault(step.worker, Counter())
            counts["steps"] += 1
            for name in _COUNTED:
                counts[name] += getattr(step, name)


def _speed(seen: Counter[str], steps_per_s: float) -> Speed:
    per_step = steps_per_s / seen["steps"] if seen["steps"] else 0.0
    return Speed(
        steps=steps_per_s,
        prefill_tokens=seen["num_prefill_tokens"] * per_step,
        decode_tokens=seen["num_decode_tokens"] * per_step,
        blocks_copied=seen["blocks_copied"] * per_step,
        blocks_swapped_in=seen["blocks_swapped_in"] * per_step,
        blocks_swapped_out=seen["blocks_swapped_out"] * per_step,
    )
