"""Whether OpenVINO's float32 products keep to a set of instructions: `python -m benchmarks.openvino_limits DIR`.

DIR is the folder of virtual environments of `benchmarks.peers`. One product of 32 rows by a weight of 3,072 x 1,024, in
one thread, with and without the limit to AVX2: where both are as fast, there is no limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.instruction_sets import SETS
from octavo.bench import machine

_SCRIPT = """
import time
import numpy
import openvino
from openvino import opset13

rows, outputs, inputs = 32, 3072, 1024
x = opset13.parameter([rows, inputs], numpy.float32)
weight = opset13.constant(numpy.random.default_rng(0).standard_normal((outputs, inputs), numpy.float32))
model = openvino.Model([opset13.matmul(x, weight, False, True)], [x])
options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
request = openvino.Core().compile_model(model, "CPU", options).create_infer_request()
numbers, best = numpy.ones((rows, inputs), numpy.float32), float("inf")
for _ in range(50):
    started = time.perf_counter()
    request.infer([numbers])
    best = min(best, time.perf_counter() - started)
print(2 * rows * outputs * inputs / best / 1e9)
"""


def main() -> int:
    """Prints a line for each; exit code 2 without DIR."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    python = Path(sys.argv[1]) / "openvino/bin/python"
    print(machine.describe()["cpu"])
    for name, variables in (("no limit", {}), ("AVX2", SETS["avx2"].variables())):
        output = subprocess.check_output([python, "-c", _SCRIPT], env={**os.environ, **variables}, text=True)
        print(f"{name}: {float(output.split()[-1]):.0f} GFLOP/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
