"""What a GPU worker launches in a step, counted by `benchmarks.gpu_host_time` under a driver that launches nothing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys


def test_launches_of_a_mixed_step() -> None:
    """In a process where Triton's interpreter is off."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu_host_time", "--steps", "1", "--step", "mixed", "--verbose"]
    command += ["--model", "Qwen3 0.6B", "--model", "Mixtral 8x7B"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("    {'")]
    eager_qwen, _, graph_qwen, _, eager_mixtral, operators, graph_mixtral, _ = told
    assert graph_qwen == graph_mixtral == {"graph": 2}, "one of the pass, one of sampling"
    # Norms of a layer and the last one: those of heads are part of the rotation.
    assert eager_qwen["rms_norm"] == 2 * 28 + 1 and eager_qwen["rotary_and_cache"] == 28
    assert eager_mixtral["choose"] == eager_mixtral["place"] == eager_mixtral["combine"] == 32
    assert operators["linear"] == 3 * 32 + 1 and sum(operators.values()) < 3 * 32 + 30, (
        "products, and what is done once a step"
    )
