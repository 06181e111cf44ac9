"""The whole service over gRPC beside the bare worker: tokens a second while all sequences of a Llama 3 8B decode."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import shapes
from benchmarks.gpu_sections import streams
from benchmarks.gpu_sections.decode_step import BATCH, CONTEXT, MAX_NUM_BATCHED_TOKENS, STEP_US
from benchmarks.gpu_sections.figure import Figure, Report, value_of
from benchmarks.served import served, wait_until_ready
from octavo.bench.workloads import BenchRequest

SECTION = "service"
_OUTPUT_TOKENS = 192  # around the context of the bare worker; so many that all requests decode together for a while
_SHARE = 0.92


def run(report: Report, earlier: Sequence[Figure], is_dry_run: bool) -> None:
    """Speed over Generate, and its ratio to the bare worker's among the `earlier` figures."""
    batch, context, output_tokens = (3, 40, 24) if is_dry_run else (BATCH, CONTEXT, _OUTPUT_TOKENS)
    dtype, device = ("float32", "cpu") if is_dry_run else ("bfloat16", "cuda")
    rng = random.Random(0)

    def request(length: int, max_tokens: int) -> BenchRequest:
        return BenchRequest(tuple(rng.randrange(3, 1000) for _ in range(length)), max_tokens)

    flags = ["--load-format=dummy", f"--dtype={dtype}", f"--device={device}", f"--max-num-seqs={batch}"]
    flags += [f"--max-num-batched-tokens={64 if is_dry_run else MAX_NUM_BATCHED_TOKENS}"]
    flags += shapes.SMALL if is_dry_run else []
    with tempfile.TemporaryDirectory() as folder:
        shapes.write_model(Path(folder), shapes.LLAMA_3_8B, dtype, is_tiny=is_dry_run)
        with served(folder, *flags) as address:
            wait_until_ready(address)
            asyncio.run(streams.generate_all(address, [request(8, 4)] * 2))
            requests = [request(context - output_tokens // 2, output_tokens) for _ in range(batch)]
            deliveries = asyncio.run(streams.generate_all(address, requests))
    rate = streams.steady_tokens_per_s(deliveries)
    detail = {"requests": batch, "context": context, "messages": sum(map(len, deliveries))}
    report(Figure(SECTION, "the whole service, all sequences decoding", rate, "tokens/s", detail=detail))
    step_us = value_of(earlier, STEP_US)
    name, goal = "the whole service beside the bare worker", f">= {100 * _SHARE:.0f} %"
    if step_us is None:
        report(Figure(SECTION, name, None, "%", goal, detail={"error": "the bare worker was not timed"}))
        return
    share = rate / (batch / step_us * 1e6)
    report(Figure(SECTION, name, 100 * share, "%", goal, share >= _SHARE))
