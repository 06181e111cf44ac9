"""Products on a CPU by what their weights are kept in: `python -m benchmarks.product_speed`.

One row, as a single sequence decodes, and 32. A row is bound by reading the weight: beside its time stands the part
of one core's bandwidth that it uses, which a plain loop measures in the same run; more than 1 is better than that loop.
All computes in one thread, by whose processor time it is measured, so that what else runs on the machine takes little
part. For one row weights lie in copies that no cache holds; all kinds take turns, and the best of some rounds counts.
Numbers do not matter to the time, and all are the same here.

`--save` keeps the figures in benchmarks/results/; docs/cpu-performance.md shows them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kernels.cpu.library import library
from kernels.cpu.products.layer_product import Product
from kernels.cpu.products.packed_weight import packed_shape
from kernels.cpu.products.records import Codes, Offset, Records, RecordWeight, Scale
from kernels.int8_weight import GROUP, PANEL
from octavo.bench import machine

RESULTS = Path(__file__).parent / "results"
SHAPES = {"SmolLM2-135M": [(3072, 576), (576, 1536)], "Qwen3-0.6B": [(6144, 1024), (1024, 3072)]}
ROWS = (1, 32)
_BYTES = 80 << 20  # of a kind's copies, far more than a core's share of the caches
_ROUNDS = 12
_AHEAD_BYTES = (0, 1024, 4096)  # that are asked for before they are read
_BYTE = 0x22  # of all weights: a small number in every type


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a weight is kept in, and of what type rows are. Without records: a float type, pairs (uint32) or int8."""

    name: str
    kept_in: Records | torch.dtype
    are_rows_rounded: bool = False
    rows: torch.dtype = torch.float32

    def product(self, out_features: int, in_features: int) -> Product:
        """One with a weight of its own."""
        if isinstance(self.kept_in, Records):
            packed = _filled(*self.kept_in.packed_shape(out_features, in_features))
            weight = RecordWeight(self.kept_in, packed, out_features, in_features)
            return Product.of_records(weight, None, are_rows_rounded=self.are_rows_rounded)
        if self.are_rows_rounded:
            shape = -(-out_features // PANEL), -(-in_features // GROUP), GROUP // 4, PANEL, 4
            return Product.of_int8(_filled(*shape), torch.ones(out_features), None, in_features)
        inputs = in_features // 2 if self.kept_in == torch.uint32 else in_features
        panels, *line, last = packed_shape(self.kept_in, out_features, inputs)
        packed = _filled(panels, *line, last * self.kept_in.itemsize).view(self.kept_in)
        return Product.of_floats(packed, None, out_features, in_features)


_GGUF_SCALE, _ZERO = Scale.FLOAT16, Offset.ZERO
KINDS = [
    Kind("float32", torch.float32),
    Kind("bfloat16", torch.bfloat16),
    Kind("`--quantization int8`", torch.int8, are_rows_rounded=True),
    Kind("`--quantization int4`", Records(Codes.UINT4, _GGUF_SCALE, Offset.FLOAT16, 32), are_rows_rounded=True),
    Kind("`--quantization int4-128`", Records(Codes.UINT4, _GGUF_SCALE, Offset.FLOAT16, 128), are_rows_rounded=True),
    Kind("Q4_0", Records(Codes.INT4, _GGUF_SCALE, Offset.NOTHING, 32)),
    Kind("Q4_K", Records(Codes.UINT4, Scale.FACTOR, Offset.FACTOR, 32)),
    Kind("AWQ, GPTQ, groups of 128", Records(Codes.UINT4, _GGUF_SCALE, _ZERO, 128)),
    Kind("Q6_K", Records(Codes.INT8, Scale.FACTOR, Offset.NOTHING, 16)),
    Kind("Q8_0", Records(Codes.INT8, _GGUF_SCALE, Offset.NOTHING, 32)),
    Kind("fp8, blocks of 128", Records(Codes.E4M3, Scale.FLOAT32, Offset.NOTHING, 128)),
    Kind("bfloat16, rows of bfloat16", torch.uint32, rows=torch.bfloat16),
    Kind("Q4_0, rows of bfloat16", Records(Codes.INT4, _GGUF_SCALE, Offset.NOTHING, 32), rows=torch.bfloat16),
    Kind("Q4_K, rows of bfloat16", Records(Codes.UINT4, Scale.FACTOR, Offset.FACTOR, 32), rows=torch.bfloat16),
    Kind("Q6_K, rows of bfloat16", Records(Codes.INT8, Scale.FACTOR, Offset.NOTHING, 16), rows=torch.bfloat16),
    Kind("Q4_0, rounded rows", Records(Codes.INT4, _GGUF_SCALE, Offset.NOTHING, 32), are_rows_rounded=True),
    Kind("Q4_K, rounded rows", Records(Codes.UINT4, Scale.FACTOR, Offset.FACTOR, 32), are_rows_rounded=True),
    Kind("AWQ, GPTQ, rounded rows", Records(Codes.UINT4, _GGUF_SCALE, _ZERO, 128), are_rows_rounded=True),
    Kind("Q6_K, rounded rows", Records(Codes.INT6, Scale.FACTOR, Offset.NOTHING, 16), are_rows_rounded=True),
    Kind("Q8_0, rounded rows", Records(Codes.QUADS, _GGUF_SCALE, Offset.NOTHING, 32), are_rows_rounded=True),
]


def _filled(*shape: int) -> torch.Tensor:
    return torch.full(shape, _BYTE, dtype=torch.uint8)


def measure(out_features: int, in_features: int, rounds: int) -> list[dict[str, Any]]:
    """All kinds for one shape: bits a number, microseconds by rows, and bandwidth that one row uses over what there
    is."""
    fitting = [kind for kind in KINDS if _fits(kind, in_features)]
    products = {}
    for kind in fitting:
        first = kind.product(out_features, in_features)
        copies = max(1, _BYTES // first.weight_bytes)
        products[kind.name] = [first, *(kind.product(out_features, in_features) for _ in range(copies))]
    rows = {
        (kind.rows, count): [torch.ones(count, size, dtype=kind.rows) for size in (in_features, out_features)]
        for kind in fitting
        for count in ROWS
    }
    best = {(kind.name, count): float("inf") for kind in fitting for count in ROWS}
    numbers, read_s = _filled(_BYTES), float("inf")
    for _ in range(rounds):
        for kind in fitting:
            for count in ROWS:
                x, out = rows[kind.rows, count]
                some = products[kind.name] if count == 1 else products[kind.name][:2]
                started = time.thread_time()
                for product in some:
                    product.multiply(out, x)
                best[kind.name, count] = min(best[kind.name, count], (time.thread_time() - started) / len(some))
        for ahead in _AHEAD_BYTES:
            started = time.thread_time()
            library().read_memory(numbers.data_ptr(), numbers.nbytes, 1, ahead)
            read_s = min(read_s, time.thread_time() - started)
    bytes_per_s = numbers.nbytes / read_s
    found = []
    for kind in fitting:
        num_bytes = products[kind.name][0].weight_bytes
        found.append(
            {
                "kind": kind.name,
                "bits": num_bytes * 8 / (out_features * in_features),
                "us": {count: best[kind.name, count] * 1e6 for count in ROWS},
                "of_bandwidth": num_bytes / best[kind.name, 1] / bytes_per_s,
            }
        )
    return found


def _fits(kind: Kind, in_features: int) -> bool:
    if kind.rows == torch.bfloat16 and not library().has_pairs:
        return False
    return not isinstance(kind.kept_in, Records) or in_features % kind.kept_in.inputs == 0 or kind.kept_in.group > 32


def report(result: dict[str, Any]) -> str:
    """Markdown: a table a model."""
    parts = [
        f"{result['date']}, {result['machine']['cpu']}, one thread: microseconds by rows, and of a core's bandwidth "
        f"what one row uses"
    ]
    for model, shapes in result["shapes"].items():
        header = ["weight", "bits"]
        for shape in shapes:
            header += [f"{shape}, 1 row", "of bandwidth", "32 rows"]
        lines = ["| " + " | ".join(header) + " |", "| " + " | ".join(["---"] * len(header)) + " |"]
        by_kind = {kind.name: [_found(rows, kind.name) for rows in shapes.values()] for kind in KINDS}
        for name, cells in by_kind.items():
            bits = next((found["bits"] for found in cells if found), None)
            if bits is not None:
                line = [name, f"{bits:.2f}"]
                for found in cells:
                    line += _cells(found)
                lines.append("| " + " | ".join(line) + " |")
        parts.append(f"{model}:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _found(rows: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((row for row in rows if row["kind"] == name), None)


def _cells(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["-"] * 3
    times = {int(count): us for count, us in found["us"].items()}
    return [f"{times[1]:.0f}", f"{found['of_bandwidth']:.2f}", f"{times[32]:.0f}"]


def main() -> int:
    """Prints tables."""
    parser = argparse.ArgumentParser(description="Times products on a CPU by what their weights are kept in.")
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine.describe(),
        "shapes": {
            model: {f"{n} x {k}": measure(n, k, arguments.rounds) for n, k in shapes}
            for model, shapes in SHAPES.items()
        },
    }
    print(report(result))
    if arguments.save:
        path = RESULTS / f"{result['date']}-product-speed-{machine.slug(machine.describe())}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"kept in {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
