"""Every operation's cases, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.bench import (
    attention_cases,
    cache_cases,
    latent_cases,
    lora_cases,
    matrix_cases,
    quantized_cases,
    row_cases,
    sampling_cases,
)
from kernels.bench.case import Case, Setting

_MODULES = (
    attention_cases,
    latent_cases,
    sampling_cases,
    cache_cases,
    row_cases,
    matrix_cases,
    quantized_cases,
    lora_cases,
)


def cases(setting: Setting, op: str | None = None) -> Iterator[Case]:
    """Those of one operation, or all. Raises ValueError where `op` names none."""
    found = [case for module in _MODULES for case in module.cases(setting)]
    names = list(dict.fromkeys(case.op for case in found))
    if op is not None and op not in names:
        raise ValueError(f"no operation is called {op!r}; there are {', '.join(names)}")
    return (case for case in found if op in (None, case.op))
