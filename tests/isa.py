"""Runs tests as another processor would: `python -m tests.isa PROFILE [PYTEST ARGUMENT ...]`, or `all` for one by one.

torch, oneDNN, MKL and the library of CPU kernels each have a variable that takes instructions away from them; a profile
sets all of them. Instructions that this machine lacks cannot be made up, but for AMX's tiles, which the library of CPU
kernels emulates; no promise of Octavo rests on the products of others (`tests/worker/test_batch_invariant.py`).
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.instruction_sets import SETS
from kernels.cpu.native.build import EMULATED

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_TESTS = ["tests/kernels", "tests/worker"]
PROFILES = {**SETS, EMULATED: dataclasses.replace(SETS["avx2"], level=EMULATED)}


def environment(name: str) -> dict[str, str]:
    """The variables of a process that computes as if on that processor."""
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return {**os.environ, **PROFILES[name].variables(), "OMP_NUM_THREADS": threads}


def run(name: str, arguments: list[str]) -> int:
    """pytest's exit status, 0 where the profile is skipped."""
    if missing := PROFILES[name].lacking():
        print(f"{name}: skipped, as this processor has no {', '.join(missing)}", flush=True)
        return 0
    print(f"{name}:", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", *(arguments or DEFAULT_TESTS)]
    return subprocess.run(command, cwd=ROOT, env=environment(name)).returncode


def main() -> int:
    """The worst of the profiles' exit statuses."""
    name, *arguments = sys.argv[1:] or ["all"]
    if name != "all" and name not in PROFILES:
        print(f"no profile {name!r}: {', '.join(PROFILES)}, all", file=sys.stderr)
        return 2
    return max(run(one, arguments) for one in (PROFILES if name == "all" else [name]))


if __name__ == "__main__":
    sys.exit(main())
