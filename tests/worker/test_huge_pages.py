"""Memory in large pages: apart from what others have, at the start of a cache line, and there as long as it is used."""

from __future__ import annotations

import math

import torch

from worker_svc.host.huge_pages import bytes_in_huge_pages


def test_places_do_not_overlap() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (1,), (1 << 20, 7), (0, 4), (5 << 20,), (2, 3, 4)]  # together more than a slab
    originals = [torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for shape in shapes]
    kept = [
        bytes_in_huge_pages(math.prod(shape)).view(shape).copy_(one)
        for shape, one in zip(shapes, originals, strict=True)
    ]
    kept[0].fill_(7)
    assert all(torch.equal(original, copy) for original, copy in list(zip(originals, kept, strict=True))[1:])
    assert all(copy.data_ptr() % 64 == 0 for copy in kept if copy.numel())


def test_one_larger_than_a_slab_and_one_that_outlives_the_rest() -> None:
    large = bytes_in_huge_pages(80 << 20).view(torch.int64).copy_(torch.arange(10 << 20))
    assert int(large[-1]) == (10 << 20) - 1
    last = bytes_in_huge_pages(36).view(torch.float32).fill_(3.0)
    del large
    others = [bytes_in_huge_pages(8 << 20).fill_(9) for _ in range(4)]
    assert torch.equal(last, torch.full((9,), 3.0)) and all(bool((other == 9).all()) for other in others)
