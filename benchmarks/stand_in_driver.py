"""Triton without a GPU: launchers run as they would, and in place of a launch something is counted.

The driver says that it is a Hopper GPU. Triton's own Python runs whole: it binds arguments, finds out types and
alignments, and looks for the compiled kernel. None is compiled, and what a launch would write stays as it was. A real
launch takes another one to three microseconds, in the driver.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

# Operators that only describe memory: they launch nothing on a GPU.
_VIEWS = {"alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty", "permute"}
_VIEWS |= {"select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"}
_VIEWS |= {
    "_unsafe_view",
    "_reshape_alias",
    "chunk",
    "lift_fresh",
    "resolve_conj",
    "resolve_neg",
    "unflatten",
    "flatten",
    "mT",
}


class StandInDriver:
    """What `triton.runtime` asks of a driver at a launch."""

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Hopper."""
        return GPUTarget("cuda", 90, 32)


class Launches:
    """What has been launched since `clear`, by name, and the seconds that Triton's Python took for it."""

    def __init__(self) -> None:
        self.triton: Counter[str] = Counter()
        self.torch: Counter[str] = Counter()
        self.triton_s = 0.0

    def clear(self) -> None:
        """Forgets."""
        self.triton.clear()
        self.torch.clear()
        self.triton_s = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Operators of torch are counted, too, and launches of Triton timed: both make what is watched slower."""
        run = JITFunction.run

        def timed(*args: Any, **options: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return run(*args, **options)
            finally:
                self.triton_s += time.perf_counter() - started_s

        with _Operators(self.torch), mock.patch.object(JITFunction, "run", timed):
            yield


class _Operators(TorchDispatchMode):
    """Counts operators that would launch something."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if name not in _VIEWS and not (name in ("to", "contiguous", "reshape") and result is args[0]):
            self._counts[name] += 1
        return result


class _CountedKernel(CompiledKernel):  # type: ignore[misc]  # Triton has no types
    """In place of a compiled kernel, which is launched as one is."""

    def __init__(self, launches: Launches, name: str, zeroes_first: bool) -> None:
        self._launches, self._zeroes_first = launches, zeroes_first
        self.name, self.src = name, None
        self.module = self.function = self.packed_metadata = ()  # nothing has to be loaded
        self._run = self._count

    def _count(self, *args: Any) -> None:
        """The launch."""
        self._launches.triton[self.name] += 1
        if self._zeroes_first:
            args[9].zero_()  # after the grid, stream, function, metadata and hooks: the kernel's own first argument


@contextmanager
def stand_in() -> Iterator[Launches]:
    """Triton's launches are counted from here on; `_draw_kernel` draws token 0, which is one of any vocabulary."""
    launches = Launches()

    def compiled(function: Any, key: Any, signature: Any, device: int, *rest: Any) -> _CountedKernel:
        name = function.fn.__name__
        kernel = _CountedKernel(launches, name.strip("_").removesuffix("_kernel"), name == "_draw_kernel")
        function.device_caches[device][0][key] = kernel
        return kernel

    driver.set_active(StandInDriver())  # as much of a driver as a launch needs
    with mock.patch.object(JITFunction, "_do_compile", compiled), torch.inference_mode():
        yield launches
