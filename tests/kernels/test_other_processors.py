"""Kernels compiled for another processor than this one take the code that it can run, and give the same sums."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from kernels.cpu import runtime
from kernels.cpu.products.matmul import matmul
from kernels.cpu.products.packed_weight import pack
from tests.isa import PROFILES, ROOT, environment, lacking

SHAPES = [(1, 60, 157), (7, 97, 64), (19, 97, 64)]  # rows, outputs, inputs: tiles of every height

CHOICES = """
from kernels.cpu.vectors.dot_products import dot_kind_of_this_cpu
from kernels.cpu.vectors.processor import HAS_PAIRS, HAS_WIDE_REGISTERS
print(HAS_WIDE_REGISTERS, HAS_PAIRS, dot_kind_of_this_cpu())
"""
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


def run(profile: str, code: str, *arguments: str) -> str:
    if missing := lacking(profile):
        pytest.skip(f"this processor has no {', '.join(missing)}")
    command = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=environment(profile), capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    ("profile", "choices"),
    [("avx2", "False False portable"), ("avx512", "True False portable"), ("avx512-bf16", "True True 512 bits")],
)
def test_code_is_chosen_for_the_processor_that_it_is_compiled_for(profile: str, choices: str) -> None:
    assert run(profile, CHOICES).strip() == choices


def test_every_profile_is_known_to_the_test_above() -> None:
    assert list(PROFILES) == ["avx2", "avx512", "avx512-bf16"]


def test_an_avx2_processor_gives_the_bits_of_this_one(tmp_path: Path) -> None:
    run("avx2", PRODUCTS, str(tmp_path / "found"))
    for there, here in zip(torch.load(tmp_path / "found"), products(), strict=True):
        assert torch.equal(there, here)


def test_compiled_kernels_that_cannot_be_written_to_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = tmp_path / "shared" / "kernels-0"
    compiled.mkdir(parents=True)
    (compiled / "index").write_text("machine code")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    copy = runtime._own_copy(compiled)
    assert copy == runtime._own_copy(compiled) == tmp_path / f"octavo-{os.getuid()}" / "kernels-0"
    assert (copy / "index").read_text() == "machine code" and [*copy.parent.iterdir()] == [copy]

    (copy / "index").write_text("somebody else's")
    copy.parent.chmod(0o777)  # as a folder that others may write to
    other = runtime._own_copy(compiled)
    assert other != copy and (other / "index").read_text() == "machine code"
