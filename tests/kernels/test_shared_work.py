"""Items that threads take as they come: each is done once, whoever is slow, and phases begin one after the other.

And what calls hand over: the memory of a thread, and tensors that are what they are read as.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from kernels import cpu
from kernels.cpu.library import library
from kernels.cpu.products.packed_weight import pack
from kernels.int8_weight import pack_int8, quantize_int8
from tests.kernels.cpu_products import int8_linear, matmul

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


def test_a_helper_that_comes_late_takes_no_part_twice() -> None:
    """Of short work, one after the other: a second part would replace what the first has summed up."""
    ones = torch.ones(3 << 18)  # three pieces of 1 MB
    read = library().read_memory
    assert {read(ones.data_ptr(), ones.nbytes, 3, 0) for _ in range(300)} == {float(3 << 18)}


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_multiply_adds_are_counted_whoever_does_them(threads: int) -> None:
    multiply_add = library().multiply_add
    of_one = multiply_add(1, 1, threads)  # of each sum the lanes
    assert of_one > 0 and of_one % 16 == 0
    assert multiply_add(17, 1000, threads) == 17_000 * of_one


def test_threads_say_what_they_spend_their_time_on() -> None:
    spent = torch.zeros(5, dtype=torch.int64)  # `Work` of native/threads.h
    x, weight = torch.ones(1, 64), pack(torch.ones(96, 64))
    library().time_work(spent.data_ptr())
    try:
        count(1, 17)
        rows, products, attention, waiting, phases = spent.tolist()
        assert rows > 0 and products == attention == 0 and waiting >= 0 and phases == PHASES
        matmul(torch.empty(1, 96), x, weight)
        assert spent[1] > 0 and spent[0] == rows, "a product is no work on rows"
    finally:
        library().time_work(None)
    before = spent.clone()
    count(2, 17)
    assert torch.equal(spent, before), "nobody asks"


def test_a_forked_process_has_helpers_of_its_own() -> None:
    count(3, 17)
    child = os.fork()
    if child == 0:
        times, wrong = count(3, 17)
        os._exit(0 if (times == 1).all() and wrong == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_thread_that_ends_gives_its_memory_back() -> None:
    """Quantised rows of a thousand tokens are 3 MB: those of 60 threads would be 180."""
    weight, scale = quantize_int8(torch.randn(64, 2048))
    packed, x, out = pack_int8(weight), torch.randn(1000, 2048), torch.empty(1000, 64)

    def multiply() -> None:
        torch.set_num_threads(1)  # of this thread: what is taken is its own
        int8_linear(out, x, packed, scale)

    def in_threads(count: int) -> int:
        for _ in range(count):
            thread = threading.Thread(target=multiply)
            thread.start()
            thread.join()
        return psutil.Process().memory_info().rss

    child = os.fork()  # where nothing else grows meanwhile
    if child == 0:
        try:
            before = in_threads(5)
            os._exit(0 if in_threads(60) - before < 60 << 20 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


ROWS, CACHE, ANGLES = torch.zeros(2, 2, 16), torch.zeros(1, 2, 16, 16), torch.zeros(9, 16)
POSITIONS, INTEGERS, STARTS = torch.zeros(2, dtype=torch.int64), torch.zeros(1, 1).int(), torch.zeros(2).int()
FLAT, WEIGHT, ADAPTERS = torch.zeros(2, 16), torch.ones(16), torch.zeros(2).int()


def attend(**changed: torch.Tensor) -> None:
    arguments: dict[str, Any] = {"out": ROWS, "query": ROWS, "key_cache": CACHE, "value_cache": CACHE}
    arguments |= {"block_tables": INTEGERS, "seq_lens": STARTS[:1], "query_starts": STARTS}
    cpu.paged_attention(**arguments | changed, scale=1.0, max_query_len=1, max_seq_len=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cpu.silu_and_mul(FLAT.clone(), torch.zeros(2, 8)), "is not a gate"),
        (lambda: cpu.clamped_swiglu(FLAT.clone(), torch.zeros(2, 8), alpha=1.0, limit=1.0), "is not a gate"),
        (lambda: cpu.gelu(FLAT.clone(), torch.zeros(2, 8), is_approximate=True), "is not for out"),
        (lambda: cpu.rms_norm(FLAT.clone(), FLAT, WEIGHT[:8], eps=1e-5), "weight .* is not for rows"),
        (lambda: cpu.rms_norm(FLAT.clone(), FLAT, WEIGHT, eps=1e-5, residual=FLAT[:1].clone()), "not as many"),
        (lambda: cpu.rotary(ROWS, ROWS, POSITIONS, ANGLES.bfloat16()), "cos_sin .* turns no heads"),
        (lambda: cpu.rotary(ROWS, ROWS, POSITIONS.int(), ANGLES), "positions is torch.int32"),
        (lambda: cpu.rotary(ROWS, ROWS[:1], POSITIONS, ANGLES), "do not fit query"),
        (lambda: cpu.rotary(ROWS.transpose(1, 2), ROWS, POSITIONS, ANGLES), "no contiguous rows of heads"),
        (lambda: cpu.reshape_and_cache(ROWS, ROWS, CACHE, CACHE, POSITIONS.int()), "slot_mapping is torch.int32"),
        (lambda: cpu.reshape_and_cache(ROWS[:1], ROWS, CACHE, CACHE, POSITIONS), "key .* does not fit a cache"),
        (lambda: cpu.reshape_and_cache(ROWS, ROWS, CACHE, CACHE.transpose(2, 3), POSITIONS), "not contiguous"),
        (lambda: attend(seq_lens=STARTS[:1].long()), "seq_lens is torch.int64"),
        (lambda: attend(out=torch.zeros(1, 2, 16)), "does not fit query"),
        (lambda: attend(query_starts=STARTS[:1]), "1 query starts"),
        (lambda: attend(sinks=torch.zeros(2).double()), "sinks .* of torch.float64 are not 2 float32"),
        (lambda: attend(sinks=torch.zeros(3)), "sinks .* are not 2 float32"),
        (lambda: attend(value_cache=torch.zeros(2, 2, 16, 16)), "are not alike"),
        (lambda: cpu.lora_shrink(torch.zeros(1, 2, 4), FLAT, torch.zeros(1, 4, 16), ADAPTERS.long()), "adapters is"),
        (lambda: cpu.lora_shrink(torch.zeros(1, 2, 4), FLAT, torch.zeros(1, 4, 16).double(), ADAPTERS), "are float32"),
    ],
)
def test_what_would_be_read_as_something_else_is_refused(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_residual_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="bfloat16"):
        cpu.rms_norm(FLAT.clone(), FLAT, WEIGHT, eps=1e-5, residual=FLAT.bfloat16())


def test_nan_stays_nan_in_a_cache_of_bfloat16_and_a_slot_outside_of_it_is_nowhere() -> None:
    """Also those that another rounding would make a zero, or an infinity."""
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).repeat(8)
    key, cache = bits.view(torch.float32).view(1, 1, 16), torch.zeros(1, 1, 16, 16, dtype=torch.bfloat16)
    cpu.reshape_and_cache(key, key, cache, cache.clone(), torch.tensor([16]))
    assert not cache.any()
    cpu.reshape_and_cache(key, key, cache, cache.clone(), torch.tensor([15]))
    assert cache[0, 0, 15].isnan().all() and not cache[0, 0, :15].any()
