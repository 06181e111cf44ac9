"""Kernels are compiled without a GPU, and what is said of them is what the machine code has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kernels.bench import compile_all
from kernels.bench.compiled import Compiled, table
from kernels.bench.compiler import read_log
from kernels.bench.machine_code import Loop, main_loop, spills_in_products
from kernels.bench.targets import TARGETS, parse
from kernels.gpu.variant import Variant
from octavo.cli import main
from tests.forkserver import ForkedCommand


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a process that compiles: Triton's interpreter is off, and its cache empty."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}


def run(environment: dict[str, str], module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The module's `main` in a process that is forked with torch, and without Triton, imported."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = ForkedCommand(arguments, err.fileno(), stdout=out.fileno(), module=module, environment=environment)
        try:
            code = process.wait(110)
        finally:
            process.kill()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(process.args, code, out.read(), err.read())


def run_compile_all(environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    return run(environment, "kernels.bench.compile_all", "--jobs", "2", *flags)


def test_what_is_reported_is_what_the_machine_code_has(environment: dict[str, str]) -> None:
    done = run(environment, "tests.kernels.compiled", "resources")
    assert done.returncode == 0, done.stderr
    for line, spills in zip(done.stdout.splitlines(), (False, True), strict=True):
        found = json.loads(line)
        usage = dict(re.findall(r"(REG|STACK):(\d+)", found["usage"]))
        assert found["said"]["registers"] == int(usage["REG"]) > 0
        assert (found["said"]["spill_bytes"] > 0) == (int(usage["STACK"]) > 0) == (found["local_stores"] > 0) == spills
        assert found["said"]["fault"] == ""


def test_rows_of_attention_stay_with_their_warps(environment: dict[str, str]) -> None:
    """No row's keys are shared out to warps, in whose order their sum would depend on the kernel, and no weights pass
    through shared memory: the only barriers of the loop are for copies. Copies go on over the border of a segment."""
    done = run(environment, "tests.kernels.compiled", "loops_of_attention")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 2 0 0"] * 2


def test_a_norm_that_rounds_sums_in_the_order_of_one_that_does_not(environment: dict[str, str]) -> None:
    """Which the interpreter does not show: else a card would give them other bits."""
    done = run(environment, "tests.kernels.compiled", "sums_of_norms")
    assert done.returncode == 0, done.stderr
    plain, rounded = done.stdout.splitlines()
    assert plain == rounded and plain.startswith("1x4096xf32 #ttg.blocked") and plain.endswith(" 16")


def test_norms_of_heads_and_of_rows_add_up_the_same_squares(environment: dict[str, str]) -> None:
    """Rounded before they are added, and shared out to the threads of a warp alike; of rows, keys and queries."""
    done = run(environment, "tests.kernels.compiled", "squares_of_heads")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["math.fma sizePerThread = [1, 8], threadsPerWarp = [2, 16]"] * 3


def test_float32_rows_and_codes_are_multiplied_in_float32(environment: dict[str, str]) -> None:
    done = run(environment, "tests.kernels.compiled", "float32_products")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["multiplies in TF32, which is less than float32", ""]


def test_kernels_without_fault_pass_and_a_second_run_compiles_nothing(environment: dict[str, str]) -> None:
    first = run_compile_all(environment, "--package", "tests.kernels.toys", "--target", "sm_80,sm_90,sm_100", "--json")
    assert first.returncode == 0, first.stderr
    rows = json.loads(first.stdout)
    targets = ["sm_80", "sm_90", "sm_100"]
    assert [(row["variant"], row["target"]) for row in rows] == [
        (f"add {dtype}", target) for dtype in ("bf16", "fp32") for target in targets
    ]
    assert all(0 < row["registers"] < 64 and row["spill_bytes"] == 0 for row in rows)
    cubins = {path: path.stat().st_mtime_ns for path in Path(environment["TRITON_CACHE_DIR"]).rglob("*.cubin")}
    assert len(cubins) == len(rows)
    # What was kept says how long compiling took then: a second run would say something else.
    second = run_compile_all(environment, "--package", "tests.kernels.toys", "--target", "sm_80,sm_90,sm_100", "--json")
    assert json.loads(second.stdout) == rows
    assert {path: path.stat().st_mtime_ns for path in cubins} == cubins


def test_each_fault_is_named_and_the_others_are_reported_all_the_same(environment: dict[str, str]) -> None:
    done = run_compile_all(environment, "--package", "tests.kernels.faulty_toys", "--target", "sm_90", "--json")
    assert done.returncode == 1
    rows = {row["variant"]: row for row in json.loads(done.stdout)}
    faults = {name: row["fault"] for name, row in rows.items()}
    assert "incompatible dimensions" in faults["two lengths"]
    assert faults["nothing given"].startswith("ValueError: arguments are out; the variant gives")
    assert faults["deadly"] == "the compiler died"
    assert faults["rounding"] == "multiplies in TF32, which is less than float32"
    shared_bytes = rows["greedy"]["shared_bytes"]
    assert faults["greedy"] == f"takes {shared_bytes} bytes of shared memory, 232448 is what a block can have"
    assert shared_bytes > 4 * 2 * 128 * 128 * 2  # four stages of two tiles at least
    spilled = rows["spilling, forbidden"]["spill_bytes"]
    assert faults["spilling, forbidden"] == f"spills {spilled} bytes, and may spill none"
    assert faults["spilling, allowed"] == "" and rows["spilling, allowed"]["spill_bytes"] == spilled > 0
    assert [line.split(": ")[0] for line in done.stderr.splitlines() if line.startswith("sm_90, ")] == [
        f"sm_90, {name}" for name, fault in faults.items() if fault
    ]


def test_a_spill_may_be_allowed_on_some_cards_alone() -> None:
    variant = Variant("add", kernel=None, signature={}, constants={}, may_spill=False, may_spill_on=(120,))
    assert [variant.spills_are_allowed(target.capability) for target in TARGETS.values()] == [False] * 5 + [True]
    assert Variant("add", kernel=None, signature={}, constants={}).spills_are_allowed(80)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--target", "sm_42"), "no target is called 'sm_42'; there are sm_80"),
        (("--op", "division", "--package", "tests.kernels.toys"), "no operation is called 'division'; there are add"),
        (
            ("--op", "division"),
            "no operation is called 'division'; there are chunk_maxima, clamped_swiglu, combine_experts",
        ),
        (("--package", "kernels.oracles"), "no module of kernels.oracles has variants()"),
    ],
)
def test_bad_usage_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # which it would set
    assert compile_all.main(flags) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert printed.out == "" and said in line


def test_the_command_passes_its_flags_on_and_returns_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def run(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        calls.append((command, env))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    flags = ["--compile-only", "--target", "sm_90", "--op", "add", "--jobs", "3", "--loops", "--json"]
    assert main(["bench", "kernels", *flags]) == 1
    ((command, environment),) = calls
    assert command[1:] == [
        "-P",
        "-m",
        "kernels.bench.compile_all",
        "--target=sm_90",
        "--op=add",
        "--jobs=3",
        "--loops",
        "--json",
    ]
    assert "TRITON_INTERPRET" not in environment


def test_what_ptxas_prints_is_read() -> None:
    log = """ptxas info    : (C7511) Potential Performance Loss: products are serialized in the function 'f' in line 3
ptxas info    : Function properties for f
    24 bytes stack frame, 20 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size
"""
    assert read_log(log) == {"registers": 255, "spill_bytes": 20, "remark": "products are serialized"}
    with pytest.raises(RuntimeError, match="does not say"):
        read_log("nothing of this kind")


def test_a_spill_counts_in_the_innermost_loop_over_products() -> None:
    """Two loops over products in one over tiles, and a loop without any."""
    places = ["MOV", "STL [R1]", "LDG", "LDL R2", "BRA 0x0020", "STL [R1+4]", "HMMA.16816", "BRA 0x0060", "LDL R3"]
    places += ["@!P0 HGMMA.64x64x16", "STL [R1+8]", "@P1 BRA `(.L_x_3) 0x0090", "LDL R4", "BRA 0x0010", "BRA 0x0100"]
    code = "".join(f"        /*{16 * place:04x}*/    {text} ;\n" for place, text in enumerate(places))
    assert spills_in_products(code) == 1
    assert spills_in_products(code.replace("MMA", "FMA")) is None
    rows = [Compiled("add", "plain", "sm_80", False, spill_bytes=8, spills_in_products=found) for found in (0, 1, None)]
    assert [row.fault.partition(",")[0] for row in rows] == [
        "",
        "spills 8 bytes in its loop over products",
        "spills 8 bytes",
    ]


def test_a_wait_out_of_line_is_no_loop() -> None:
    """It stands behind the loop, with what is spilled there, and leads back into it."""
    places = ["MOV", "LDGSTS.E [R1]", "LDGDEPBAR", "DEPBAR.LE SB0, 0x2", "BAR.SYNC 0x0", "HGMMA.64x64x16.F32 R8"]
    places += ["WARPGROUP.DEPBAR.LE gsb0, 0x1", "LDL R2", "@P0 BRA 0x0010", "STL [R1]", "SYNCS.PHASECHK P0"]
    places.append("BRA 0x0040")
    code = "".join(f"        /*{16 * place:04x}*/    {text} ;\n" for place, text in enumerate(places))
    for text in (code, code.replace("BRA 0x0040", "EXIT")):
        assert main_loop(text) == Loop(8, 1, 1, 1, "1 LDGSTS", 2, 1)
        assert spills_in_products(text) == 1
    assert str(main_loop(code)) == (
        "8 instructions, 1 products, 1 barriers, copies 1 LDGSTS, 2 groups of copies under way, "
        "1 products under way, 1 spills"
    )
    assert str(main_loop(code.replace("HGMMA", "FFMA"))) == "no loop over products"


def test_the_table_marks_faults() -> None:
    rows = [
        Compiled("add", "plain", "sm_80", False, registers=17, shared_bytes=2048),
        Compiled("add", "plain", "sm_90", False, registers=255, spill_bytes=8),
        Compiled("add", "other", "sm_90", False, error="no"),
        Compiled("add", "wide", "sm_100", True, tensor_memory_columns=513),
    ]
    lines = table(rows, ["sm_80", "sm_90"]).splitlines()
    assert lines[2].split() == ["plain", "17", "0", "B", "2.0", "K", "255", "8", "B", "0.0", "K!"]
    assert lines[3].split() == ["other", "does", "not", "compile"]
    assert rows[3].fault == "takes 513 columns of tensor memory of 512"


def test_targets_are_named_once_each() -> None:
    assert parse("sm_90,sm_80,sm_90") == [TARGETS["sm_90"], TARGETS["sm_80"]]
