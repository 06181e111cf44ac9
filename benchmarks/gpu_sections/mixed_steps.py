"""Steps of a Qwen3 0.6B in which sequences decode beside a chunk of a prompt, in a bare worker."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import shapes
from benchmarks.gpu_sections.bare_worker import BareWorker
from benchmarks.gpu_sections.figure import Figure, Report
from benchmarks.gpu_sections.launch_gaps import gap_share

SECTION = "mixed steps"
_BATCH, _CONTEXT = 32, 1024
_CHUNKS = (32, 512)  # tokens of the prompt a step
_STEPS, _PROFILED_STEPS = 24, 8
_GAPS = 0.03


def run(report: Report, earlier: Sequence[Figure], is_dry_run: bool) -> None:
    """A step by the size of the chunk, and the share of it in which nothing runs; `earlier` is not looked at."""
    batch, context, chunks = (3, 40, (4, 8)) if is_dry_run else (_BATCH, _CONTEXT, _CHUNKS)
    dtype, device = ("float32", "cpu") if is_dry_run else ("bfloat16", "cuda")
    num_steps, profiled = (3, 2) if is_dry_run else (_STEPS, _PROFILED_STEPS)
    options: dict[str, Any] = {"kv_cache_memory": 0.05, "swap_space": 0.01} if is_dry_run else {}
    with tempfile.TemporaryDirectory() as folder:
        shapes.write_model(Path(folder), shapes.QWEN3_0_6B, dtype, is_tiny=is_dry_run)
        sizes = {"max_num_seqs": batch + 2 * len(chunks), "max_num_batched_tokens": 2048 if not is_dry_run else 64}
        worker = BareWorker(Path(folder), device=device, **sizes, **options)
    worker.start(batch, context, len(chunks) * (num_steps + profiled))
    for chunk in chunks:
        times = worker.mix(num_steps, chunk)
        detail = {"batch": batch, "context": context, "us": [round(us, 1) for us in times]}
        name = f"Qwen3 0.6B, {batch} sequences decode beside a chunk of {chunk}"
        report(Figure(SECTION, name, statistics.median(times), "us", detail=detail))
        name, goal = f"launch gaps beside a chunk of {chunk}", f"< {100 * _GAPS:.0f} %"
        if is_dry_run:
            worker.mix(profiled, chunk)
            report(Figure(SECTION, name, None, "%", goal, detail={"error": "nothing is launched on a CPU"}))
            continue
        share = gap_share(lambda size=chunk: worker.mix(profiled, size))  # type: ignore[misc]  # a default's type
        report(Figure(SECTION, name, 100 * share, "%", goal, share < _GAPS))
    worker.close()
