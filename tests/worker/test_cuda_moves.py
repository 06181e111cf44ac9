"""What waits for what when blocks are swapped on a GPU; streams and events are fakes that write down what is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from kernels.gpu import swap_blocks
from kernels.gpu.copy_blocks import copy_blocks
from worker_svc.cache import cuda_moves
from worker_svc.cache.cuda_moves import CudaMoves

PAIRS = torch.tensor([[3, 0], [1, 4], [2, 1]])


class FakeStream:
    """A stream that does at once what it is given."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self._log.append(f"{self.name} waits for the mark of {event.stream}")


class FakeEvent:
    def __init__(self, log: list[str]) -> None:
        self.stream, self._log = "nobody", log

    def record(self, stream: FakeStream) -> None:
        self.stream = stream.name
        self._log.append(f"mark of {stream.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    current = [FakeStream("compute", lines)]

    @contextmanager
    def stream(chosen: FakeStream) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    def note(name: str, call: partial[None]) -> partial[None]:
        def noted(*arguments: object) -> None:
            lines.append(f"{current[-1].name}: {name}")
            call(*arguments)

        return partial(noted)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("swaps", lines))
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(lines))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(cuda_moves, "block_major", lambda *shape, pinned=False: swap_blocks.block_major(*shape))
    monkeypatch.setattr(cuda_moves, "copy_blocks", note("copy", partial(copy_blocks)))
    monkeypatch.setattr(swap_blocks, "copy_blocks", note("gather or scatter", partial(copy_blocks)))
    monkeypatch.setattr(swap_blocks, "_transfer", note("transfer", partial(swap_blocks._transfer)))
    return lines


def test_steps_wait_for_the_gathering_and_not_for_the_bus(log: list[str]) -> None:
    cache = torch.randn(2, 2, 5, 1, 4, 8)
    before, moves = cache.clone(), CudaMoves(cache, 6, 1 << 20)
    moves.swap_out(PAIRS)
    assert log == [
        "swaps waits for compute",  # the blocks are written
        "swaps: gather or scatter",
        "mark of swaps",
        "swaps: transfer",  # of 0 and 1, neighbours on the host
        "swaps: transfer",
        "compute waits for the mark of swaps",
    ]
    log.clear()
    cache[:, :, PAIRS[:, 0]] = torch.nan
    moves.swap_in(PAIRS.flip(1))
    assert log == [
        "swaps waits for compute",  # the blocks are no longer read
        "swaps: transfer",
        "swaps: transfer",
        "swaps: gather or scatter",
        "mark of swaps",
        "compute waits for the mark of swaps",
    ]
    assert torch.equal(cache, before)
    log.clear()
    moves.copy(torch.tensor([[3, 0]]))
    assert log == ["compute: copy"]
    assert torch.equal(cache[:, :, 0], before[:, :, 3])


def test_staging_has_room_for_what_is_worth_it(log: list[str]) -> None:
    """Never more blocks than the host has, as many as fit in its bytes, and one at least."""
    cache = torch.zeros(2, 2, 5, 1, 4, 8)
    block_bytes = 2 * 2 * 4 * 8 * 4
    assert CudaMoves(cache, 6, 100 * block_bytes)._staging.shape == (2, 2, 6, 1, 4, 8)
    assert CudaMoves(cache, 6, 3 * block_bytes - 1)._staging.shape[2] == 2
    small = CudaMoves(cache, 6, 1)
    assert small._staging.shape[2] == 1
    small.swap_out(PAIRS)
    assert log.count("mark of swaps") == 1 and log.count("swaps: gather or scatter") == 3
    assert log.index("mark of swaps") == len(log) - 3  # before the last block's transfer
