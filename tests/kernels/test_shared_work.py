"""Items that threads take as they come: each is done once, whoever is slow, and phases begin one after the other."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels.cpu.library import library

PHASES = 7


def count(threads: int, num_items: int, late: int = -1, looks: int = 0) -> tuple[torch.Tensor, int]:
    """How often each item of each phase was done, and how many came too early."""
    times = torch.zeros(PHASES, num_items, dtype=torch.int64)
    return times, library().count_phases(times.data_ptr(), PHASES, num_items, threads, late, looks)


@pytest.mark.parametrize("looks", [0, 3_000_000], ids=["all the same", "one slow"])
@pytest.mark.parametrize("num_items", [0, 1, 2, 17, 400])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_item_is_done_once_and_after_the_phase_before_it(threads: int, num_items: int, looks: int) -> None:
    """8 threads are more than there are cores: some begin after others are through."""
    for late in (0, threads - 1):
        times, wrong = count(threads, num_items, late, looks if num_items in (1, 17) else 0)
        assert (times == 1).all() and wrong == 0


def test_several_callers_at_once_each_get_their_work_done() -> None:
    def often(number: int) -> bool:
        results = [count(2 + number % 3, 17) for _ in range(200)]
        return all(bool((times == 1).all()) and wrong == 0 for times, wrong in results)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(often, range(4)))


def test_a_forked_process_has_helpers_of_its_own() -> None:
    count(3, 17)
    child = os.fork()
    if child == 0:
        times, wrong = count(3, 17)
        os._exit(0 if (times == 1).all() and wrong == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
