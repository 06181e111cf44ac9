"""Runs tests as another processor would: `python -m tests.isa PROFILE [PYTEST ARGUMENT ...]`, or `all` for one by one.

torch, oneDNN, MKL and numba each have a variable that takes instructions away from them; a profile sets all of them,
and keeps what is compiled for it apart. Instructions that this machine lacks cannot be made up: there is no profile of
AMX. It needs none, as no promise of Octavo rests on a library's products (`tests/worker/test_batch_invariant.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from llvmlite import binding

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_TESTS = ["tests/kernels", "tests/worker"]
_AVX2 = (
    "+64bit,+cmov,+cx8,+cx16,+fxsr,+mmx,+sahf,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+crc32,+xsave,+xsaveopt,"
    "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+pclmul,+aes"
)
_AVX512 = f"{_AVX2},+avx512f,+avx512cd,+avx512bw,+avx512dq,+avx512vl"
_BFLOAT16 = f"{_AVX512},+avx512vnni,+avx512bf16"
# Name -> LLVM's processor, its features, what ATen may use, what oneDNN may, what MKL may.
PROFILES = {
    "avx2": ("haswell", _AVX2, "avx2", "AVX2", "AVX2"),
    "avx512": ("skylake-avx512", _AVX512, "avx512", "AVX512_CORE", "AVX512"),
    "avx512-bf16": ("cooperlake", _BFLOAT16, "avx512", "AVX512_CORE_BF16", "AVX512"),
}


def lacking(name: str) -> list[str]:
    """What of the profile this machine does not have itself."""
    own = binding.get_host_cpu_features()
    return [feature for feature in PROFILES[name][1].replace("+", "").split(",") if not own.get(feature)]


def environment(name: str) -> dict[str, str]:
    """The variables of a process that computes as if on that processor."""
    cpu, features, aten, onednn, mkl = PROFILES[name]
    return {
        **os.environ,
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(ROOT / ".pytest_cache" / f"kernels-{name}"),
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
    (ROOT / ".pytest_cache").mkdir(exist_ok=True)
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
