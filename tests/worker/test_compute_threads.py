"""Threads that compute and the cores they are kept on. Each case has a thread of its own: what it pins ends with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from kernels.cpu.pinning import pin_threads
from octavo.cores import allowed_cores
from worker_svc.compute_threads import set_threads
from worker_svc.config import WorkerConfig
from worker_svc.errors import StartupError

CPU = torch.device("cpu")
T = TypeVar("T")


@pytest.fixture(autouse=True)
def num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def in_own_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


def test_each_thread_of_the_pool_stays_on_its_core_and_no_other_thread_does():
    cores = allowed_cores()[::-1]

    def pinned() -> tuple[int, dict[int, set[int]]]:
        torch.set_num_threads(len(cores))
        threads = pin_threads(cores)
        return threading.get_native_id(), {thread: os.sched_getaffinity(thread) for thread in threads}

    caller, threads = in_own_thread(pinned)
    assert list(threads.values()) == [{core} for core in cores]
    assert next(iter(threads)) == caller
    assert os.sched_getaffinity(0) == set(cores), "this thread is in no pool"


def test_a_core_that_may_not_be_used_and_a_wrong_number_of_them():
    def refused() -> None:
        torch.set_num_threads(1)
        for core in (1023, 4096):
            with pytest.raises(ValueError, match=f"core {core} may not be used"):
                pin_threads([core])
        with pytest.raises(ValueError, match="2 cores for 1 threads"):
            pin_threads([0, 1])

    in_own_thread(refused)


def test_the_option_pins_as_many_threads_as_compute():
    last = allowed_cores()[-1]

    def affinities(config: WorkerConfig) -> tuple[int, set[int]]:
        torch.set_num_threads(len(allowed_cores()))
        set_threads(config, CPU)
        return torch.get_num_threads(), os.sched_getaffinity(0)

    everywhere = set(allowed_cores())
    assert in_own_thread(lambda: affinities(WorkerConfig(num_threads=1))) == (1, everywhere)
    assert in_own_thread(lambda: affinities(WorkerConfig(cpu_pinning=str(last)))) == (1, {last})
    first = {allowed_cores()[0]}
    assert in_own_thread(lambda: affinities(WorkerConfig(cpu_pinning="auto", num_threads=1))) == (1, first)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (WorkerConfig(cpu_pinning="auto", num_threads=3000), "3000 threads, and"),
        (WorkerConfig(cpu_pinning="1023"), "cpu_pinning 1023: core 1023 may not be used"),
    ],
)
def test_what_cannot_be_pinned_prevents_the_start(config, message):
    with pytest.raises(StartupError, match=message):
        in_own_thread(lambda: set_threads(config, CPU))
