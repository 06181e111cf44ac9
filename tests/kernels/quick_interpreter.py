"""Triton's interpreter without what it does again and again: two thirds of its time.

At a launch it puts its own operations into `triton.language`, and at each call of a function inside the kernel it looks
through all names there for operations that it has yet to replace. There are none, but for those of a module that
neither the kernel nor a function before saw. For every value it makes its type and its shape anew, and a table
of all types to find numpy's. Every sum of integers is computed twice, and each constant is made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Patch = Callable[[Any], Any]


def install() -> None:
    """For this process, once."""
    if not isinstance(interpreter._patch_lang, _PatchOnce):
        interpreter._patch_lang = _PatchOnce(interpreter._patch_lang)
        interpreter._get_np_dtype = _QuickTypes(interpreter._get_np_dtype)
        tl.tensor.__init__ = _init_tensor
        tl.block_type.__init__ = _quick_blocks(tl.block_type.__init__)
        semantic = type(interpreter.interpreter_semantic)
        semantic.binary_op_sanitize_overflow_impl = _check_nothing
        semantic.binary_op_type_checking_impl = _quick_operands(semantic.binary_op_type_checking_impl)
        semantic.computation_type_impl = _type_once(semantic.computation_type_impl)
        semantic.scalar_constant = _constant_once(semantic.scalar_constant)


class _PatchOnce:
    """Takes a function and returns what undoes the patch, which the interpreter asks of a launch alone."""

    def __init__(self, patch: Patch) -> None:
        self._patch = patch
        self._patched: set[int] = set()  # ids of modules, during a launch

    def __call__(self, function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        is_launch = not self._patched
        if not is_launch and seen <= self._patched:
            return None
        self._patched |= seen
        scope = self._patch(function)
        if is_launch:
            restore = scope.restore

            def restore_all() -> None:
                self._patched.clear()
                restore()

            scope.restore = restore_all
        return scope


class _QuickTypes:
    """numpy's type of Triton's: that of its scalar."""

    def __init__(self, find: Callable[[Any], np.dtype[Any]]) -> None:
        self._find = find
        self._found: dict[str, np.dtype[Any]] = {}

    def __call__(self, dtype: Any) -> np.dtype[Any]:
        scalar = dtype.scalar
        if (found := self._found.get(scalar.name)) is None:
            found = self._found[scalar.name] = self._find(scalar)
        return found


def _quick_blocks(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Types of blocks: each checked and named once."""
    known: dict[tuple[Any, ...], tuple[Any, int, str]] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[size.value if isinstance(size, tl.constexpr) else size for size in shape]
        if key in known:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known[key]
        else:
            init(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name

    return init_block


@cache
def _shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """As Triton's values hold it, and its product."""
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(prod(shape))


def _init_tensor(self: Any, handle: Any, dtype: Any) -> None:
    self.handle, self.type, self.dtype = handle, dtype, dtype.scalar
    self.shape, self.numel = _shape(tuple(dtype.shape) if dtype.is_block() else ())


def _check_nothing(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
    """Integers are computed again in 64 bits, for an assertion on which nobody looks but with `debug`."""
    assert not self.builder.options.debug


def _quick_operands(find: Callable[..., Any]) -> Callable[..., Any]:
    """Two numbers of one type and shape are what an operation takes; quotients of halves alone are of another type."""

    def operands(self: Any, lhs: Any, rhs: Any, *rules: bool, **more_rules: bool) -> Any:
        if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.type == rhs.type:
            scalar = lhs.dtype
            if not (scalar.is_ptr() or scalar.is_fp16() or scalar.is_bf16()):
                return lhs, rhs
        return find(self, lhs, rhs, *rules, **more_rules)

    return operands


def _type_once(find: Callable[..., Any]) -> Callable[..., Any]:
    """What an operation on two types computes in."""
    found: dict[tuple[Any, ...], Any] = {}

    def computation_type(self: Any, lhs: Any, is_lhs_scalar: bool, rhs: Any, is_rhs_scalar: bool, divides: bool) -> Any:
        key = lhs.name, is_lhs_scalar, rhs.name, is_rhs_scalar, divides
        if key not in found:
            found[key] = find(self, lhs, is_lhs_scalar, rhs, is_rhs_scalar, divides)
        return found[key]

    return computation_type


def _constant_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """A number of the kernel's text, which no operation writes to."""
    made: dict[tuple[Any, ...], Any] = {}

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = value, dtype.name
        if key not in made:
            made[key] = make(self, value, dtype)
        return made[key]

    return scalar_constant
