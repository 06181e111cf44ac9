"""The compiled library of CPU kernels: found or compiled, loaded, and declared.

Its functions are plain C and are called by ctypes, which lets go of the interpreter's lock. They are handed addresses,
strides and shapes; who calls them checks these first. KERNELS_CPU_LEVEL names another level of instructions than the
best that this processor has (`native.build.LEVELS`), KERNELS_CPU_LIBRARY the file itself, as `make sanitize` does.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import tempfile
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
    "octavo_workspace_bytes": (_I64, [_PLACE, _I64, _I64]),
    "octavo_pack_few_bits": (_I64, [_PLACE, _I64, _PLACE, *[_I64] * 8]),
    "octavo_pack_panels": (_I64, [_PLACE, _I64, _I64, _PLACE, *[_I64] * 4]),
    "octavo_pack_records": (None, [_PLACE, _PLACE, *[_I64] * 6]),
    "octavo_put_words": (None, [_I64, _PLACE, _PLACE, _I64, _I64]),
    "octavo_read_blocks": (None, [_I64, *[_PLACE] * 4, _I64, _I64]),
    "octavo_find_factors": (_I64, [*[_PLACE] * 3, _I64, _I64, _PLACE, _I64, _I64]),
    "octavo_quantize_eight_bits": (None, [_PLACE, _PLACE, _I64, _PLACE, *[_I64] * 4]),
    "octavo_quantize_four_bits": (None, [_PLACE, _I64, _PLACE, *[_I64] * 6]),
    "octavo_paged_attention": (None, [_PLACE, _I64]),
    "octavo_count_attention_items": (_I64, [_PLACE, _I64]),
    "octavo_rms_norm": (None, [_I64, _PLACE, _PLACE, _PLACE, _PLACE, _I64, _I64, _FLOAT, _FLOAT, _I64]),
    "octavo_silu_and_mul": (None, [_I64, _PLACE, _PLACE, _I64, _I64, _I64]),
    "octavo_clamped_swiglu": (None, [_I64, _PLACE, _PLACE, _I64, _I64, _FLOAT, _FLOAT, _I64]),
    "octavo_gelu": (None, [_I64, _PLACE, _PLACE, *[_I64] * 5]),
    "octavo_position_without_angles": (_I64, [_PLACE, _I64, _I64]),
    "octavo_rotary": (None, [_I64, _PLACE, _I64, _I64, _PLACE, *[_I64] * 4, _PLACE, _PLACE, _I64, _I64]),
    "octavo_reshape_and_cache": (None, [_I64, _PLACE, _I64, _PLACE, _I64, _PLACE, _PLACE, _I64]),
    "octavo_lora_shrink": (None, [_I64, _PLACE, _PLACE, _I64, _PLACE, _PLACE, *[_I64] * 4]),
    "octavo_lora_expand": (None, [_I64, _PLACE, _I64, _PLACE, _PLACE, _PLACE, _PLACE, *[_I64] * 4]),
    "octavo_run_layers": (None, [_PLACE, _I64, _PLACE, _I64, _I64, _I64]),
    "octavo_penalize": (None, [_PLACE, _I64, *[_PLACE] * 6, _I64, _I64]),
    "octavo_chunk_maxima": (None, [_PLACE, _PLACE, *[_I64] * 3]),
    "octavo_most_likely": (None, [*[_PLACE] * 3, *[_I64] * 3]),
    "octavo_kept_range": (None, [*[_PLACE] * 8, *[_I64] * 3]),
    "octavo_draw_tokens": (None, [*[_PLACE] * 10, *[_I64] * 4]),
    "octavo_uniforms": (None, [*[_PLACE] * 4, _I64]),
    "octavo_token_logprobs": (None, [*[_PLACE] * 7, *[_I64] * 3]),
    "octavo_top_logits": (None, [*[_PLACE] * 5, *[_I64] * 4]),
    "octavo_begin_tiles": (_I64, []),
    "octavo_time_work": (None, [_PLACE]),
    "octavo_count_phases": (_I64, [_PLACE, *[_I64] * 5]),
    "octavo_read_memory": (_FLOAT, [_PLACE, _I64, _I64, _I64]),
    "octavo_multiply_add": (_I64, [_I64, _I64, _I64]),
    "octavo_multiplies_pairs": (_I64, []),
}
_log = logging.getLogger(__name__)


class TilesError(RuntimeError):
    """This system or processor does not multiply with tiles (AMX), though it says that it has them."""


class Library:
    """A library of one level, with the library's functions under their names without `octavo_`.

    Raises TilesError for one with tiles where the system refuses them, or a product comes out wrong.
    """

    def __init__(self, level: str) -> None:
        self.level = level
        loaded = _loaded(level)
        for name, (result, arguments) in _DECLARED.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("octavo_"), function)
        self.has_pairs = bool(self.multiplies_pairs())  # of the file, which need not be of this level where it is named
        _check_tiles(self.begin_tiles())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the library of CPU kernels has no {name}")


def _check_tiles(failed: int) -> None:
    """Takes what `begin_tiles` says. Raises TilesError."""
    if failed:
        why = "multiplies wrongly with them" if failed < 0 else f"refuses them: {os.strerror(failed)}"
        raise TilesError(f"AMX tiles are not used, as this system {why}")


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
    try:
        _in_use[:] = [load(name or _best(usable))]
    except TilesError as error:
        if name:
            raise
        lesser = _best(usable[:-1])
        _log.warning("%s: CPU kernels are those for %s", error, lesser)
        _in_use[:] = [load(lesser)]
    return _in_use[0]


def _best(levels: list[str]) -> str:
    return build.best_level(levels, lambda level: _found(level) is not None, _log.warning)


def _loaded(level: str) -> ctypes.CDLL:
    """The first of a level's files that can be loaded. One may be made for a newer C library than this machine has, as
    a wheel's may be, or damaged: where none is left it is compiled into the user's cache."""
    path = _path_of(level)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if os.environ.get(_LIBRARY):
            raise
        _log.warning("CPU kernels cannot be loaded: %s", error)
    own = _own_folder() / build.file_name(level)
    if own != path:
        with contextlib.suppress(OSError):  # as it also is where there is none
            return ctypes.CDLL(str(own))
    with contextlib.suppress(OSError):
        own.unlink()
    return ctypes.CDLL(str(build.library_of(level, own.parent, _log.warning)))


def _path_of(level: str) -> Path:
    """What there is of a level, or what is compiled now."""
    return _found(level) or build.library_of(level, _folder(), _log.warning)


def _found(level: str) -> Path | None:
    if given := os.environ.get(_LIBRARY):
        return Path(given)
    name = build.file_name(level)
    if (build.BUILT / name).exists():
        return build.BUILT / name
    return _folder() / name if (_folder() / name).exists() else None


def _folder() -> Path:
    """Where libraries are compiled to: beside the sources, or in the user's cache where nobody may write there."""
    parent = build.BUILT if build.BUILT.exists() else build.BUILT.parent
    return build.BUILT if os.access(parent, os.W_OK) else _own_folder()


@cache
def _own_folder() -> Path:
    """`kernels-glibc-2.36` or the like in Octavo's cache (`octavo.shared.cache`, which nothing here may import):
    machines with other C libraries may share a home.

    What lies in it is run as code: where others may write to it, a folder of this process alone.
    """
    given = os.environ.get("OCTAVO_CACHE")
    try:
        of_user = given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
        folder = Path(of_user) / "-".join(["kernels", *filter(None, platform.libc_ver())])
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # there is no home, or none that can be written to
        return Path(tempfile.mkdtemp(prefix="octavo-kernels-"))
    is_own = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if is_own else Path(tempfile.mkdtemp(prefix="octavo-kernels-"))
