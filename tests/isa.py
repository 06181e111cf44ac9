"""Runs tests as another processor would: `python -m tests.isa PROFILE [PYTEST ARGUMENT ...]`, or `all` for one by one.

torch, oneDNN, MKL and the library of CPU kernels each have a variable that takes instructions away from them; a profile
sets all of them. Instructions that this machine lacks cannot be made up, but for AMX's tiles, which the library of CPU
kernels emulates; no promise of Octavo rests on the products of others (`tests/worker/test_batch_invariant.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kernels.cpu.native.build import EMULATED, LEVELS, processor_features

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_TESTS = ["tests/kernels", "tests/worker"]
# Level of `kernels.cpu.native.build` -> what ATen may use, what oneDNN may, what MKL may.
PROFILES = {
    "avx2": ("avx2", "AVX2", "AVX2"),
    EMULATED: ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "avx512-bf16": ("avx512", "AVX512_CORE_BF16", "AVX512"),
}


def lacking(name: str) -> list[str]:
    """What of the profile this machine does not have itself."""
    return sorted(LEVELS[name].needs - processor_features())


def environment(name: str) -> dict[str, str]:
    """The variables of a process that computes as if on that processor."""
    aten, onednn, mkl = PROFILES[name]
    return {
        **os.environ,
        "KERNELS_CPU_LEVEL": name,
        "ATEN_CPU_CAPABILITY": aten,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def run(name: str, arguments: list[str]) -> int:
    """pytest's exit status, 0 where the profile is skipped."""
    if missing := lacking(name):
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
