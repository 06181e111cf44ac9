"""Swaps: in few transfers of neighbours, bit for bit what the oracle does, and in order on a GPU's streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.gpu.cache import swap_blocks
from kernels.gpu.cache.swap_blocks import Run, block_major, cut
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


def test_pieces_are_cut_into_runs_of_neighbours() -> None:
    cached, hosted = torch.tensor([6, 0, 5, 2, 7, 4]), torch.tensor([3, 10, 7, 2, 4, 9])
    (whole,) = cut(cached, hosted, 6)
    assert (whole.cached.tolist(), whole.hosted.tolist()) == ([2, 6, 7, 5, 4, 0], [2, 3, 4, 7, 9, 10])
    assert whole.runs == [Run(0, 2, 3), Run(3, 7, 1), Run(4, 9, 2)]
    first, second = cut(cached, hosted, 4)
    assert first.cached.tolist() + second.cached.tolist() == whole.cached.tolist()
    assert (first.runs, second.runs) == ([Run(0, 2, 3), Run(3, 7, 1)], [Run(0, 9, 2)])


@pytest.mark.parametrize(("num_staged", "num_transfers"), [(6, 3), (100, 3), (4, 3), (2, 4), (1, 6)])
def test_out_and_in_again(num_staged: int, num_transfers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With less room than blocks there are several pieces, each of which ends its runs."""
    cache, host = stores()
    area = block_major((LAYERS, 2, num_staged, *BLOCK), torch.float32, DEVICE)
    transfers: list[int] = []
    transfer = swap_blocks._transfer

    def counted(source: torch.Tensor, first: int, destination: torch.Tensor, place: int, count: int) -> None:
        transfers.append(count)
        transfer(source, first, destination, place, count)

    monkeypatch.setattr(swap_blocks, "_transfer", counted)
    expected_host, expected_cache = host.clone(), cache.clone()
    reference.copy_blocks(cache, expected_host, OUT)
    for piece in cut(OUT[:, 0], OUT[:, 1], num_staged):
        swap_blocks.gather(cache, area, piece.cached)
        swap_blocks.to_host(area, host, piece.runs)
    arrive()
    assert torch.equal(bits(host), bits(expected_host)) and torch.equal(bits(cache), bits(expected_cache))
    assert len(transfers) == num_transfers and sum(transfers) == 6

    back = OUT.flip(1).clone()
    back[:, 1] = torch.tensor([1, 3, 6, 2, 8, 0])
    transfers.clear()
    reference.copy_blocks(host, expected_cache, back)
    for piece in cut(back[:, 1], back[:, 0], num_staged):
        swap_blocks.from_host(host, area, piece.runs)
        swap_blocks.scatter(area, cache, piece.cached)
    assert torch.equal(bits(cache), bits(expected_cache)) and torch.equal(bits(host), bits(expected_host))
    assert len(transfers) == num_transfers


def test_what_does_not_fit_is_refused() -> None:
    cache, _ = stores()
    area = block_major((LAYERS, 2, 2, *BLOCK), torch.float32, DEVICE)
    with pytest.raises(ValueError, match="host is not of whole blocks"):
        swap_blocks.to_host(area, cache, [Run(0, 0, 1)])
    with pytest.raises(ValueError, match="area is not of whole blocks, one or more"):
        swap_blocks.gather(cache, area[:, :, :0], torch.tensor([0]))
    with pytest.raises(ValueError, match="area is not of whole blocks"):
        swap_blocks.scatter(cache, cache, torch.tensor([0]))


@pytest.mark.gpu
def test_streams_wait_for_what_they_must() -> None:
    if DEVICE == "cpu":
        pytest.skip("streams are for a GPU")
    cache = torch.zeros(CACHE, device=DEVICE)
    moves, everything = CudaMoves(cache, HOST[2], 1, 2), np.arange(CACHE[2])
    for turn in range(1, 20):
        torch.cuda._sleep(2_000_000)  # what is swapped out is written late
        moves.hold_steps(everything, everything)
        cache.fill_(turn)
        moves.swap_out(OUT)
        moves.hold_steps(everything, everything)
        cache.fill_(-1)  # and overwritten at once
        moves.swap_in(OUT.flip(1))
        moves.copy(torch.tensor([[8, 1]]))
        moves.hold_steps(everything, everything)
        mixed = cache[:, :, [8, 0, 5, 2, 7, 4, 1]].clone()
        cache.fill_(-2)
        assert bool((mixed == turn).all())
