"""Where a decode step's time goes, operator by operator, against what the machine can do: `python -m
benchmarks.step_profile`.

One forward pass of a loaded model, without scheduler or wire: N sequences of the same length, each computing one token
over blocks that lie scattered. Where a worker computes all layers in one call, the operators are those of the layers
one by one, whose numbers are the same, and the whole pass is timed both ways. The limit of an operator is the longer of
reading its bytes at the machine's measured bandwidth and computing its products at its measured speed; both are
measured in the same run. Times are medians over passes, the machine's limits the best of some rounds.
`docs/cpu-performance.md` explains the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks import machine, machine_limits
from benchmarks.machine_limits import Limits
from kernels import cpu
from octavo.models.resolve import resolve_model
from octavo.serving_plan import waiting_threads
from octavo.shared.cores import available_cores
from worker_svc.cache.cache_engine import CacheEngine
from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.config import ModelConfig
from worker_svc.models.float_linear import FloatLinear
from worker_svc.models.fused_layers import FusedLayers
from worker_svc.models.int4_linear import Int4Linear
from worker_svc.models.int8_linear import Int8Linear
from worker_svc.models.loader import Model, load_model
from worker_svc.models.packed_linear import PackedLinear

_BLOCK_SIZE = 16
_WARM_UP = 3


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

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, models made or used are timed call by call; one at a time in a process."""
        kernels = SimpleNamespace(**{name: self._kernel(name) for name in cpu.__all__})
        with (
            mock.patch("worker_svc.models.decoder.kernels_for", lambda _: kernels),
            mock.patch.object(FusedLayers, "is_for", lambda *_: False),
            mock.patch.object(PackedLinear, "__call__", self._product(PackedLinear.__call__)),
            mock.patch.object(FloatLinear, "__call__", self._product(FloatLinear.__call__)),
            mock.patch.object(Int8Linear, "__call__", self._product(Int8Linear.__call__)),
            mock.patch.object(Int4Linear, "__call__", self._product(Int4Linear.__call__)),
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
        """Begin anew, after passes that only warmed up."""
        self.operators.clear()
        self.passes.clear()

    def _product(self, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(linear: PackedLinear | FloatLinear | Int8Linear | Int4Linear, x: torch.Tensor) -> torch.Tensor:
            started = time.perf_counter()
            out = call(linear, x)
            seconds = time.perf_counter() - started
            num_flops = 2 * x.shape[0] * x.shape[1] * out.shape[1]
            name = f"product {out.shape[1]} x {x.shape[1]}"
            self._add(name, seconds, linear.weight_bytes, num_flops, 4 * x.shape[1] * out.shape[1])
            return out

        return run

    def _kernel(self, name: str) -> Callable[..., None]:
        kernel = getattr(cpu, name)

        def run(*arguments: Any, **options: Any) -> None:
            started = time.perf_counter()
            kernel(*arguments, **options)
            seconds = time.perf_counter() - started
            costs = _attention_costs(*arguments) if name == "paged_attention" else (0, 0)
            self._add(name, seconds, *costs)

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


def profile(model_name: str, quantization: str, num_sequences: int, seq_len: int, num_passes: int) -> Profiler:
    """Passes of a decode step, each sequence `seq_len` tokens long with its new one; quantization: "" or "int8"."""
    profiler, folder = Profiler(), resolve_model(model_name)
    config = ModelConfig.from_folder(folder, "float32", quantization=quantization)
    with profiler.active():
        model = load_model(folder, config, "cpu")
        for number in range(_WARM_UP + num_passes):
            if number == 0:
                step = _decode_step(model, num_sequences, seq_len)
            if number == _WARM_UP:
                profiler.forget()
            with profiler.one_pass():
                model.forward(*step)
    model = load_model(folder, config, "cpu")
    for _ in range(_WARM_UP + num_passes):
        started = time.perf_counter()
        model.forward(*step)
        profiler.served.append(time.perf_counter() - started)
    del profiler.served[:_WARM_UP]
    return profiler


def _decode_step(model: Model, num_sequences: int, seq_len: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    num_blocks = -(-seq_len // _BLOCK_SIZE)
    cache = CacheEngine(model.config, _BLOCK_SIZE, num_sequences * num_blocks, 0, torch.float32, "cpu")
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


def table(profiler: Profiler, limits: Limits) -> str:
    """Markdown; operators by time, what lies between them, and the whole pass, so and as it is served."""
    whole_s = statistics.median(profiler.passes)
    lines = ["| operator | calls | ms | share | limit, ms | of the limit |", "| --- | --- | --- | --- | --- | --- |"]
    medians = {name: statistics.median(operator.seconds) for name, operator in profiler.operators.items()}
    limit_s = 0.0
    for name in sorted(medians, key=lambda name: -medians[name]):
        operator, seconds = profiler.operators[name], medians[name]
        own_s = operator.limit_s(limits)
        limit_s += own_s
        bound = f"{own_s * 1e3:.2f} | {own_s / seconds:.2f}" if own_s else "- | -"
        lines.append(f"| {name} | {operator.num_calls} | {seconds * 1e3:.2f} | {seconds / whole_s:.1%} | {bound} |")
    between_s = whole_s - sum(medians.values())
    lines.append(f"| between operators |  | {between_s * 1e3:.2f} | {between_s / whole_s:.1%} | - | - |")
    for name, seconds in (("whole pass", whole_s), ("whole pass as served", statistics.median(profiler.served))):
        bound = f"{limit_s * 1e3:.2f} | {limit_s / seconds:.2f}"
        lines.append(f"| {name} |  | {seconds * 1e3:.2f} | {seconds / whole_s:.1%} | {bound} |")
    return "\n".join(lines)


def weights(profiler: Profiler) -> str:
    """What a pass reads of them, whatever else it reads, and what that is short for."""
    products = [operator for operator in profiler.operators.values() if operator.float32_bytes]
    read, float32 = (sum(getattr(one, name) for one in products) / 1e6 for name in ("num_bytes", "float32_bytes"))
    return f"{read:.0f} MB of weights are read, {float32:.0f} MB as float32"


def main() -> int:
    """Prints the operators of a pass beside their limits, as a table or JSON."""
    parser = argparse.ArgumentParser(description="Profiles a decode step, operator by operator, against the limits.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--quantization", choices=["none", "int8"], default="none")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32], help="W1 has 1, W2 up to 32")
    parser.add_argument("--seq-len", type=int, default=200, help="tokens of each sequence (default: %(default)s)")
    parser.add_argument("--passes", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if waiting := waiting_threads():  # OpenMP has read its variables: once more, with those that a worker is given
        command = [sys.executable, "-m", "benchmarks.step_profile", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | waiting)
    facts, limits = machine.describe(), machine_limits.measure(arguments.threads)
    quantization = "" if arguments.quantization == "none" else arguments.quantization
    profilers = {
        count: profile(arguments.model, quantization, count, arguments.seq_len, arguments.passes)
        for count in arguments.sequences
    }
    if arguments.json:
        rows = {
            count: {
                "passes": profiler.passes,
                "served": profiler.served,
                "operators": {k: dataclasses.asdict(v) for k, v in profiler.operators.items()},
            }
            for count, profiler in profilers.items()
        }
        print(json.dumps({"machine": facts, "limits": dataclasses.asdict(limits), "sequences": rows}, indent=1))
        return 0
    print(
        f"{facts['cpu']}, {limits.num_threads} threads: reads {limits.read_gb_per_s:.1f} GB/s, "
        f"computes {limits.gflop_per_s:.0f} GFLOP/s"
    )
    for count, profiler in profilers.items():
        print(f"\n{count} sequences of {arguments.seq_len} tokens; {weights(profiler)}\n\n{table(profiler, limits)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
