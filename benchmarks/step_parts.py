"""Where the time of a whole decode step of one request goes: the pass by kind of work, and what lies around it.

The pass is the one that a worker makes. The thread that calls the CPU kernels adds up what it spends in them on
products, on attention, on the other rows, and waiting for the others at the end of a phase. The step comes from `LLM`,
in which a scheduler's process and a worker generate for one request of a short prompt.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine_limits import MemoryReader
from benchmarks.step_cpu import decode_steps
from kernels.cpu.library import library
from octavo.bench import offline
from octavo.bench.workloads import warm_up
from octavo.llm import LLM

_NUM_WORKS = 5  # `Work` of kernels/cpu/native/threads.h
_PHASES = {"forward": ["forward"], "sample": ["sample"], "prepare": ["cache_ops", "prepare"]}  # of a worker's step
_STEP_TOKENS, _STEP_RUNS = 100, 4


@dataclasses.dataclass(frozen=True)
class PassParts:
    """Milliseconds of a pass: means of the quickest quarter, as what else runs on a machine only adds."""

    pass_ms: float
    rows_ms: float  # norms, rotation, gates, the way into the cache
    products_ms: float
    attention_ms: float
    waiting_ms: float
    phases: float  # that threads go through together
    weights_bytes: int  # of layers and head
    read_gb_per_s: float  # the best of before and after

    @property
    def python_ms(self) -> float:
        """What is left: the calls of kernels, and what torch does between them."""
        return self.pass_ms - self.rows_ms - self.products_ms - self.attention_ms - self.waiting_ms


def of_pass(run: Callable[[], Any], weights_bytes: int, num_threads: int, num_passes: int) -> PassParts:
    """`run`: one pass of a loaded model."""
    reader, passes = MemoryReader(min(weights_bytes, 512 << 20), num_threads), []
    before = reader.gb_per_s()
    spent = np.zeros(_NUM_WORKS, np.int64)
    library().time_work(spent.ctypes.data)
    try:
        for _ in range(num_passes):
            spent[:] = 0
            started_ns = time.perf_counter_ns()
            run()
            passes.append((time.perf_counter_ns() - started_ns, *spent))
    finally:
        library().time_work(None)
    means = np.mean(sorted(passes)[: max(num_passes // 4, 1)], axis=0)
    pass_ms, rows_ms, products_ms, attention_ms, waiting_ms = (float(ns) / 1e6 for ns in means[:5])
    return PassParts(
        pass_ms,
        rows_ms,
        products_ms,
        attention_ms,
        waiting_ms,
        phases=float(means[5]),
        weights_bytes=weights_bytes,
        read_gb_per_s=max(before, reader.gb_per_s()),
    )


def of_step(model: Path, options: dict[str, str]) -> dict[str, float]:
    """Milliseconds of a step over `LLM`, of the best of some runs: all of it, and in the worker the pass, sampling, and
    what comes before a pass."""
    best: dict[str, float] = {}
    with LLM(str(model), max_model_len=2048, **options) as llm:
        vocab_size = llm.get_tokenizer().vocab_size
        offline.run(llm, warm_up(vocab_size))
        for number in range(_STEP_RUNS):
            before = llm.statistics()
            row, _ = offline.run(llm, decode_steps(1, _STEP_TOKENS + number, vocab_size))
            after = llm.statistics()
            num_steps = after["num_steps"] - before["num_steps"]
            found = {"step_ms": row.wall_s / num_steps * 1e3}
            for name, phases in _PHASES.items():
                spent_ns = sum(after["worker_ns"][phase] - before["worker_ns"][phase] for phase in phases)
                found[f"{name}_ms"] = spent_ns / num_steps / 1e6
            best = min(best or found, found, key=lambda each: each["step_ms"])
    return best


def is_in(result: dict[str, Any]) -> bool:
    """Whether a result of `benchmarks.step_profile` has them."""
    return "step" in result and "parts" in result["sequences"].get("1", {})


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown, milliseconds: a row for each result of `benchmarks.step_profile` that has them."""
    headers = ["weights", "products", "attention", "other rows", "waiting", "Python", "the pass", "bound / pass"]
    headers += ["sampling", "around it", "a step", "phases"]
    lines = [f"| {' | '.join(headers)} |", "| --- " * len(headers) + "|"]
    for result in filter(is_in, results):
        parts, step = PassParts(**result["sequences"]["1"]["parts"]), result["step"]
        bound_ms = parts.weights_bytes / parts.read_gb_per_s / 1e6
        around_ms = step["step_ms"] - step["forward_ms"] - step["sample_ms"]
        cells = [parts.products_ms, parts.attention_ms, parts.rows_ms, parts.waiting_ms, parts.python_ms, parts.pass_ms]
        cells += [bound_ms / parts.pass_ms, step["sample_ms"], around_ms, step["step_ms"]]
        shown = [f"{Path(result['model']).name}, {result['type']}", *(f"{cell:.2f}" for cell in cells)]
        lines.append(f"| {' | '.join(shown)} | {parts.phases:.0f} |")
    return "\n".join(lines)
