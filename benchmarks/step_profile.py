"""Where the time of a decode step goes, operator by operator: `python -m benchmarks.step_profile`.

One forward pass of a loaded model, without scheduler or gRPC. N sequences of the same length compute one token each;
their cache blocks lie scattered. Each operator is timed by itself and set beside its limit: the longer of reading its
bytes at the machine's bandwidth and computing its products at the machine's speed, both measured in the same run. A
worker runs all layers in one compiled call, with the same results; that pass is timed as well ("as served"). Times are
medians over passes, limits the best of some rounds. With one sequence, `benchmarks.step_parts` adds what the served
pass and a whole step consist of.

`--save` keeps the figures in benchmarks/results/; docs/cpu-performance.md shows them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks import machine_limits, step_parts, token_bytes
from benchmarks.machine_limits import Limits
from kernels import cpu
from octavo.bench import machine
from octavo.models.resolve import resolve_model
from octavo.serving.plan import waiting_threads
from octavo.shared.cores import available_cores
from worker_svc.cache.cache_engine import CacheEngine
from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.checkpoint.gguf_folder import model_folder
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.fused_layers import FusedLayers
from worker_svc.models.loader import Model, load_model
from worker_svc.models.products.compiled_linear import CompiledLinear
from worker_svc.service.devices import cache_dtype

RESULTS = Path(__file__).parent / "results"
_BLOCK_SIZE = 16
_WARM_UP = 3
# Of weights, as options of a model.
TYPES = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    **{name: {"quantization": name} for name in ("int8", "int4", "int4-128")},
}


@dataclasses.dataclass
class Operator:
    """All calls of one operator in a pass; of several passes, one after the other."""

    num_bytes: int = 0  # read from memory in one pass, of weights those that they are kept in
    float32_bytes: int = 0  # that the weights would be as float32
    num_flops: int = 0
    num_calls: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)  # a pass each

    def limit_s(self, limits: Limits) -> float:
        """No pass can be quicker."""
        return max(self.num_bytes / limits.read_gb_per_s, self.num_flops / limits.gflop_per_s) / 1e9


class Profiler:
    """Times the products and kernels that a model calls while it is made and used within `active`."""

    def __init__(self) -> None:
        self.operators: dict[str, Operator] = {}
        self.passes: list[float] = []  # seconds of each, all operators and what lies between them
        self.served: list[float] = []  # of passes as a worker computes them
        self.parts: step_parts.PassParts | None = None  # of such a pass, of one sequence

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, models made or used are timed call by call; one at a time in a process."""
        kernels = SimpleNamespace(__all__=cpu.__all__, **{name: self._kernel(name) for name in cpu.__all__})
        with (
            mock.patch("worker_svc.models.decoder.kernels_for", lambda _: kernels),
            mock.patch.object(FusedLayers, "is_for", lambda *_: False),
            mock.patch.object(CompiledLinear, "__call__", self._product(CompiledLinear.__call__)),
        ):
            yield

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Sets the counts of all operators to zero, and times what runs within as one pass."""
        for operator in self.operators.values():
            operator.num_bytes = operator.float32_bytes = operator.num_flops = operator.num_calls = 0
            operator.seconds.append(0.0)
        started = time.perf_counter()
        yield
        self.passes.append(time.perf_counter() - started)

    def forget(self) -> None:
        """Begin again, after passes that only warmed up."""
        self.operators.clear()
        self.passes.clear()

    def _product(self, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(linear: CompiledLinear, x: torch.Tensor) -> torch.Tensor:
            started = time.perf_counter()
            out = call(linear, x)
            seconds = time.perf_counter() - started
            num_flops = 2 * x.shape[0] * x.shape[1] * out.shape[1]
            name = f"product {out.shape[1]} x {x.shape[1]}"
            self._add(name, seconds, linear.weight_bytes, num_flops, 4 * x.shape[1] * out.shape[1])
            return out

        return run

    def _kernel(self, name: str) -> Callable[..., Any]:
        kernel = getattr(cpu, name)

        def run(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            found = kernel(*arguments, **options)
            seconds = time.perf_counter() - started
            costs = _attention_costs(*arguments) if name == "paged_attention" else (0, 0)
            self._add(name, seconds, *costs)
            return found

        return run

    def _add(self, name: str, seconds: float, num_bytes: int, num_flops: int, float32_bytes: int = 0) -> None:
        operator = self.operators.setdefault(name, Operator(seconds=[0.0]))
        operator.num_bytes += num_bytes
        operator.float32_bytes += float32_bytes
        operator.num_flops += num_flops
        operator.num_calls += 1
        operator.seconds[-1] += seconds


def _attention_costs(
    out: torch.Tensor, query: torch.Tensor, key_cache: torch.Tensor, *rest: torch.Tensor
) -> tuple[int, int]:
    """Bytes and products of decode rows whose sequences share no block."""
    _, num_kv_heads, _, head_size = key_cache.shape
    num_keys = int(rest[2].sum())
    num_bytes = 2 * num_keys * num_kv_heads * head_size * key_cache.dtype.itemsize
    return num_bytes, 4 * num_keys * query.shape[1] * head_size


def profile(folder: Path, type_: str, num_sequences: int, seq_len: int, num_passes: int) -> Profiler:
    """Passes of a decode step, each sequence `seq_len` tokens long with its new one; type: a name of `TYPES`."""
    profiler, options = Profiler(), TYPES[type_]
    config = ModelConfig.from_folder(folder, options.get("dtype", "auto"), quantization=options.get("quantization", ""))
    with profiler.active():
        model = load_model(folder, config, "cpu")
        for number in range(_WARM_UP + num_passes):
            if number == 0:
                step = decode_step(model, num_sequences, seq_len)
            if number == _WARM_UP:
                profiler.forget()
            with profiler.one_pass():
                model.forward(*step)
    del model
    model = load_model(folder, config, "cpu")
    for number in range(_WARM_UP + num_passes):
        started = time.perf_counter()
        model.forward(*step)
        if number >= _WARM_UP:
            profiler.served.append(time.perf_counter() - started)
    if num_sequences == 1 and isinstance(model, Decoder):
        run = functools.partial(model.forward, *step)
        profiler.parts = step_parts.of_pass(run, token_bytes.of_decoder(model), torch.get_num_threads(), 5 * num_passes)
    return profiler


def decode_step(model: Model, num_sequences: int, seq_len: int) -> tuple[Any, ...]:
    """Arguments of `Model.forward`: so many sequences of this length compute their last token each."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = -(-seq_len // _BLOCK_SIZE)
    dtype = cache_dtype("auto", torch.device("cpu"), model.config.quantization) or model.config.dtype
    cache = CacheEngine(model.config, _BLOCK_SIZE, num_sequences * num_blocks, 0, dtype, "cpu")
    for layer in cache.layers:
        for part in layer:
            part.normal_(generator=generator)
    tables = torch.randperm(num_sequences * num_blocks, generator=generator).int().view(num_sequences, num_blocks)
    last = seq_len - 1
    attention = AttentionMetadata(
        slot_mapping=tables[:, -1].long() * _BLOCK_SIZE + last % _BLOCK_SIZE,
        query_starts=torch.arange(num_sequences + 1, dtype=torch.int32),
        seq_lens=torch.full((num_sequences,), seq_len, dtype=torch.int32),
        block_tables=tables,
        max_query_len=1,
        max_seq_len=seq_len,
    )
    token_ids = torch.randint(model.config.vocab_size, (num_sequences,), generator=generator)
    return token_ids, torch.full((num_sequences,), last), cache.layers, attention, torch.arange(num_sequences)


def figures(profiler: Profiler, limits: Limits) -> dict[str, Any]:
    """For JSON: ms of each operator, slowest first, with its limit, and of the whole pass. A limit of 0: none known."""
    operators = [
        {
            "operator": name,
            "calls": operator.num_calls,
            "ms": statistics.median(operator.seconds) * 1e3,
            "limit_ms": operator.limit_s(limits) * 1e3,
        }
        for name, operator in profiler.operators.items()
    ]
    products = [operator for operator in profiler.operators.values() if operator.float32_bytes]
    parts = {} if profiler.parts is None else {"parts": dataclasses.asdict(profiler.parts)}
    return {
        **parts,
        "operators": sorted(operators, key=lambda row: -row["ms"]),
        "pass_ms": statistics.median(profiler.passes) * 1e3,
        "served_ms": statistics.median(profiler.served) * 1e3,
        "weights_mb": sum(operator.num_bytes for operator in products) / 1e6,
        "weights_as_float32_mb": sum(operator.float32_bytes for operator in products) / 1e6,
    }


def table(found: dict[str, Any]) -> str:
    """Markdown of `figures`: operators, the time between them, the whole pass one by one and as served."""
    whole_ms = found["pass_ms"]
    lines = ["| operator | calls | ms | share | limit, ms | limit / time |", "| --- | --- | --- | --- | --- | --- |"]
    for row in found["operators"]:
        ms, limit_ms = row["ms"], row["limit_ms"]
        bound = f"{limit_ms:.2f} | {limit_ms / ms:.2f}" if limit_ms else "- | -"
        lines.append(f"| {row['operator']} | {row['calls']} | {ms:.2f} | {ms / whole_ms:.1%} | {bound} |")
    between_ms = whole_ms - sum(row["ms"] for row in found["operators"])
    lines.append(f"| between operators |  | {between_ms:.2f} | {between_ms / whole_ms:.1%} | - | - |")
    limit_ms = sum(row["limit_ms"] for row in found["operators"])
    for name, ms in {"whole pass": whole_ms, "as served": found["served_ms"]}.items():
        lines.append(f"| {name} |  | {ms:.2f} | {ms / whole_ms:.1%} | {limit_ms:.2f} | {limit_ms / ms:.2f} |")
    return "\n".join(lines)


def title(count: str, seq_len: int, type_: str, found: dict[str, Any]) -> str:
    """What stands above a table; type: a name of `TYPES`."""
    sequences = "1 sequence" if count == "1" else f"{count} sequences"
    weights = f"{found['weights_mb']:.0f} MB of weights are read, {found['weights_as_float32_mb']:.0f} MB as float32"
    option = "--dtype" if "dtype" in TYPES[type_] else "--quantization"
    return f"{sequences} of {seq_len} tokens, `{option} {type_}` ({weights}):"


def machine_line(date: str, facts: dict[str, Any], limits: dict[str, Any]) -> str:
    """The hardware, and what it can do at most."""
    alone = limits.get("multiply_add_gflop_per_s")  # older results lack it
    return (
        f"{date}, {facts['cpu']}, {limits['num_threads']} threads: reads {limits['read_gb_per_s']:.1f} GB/s, "
        f"computes {limits['gflop_per_s']:.0f} GFLOP/s"
        + (f" in a large product, {alone:.0f} in multiply-adds alone" if alone else "")
    )


def keep(result: dict[str, Any]) -> Path:
    """Writes into today's file of this machine, beside what it has of other models and types."""
    path = RESULTS / f"{time.strftime('%Y-%m-%d')}-step-profile-{machine.slug(result['machine'])}.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[f"{Path(result['model']).name} {result['type']}"] = result
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return path


def main() -> int:
    """Prints the operators of a pass beside their limits, as a table or JSON."""
    parser = argparse.ArgumentParser(description="Profiles a decode step, operator by operator, against the limits.")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name, folder or GGUF file")
    parser.add_argument("--types", nargs="+", choices=tuple(TYPES), default=["float32"], help="of weights")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32], help="W1 has 1, W2 up to 32")
    parser.add_argument("--seq-len", type=int, default=200, help="tokens of each sequence (default: %(default)s)")
    parser.add_argument("--passes", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print JSON in place of the tables")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    arguments = parser.parse_args()
    if waiting := waiting_threads():  # OpenMP has read its variables: once more, with those that a worker is given
        command = [sys.executable, "-m", "benchmarks.step_profile", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | waiting)
    facts, model = machine.describe(), resolve_model(arguments.model)
    for type_ in arguments.types:
        step = step_parts.of_step(model, TYPES[type_])
        limits = machine_limits.measure(arguments.threads)
        with model_folder(model) as folder:
            sequences = {
                str(count): figures(profile(folder, type_, count, arguments.seq_len, arguments.passes), limits)
                for count in arguments.sequences
            }
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": facts,
            "model": arguments.model,
            "type": type_,
            "seq_len": arguments.seq_len,
            "limits": dataclasses.asdict(limits),
            "step": step,
            "sequences": sequences,
        }
        print(json.dumps(result, indent=1) if arguments.json else report(result))
        if arguments.save:
            print(f"kept in {keep(result)}", file=sys.stderr)
    return 0


def report(result: dict[str, Any]) -> str:
    """Markdown of one run: the machine, a table for each number of sequences, and what a step consists of."""
    parts = [machine_line(result["date"], result["machine"], result["limits"])]
    for count, found in result["sequences"].items():
        parts += [title(count, result["seq_len"], result["type"], found), table(found)]
    return "\n\n".join([*parts, step_parts.table([result])] if step_parts.is_in(result) else parts)


if __name__ == "__main__":
    sys.exit(main())
