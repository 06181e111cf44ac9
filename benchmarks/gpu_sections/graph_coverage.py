"""Which steps of a Llama 3 8B with 131,072 positions have a graph in the memory that is set aside for them."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import shapes
from benchmarks.gpu_sections.bare_worker import BareWorker
from benchmarks.gpu_sections.figure import Figure, Report
from kernels.gpu.attention.paged_attention import attention_scratch_bytes
from worker_svc.config import WorkerConfig
from worker_svc.steps.decode_graphs import batch_sizes
from worker_svc.steps.mixed_graphs import token_counts

SECTION = "graph coverage"
MAX_NUM_SEQS, POSITIONS = 256, 131_072


def run(report: Report, earlier: Sequence[Figure], is_dry_run: bool) -> None:
    """Attention's scratch, and the shares of steps' sizes that have a graph with the default `--cuda-graph-memory`."""
    device, dtype = ("cpu", torch.float32) if is_dry_run else ("cuda", torch.bfloat16)
    config = shapes.LLAMA_3_8B | {"max_position_embeddings": POSITIONS}
    heads = (config["num_attention_heads"], config["hidden_size"] // config["num_attention_heads"])
    scratch = attention_scratch_bytes(torch.device(device), MAX_NUM_SEQS, POSITIONS, *heads)
    name = f"attention's scratch for {MAX_NUM_SEQS} sequences of {POSITIONS:,}"
    report(Figure(SECTION, name, scratch / 2**20, "MiB"))
    max_num_seqs = 4 if is_dry_run else MAX_NUM_SEQS
    options: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 64 if is_dry_run else 8192}
    if is_dry_run:
        options |= {"kv_cache_memory": 0.05, "swap_space": 0.01}
    with tempfile.TemporaryDirectory() as folder:
        shapes.write_model(Path(folder), config, str(dtype).removeprefix("torch."), is_tiny=is_dry_run)
        worker = BareWorker(Path(folder), device=device, max_model_len="auto", **options)
    captured = worker.graph_sizes
    of_others = token_counts(options["max_num_batched_tokens"])
    worker.close()
    default = next(field.default for field in dataclasses.fields(WorkerConfig) if field.name == "cuda_graph_memory")
    for what, wanted, found in (
        ("batch sizes", batch_sizes(max_num_seqs), captured.batch_sizes),
        ("numbers of tokens", of_others, captured.token_counts),
    ):
        detail = {"wanted": wanted, "captured": found, "positions": worker.sizes.max_model_len, "gib": default}
        share = 100 * len(found) / len(wanted)
        report(Figure(SECTION, f"{what} that have a graph", share, "%", "100 %", share == 100, detail=detail))
