"""What settings of memory and threads buy on a CPU, with and without by turns: `python -m benchmarks.cpu_settings`.

Whole passes of a loaded model, as a worker computes them, for one sequence and for 32, SmolLM2-135M in float32 and a
random model of Qwen3-0.6B's shape in bfloat16:

- touched ahead: the first pass of a prompt of 512 tokens over a cache whose memory is there, or has yet to be provided;
- bound: a pass of one sequence beside the time that reading its weights takes, in each type they are kept in;
- giving way: one thread fewer than cores, or as many as cores, beside a process that computes without end, and for two
  such models at once.

Both ways take turns pass by pass, so that what else happens on the machine happens to both; a ratio is the median over
pairs. `--save` keeps the figures in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import token_bytes
from benchmarks.step_profile import decode_step
from kernels.cpu.library import library
from octavo.bench import machine
from octavo.models.resolve import resolve_model
from octavo.serving.plan import waiting_threads
from octavo.shared.cores import allowed_cores
from worker_svc.cache.cache_engine import CacheEngine
from worker_svc.host.touch_ahead import provide
from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.loader import Model, load_model

RESULTS = Path(__file__).parent / "results"
SMOLLM2, QWEN3 = "smollm2-135m-instruct float32", "Qwen3-0.6B's shape bfloat16"
_QWEN3_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
_READ_BYTES = 256 << 20  # far more than any cache
_WARM_UP, _SEQ_LEN, _PROMPT, _BLOCK_SIZE = 3, 200, 512, 16


def load(name: str, dtype: str = "", quantization: str = "") -> Model:
    """One of the two models, as its name says or in another type."""
    if name == SMOLLM2:
        folder = resolve_model("smollm2-135m-instruct")
        return load_model(folder, ModelConfig.from_folder(folder, dtype or "float32", quantization=quantization), "cpu")
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        (folder / "config.json").write_text(json.dumps(_QWEN3_CONFIG), encoding="utf-8")
        config = ModelConfig.from_folder(folder, dtype or "bfloat16", quantization=quantization)
        return load_model(folder, config, "cpu", load_format="dummy")


def seconds(run: Callable[[], Any]) -> float:
    """Of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def by_turns(ways: dict[str, Callable[[], Any]], passes: int, before: Callable[[str], Any] | None = None) -> Any:
    """Median seconds of each of two ways, and the median over pairs of second by first."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(_WARM_UP + passes):
        for name in sorted(ways, reverse=bool(number % 2)):
            if before is not None:
                before(name)
            taken = seconds(ways[name])
            if number >= _WARM_UP:
                times[name].append(taken)
    first, second = ways
    ratios = [b / a for a, b in zip(times[first], times[second], strict=True)]
    return {
        **{f"{name}_ms": statistics.median(times[name]) * 1e3 for name in ways},
        f"{second} / {first}": statistics.median(ratios),
    }


def bound(name: str, dtype: str, quantization: str, passes: int) -> Any:
    """A pass of one sequence, and the bytes of its weights at the bandwidth that was measured just before it."""
    model = load(name, dtype, quantization)
    assert isinstance(model, Decoder)
    num_bytes = token_bytes.of_decoder(model)
    step, threads = decode_step(model, 1, _SEQ_LEN), torch.get_num_threads()
    numbers = torch.ones(_READ_BYTES, dtype=torch.uint8)
    place = numbers.data_ptr(), numbers.nbytes, threads
    read = min((1024, 4096, 16384), key=lambda ahead: seconds(lambda: library().read_memory(*place, ahead)))
    found = by_turns(
        {"read": lambda: library().read_memory(*place, read), "pass": lambda: model.forward(*step)}, passes
    )
    found["weights_mb"] = num_bytes / 1e6
    found["bound / pass"] = num_bytes / numbers.nbytes / found["pass / read"]
    return found


def touching(model: Model, passes: int) -> Any:
    """A prompt over a new cache, whose memory is there or has yet to come."""
    num_blocks = -(-_PROMPT // _BLOCK_SIZE)
    token_ids, positions = torch.arange(_PROMPT), torch.arange(_PROMPT)
    tables, starts = torch.arange(num_blocks).int()[None], torch.tensor([0, _PROMPT]).int()
    metadata = AttentionMetadata(positions, starts, starts[1:].clone(), tables, _PROMPT, _PROMPT)
    made: dict[str, CacheEngine] = {}

    def make(way: str) -> None:
        made.clear()
        cache = made[way] = CacheEngine(model.config, _BLOCK_SIZE, 4 * num_blocks, 0, model.config.dtype, "cpu")
        if way == "touched":
            provide(cache.store.data_ptr(), cache.store.nbytes)

    def run() -> None:
        (cache,) = made.values()
        model.forward(token_ids, positions, cache.layers, metadata, torch.tensor([_PROMPT - 1]))

    return by_turns({"touched": run, "untouched": run}, passes, make)


def giving_way(model: Model, sequences: int, passes: int) -> Any:
    """With as many threads as cores or one fewer, beside a process that computes without end."""
    cores, step = len(allowed_cores()), decode_step(model, sequences, _SEQ_LEN)
    neighbour = multiprocessing.get_context("spawn").Process(target=_compute_without_end)
    neighbour.start()
    try:
        run = lambda: model.forward(*step)  # noqa: E731 - the same pass twice
        threads = {"fewer": max(cores - 1, 1), "all": cores}
        return by_turns({"fewer": run, "all": run}, passes, lambda way: torch.set_num_threads(threads[way]))
    finally:
        neighbour.kill()
        neighbour.join()
        torch.set_num_threads(cores)


def _compute_without_end() -> None:
    while True:
        pass


def two_at_once(name: str, sequences: int, seconds_each: float) -> dict[str, float]:
    """Passes a second of two models together on the same cores, with all cores' threads each or half of them."""
    context, cores, found = multiprocessing.get_context("spawn"), len(allowed_cores()), {}
    for way, threads in (("half", max(cores // 2, 1)), ("all", cores)):
        start, counts = context.Barrier(2), context.Queue()
        arguments = name, sequences, threads, seconds_each, start, counts
        processes = [context.Process(target=_count_passes, args=arguments) for _ in range(2)]
        for process in processes:
            process.start()
        found[f"{way}_passes_per_s"] = sum(counts.get() for _ in processes) / seconds_each
        for process in processes:
            process.join()
    found["half / all"] = found["half_passes_per_s"] / found["all_passes_per_s"]
    return found


def _count_passes(name: str, sequences: int, threads: int, seconds_each: float, start: Any, counts: Any) -> None:
    torch.set_num_threads(threads)
    model = load(name)
    step = decode_step(model, sequences, _SEQ_LEN)
    model.forward(*step)
    start.wait()
    count, until = 0, time.monotonic() + seconds_each
    while time.monotonic() < until:
        model.forward(*step)
        count += 1
    counts.put(count)


def main() -> int:
    """Prints each figure as it comes, JSON a line."""
    parser = argparse.ArgumentParser(description="Compares settings of memory and threads on a CPU.")
    parser.add_argument("--models", nargs="+", choices=[SMOLLM2, QWEN3], default=[SMOLLM2, QWEN3])
    parser.add_argument("--passes", type=int, default=30)
    parser.add_argument("--only-bound", action="store_true", help="leave the settings out")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    arguments = parser.parse_args()
    if waiting := waiting_threads():  # OpenMP has read its variables: once more, with those that a worker is given
        command = [sys.executable, "-m", "benchmarks.cpu_settings", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | waiting)
    torch.set_num_threads(len(allowed_cores()))
    figures: dict[str, Any] = {}

    def show(name: str, found: Any) -> None:
        figures[name] = found
        print(json.dumps({name: found}), flush=True)

    for name in arguments.models:
        for dtype, quantization in (("float32", ""), ("bfloat16", ""), ("float32", "int8"), ("bfloat16", "int8")):
            kind = f"{name.split()[0]} | 1 | bound of {dtype} {quantization}".strip()
            show(kind, bound(name, dtype, quantization, arguments.passes))
        if arguments.only_bound:
            continue
        model, passes = load(name), arguments.passes
        for count in (1, 32):
            show(f"{name} | {count} | giving way", giving_way(model, count, passes))
            show(f"{name} | {count} | two at once", two_at_once(name, count, 5.0))
        show(f"{name} | prompt | touched ahead", touching(model, max(passes // 3, 3)))
        del model
    if arguments.save:
        facts = machine.describe()
        path = RESULTS / f"{time.strftime('%Y-%m-%d')}-cpu-settings-{machine.slug(facts)}.json"
        result = {"date": time.strftime("%Y-%m-%d"), "machine": facts, "figures": figures}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"kept in {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
