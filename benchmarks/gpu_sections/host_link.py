"""How fast memory goes between the GPU and pinned memory of the host: what swapping is measured against."""

from __future__ import annotations

import statistics

import torch

_NUM_BYTES = 256 << 20
_COPIES = 5  # each way; the median is taken


def gb_per_s() -> float:
    """In the slower direction, one large transfer at a time."""
    on_host = torch.empty(_NUM_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(_NUM_BYTES, dtype=torch.uint8, device="cuda")
    directions = ((on_device, on_host), (on_host, on_device))
    return min(_NUM_BYTES / 1e6 / statistics.median(_ms(*pair) for _ in range(_COPIES)) for pair in directions)


def _ms(destination: torch.Tensor, source: torch.Tensor) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    destination.copy_(source, non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))
