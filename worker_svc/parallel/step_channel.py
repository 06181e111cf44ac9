"""How rank 0 passes on what it begins: through shared memory to ranks that it has started itself, through the process
group to others. Messages arrive whole and in order."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

_RING_BYTES = 1 << 28  # untouched pages take no memory; a step is at most 64 MiB
_HEADER_BYTES = mmap.PAGESIZE
_LENGTH = struct.Struct("<I")
_REUSED_BYTES = 1 << 20  # from here on the ring begins anew where it can: a page that was written to takes memory
_BEGIN_ANEW = (1 << 32) - 1  # in place of a length: the next message is where the ring begins
_FULL_PAUSE_S = 0.001


class StepChannel(Protocol):
    """From one rank, for steps rank 0, to all others that have it."""

    def send(self, message: bytes) -> None:
        """On that rank; waits while the others are far behind."""

    def receive(self) -> bytes:
        """On the others; waits for the next message."""


class SharedMemoryChannel:
    """A ring of bytes that one process writes and all others read.

        header   u64 written | u64 read by rank 1 | u64 read by rank 2 | ...      bytes, ever
        ring     ... u32 length, message, u32 length, message ...                 at those counts modulo its size

    A reader sleeps on an eventfd of its own. Processes get the descriptors by inheritance.
    """

    def __init__(self, memory: int, wakers: Sequence[int], rank: int) -> None:
        """
        Args:
            memory: descriptor of the ring.
            wakers: eventfds of ranks 1, 2, ...
            rank: of this process.
        """
        self._descriptors = [memory, *wakers]
        self._map, self._wakers, self._rank = mmap.mmap(memory, _HEADER_BYTES + _RING_BYTES), wakers, rank
        # Written whole, each in one instruction: `struct.pack_into` writes zeros first, and others look meanwhile.
        self._counts = memoryview(self._map)[:_HEADER_BYTES].cast("Q")

    @classmethod
    def create(cls, size: int) -> SharedMemoryChannel:
        """That of rank 0, for a group of `size`."""
        memory = os.memfd_create("octavo-steps", 0)
        os.truncate(memory, _HEADER_BYTES + _RING_BYTES)
        return cls(memory, [os.eventfd(0, 0) for _ in range(size - 1)], 0)

    @classmethod
    def inherited(cls, text: str, rank: int) -> SharedMemoryChannel:
        """That of another rank, from rank 0's `descriptors` as text."""
        memory, *wakers = map(int, text.split(","))
        return cls(memory, wakers, rank)

    @property
    def descriptors(self) -> list[int]:
        """What a process has to inherit."""
        return self._descriptors

    def send(self, message: bytes) -> None:
        """See `StepChannel`."""
        written = self._counts[0]
        left = _RING_BYTES - written % _RING_BYTES
        if _LENGTH.size <= left <= _RING_BYTES - _REUSED_BYTES and self._least_read() == written:
            self._write(written, _LENGTH.pack(_BEGIN_ANEW))
            written += left
            self._publish(written)
        end = written + _LENGTH.size + len(message)
        while end - self._least_read() > _RING_BYTES:
            time.sleep(_FULL_PAUSE_S)
        self._write(written, _LENGTH.pack(len(message)))
        self._write(written + _LENGTH.size, message)
        self._publish(end)

    def receive(self) -> bytes:
        """See `StepChannel`."""
        read, length = self._next_length()
        if length == _BEGIN_ANEW:
            self._counts[self._rank] = read + _RING_BYTES - read % _RING_BYTES
            read, length = self._next_length()
        message = self._read(read + _LENGTH.size, length)
        self._counts[self._rank] = read + _LENGTH.size + length
        return message

    def _publish(self, count: int) -> None:
        self._counts[0] = count
        for waker in self._wakers:
            os.eventfd_write(waker, 1)

    def _next_length(self) -> tuple[int, int]:
        """How much has been read, and what is written there; waits for it."""
        read = self._counts[self._rank]
        while self._counts[0] == read:
            os.eventfd_read(self._wakers[self._rank - 1])
        return read, _LENGTH.unpack(self._read(read, _LENGTH.size))[0]

    def _least_read(self) -> int:
        return min(self._counts[rank] for rank in range(1, len(self._wakers) + 1))

    def _write(self, count: int, data: bytes) -> None:
        start = count % _RING_BYTES
        first = min(len(data), _RING_BYTES - start)
        self._map[_HEADER_BYTES + start : _HEADER_BYTES + start + first] = data[:first]
        self._map[_HEADER_BYTES : _HEADER_BYTES + len(data) - first] = data[first:]

    def _read(self, count: int, length: int) -> bytes:
        start = count % _RING_BYTES
        first = min(length, _RING_BYTES - start)
        head = self._map[_HEADER_BYTES + start : _HEADER_BYTES + start + first]
        return head + self._map[_HEADER_BYTES : _HEADER_BYTES + length - first]

    def close(self) -> None:
        """For tests: a process keeps its channel until it ends."""
        self._counts.release()
        self._map.close()
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


class GroupChannel:
    """Broadcasts of a process group that nothing else uses, over CPUs: a length, then the bytes."""

    def __init__(self, group: dist.ProcessGroup, source: int = 0) -> None:
        """`source`: the rank that sends, by its number in the whole group."""
        self._group, self._source = group, source

    def send(self, message: bytes) -> None:
        """See `StepChannel`."""
        dist.broadcast(torch.tensor([len(message)]), self._source, group=self._group)
        dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), self._source, group=self._group)

    def receive(self) -> bytes:
        """See `StepChannel`."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, self._source, group=self._group)
        message = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(message, self._source, group=self._group)
        return message.numpy().tobytes()
