"""A kernel bound to all that it is launched with but tensors, so that a launch is one call and checks nothing.

Triton's own `kernel[grid](...)` finds out at each launch what it has to be compiled for: six to seven microseconds of
the host, and checks of arguments take as long again. A step without a graph launches the same few kernels in every
layer, over tensors that are laid out alike. So an operation is checked and bound once a layout:

    @once_a_layout
    def _bound(out, x, eps):               checks; raises ValueError
        return Launch(_kernel, grid, numbers, SIZE=..., num_warps=...)

    def operation(out, x, *, eps):
        tensors = out, x
        _bound(tensors, eps)(*tensors)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

B = TypeVar("B")

_MOST_KNOWN = 64  # layouts of an operation: a step has one or two, and the next step may have others
_ALIGNMENT = 16  # bytes: addresses that divide by it, and others, are compiled for apart


class Launch:
    """Calls launch the kernel on tensors that are laid out as those of the first call; with an empty grid, nothing."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: Sequence[float], **constants: Any) -> None:
        """`kernel` under `triton.jit` takes tensors, `numbers`, then constants, among which options of the compiler may
        be: `num_warps`."""
        self._kernel, self._grid, self._is_empty = kernel, grid, 0 in grid
        self._numbers, self._constants = numbers, constants
        self._compiled: Callable[..., None] | None = None
        self._rest: list[Any] = []

    def __call__(self, *tensors: torch.Tensor | TensorDescriptor | float | None) -> None:
        """Tensors in the order of the kernel's parameters. A float may be among them, for whose value no kernel is
        compiled, and descriptors of tensors' tiles, whose sizes are those of the first call."""
        if self._compiled is not None:
            self._compiled(*tensors, *self._rest)
        elif not self._is_empty:
            compiled = self._kernel[self._grid](*tensors, *self._numbers, **self._constants)
            if compiled is not None:  # which it is under the interpreter
                names = self._kernel.arg_names[len(tensors) + len(self._numbers) :]
                self._rest = [*self._numbers, *[self._constants[name] for name in names]]
                self._compiled = compiled[(*self._grid, 1, 1)[:3]]


def once_a_layout(bind: Callable[..., B]) -> Callable[..., B]:
    """(tensors, *options) to what `bind(*tensors, *options)` returns, which is called once for tensors of the same
    shapes, strides, types and devices and the same options, and so may not keep a tensor."""
    known: dict[Hashable, B] = {}

    @wraps(bind)
    def bound(tensors: Sequence[torch.Tensor | None], *options: Hashable) -> B:
        key = (options, *[None if x is None else _layout(x) for x in tensors])
        found = known.get(key)
        if found is None:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            found = known[key] = bind(*tensors, *options)
        return found

    return bound


def _layout(x: torch.Tensor) -> Hashable:
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % _ALIGNMENT
