"""How much of the time between a profile's first and last kernel nothing ran on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # it is there, and not declared
from torch.profiler import ProfilerActivity, profile


def gap_share(run: Callable[[], object], device: str = "cuda") -> float:
    """The share of `run`'s time in which nothing ran: no kernel or copy on a GPU, no operator of this thread on a CPU.

    Raises RuntimeError where the profiler saw nothing.
    """
    activity, kind = {
        "cuda": (ProfilerActivity.CUDA, DeviceType.CUDA),
        "cpu": (ProfilerActivity.CPU, DeviceType.CPU),
    }[device]
    with profile(activities=[activity]) as profiler:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    spans = [(event.time_range.start, event.time_range.end) for event in profiler.events() if event.device_type == kind]
    if not spans:
        raise RuntimeError("the profiler saw no kernels")
    return idle_share(spans)


def idle_share(spans: Iterable[tuple[float, float]]) -> float:
    """The part of the time from the first start to the last end that no span covers; spans may overlap."""
    ordered = sorted(spans)
    first, covered_to = ordered[0][0], ordered[0][0]
    idle = 0.0
    for start, end in ordered:
        idle += max(0.0, start - covered_to)
        covered_to = max(covered_to, end)
    return idle / (covered_to - first) if covered_to > first else 0.0
