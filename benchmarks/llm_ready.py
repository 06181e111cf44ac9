"""How long a script waits for its `LLM`: `python -m benchmarks.llm_ready` (half a minute, two idle cores).

Each round is a Python process of its own, from the first import to an `LLM` that is ready, and to the first token.
Kernels are compiled before, as `make setup` does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from statistics import median

from octavo.bench import machine

PROGRAM = """
import json, sys, time
begun = time.perf_counter()
from octavo import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    times = [time.perf_counter() - begun]
    llm.generate("The sea is", SamplingParams(max_tokens=1), use_tqdm=False)
    times.append(time.perf_counter() - begun)
    print(json.dumps(times))
"""


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Measures how long a script waits for its LLM.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print(json.dumps(machine.describe()))
    rounds = [measure(arguments.model) for _ in range(arguments.rounds)]
    for what, seconds in zip(("ready", "first token"), zip(*rounds, strict=True), strict=True):
        print(f"{what}: {median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})")
    return 0


def measure(model: str) -> tuple[float, float]:
    """Seconds until it is ready, and until the first token. Raises CalledProcessError."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, model], stdout=subprocess.PIPE, text=True, check=True)
    ready, first_token = json.loads(done.stdout)
    return ready, first_token


if __name__ == "__main__":
    sys.exit(main())
