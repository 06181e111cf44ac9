"""A worker's streams on a real GPU: what goes beside the steps gives what one thing after the other gives, and no step
waits for the host's copies."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch

from tests.worker.simulated_device import Operation, Work
from tests.worker.test_cuda_moves import NUM_BLOCKS, NUM_HOST_BLOCKS, Steps, random_operations
from tests.worker.test_prompt_logprobs import of_all_prompts
from tests.worker.test_uploads import ARRAYS
from worker_svc.cache.cuda_moves import CudaMoves
from worker_svc.host.output_copies import CudaOutputs
from worker_svc.host.uploads import upload
from worker_svc.models.step_adapters import StepAdapters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are a GPU's"),
]

DEVICE = torch.device("cuda")
CACHE = (2, 2, NUM_BLOCKS, 8, 16, 128)  # a block is 256 KiB: on the bus for longer than the next launch takes
BLOCK_BYTES = 2 * 2 * 8 * 16 * 128 * 4
LATE = 1_000_000  # cycles, half a millisecond: the host is long past what comes after


class Card:
    """Computes steps late or at once."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def enqueue(self, name: str, work: Work, reads: Iterable[int] = (), writes: Iterable[int] = ()) -> Operation:
        if self._chance.random() < 0.5:
            torch.cuda._sleep(LATE)
        work()
        return Operation(name)


@pytest.mark.parametrize(("piece_blocks", "num_areas"), [(1, 1), (1, 2), (3, 2), (NUM_HOST_BLOCKS, 3)])
def test_swaps_beside_steps_give_what_plain_copies_give(piece_blocks: int, num_areas: int) -> None:
    chance = random.Random(piece_blocks + 10 * num_areas)
    before = torch.randint(4093, CACHE, generator=torch.Generator().manual_seed(1), dtype=torch.int32).float()
    cache = before.to(DEVICE, copy=True)
    moves = CudaMoves(cache, NUM_HOST_BLOCKS, piece_blocks * BLOCK_BYTES, num_areas)
    steps = Steps(Card(chance), moves, cache, before, moves._host.clone())
    for _ in range(40):
        random_operations(steps, chance)
        read, written = chance.sample(range(NUM_BLOCKS), k=4), chance.sample(range(NUM_BLOCKS), k=chance.randrange(3))
        steps.compute(read, written)
    assert not steps.lost and not steps.lost_on_host
    torch.cuda.synchronize()
    steps.check()
    assert not moves.are_under_way


def test_outputs_are_those_of_their_own_step() -> None:
    """Computed late, and dropped at once, so that the next step's may be given the same memory."""
    copies, outputs = [], CudaOutputs(DEVICE)
    for number in range(30):
        torch.cuda._sleep(LATE)
        tokens = torch.arange(number, number + 5, device=DEVICE)
        copies.append(outputs.start([torch.full((64, 1000), float(number), device=DEVICE), tokens]))
        del tokens
        torch.full((64, 1000), -1.0, device=DEVICE)
    for number, copy in enumerate(copies):
        copy.wait()
        logprobs, found = copy.arrays()
        assert (logprobs == number).all() and found.tolist() == [*range(number, number + 5)]


def test_uploads_are_what_the_arrays_were() -> None:
    sent = []
    for number in range(10):
        torch.cuda._sleep(LATE)
        changing = np.full(1000, number)
        sent.append(upload(DEVICE, changing, *ARRAYS))
        changing[:] = -1
    for number, (changed, *others) in enumerate(sent):
        assert (changed.cpu().numpy() == number).all()
        for array, tensor in zip(ARRAYS, others, strict=True):
            assert np.array_equal(tensor.cpu().numpy(), array)


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("waiting_is_an_error")
def test_inputs_of_a_step_wait_for_no_step_before_it() -> None:
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.arange(3).to(DEVICE)
    adapters = StepAdapters(DEVICE)
    with adapters.step(np.array([1, 0, -1])):
        slots = adapters.slots
    reader = of_all_prompts([3, 4, 5, 6]).reader(DEVICE)
    torch.cuda.set_sync_debug_mode("default")
    assert slots.tolist() == [1, 0, -1]
    assert reader is not None and reader.rows.tolist() == [0, 1, 2]
