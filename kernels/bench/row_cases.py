"""Norms, activations and rotary embedding over the rows of a batch: bound by memory, beside PyTorch's own operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from kernels.bench.case import Calls, Case, Goal, Setting
from kernels.bench.shapes import HEAD_SIZE, HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS
from kernels.gpu.operations import clamped_swiglu, gelu, gelu_and_mul, layer_norm, rms_norm, rotary, silu_and_mul

_TOKENS = (256, 4096, 16384)
_POSITIONS = 8192
_GOAL_TOKENS = 4096  # from here on a launch no longer counts
_EPS = 1e-5


def cases(setting: Setting) -> Iterator[Case]:
    """Every operation by number of tokens."""
    hidden, intermediate = (40, 48) if setting.is_tiny else (HIDDEN, INTERMEDIATE)
    # Operation, width of its rows, how many of them are read and written for a token, its calls.
    operations: tuple[tuple[str, int, int, Callable[[Setting, int, int], Calls]], ...] = (
        ("rms_norm", hidden, 4, _rms_norm),
        ("layer_norm", hidden, 4, _layer_norm),
        ("silu_and_mul", intermediate, 3, _silu_and_mul),
        ("clamped_swiglu", intermediate, 3, _clamped_swiglu),
        ("gelu_and_mul", intermediate, 3, _gelu_and_mul),
        ("gelu", intermediate, 2, _gelu),
        ("rotary", (NUM_HEADS + NUM_KV_HEADS) * HEAD_SIZE, 2, _rotary),
    )
    for op, size, moved, calls in operations:
        for num_tokens in (3,) if setting.is_tiny else _TOKENS:
            yield Case(
                op,
                shape=f"{num_tokens:,} x {size:,}",
                num_bytes=num_tokens * moved * size * setting.dtype.itemsize,
                build=functools.partial(calls, setting, num_tokens, size),
                goal=Goal(0.8) if num_tokens >= _GOAL_TOKENS else None,
            )


def _normal(setting: Setting, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=setting.dtype, device=setting.device)


def _rms_norm(setting: Setting, num_tokens: int, size: int) -> Calls:
    x, residual, out = _normal(setting, 3, num_tokens, size)
    weight = _normal(setting, size)

    def ours() -> None:  # the residual grows from call to call: nothing to compare
        rms_norm(out, x, weight, eps=_EPS, residual=residual)

    def plain() -> None:
        residual.add_(x)
        functional.rms_norm(residual, (size,), weight, _EPS)

    return Calls(ours, {"add, rms_norm": plain})


def _layer_norm(setting: Setting, num_tokens: int, size: int) -> Calls:
    x, residual, out = _normal(setting, 3, num_tokens, size)
    weight, bias = _normal(setting, 2, size)

    def ours() -> None:
        layer_norm(out, x, weight, bias, eps=_EPS, residual=residual)

    def plain() -> None:
        residual.add_(x)
        functional.layer_norm(residual, (size,), weight, bias, _EPS)

    return Calls(ours, {"add, layer_norm": plain})


def _silu_and_mul(setting: Setting, num_tokens: int, size: int) -> Calls:
    x = _normal(setting, num_tokens, 2 * size)
    gate, up = x.chunk(2, dim=-1)
    out = torch.empty(num_tokens, size, dtype=setting.dtype, device=setting.device)

    def ours() -> torch.Tensor:
        silu_and_mul(out, x)
        return out

    return Calls(ours, {"silu and mul": lambda: functional.silu(gate) * up})


def _clamped_swiglu(setting: Setting, num_tokens: int, size: int) -> Calls:
    x = _normal(setting, num_tokens, 2 * size)
    gate, up = x.chunk(2, dim=-1)
    out = torch.empty(num_tokens, size, dtype=setting.dtype, device=setting.device)

    def ours() -> torch.Tensor:
        clamped_swiglu(out, x, alpha=1.702, limit=7.0)
        return out

    def plain() -> torch.Tensor:
        cut = gate.clamp(max=7.0)
        return (up.clamp(-7.0, 7.0) + 1) * cut * torch.sigmoid(1.702 * cut)

    return Calls(ours, {"clamp, sigmoid and mul": plain})


def _gelu_and_mul(setting: Setting, num_tokens: int, size: int) -> Calls:
    x = _normal(setting, num_tokens, 2 * size)
    gate, up = x.chunk(2, dim=-1)
    out = torch.empty(num_tokens, size, dtype=setting.dtype, device=setting.device)

    def ours() -> torch.Tensor:
        gelu_and_mul(out, x, is_approximate=True)
        return out

    return Calls(ours, {"gelu and mul": lambda: functional.gelu(gate, approximate="tanh") * up})


def _gelu(setting: Setting, num_tokens: int, size: int) -> Calls:
    x = _normal(setting, num_tokens, size)
    out = torch.empty_like(x)

    def ours() -> torch.Tensor:
        gelu(out, x, is_approximate=True)
        return out

    return Calls(ours, {"gelu": lambda: functional.gelu(x, approximate="tanh")})


def _rotary(setting: Setting, num_tokens: int, size: int) -> Calls:
    device = setting.device
    angles = torch.rand(_POSITIONS, HEAD_SIZE // 2, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(_POSITIONS, (num_tokens,), device=device)
    heads = _normal(setting, num_tokens, size // HEAD_SIZE, HEAD_SIZE)
    query, key = heads[:, :NUM_HEADS], heads[:, NUM_HEADS:]  # as they come out of one product

    def ours() -> None:  # heads are turned in place, further with each call
        rotary(query, key, positions, cos_sin)

    def plain() -> None:
        cos, sin = (part[:, None, :] for part in cos_sin[positions].to(setting.dtype).chunk(2, dim=-1))
        x1, x2 = heads.chunk(2, dim=-1)
        heads.copy_(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1))

    return Calls(ours, {"cat of halves": plain})
