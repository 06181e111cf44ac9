"""The compiled library of CPU kernels: found or compiled, loaded, and declared.

Its functions are plain C and are called by ctypes, which lets go of the interpreter's lock. They are handed addresses,
strides and shapes; who calls them checks these first. KERNELS_CPU_LEVEL names another level of instructions than the
best that this processor has (`native.build.LEVELS`), KERNELS_CPU_LIBRARY the file itself, as `make sanitize` does.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels.cpu.native import build

_LEVEL, _LIBRARY = "KERNELS_CPU_LEVEL", "KERNELS_CPU_LIBRARY"
_I64, _FLOAT, _PLACE = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_DECLARED = {
    "octavo_multiply": (None, [_PLACE, _I64, _PLACE, _I64, _PLACE, _I64, _I64, _I64]),
    "octavo_pack_few_bits": (_I64, [_PLACE, _PLACE, *[_I64] * 8]),
    "octavo_quantize_four_bits": (None, [_PLACE, _PLACE, *[_I64] * 6]),
    "octavo_paged_attention": (None, [_PLACE, _I64]),
    "octavo_rms_norm": (None, [_I64, _PLACE, _PLACE, _PLACE, _PLACE, _I64, _I64, _FLOAT, _FLOAT, _I64]),
    "octavo_silu_and_mul": (None, [_I64, _PLACE, _PLACE, _I64, _I64, _I64]),
    "octavo_gelu": (None, [_I64, _PLACE, _PLACE, *[_I64] * 5]),
    "octavo_position_without_angles": (_I64, [_PLACE, _I64, _I64]),
    "octavo_rotary": (None, [_I64, _PLACE, _I64, _I64, _PLACE, *[_I64] * 4, _PLACE, _PLACE, _I64, _I64]),
    "octavo_reshape_and_cache": (None, [_I64, _PLACE, _I64, _PLACE, _I64, _PLACE, _PLACE, _I64]),
    "octavo_lora_shrink": (None, [_I64, _PLACE, _PLACE, _I64, _PLACE, _PLACE, *[_I64] * 4]),
    "octavo_lora_expand": (None, [_I64, _PLACE, _I64, _PLACE, _PLACE, _PLACE, _PLACE, *[_I64] * 4]),
    "octavo_run_layers": (None, [_PLACE, _I64, _PLACE, _I64, _I64, _I64]),
    "octavo_pin_threads": (_I64, [_PLACE, _PLACE, _I64]),
    "octavo_count_phases": (_I64, [_PLACE, *[_I64] * 5]),
    "octavo_read_memory": (_FLOAT, [_PLACE, _I64, _I64, _I64]),
}
_compiling = threading.Lock()


class Library:
    """A library of one level; `call` has its functions under their names without `octavo_`."""

    def __init__(self, level: str) -> None:
        self.level = level
        self.has_pairs = "avx512bf16" in " ".join(build.LEVELS[level].flags)
        try:
            loaded = ctypes.CDLL(str(_path_of(level)))
        except OSError:  # made for a newer C library than this machine has, as a wheel's may be
            if os.environ.get(_LIBRARY):
                raise
            loaded = ctypes.CDLL(str(_compiled(level, _own_folder())))
        for name, (result, arguments) in _DECLARED.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("octavo_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the library of CPU kernels has no {name}")


def library() -> Library:
    """The one that is in use."""
    return _in_use[0] if _in_use else _choose()


@contextmanager
def at_level(level: str) -> Iterator[None]:
    """Use another level's library meanwhile, in all threads of this process; for tests."""
    before = library()
    _in_use[0] = load(level)
    try:
        yield
    finally:
        _in_use[0] = before


@cache
def load(level: str) -> Library:
    """The library of a level of `native.build.LEVELS`."""
    return Library(level)


def num_threads() -> int:
    """How many threads a kernel uses: as many as torch's operators in the calling thread."""
    return torch.get_num_threads()


_in_use: list[Library] = []


def _choose() -> Library:
    name, usable = os.environ.get(_LEVEL), build.usable_levels()
    if name and name not in usable:
        raise ValueError(f"{_LEVEL}: this processor has {', '.join(usable)}, not {name}")
    _in_use[:] = [load(name or usable[-1])]
    return _in_use[0]


def _path_of(level: str) -> Path:
    """Beside the sources, or in the user's cache where nobody may write there; compiled if it is in neither."""
    if given := os.environ.get(_LIBRARY):
        return Path(given)
    name = build.file_name(level)
    if (build.BUILT / name).exists():
        return build.BUILT / name
    with _compiling:
        parent = build.BUILT if build.BUILT.exists() else build.BUILT.parent
        return _compiled(level, build.BUILT if os.access(parent, os.W_OK) else _own_folder())


def _compiled(level: str, folder: Path) -> Path:
    path = folder / build.file_name(level)
    if not path.exists():
        print(f"compiling CPU kernels for {level} into {folder}, once: some ten seconds", file=sys.stderr, flush=True)
        build.compile_library(level, folder)
    return path


def _own_folder() -> Path:
    """`kernels` in Octavo's cache (`octavo.shared.cache`, which nothing here may import).

    What lies in it is run as code: where others may write to it, a folder of this process alone.
    """
    given, of_user = os.environ.get("OCTAVO_CACHE"), os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(given or Path(of_user) / "octavo") / "kernels"
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:  # there is no home, or none that can be written to
        return Path(tempfile.mkdtemp(prefix="octavo-kernels-"))
    is_own = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if is_own else Path(tempfile.mkdtemp(prefix="octavo-kernels-"))
