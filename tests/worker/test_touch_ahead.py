"""A cache's first pages are there before a step needs them, and no step waits for them."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
import weakref
from dataclasses import replace

import pytest
import torch

from tests.waiting import wait_until
from tests.worker.fake_model import FakeModel, fake_config
from worker_svc.config import WorkerConfig
from worker_svc.host import touch_ahead
from worker_svc.host.touch_ahead import TouchAhead, provide
from worker_svc.host.untouched import untouched_zeros
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.worker import Worker

MIB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is asked for here is Linux's")


def test_contents_stay_and_pages_are_there() -> None:
    memory = untouched_zeros((6 * MIB,), torch.uint8)
    memory[MIB : MIB + 5] = torch.arange(5, dtype=torch.uint8)
    assert not _are_there(memory[4 * MIB :])  # a page may have 2 MiB
    assert provide(memory.data_ptr() + 7, 6 * MIB - 7)
    assert _are_there(memory)
    assert memory[MIB : MIB + 5].tolist() == [0, 1, 2, 3, 4] and int(memory.sum()) == 10


def test_what_the_system_refuses_is_said() -> None:
    assert not provide(1 << 62, mmap.PAGESIZE)  # nobody's


def test_the_first_blocks_of_every_layer_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def note(address: int, num_bytes: int) -> bool:
        asked.append((address, num_bytes))
        return True

    monkeypatch.setattr(touch_ahead, "provide", note)
    monkeypatch.setattr(touch_ahead, "AHEAD_BYTES", 4 * 5 * MIB)
    store = untouched_zeros((2, 2, 7, MIB), torch.uint8)
    TouchAhead(store, lambda: 0)._thread.join()
    starts = [part.data_ptr() for layer in store for part in layer]
    within = range(store.data_ptr(), store.data_ptr() + store.nbytes)  # a thread of a test before may ask for its own
    assert [each for each in asked if each[0] in within] == [
        (start + offset * MIB, size * MIB) for offset, size in [(0, 2), (2, 2), (4, 1)] for start in starts
    ]


def test_a_running_or_new_step_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(touch_ahead, "provide", lambda address, _: asked.append(address))
    arrived: list[int | None] = [None]

    def num_steps() -> int | None:
        if arrived[0] is not None:
            arrived[0] += 1  # one since it was asked for last
        return arrived[0]

    store = untouched_zeros((1, 2, 4, MIB), torch.uint8)
    touching = TouchAhead(store, num_steps)
    time.sleep(0.3)
    arrived[0] = 1
    time.sleep(0.3)
    touching.stop()
    ours = range(store.data_ptr(), store.data_ptr() + store.nbytes)  # another test's thread may not have ended yet
    assert (arrived[0] or 0) > 2 and not [address for address in asked if address in ours]


def test_a_stop_gives_the_cache_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def provide_slowly(*_: int) -> bool:
        time.sleep(0.01)
        return True

    monkeypatch.setattr(touch_ahead, "provide", provide_slowly)
    store = untouched_zeros((30, 2, 1 << 10, 1 << 10), torch.uint8)
    references = sys.getrefcount(store)
    touching = TouchAhead(store, lambda: 0)
    touching.stop()
    assert not touching._thread.is_alive() and sys.getrefcount(store) == references


def test_a_system_that_does_not_provide_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(touch_ahead, "provide", lambda address, _: asked.append(address))
    TouchAhead(untouched_zeros((2, 2, 7, MIB), torch.uint8), lambda: 0)._thread.join()
    assert len(asked) == 1


def test_a_worker_asks_from_its_first_lease_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def note(address: int, _: int) -> bool:
        if address in own_parts():  # workers of other tests may still ask for theirs
            asked.append(address)
        return True

    def own_parts() -> list[int]:
        return [part.data_ptr() for layer in runner.cache.layers for part in layer]

    monkeypatch.setattr(touch_ahead, "provide", note)
    config = WorkerConfig(device="cpu", block_size=4, max_num_seqs=4, max_num_batched_tokens=32, kv_cache_memory=0.001)
    runner = ModelRunner(FakeModel(), fake_config(), config.block_size)
    worker = Worker(runner, config)
    worker.initialize(worker.bounds).result(60)
    time.sleep(0.2)
    assert not asked
    worker.begin(1).result(60)
    parts = own_parts()
    wait_until(lambda: asked == parts, seconds=60)  # each has less than a piece
    # For other limits there is another cache: nobody holds on to the one before.
    first = weakref.ref(runner.cache.store)
    worker.end().result(60)
    worker.initialize(replace(worker.bounds, max_num_seqs=2)).result(60)
    assert first() is None
    wait_until(lambda: asked[len(parts) :] == own_parts(), seconds=60)


def _are_there(memory: torch.Tensor) -> bool:
    """Whether every page of this memory is in use, by mincore(2)."""
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = memory.data_ptr() + memory.nbytes - start
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    assert mincore(start, size, found) == 0
    return all(page & 1 for page in found)
