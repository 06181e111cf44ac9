"""Triton's interpreter without what it does again and again: a fourth of its time.

At a launch it puts its own operations into `triton.language`, and at each call of a function inside the kernel it looks
through all names there for operations that it has yet to replace. There are none, but for those of a module that
neither the kernel nor a function before saw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

Patch = Callable[[Any], Any]


def install() -> None:
    """For this process, once."""
    if not isinstance(interpreter._patch_lang, _PatchOnce):
        interpreter._patch_lang = _PatchOnce(interpreter._patch_lang)


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
