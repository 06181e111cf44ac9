"""Swaps: in few transfers of neighbours, bit for bit what the oracle does, and in order on a GPU's streams."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu import swap_blocks
from kernels.gpu.swap_blocks import Run, block_major, runs
from kernels.oracles import reference
from tests.kernels.device import DEVICE
from tests.kernels.stores import bits, store
from worker_svc.cache.cuda_moves import CudaMoves

LAYERS, BLOCK = 2, (1, 4, 8)  # heads, tokens, head size
CACHE, HOST = (LAYERS, 2, 9, *BLOCK), (LAYERS, 2, 11, *BLOCK)
# (cache block, host block), in no order: on the host 2, 3, 4, then 7, then 9 and 10.
OUT = torch.tensor([[8, 3], [0, 10], [5, 7], [2, 2], [7, 4], [4, 9]])


def stores() -> tuple[torch.Tensor, torch.Tensor]:
    cache = store(*CACHE, dtype=torch.float32)
    host = block_major(HOST, torch.float32, "cpu", pinned=DEVICE == "cuda")
    return cache, host.copy_(store(*HOST, dtype=torch.float32, seed=1).cpu())


def arrive() -> None:
    """What was sent to the host is there."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def test_runs_are_of_neighbours() -> None:
    assert runs([]) == []
    assert runs([5]) == [Run(0, 5, 1)]
    assert runs([2, 3, 4, 7, 9, 10]) == [Run(0, 2, 3), Run(3, 7, 1), Run(4, 9, 2)]


@pytest.mark.parametrize(("num_staged", "num_transfers"), [(6, 3), (100, 3), (4, 3), (2, 4), (1, 6)])
def test_out_and_in_again(num_staged: int, num_transfers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With less room than blocks there are several rounds, each of which ends its runs."""
    cache, host = stores()
    staging = block_major((LAYERS, 2, num_staged, *BLOCK), torch.float32, DEVICE)
    transfers: list[int] = []
    transfer = swap_blocks._transfer

    def counted(source: torch.Tensor, first: int, destination: torch.Tensor, place: int, count: int) -> None:
        transfers.append(count)
        transfer(source, first, destination, place, count)

    monkeypatch.setattr(swap_blocks, "_transfer", counted)
    done: list[int] = []
    expected_host, expected_cache = host.clone(), cache.clone()
    reference.copy_blocks(cache, expected_host, OUT)
    swap_blocks.swap_blocks(cache, host, OUT, staging, when_done=lambda: done.append(len(transfers)))
    arrive()
    assert torch.equal(bits(host), bits(expected_host)) and torch.equal(bits(cache), bits(expected_cache))
    assert len(transfers) == num_transfers and sum(transfers) == 6
    # The cache was read before the last round's transfers.
    assert len(done) == 1 and done[0] < num_transfers

    back = OUT.flip(1).clone()
    back[:, 1] = torch.tensor([1, 3, 6, 2, 8, 0])
    transfers.clear()
    reference.copy_blocks(host, expected_cache, back)
    swap_blocks.swap_blocks(host, cache, back, staging, when_done=lambda: done.append(len(transfers)))
    assert torch.equal(bits(cache), bits(expected_cache)) and torch.equal(bits(host), bits(expected_host))
    assert done[1] == len(transfers) == num_transfers


def test_what_does_not_fit_is_refused() -> None:
    cache, host = stores()
    staging = block_major((LAYERS, 2, 2, *BLOCK), torch.float32, DEVICE)
    with pytest.raises(ValueError, match="one of source and destination must be block-major"):
        swap_blocks.swap_blocks(cache, cache, OUT, staging)
    with pytest.raises(ValueError, match="of a block or more"):
        swap_blocks.swap_blocks(cache, host, OUT, staging[:, :, :0])


@pytest.mark.gpu
def test_streams_wait_for_what_they_must() -> None:
    if DEVICE == "cpu":
        pytest.skip("streams are for a GPU")
    cache = torch.zeros(CACHE, device=DEVICE)
    moves = CudaMoves(cache, HOST[2], 1 << 20)
    for turn in range(1, 20):
        torch.cuda._sleep(2_000_000)  # what is swapped out is written late
        cache.fill_(turn)
        moves.swap_out(OUT)
        cache.fill_(-1)  # and overwritten at once
        moves.swap_in(OUT.flip(1))
        moves.copy(torch.tensor([[8, 1]]))
        mixed = cache[:, :, [8, 0, 5, 2, 7, 4, 1]].clone()
        cache.fill_(-2)
        assert bool((mixed == turn).all())
