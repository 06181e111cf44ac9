"""Low-rank adapters, each row with one of several: bound by memory, beside products of gathered weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kernels.bench.case import Calls, Case, Setting
from kernels.bench.shapes import HIDDEN
from kernels.gpu.lora import num_segments
from kernels.gpu.operations import lora_expand, lora_shrink

_TOKENS = (16, 256, 4096)
_GATHERED_TOKENS = 256  # for more, the gathered weights of rank 16 alone would be a gigabyte
_ADAPTERS, _RANK = 16, 16


def cases(setting: Setting) -> Iterator[Case]:
    """By number of tokens; rank and number of adapters are fixed."""
    size = 40 if setting.is_tiny else HIDDEN
    for num_tokens in (5,) if setting.is_tiny else _TOKENS:
        yield _lora(setting, num_tokens, size)


def _lora(setting: Setting, num_tokens: int, size: int) -> Case:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=setting.dtype, device=setting.device)

    def build() -> Calls:
        x, out = normal(num_tokens, size), normal(num_tokens, size)
        a, b = normal(_ADAPTERS, _RANK, size) / size**0.5, normal(_ADAPTERS, size, _RANK)
        adapters = torch.randint(_ADAPTERS, (num_tokens,), dtype=torch.int32, device=setting.device)
        scales = torch.ones(_ADAPTERS, device=setting.device)
        between = torch.empty(num_segments(size), num_tokens, _RANK, device=setting.device)

        def ours() -> None:  # `out` grows from call to call: nothing to compare
            lora_shrink(between, x, a, adapters)
            lora_expand(out, between, b, adapters, scales)

        def gathered() -> None:
            low = torch.bmm(a[adapters], x[:, :, None])
            out.add_(torch.bmm(b[adapters], low)[:, :, 0])

        of_adapters = [(adapters == adapter).nonzero().squeeze(1) for adapter in range(_ADAPTERS)]

        def one_by_one() -> None:
            for rows, shrink, expand in zip(of_adapters, a, b, strict=True):
                out.index_add_(0, rows, x[rows] @ shrink.T @ expand.T)

        peers: dict[str, Callable[[], None]] = {"matmul an adapter": one_by_one}
        if num_tokens <= _GATHERED_TOKENS:
            peers["gather, bmm"] = gathered
        return Calls(ours, peers)

    adapter_elements = min(_ADAPTERS, num_tokens) * _RANK * 2 * size
    return Case(
        op="lora",
        shape=f"{num_tokens:,} x {size:,}, {_ADAPTERS} adapters of rank {_RANK}",
        num_bytes=(num_tokens * 3 * size + adapter_elements) * setting.dtype.itemsize,
        flops=2 * num_tokens * _RANK * 2 * size,
        build=build,
    )
