"""Kernels compiled for another processor than this one take the code that it can run, and give the same sums."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from platform import libc_ver

import pytest
import torch

from kernels import cpu
from kernels.cpu import library as library_module
from kernels.cpu.library import at_level
from kernels.cpu.native import build
from kernels.cpu.products.packed_weight import pack
from tests.isa import PROFILES, ROOT, environment
from tests.kernels.cpu_products import matmul

SHAPES = [(1, 60, 157), (7, 97, 64), (19, 97, 64)]  # rows, outputs, inputs: tiles of every height

PRODUCTS = """
import sys, torch
from tests.kernels.test_other_processors import products
torch.save(products(), sys.argv[1])
"""


def products() -> list[torch.Tensor]:
    generator, found = torch.Generator().manual_seed(0), []
    for rows, outputs, inputs in SHAPES:
        x, weight = (torch.randn(size, inputs, generator=generator) for size in (rows, outputs))
        out = torch.empty(rows, outputs)
        matmul(out, x, pack(weight))
        found.append(out)
    return found


def sampled() -> list[torch.Tensor]:
    """What the kernels of sampling give for rows of every kind, with all filters."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 1037, generator=generator) * 4
    logits[1], logits[2, ::3], logits[3] = 2.5, -torch.inf, (logits[3] * 2).round() / 2
    random = [torch.rand(40, generator=generator) for _ in range(3)]
    temperature, min_p, top_p, zeros = random[0] + 0.3, random[1] * 0.1, random[2], torch.zeros(40)
    maxima, smallest, token_ids = torch.empty(40, 17), torch.empty(40), torch.empty(40, dtype=torch.int64)
    rows = torch.arange(40)
    cpu.chunk_maxima(maxima, logits)
    largest = maxima.amax(dim=-1)
    cpu.kept_range(smallest, logits, maxima, largest, temperature, min_p, rows * 9, top_p)
    cpu.draw_tokens(token_ids, logits, maxima, largest, smallest, temperature, rows, rows, rows, rows)
    logprobs, log_sums, ranks = torch.empty(40), torch.empty(40), torch.empty_like(rows)
    cpu.token_logprobs(logprobs, ranks, log_sums, logits, largest, rows, token_ids)
    penalised, counts = logits.clone(), torch.randint(0, 5, (40, 1037), generator=generator, dtype=torch.int32)
    cpu.penalize(penalised, rows, counts, rows, temperature, min_p, zeros + 0.3)
    greedy, values = torch.empty_like(rows), torch.empty(40)
    cpu.most_likely(greedy, values, logits)
    return [maxima, smallest, token_ids, logprobs, log_sums, ranks, penalised, greedy, values]


def gated() -> list[torch.Tensor]:
    """What the gates of MLPs and of experts give."""
    x = 3 * torch.randn(7, 106, generator=torch.Generator().manual_seed(2))
    found = [torch.empty(7, 53) for _ in range(2)]
    cpu.silu_and_mul(found[0], x)
    cpu.clamped_swiglu(found[1], x, alpha=1.702, limit=7.0)
    return found


def run(profile: str, code: str, *arguments: str) -> str:
    if missing := PROFILES[profile].lacking():
        pytest.skip(f"this processor has no {', '.join(missing)}")
    command = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=environment(profile), capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_another_level_than_the_best_is_chosen_by_name() -> None:
    code = "from kernels.cpu.library import library; print(library().level, library().has_pairs)"
    assert run("avx2", code).strip() == "avx2 False"


def test_a_library_that_is_named_says_itself_what_it_multiplies() -> None:
    """One of a lower level than the processor's best, as `make sanitize` may compile."""
    code = (
        "import os; from kernels.cpu import library; os.environ['KERNELS_CPU_LIBRARY'] = str(library._path_of('avx2'));"
        "print(library.library().has_pairs)"
    )
    if PROFILES["avx2"].lacking():
        pytest.skip("this processor has no AVX2")
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.stdout.strip() == "False", ended.stderr


def test_a_level_that_this_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELS_CPU_LEVEL", "avx9000")
    with pytest.raises(ValueError, match=r"this processor has plain.*, not avx9000"):
        library_module._choose()


@pytest.mark.parametrize(
    ("vendor", "level", "fastest"),
    [
        ("AuthenticAMD", "avx512-bf16", ["avx512-vnni", "avx512-bf16"]),
        ("GenuineIntel", "avx512-bf16", ["avx512-bf16", "avx512-vnni"]),
        ("GenuineIntel", "amx", ["avx512-vnni", "amx"]),
        ("GenuineIntel", "avx2", [build.EMULATED, "avx2"]),
    ],
)
def test_processors_of_intel_without_tiles_take_no_pairs_of_bfloat16(
    vendor: str, level: str, fastest: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_said_of_processor", lambda what: {"vendor_id": vendor}[what])
    monkeypatch.setattr(build, "processor_features", lambda: build.LEVELS[level].needs)
    usable = [name for name, each in build.LEVELS.items() if each.needs <= build.LEVELS[level].needs]
    assert build.usable_levels()[-2:] == fastest and sorted(build.usable_levels()) == sorted(usable)


@pytest.mark.parametrize("level", build.usable_levels()[:-1])
def test_every_level_gives_the_same_bits(level: str) -> None:
    expected = products() + sampled() + gated()
    with at_level(level):
        found = products() + sampled() + gated()
    assert all(torch.equal(there, here) for there, here in zip(found, expected, strict=True))


def test_every_profile_is_known_to_the_test_above() -> None:
    assert list(PROFILES) == ["avx2", "avx512", "avx512-bf16", build.EMULATED]


def test_an_avx2_processor_gives_the_bits_of_this_one(tmp_path: Path) -> None:
    run("avx2", PRODUCTS, str(tmp_path / "found"))
    for there, here in zip(torch.load(tmp_path / "found"), products(), strict=True):
        assert torch.equal(there, here)


@pytest.fixture
def own_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a small part of the sources, of which libraries are compiled meanwhile."""
    sources = [build.SOURCES / name for name in ("checks.cpp", "threads.cpp", "threads.h", "tiles.h")]
    for path in (*sources, *build.SOURCES.glob("vec*.h")):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    build._digest.cache_clear()
    library_module._own_folder.cache_clear()
    yield tmp_path
    build._digest.cache_clear()
    library_module._own_folder.cache_clear()


def test_a_library_is_compiled_once_and_again_when_its_sources_change(
    own_sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    level = build.usable_levels()[-1]
    path = library_module._path_of(level)
    assert path.exists() and path.parent == own_sources / "built"
    assert f"compiling CPU kernels for {level} into {own_sources / 'built'}" in caplog.messages[0]
    assert library_module._path_of(level) == path and len(caplog.messages) == 1
    with (own_sources / "vec.h").open("a") as header:
        header.write("// changed")
    build._digest.cache_clear()
    assert library_module._path_of(level) != path and not path.exists()


def test_a_library_goes_to_the_users_cache_where_the_package_cannot_be_written_to(
    own_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != own_sources and access(path, mode))
    path = library_module._path_of("plain")
    assert path.exists() and path.parent == tmp_path / "cache" / "-".join(["kernels", *filter(None, libc_ver())])
    assert library_module._path_of("plain") == path
    path.parent.chmod(0o777)  # somebody else's code might lie there
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    library_module._own_folder.cache_clear()
    other = library_module._path_of("plain")
    assert other.exists() and other.parent.parent == tmp_path and library_module._path_of("plain") == other


@pytest.fixture
def shared_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Only the user's cache can be written to; a library that is compiled is a copy of the one in use. The libraries
    that were compiled."""
    real, level, compiled = library_module._path_of(library_module.library().level), library_module.library().level, []

    def compile_at_once(level: str, folder: Path, *, is_sanitized: bool = False) -> None:
        compiled.append(folder / real.name)
        shutil.copy(real, compiled[-1])

    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KERNELS_CPU_LEVEL", level)
    monkeypatch.setattr(build, "BUILT", tmp_path / "not there" / "built")
    monkeypatch.setattr(build, "compile_library", compile_at_once)
    library_module._own_folder.cache_clear()
    yield compiled
    library_module._own_folder.cache_clear()


def test_machines_that_share_a_home_have_a_library_for_each_c_library(
    shared_home: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    level, theirs = library_module.library().level, []
    for version in ("2.36", "2.31"):
        monkeypatch.setattr("platform.libc_ver", lambda version=version: ("glibc", version))
        library_module._own_folder.cache_clear()
        theirs.append(library_module._own_folder() / build.file_name(level))
    theirs[0].write_bytes(b"of no use to a machine with another C library")
    for _ in range(2):  # compiled, found
        library_module.Library(level)
    assert shared_home == theirs[1:] and theirs[0].exists()
    assert [path.parent.name for path in theirs] == ["kernels-glibc-2.36", "kernels-glibc-2.31"]


def test_a_user_without_a_home_gets_a_folder_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("OCTAVO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    library_module._own_folder.cache_clear()
    try:
        assert library_module._own_folder().parent == tmp_path
    finally:
        library_module._own_folder.cache_clear()


def test_a_damaged_library_in_the_users_cache_is_compiled_again(shared_home: list[Path]) -> None:
    level = library_module.library().level
    path = library_module._own_folder() / build.file_name(level)
    path.touch()  # as after a crash of the machine
    library_module.Library(level)
    assert shared_home == [path]


def test_a_damaged_library_in_the_users_cache_is_compiled_again_where_the_packages_cannot_be_loaded_either(
    tmp_path: Path, shared_home: list[Path]
) -> None:
    level = library_module.library().level
    path = library_module._own_folder() / build.file_name(level)
    build.BUILT.mkdir(parents=True)
    (build.BUILT / path.name).write_bytes(b"of another C library")
    path.touch()
    for _ in range(2):  # compiled, found
        library_module.Library(level)
    assert shared_home == [path]


def test_what_a_compilation_left_that_was_killed_is_removed(tmp_path: Path, shared_home: list[Path]) -> None:
    (tmp_path / "compiling-killed").mkdir()
    (tmp_path / "compiling-killed" / "layers.o").touch()
    (tmp_path / "something else").mkdir()
    path = build.library_of(library_module.library().level, tmp_path, str)
    assert path.exists() and {each.name for each in tmp_path.iterdir()} == {path.name, "lock", "something else"}


def test_a_compilation_works_where_the_next_one_would_clean_up(
    own_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    run = build._run

    def look(command: list[str]) -> None:
        seen.update(path.name[: len("compiling-")] for path in own_sources.glob("built/*") if path.is_dir())
        run(command)

    monkeypatch.setattr(build, "_run", look)
    build.library_of("plain", own_sources / "built", str)
    assert seen == {"compiling-"}


def test_of_workers_that_start_at_once_one_compiles_and_the_others_wait(
    own_sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Threads here, which the lock of a file keeps apart as it does processes."""
    compiled: list[str] = []

    def compile_slowly(level: str, folder: Path, *, is_sanitized: bool = False) -> None:
        compiled.append(level)
        while sum("waiting for CPU kernels" in line for line in caplog.messages) < 2:
            time.sleep(0.01)
        (folder / build.file_name(level)).touch()

    monkeypatch.setattr(build, "compile_library", compile_slowly)
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(library_module._path_of, ["plain"] * 3))
    assert compiled == ["plain"] and paths == {build.BUILT / build.file_name("plain")}


def compiler_without(folder: Path, flag: str) -> str:
    """A C++ compiler that does not know a flag, as a command with an argument."""
    path = folder / "old compiler"
    refuse, go_on = f'case "$*" in *{flag}*) exit 1 ;; esac', f'exec {shlex.join(build.compiler())} "$@"'
    path.write_text(f"#!/bin/sh\nshift\n{refuse}\n{go_on}\n")
    path.chmod(0o755)
    return f"{shlex.quote(str(path))} argument"


def test_a_compiler_that_lacks_a_level_compiles_the_next_lower_one(
    own_sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "usable_levels", lambda: ["plain", "avx2-vnni"])
    monkeypatch.setenv("CXX", compiler_without(own_sources, "-mavxvnni"))
    monkeypatch.setattr(sys, "argv", ["build.py", "--into", str(own_sources / "built")])
    build.main()
    assert (own_sources / "built" / build.file_name("plain")).exists()
    assert "no C++ compiler here knows avx2-vnni: CPU kernels are used as compiled for plain" in capsys.readouterr().err
    # What is there needs no compiler: a wheel may carry what this machine's would not make.
    assert build.best_level(build.usable_levels(), lambda level: True, print) == "avx2-vnni"


def test_without_a_compiler_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(build.NoCompilerError, match="install g\\+\\+, or `pip install ziglang`"):
        build.compile_library("plain", tmp_path)
