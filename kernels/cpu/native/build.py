"""Compiles the library of CPU kernels for levels of instructions: `python kernels/cpu/native/build.py [--all]`.

Needs nothing but the standard library and a compiler of C++17: $CXX, g++, clang++ or c++, else `ziglang` from pip. A
file is named after its level and a hash of all that goes into it, so a change of the sources makes another one.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
BUILT = SOURCES / "built"
# No library of C++ and nothing that would change a bit: sums are fused where the source says so, and nowhere else.
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off"]
FLAGS += ["-falign-loops=32"]  # what decodes instructions takes so many bytes at once: up to a twentieth of a product
FLAGS += ["-fno-math-errno", "-fno-trapping-math"]
WARNINGS = ["-Werror", "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize=alignment"]


EMULATED = "amx-emulated"
WITH_PAIRS = "avx512-bf16"
_EMULATION = ["-DEMULATE_TILES"]
_SCRATCH = "compiling-"  # begins the name of a folder in which a library is put together


@dataclass(frozen=True)
class Level:
    """Instructions that a library may use: what a processor has to have, as Linux calls it, and compiler flags."""

    needs: frozenset[str]
    flags: list[str]


_AVX2 = ["avx2", "fma", "f16c"]
_AVX512 = [*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl"]
_BFLOAT16 = [*_AVX512, "avx512vnni", "avx512bf16"]


def _level(names: list[str]) -> Level:
    of_linux = {"avxvnni": "avx_vnni", "avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16"}
    needs = frozenset(of_linux.get(name, name.replace("-", "_")) for name in names)
    return Level(needs, [f"-m{name}" for name in names])


# The most capable last. Only tests ask for emulated tiles by name: any processor that could run them has a better
# level.
LEVELS = {
    "plain": Level(frozenset(), ["-O1", "-Wno-psabi"]),  # with -O2 a minute in place of ten seconds
    EMULATED: Level(_level(_AVX2).needs, [*_level(_AVX2).flags, *_EMULATION]),
    "avx2": _level(_AVX2),
    "avx2-vnni": _level([*_AVX2, "avxvnni"]),
    "avx512": _level(_AVX512),
    "avx512-vnni": _level([*_AVX512, "avx512vnni"]),
    WITH_PAIRS: _level(_BFLOAT16),
    "amx": _level([*_BFLOAT16, "amx-tile", "amx-bf16", "amx-int8"]),
}


class NoCompilerError(RuntimeError):
    """There is no compiler of C++, and no library that was compiled before."""


@cache
def processor_features() -> frozenset[str]:
    """What Linux says that this processor has; nothing where it is no x86-64."""
    return frozenset(_said_of_processor("flags").split())


def usable_levels() -> list[str]:
    """Those that this processor has all of, as its system says, the fastest last; tiles also need its leave
    (`kernels.cpu.library`).

    On Intel's, products by pairs of bfloat16 are slower than those by fused multiply-adds of the same numbers
    (docs/cpu-kernels.md, instruction sets). So where there are no tiles, which a virtual machine may hide, the level
    without pairs is the faster one.
    """
    usable = [name for name, level in LEVELS.items() if level.needs <= processor_features()]
    if _said_of_processor("vendor_id") == "GenuineIntel" and WITH_PAIRS in usable:
        usable.remove(WITH_PAIRS)
        usable.insert(usable.index("avx512-vnni"), WITH_PAIRS)
    return usable


@cache
def _said_of_processor(what: str) -> str:
    if platform.machine() not in ("x86_64", "AMD64"):
        return ""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(what):
            return line.partition(":")[2].strip()
    return ""


@cache
def _digest() -> str:
    files = sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"), Path(__file__)])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def file_name(level: str, *, is_sanitized: bool = False) -> str:
    """Of a library: for which processors, and of which sources."""
    kind = "-sanitized" if is_sanitized else ""
    return f"octavo-{platform.machine()}-{level}{kind}-{_digest()}.so"


def compiler() -> list[str]:
    """The command of a C++ compiler; $CXX may have arguments. Raises NoCompilerError."""
    for command in (shlex.split(os.environ.get("CXX", "")), ["g++"], ["clang++"], ["c++"]):
        if command and shutil.which(command[0]):
            return command
    if importlib.util.find_spec("ziglang"):
        # A target that is named stands for the least of its processors; without one, for this very one.
        return [sys.executable, "-P", "-m", "ziglang", "c++", "-target", f"{platform.machine()}-linux-gnu"]
    raise NoCompilerError(
        "CPU kernels have to be compiled, and there is no C++ compiler: install g++, or `pip install ziglang`"
    )


def knows(level: str) -> bool:
    """Whether there is a compiler, and one that has the flags of this level: g++ has all of them from 11 on."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            command = [*compiler(), *LEVELS[level].flags, "-x", "c++", "-c", os.devnull, "-o", f"{scratch}/nothing.o"]
        except NoCompilerError:
            return False
        return subprocess.run(command, capture_output=True).returncode == 0


def best_level(levels: list[str], is_there: Callable[[str], bool], say: Callable[[str], object]) -> str:
    """The last of `levels` whose library is there or can be compiled; where that is not the very last, `say` is told.
    Raises NoCompilerError where there is none."""
    for level in reversed(levels):
        if is_there(level) or knows(level):
            if level != levels[-1]:
                say(f"no C++ compiler here knows {levels[-1]}: CPU kernels are used as compiled for {level}")
            return level
    command = " ".join(compiler())
    raise NoCompilerError(f"CPU kernels have to be compiled, and the C++ compiler does not work: {command}")


@contextmanager
def _alone(folder: Path, say: Callable[[str], object]) -> Iterator[None]:
    """One process at a time, as several workers may be started at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for CPU kernels, which another process compiles into {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def library_of(level: str, folder: Path, say: Callable[[str], object], *, is_sanitized: bool = False) -> Path:
    """The library of a level in `folder`, compiled where it is not there yet, of which `say` is told. Raises as
    `compile_library`."""
    path = folder / file_name(level, is_sanitized=is_sanitized)
    if not path.exists():
        with _alone(folder, say):
            for left in folder.glob(f"{_SCRATCH}*"):  # by a compilation that was killed: no other is under way
                shutil.rmtree(left, ignore_errors=True)
            if not path.exists():
                say(f"compiling CPU kernels for {level} into {folder}, once: some ten seconds")
                compile_library(level, folder, is_sanitized=is_sanitized)
    return path


def compile_library(level: str, folder: Path, *, is_sanitized: bool = False, is_checked: bool = False) -> Path:
    """Compiles the library of a level into `folder`; its path. Raises NoCompilerError, or RuntimeError with what the
    compiler says; of a warning only where it `is_checked`, as each compiler has warnings of its own."""
    command, flags = compiler(), [*FLAGS, *LEVELS[level].flags, *(SANITIZED if is_sanitized else [])]
    flags += WARNINGS if is_checked else []
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as scratch:
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
        objects = [f"{scratch}/{path.stem}.o" for path in sources]
        commands = [[*command, *flags, "-c", str(path), "-o", out] for path, out in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(_run, commands))
        library = f"{scratch}/library.so"
        if "ziglang" in command:
            command = [
                "cc" if each == "c++" else each for each in command
            ]  # as C++ it would first compile C++'s library, of which nothing is used
        linked = ["-shared", "-pthread", "-Wl,--as-needed", "-Wl,-z,defs" if not is_sanitized else "-Wl,-z,lazy"]
        _run([*command, *flags, *linked, *objects, "-o", library, "-lm"])
        path = folder / file_name(level, is_sanitized=is_sanitized)
        _digest.cache_clear()
        if path != folder / file_name(level, is_sanitized=is_sanitized):
            raise RuntimeError(f"the sources in {SOURCES} have changed while they were compiled")
        Path(library).rename(path)  # at once: another process finds all of it or nothing
    if folder == BUILT and not is_sanitized:  # another folder may be shared by several versions
        for other in folder.glob(f"octavo-{platform.machine()}-{level}-" + "?" * 16 + ".so"):
            if other != path:
                other.unlink(missing_ok=True)  # of earlier sources
    return path


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{ended.stderr}")


def main() -> None:
    """Compiles what is not there yet."""
    parser = argparse.ArgumentParser(prog="kernels/cpu/native/build.py")
    parser.add_argument("--all", action="store_true", help="for every kind of processor, not for this one alone")
    parser.add_argument("--tests", action="store_true", help="all, and what only tests use")
    parser.add_argument("--level", choices=LEVELS, help="for this one alone")
    parser.add_argument("--into", type=Path, default=BUILT, metavar="FOLDER")
    parser.add_argument("--sanitize", action="store_true", help="with the checks of memory and undefined behaviour")
    parser.add_argument("--check", action="store_true", help="keep nothing, and take warnings for errors")
    options = parser.parse_args()
    into: Path = options.into

    def is_there(level: str) -> bool:
        return (into / file_name(level, is_sanitized=options.sanitize)).exists()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if options.level:
        levels = [options.level]
    elif options.all or options.tests:
        levels = [name for name in LEVELS if platform.machine() == "x86_64" or name == "plain"]
        levels = [name for name in levels if name != EMULATED or options.tests]
        for level in [name for name in levels if not is_there(name) and not knows(name)]:
            levels.remove(level)
            say(f"left out: {' '.join(compiler())} does not know {level}")
    else:
        levels = [best_level(usable_levels(), is_there, say)]
    if options.check:
        for level in levels:
            with tempfile.TemporaryDirectory() as scratch:
                compile_library(level, Path(scratch), is_checked=True)
        return
    for level in [name for name in levels if not is_there(name)]:
        start = time.perf_counter()
        library_of(level, into, say, is_sanitized=options.sanitize)
        say(f"CPU kernels for {level}: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
