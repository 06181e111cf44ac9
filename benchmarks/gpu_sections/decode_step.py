"""A whole decode step of a Llama 3 8B with made-up weights, in a bare worker, against the sum over its operations."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import shapes
from benchmarks.gpu_sections import host_link
from benchmarks.gpu_sections.bare_worker import BareWorker
from benchmarks.gpu_sections.figure import Figure, Report
from benchmarks.gpu_sections.launch_gaps import gap_share
from benchmarks.gpu_sections.step_floor import floor_us, operations
from kernels.bench.ceilings import Ceilings
from kernels.bench.clock import GraphClock, HostClock

SECTION = "decode step"
STEP_US = "decode step of a bare worker"
BATCH, CONTEXT = 256, 1024
MAX_NUM_BATCHED_TOKENS = 8192
_WARM_UP_STEPS, _PROFILED_STEPS = 8, 16
_TURNS, _STEPS_OF_TURN = 6, 8  # of steps without swaps, and as many of steps beside them
_TIMED_STEPS = 2 * _TURNS * _STEPS_OF_TURN
_OVER_FLOOR, _GAPS, _BESIDE_SWAPS = 1.15, 0.03, 1.05
_SWAPPED_BYTES = 96 << 20  # a step: more than is staged at once


def run(report: Report, earlier: Sequence[Figure], is_dry_run: bool) -> None:
    """The sum over operations, the step itself, their ratio, the share of the step in which nothing runs, and the step
    beside swaps of other blocks."""
    device, dtype = ("cpu", torch.float32) if is_dry_run else ("cuda", torch.bfloat16)
    batch, context = (3, 80) if is_dry_run else (BATCH, CONTEXT)
    with tempfile.TemporaryDirectory() as folder:
        config = shapes.write_model(
            Path(folder), shapes.LLAMA_3_8B, str(dtype).removeprefix("torch."), is_tiny=is_dry_run
        )
        # First, while the card's memory is free.
        ceilings = Ceilings(HostClock() if is_dry_run else GraphClock(torch.device(device)))
        floors = {op.name: floor_us(op, ceilings, dtype) for op in operations(config, batch, context, dtype.itemsize)}
        del ceilings
        torch.cuda.empty_cache()
        floor = sum(floors.values())
        report(Figure(SECTION, "sum over a decode step's operations", floor, "us", detail=floors))
        tokens = max(batch, 64 if is_dry_run else MAX_NUM_BATCHED_TOKENS)
        small = {"kv_cache_memory": 0.05, "swap_space": 0.01} if is_dry_run else {}
        worker = BareWorker(Path(folder), device=device, max_num_seqs=batch, max_num_batched_tokens=tokens, **small)
    swap = worker.sizes.swap_bytes_per_s / 1e9
    report(Figure(SECTION, "swapping cache blocks, the slower direction", swap, "GB/s"))
    if not is_dry_run:
        report(Figure(SECTION, "the link to the host, the slower direction", host_link.gb_per_s(), "GB/s"))
    times, times_beside = times_us(worker, batch, context)
    step_us = statistics.median(times)
    detail = {"batch": batch, "context": context, "us": [round(us, 1) for us in times]}
    report(Figure(SECTION, STEP_US, step_us, "us", detail=detail))
    over = step_us / floor
    goal = f"<= {_OVER_FLOOR}"
    report(Figure(SECTION, "decode step over that sum", over, goal=goal, is_goal_met=over <= _OVER_FLOOR))
    beside = statistics.median(times_beside) / step_us
    goal, detail = f"<= {_BESIDE_SWAPS}", {"us": [round(us, 1) for us in times_beside]}
    report(
        Figure(
            SECTION, "decode step beside swaps", beside, goal=goal, is_goal_met=beside <= _BESIDE_SWAPS, detail=detail
        )
    )
    goal = f"< {100 * _GAPS:.0f} %"
    if is_dry_run:
        report(Figure(SECTION, "launch gaps", None, "%", goal, detail={"error": "nothing is launched on a CPU"}))
    else:
        share = gap_share(lambda: worker.decode(_PROFILED_STEPS))
        report(Figure(SECTION, "launch gaps", 100 * share, "%", goal, share < _GAPS))
    worker.close()


def times_us(worker: BareWorker, batch: int, context: int) -> tuple[list[float], list[float]]:
    """(of steps without swaps, of steps beside swaps), with contexts of `context` tokens on average in both: in turns,
    as a step takes longer the longer the contexts. Sequences are left with places for the steps to be profiled."""
    # Of each turn the first step is not timed.
    first = context - 1 - _WARM_UP_STEPS - _TIMED_STEPS // 2
    worker.start(batch, first, _WARM_UP_STEPS + _TIMED_STEPS + _PROFILED_STEPS)
    worker.decode(_WARM_UP_STEPS)
    plain: list[float] = []
    beside: list[float] = []
    for turn in range(_TURNS):
        for is_beside in (False, True) if turn % 2 == 0 else (True, False):
            times = beside if is_beside else plain
            times += worker.decode(_STEPS_OF_TURN, _SWAPPED_BYTES if is_beside else 0)
    return plain, beside
