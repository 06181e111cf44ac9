"""What a cache of eight bits costs in quality, with scales and without: `python -m benchmarks.fp8_cache_quality`.

In bfloat16 on a CPU, whose kernels know no such cache: what reads and writes it is the reference (`kernels.oracles`).
Scales are measured over the README of the repository, quality over another text in pieces of 512 tokens,
`texts/alice.txt` (L. Carroll, "Alice's Adventures in Wonderland", 1865, the beginning):

- perplexity, and how often the most likely token is that of a cache of 16 bits;
- the divergence (Kullback and Leibler) of the distributions from those of a cache of 16 bits, in nats a token.

Models: SmolLM2; SmolLM2 with keys that are 128 times as large, under queries that are as much smaller, which in 16 bits
is the same model; and a tiny Qwen 2 with random weights and biases of keys with a standard deviation of 400 (perplexity
says nothing of it).
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import kernels.cpu
from kernels import select
from kernels.oracles import reference
from octavo.bench import machine
from octavo.models.resolve import resolve_model
from scheduler_svc.text.tokenizer import Tokenizer
from tests.tiny_models import make_tiny_model
from worker_svc.cache.cache_engine import CacheEngine
from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.cache_scales.cache_scales import LARGEST, CacheScales
from worker_svc.models.config import ModelConfig
from worker_svc.models.loader import Model, load_model
from worker_svc.steps.calibration import largest_keys_and_values
from worker_svc.steps.model_runner import ModelRunner

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TEXT, CALIBRATION = HERE / "texts" / "alice.txt", HERE.parent / "README.md"
PIECE_TOKENS, BLOCK_SIZE = 512, 16
CALIBRATION_TOKENS = 4096
FACTOR = 128  # a power of two, by which nothing is rounded
BIAS = 400.0


def main() -> int:
    """Prints a row for each model and cache; keeps them in benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Measures what a cache of eight bits costs in quality.")
    parser.add_argument("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    facts = machine.describe()
    _use_reference_caches()
    rows: list[dict[str, Any]] = []
    print("| model | cache | perplexity | same most likely token | divergence |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        for name, folder in _models(Path(scratch)):
            for row in measure(folder):
                rows.append({"model": name, **row})
                print(
                    f"| {name} | {row['cache']} | {row['perplexity']:.2f} | {row['same_most_likely_token']:.1%} | "
                    f"{row['divergence']:.2g} |",
                    flush=True,
                )
    if not arguments.no_results:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        path = RESULTS / f"{date[:10]}-fp8-cache-quality-{machine.slug(facts)}.json"
        path.write_text(json.dumps({"date": date, "machine": facts, "text": TEXT.name, "rows": rows}, indent=1) + "\n")
    return 0


def measure(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for a cache of 16 bits, and for one of eight without scales and with them."""
    tokenizer = Tokenizer.from_folder(folder)
    pieces = _pieces(tokenizer.encode(TEXT.read_text(encoding="utf-8")))
    config = ModelConfig.from_folder(folder, "bfloat16")
    model = load_model(folder, config, "cpu")
    calibration = tokenizer.encode(CALIBRATION.read_text(encoding="utf-8"))[:CALIBRATION_TOKENS]
    largest = largest_keys_and_values(ModelRunner(model, config, BLOCK_SIZE), _pieces(calibration))
    facts = {"largest": float(largest.max()), "layers_beyond_448": int((largest.amax(dim=(1, 2)) > LARGEST).sum())}
    before = [_logprobs(model, config.dtype, piece) for piece in pieces]
    yield {"cache": "16 bits", **facts, **_compared(pieces, before, before)}
    ones = CacheScales.ones(config.num_layers, config.num_kv_heads)
    for cache, scales in (("8 bits", ones), ("8 bits with scales", CacheScales.of_largest(largest))):
        model = load_model(folder, replace(config, cache_scales=scales), "cpu")
        after = [_logprobs(model, torch.float8_e4m3fn, piece) for piece in pieces]
        yield {"cache": cache, **facts, **_compared(pieces, before, after)}


def _models(scratch: Path) -> Iterator[tuple[str, Path]]:
    """Names and folders."""
    folder = resolve_model("smollm2-135m-instruct")
    yield "SmolLM2-135M-Instruct", folder
    large = scratch / "large"
    shutil.copytree(folder, large)
    tensors = load_file(large / "model.safetensors")
    for name, tensor in tensors.items():
        tensor *= FACTOR if "k_proj" in name else 1 / FACTOR if "q_proj" in name else 1
    save_file(tensors, large / "model.safetensors", metadata={"format": "pt"})
    yield f"the same, keys times {FACTOR}", large
    yield f"a tiny Qwen 2, key biases of {BIAS:g}", _tiny_qwen2(scratch / "tiny-qwen2")


def _tiny_qwen2(folder: Path) -> Path:
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=1031, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=512, max_position_embeddings=1024,
    )  # fmt: skip
    make_tiny_model(folder, config, seed=5)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(6)
    for name in sorted(tensors):
        if name.endswith("k_proj.bias"):
            tensors[name] = BIAS * torch.randn(tensors[name].shape, generator=generator)
        elif "q_proj" in name:  # so that keys have their say, and not the bias alone
            tensors[name] /= BIAS / 4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _use_reference_caches() -> None:
    """On the CPU, from now on."""
    module = ModuleType("reference_caches")
    of_caches = "reshape_and_cache", "rotary_and_cache", "paged_attention"
    for name in kernels.cpu.__all__:
        setattr(module, name, getattr(reference if name in of_caches else kernels.cpu, name))
    module.__all__ = kernels.cpu.__all__  # type: ignore[attr-defined]  # as modules have it
    sys.modules[module.__name__] = module
    select._MODULES["cpu"] = module.__name__


def _logprobs(model: Model, cache_dtype: torch.dtype, piece: Sequence[int]) -> torch.Tensor:
    """f32[length - 1, vocab]: of what follows each token but the last."""
    length = len(piece) - 1
    num_blocks = -(-length // BLOCK_SIZE)
    caches = CacheEngine(model.config, BLOCK_SIZE, num_blocks, 0, cache_dtype, "cpu").layers
    positions = torch.arange(length)
    attention = AttentionMetadata(
        slot_mapping=positions,
        query_starts=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        max_query_len=length,
        max_seq_len=length,
    )
    return model.forward(torch.tensor(piece[:-1]), positions, caches, attention, positions).log_softmax(-1)


def _compared(
    pieces: Sequence[Sequence[int]], before: list[torch.Tensor], after: list[torch.Tensor]
) -> dict[str, float]:
    next_tokens = torch.cat([torch.tensor(piece[1:]) for piece in pieces])
    one, other = torch.cat(before), torch.cat(after)
    own = other.gather(1, next_tokens[:, None])
    return {
        "tokens": len(next_tokens),
        "perplexity": math.exp(-float(own.mean())),
        "same_most_likely_token": float((one.argmax(-1) == other.argmax(-1)).float().mean()),
        "divergence": float((one.exp() * (one - other)).sum(-1).mean()),
    }


def _pieces(token_ids: list[int]) -> list[list[int]]:
    pieces = [token_ids[start : start + PIECE_TOKENS] for start in range(0, len(token_ids), PIECE_TOKENS)]
    return [piece for piece in pieces if len(piece) > 1]


if __name__ == "__main__":
    sys.exit(main())
