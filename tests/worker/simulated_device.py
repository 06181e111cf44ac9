"""A GPU's streams, simulated: what is enqueued is done later, in any order that streams and events allow.

Each operation says which blocks it reads and writes, so that a test can ask which others it comes after.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from kernels.gpu.cache import swap_blocks
from kernels.oracles import reference
from worker_svc.cache import cuda_moves

Work = Callable[[], None]


@dataclass(eq=False, repr=False)
class Operation:
    """Something a stream does. `after` are the operations that streams and events put before it, `over` those that were
    over when it was enqueued."""

    name: str
    reads: frozenset[int] = frozenset()  # addresses of blocks
    writes: frozenset[int] = frozenset()
    after: set[Operation] = field(default_factory=set)
    over: frozenset[Operation] = frozenset()
    stream: Stream | None = None
    is_done: bool = False

    def __repr__(self) -> str:
        return self.name

    def conflicts(self, other: Operation) -> bool:
        """Whether it matters which of the two is first."""
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


@dataclass(eq=False, repr=False)
class Stream:
    """`before` are the operations that what is enqueued next comes after."""

    device: torch.device
    queue: list[tuple[Operation, Work | Event]] = field(default_factory=list)
    before: set[Operation] = field(default_factory=set)

    def wait_event(self, event: Event) -> None:
        assert event.marked is not None, "an event that nobody has recorded"
        self.before |= event.marked.after
        self.queue.append((Operation("wait"), event))

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


@dataclass(eq=False, repr=False)
class Event:
    marked: Operation | None = None

    def record(self, stream: Stream) -> None:
        self.marked = Operation("mark", after=set(stream.before))
        stream.queue.append((self.marked, lambda: None))

    def query(self) -> bool:
        assert self.marked is not None
        return self.marked.is_done


class SimulatedDevice:
    """Stands for CUDA while it is installed. `fails` is asked before an operation is enqueued whether that raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Callable[[], bool] = lambda: False) -> None:
        self.steps = Stream(torch.device("cpu"))
        self.streams, self.operations = [self.steps], list[Operation]()
        self._current, self._fails = [self.steps], fails
        monkeypatch.setattr(torch.cuda, "Stream", self._new_stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self._current[-1])
        monkeypatch.setattr(torch.cuda, "stream", self._use)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        block_major = swap_blocks.block_major
        monkeypatch.setattr(cuda_moves, "block_major", lambda *shape, pinned=False: block_major(*shape))
        monkeypatch.setattr(cuda_moves, "copy_blocks", self._copy_blocks)
        monkeypatch.setattr(swap_blocks, "copy_blocks", self._copy_blocks)
        monkeypatch.setattr(swap_blocks, "_transfer", self._transfer)

    def enqueue(self, name: str, work: Work, reads: Iterable[int] = (), writes: Iterable[int] = ()) -> Operation:
        """On the current stream."""
        if self._fails():
            raise torch.OutOfMemoryError(name)
        stream = self._current[-1]
        over = frozenset(other for other in self.operations if other.is_done)
        operation = Operation(name, frozenset(reads), frozenset(writes), set(stream.before), over, stream)
        stream.before.add(operation)
        stream.queue.append((operation, work))
        self.operations.append(operation)
        return operation

    def advance(self, chance: random.Random, most: int | None = None) -> None:
        """Does at most so many operations, of whichever streams can go on; None: all."""
        while most is None or most > 0:
            ready = [stream for stream in self.streams if stream.queue and _can_begin(stream)]
            if not ready:
                assert not any(stream.queue for stream in self.streams) or most is not None, (
                    "streams wait for each other"
                )
                return
            operation, work = chance.choice(ready).queue.pop(0)
            if not isinstance(work, Event):
                work()
            operation.is_done = True
            most = None if most is None else most - 1

    def unordered(self) -> Iterator[tuple[Operation, Operation]]:
        """Pairs of operations of which it matters, and is left open, which is first."""
        for number, later in enumerate(self.operations):
            for earlier in self.operations[:number]:
                if earlier not in later.after | later.over and earlier.conflicts(later):
                    yield earlier, later

    def _new_stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream(device))
        return self.streams[-1]

    @contextmanager
    def _use(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def _copy_blocks(self, source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
        reads, writes = addresses(source, pairs[:, 0].tolist()), addresses(destination, pairs[:, 1].tolist())
        self.enqueue("copy_blocks", lambda: reference.copy_blocks(source, destination, pairs), reads, writes)

    def _transfer(self, source: torch.Tensor, first: int, destination: torch.Tensor, place: int, count: int) -> None:
        def work() -> None:
            destination[:, :, place : place + count] = source[:, :, first : first + count]

        reads, writes = (
            addresses(source, range(first, first + count)),
            addresses(destination, range(place, place + count)),
        )
        self.enqueue("transfer", work, reads, writes)


def addresses(store: torch.Tensor, blocks: Sequence[int] | range) -> list[int]:
    """Of blocks of a store."""
    return [store[0, 0, block].data_ptr() for block in blocks]


def _can_begin(stream: Stream) -> bool:
    work = stream.queue[0][1]
    return not isinstance(work, Event) or work.query()
