"""What the processor has that kernels are compiled for: this machine's, or the one that numba was told of.

`NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` together compile for another processor than this one (`tests/isa.py` does);
code that chose its instructions by this machine's would not run there.
"""

from __future__ import annotations

from functools import cache

import numba.core.config as settings
from llvmlite import binding


@cache
def features() -> frozenset[str]:
    """Names as LLVM has them, such as avx512f; those that numba was told are all, as numba adds none to them."""
    if settings.CPU_FEATURES is not None:
        return frozenset(name[1:] for name in settings.CPU_FEATURES.split(",") if name.startswith("+"))
    own = frozenset(name for name, has in binding.get_host_cpu_features().items() if has)
    return own if settings.ENABLE_AVX else frozenset(name for name in own if not name.startswith("avx"))


HAS_WIDE_REGISTERS = "avx512f" in features()  # 32 of 16 float32 numbers; else 16 of 8 or fewer
HAS_PAIRS = HAS_WIDE_REGISTERS and "avx512bf16" in features()  # products of two bfloat16 numbers at a time
