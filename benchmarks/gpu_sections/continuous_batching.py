"""Requests of all lengths on a Qwen3 0.6B with made-up weights, over the service and through `transformers`.

256 prompts and as many outputs, lengths uniform in 100 to 1,024, as nano-vllm's benchmark has them; both engines get
the same token ids and generate exactly as many tokens for each, the most likely ones.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import shapes
from benchmarks.gpu_sections import streams
from benchmarks.gpu_sections.figure import Figure, Report
from benchmarks.served import served, wait_until_ready
from benchmarks.shapes import SMALL
from octavo.bench.workloads import BenchRequest

SECTION = "continuous batching"
_REQUESTS, _LENGTHS = 256, (100, 1024)
_RESULT_TIMEOUT_S = 120.0


def run(report: Report, earlier: Sequence[Figure], is_dry_run: bool) -> None:
    """Two speeds and their ratio."""
    dtype, device = ("float32", "cpu") if is_dry_run else ("bfloat16", "cuda")
    requests = workload(4, (3, 12)) if is_dry_run else workload(_REQUESTS, _LENGTHS)
    tokens = sum(request.max_tokens for request in requests)
    detail: dict[str, Any] = {"requests": len(requests), "output_tokens": tokens}
    with tempfile.TemporaryDirectory() as folder:
        shapes.write_model(Path(folder), shapes.QWEN3_0_6B, dtype, is_tiny=is_dry_run)
        ours = _over_the_service(folder, requests, dtype, device)
        report(Figure(SECTION, "Octavo over Generate", ours, "tokens/s", detail=detail))
        theirs = _through_transformers(Path(folder), requests, dtype, device)
    report(Figure(SECTION, "transformers, continuous batching", theirs, "tokens/s", detail=detail))
    report(Figure(SECTION, "Octavo's speed by that of transformers", ours / theirs))


def workload(count: int, lengths: tuple[int, int]) -> list[BenchRequest]:
    """Prompts and outputs of uniform lengths, both ends included, from a fixed seed."""
    rng = random.Random(0)
    return [
        BenchRequest(tuple(rng.randrange(3, 1000) for _ in range(rng.randint(*lengths))), rng.randint(*lengths))
        for _ in range(count)
    ]


def _over_the_service(folder: str, requests: Sequence[BenchRequest], dtype: str, device: str) -> float:
    flags = ["--load-format=dummy", f"--dtype={dtype}", f"--device={device}", "--max-model-len=4096"]
    flags += SMALL if device == "cpu" else []
    with served(folder, *flags) as address:
        wait_until_ready(address)
        asyncio.run(streams.generate_all(address, [BenchRequest((5, 6, 7), 4)] * 2))
        started_ns = time.monotonic_ns()
        deliveries = asyncio.run(streams.generate_all(address, requests))
    return streams.tokens_per_s(deliveries, started_ns)


def _through_transformers(folder: Path, requests: Sequence[BenchRequest], dtype: str, device: str) -> float:
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="paged|sdpa"
        ).eval()
    generation = GenerationConfig(max_new_tokens=max(request.max_tokens for request in requests), do_sample=False)
    generation.eos_token_id, generation.pad_token_id = -1, 0  # lengths are forced
    # On a GPU its own choice: nearly all of the memory.
    cache = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64) if device == "cpu" else None
    with model.continuous_batching_context_manager(generation, continuous_batching_config=cache) as manager:
        manager.add_request([5, 6, 7], max_new_tokens=4, eos_token_id=-1)
        _results(manager, 1)
        started = time.perf_counter()
        wanted = {
            manager.add_request(
                list(request.prompt_token_ids), max_new_tokens=request.max_tokens, eos_token_id=-1
            ): request.max_tokens
            for request in requests
        }
        results = _results(manager, len(requests))
        wall_s = time.perf_counter() - started
    for result in results:
        if len(result.generated_tokens) != wanted[result.request_id]:
            raise RuntimeError(f"{len(result.generated_tokens)} tokens of {wanted[result.request_id]}: {result.error}")
    return sum(wanted.values()) / wall_s


def _results(manager: Any, count: int) -> list[Any]:
    """The next `count` answers. Raises TimeoutError when none comes for a while."""
    results: list[Any] = []
    while len(results) < count:
        result = manager.get_result(timeout=_RESULT_TIMEOUT_S)
        if result is None:
            raise TimeoutError(f"transformers gave {len(results)} of {count} answers")
        results.append(result)
    return results
