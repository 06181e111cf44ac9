"""Tensors kept in large pages: whole, apart from one another, and at the start of a cache line."""

from __future__ import annotations

import torch

from worker_svc.host.huge_pages import HugePages


def test_copies_are_equal_and_do_not_overlap() -> None:
    memory, generator = HugePages(), torch.Generator().manual_seed(0)
    shapes = [(3, 5), (1,), (1 << 20, 7), (0, 4), (5 << 20,), (2, 3, 4)]  # together more than a slab
    originals = [torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for shape in shapes]
    originals += [torch.randn(1000, 1300, generator=generator), torch.randn(6, 4, generator=generator).t()]
    kept = [memory.keep(tensor) for tensor in originals]
    for tensor in originals[:2]:
        tensor.zero_()
    kept[0].fill_(7)
    assert (kept[0] == 7).all() and not originals[0].any()
    for original, copy in list(zip(originals, kept, strict=True))[2:]:
        assert torch.equal(original, copy) and copy.dtype == original.dtype and copy.is_contiguous()
    assert all(copy.data_ptr() % 64 == 0 for copy in kept if copy.numel())


def test_one_larger_than_a_slab_and_one_that_outlives_the_rest() -> None:
    memory = HugePages()
    large = memory.keep(torch.arange(10 << 20))
    assert int(large[-1]) == (10 << 20) - 1
    last = memory.keep(torch.full((9,), 3.0))
    del memory, large
    assert torch.equal(last, torch.full((9,), 3.0))
