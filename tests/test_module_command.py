"""Processes of ours run nothing of the folder that they are started in, which may be a model that somebody made."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from octavo.shared.processes.module_command import module_command

ROOT = Path(__file__).parents[1]
SHADOW = "import pathlib; pathlib.Path({!r}).touch(); raise SystemExit('of the current folder')\n"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with files by the names of what every process of ours imports."""
    (folder := tmp_path / "model").mkdir()
    for name in ("numpy.py", "grpc.py", "octavo/__init__.py", "protos/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(SHADOW.format(str(tmp_path / "ran")))
    return folder


def test_a_module_is_not_taken_from_the_current_folder(hostile: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        module_command("octavo", "scheduler", "--worker=nowhere", "--host=a b"),
        cwd=hostile,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not (tmp_path / "ran").exists() and done.stderr.startswith("octavo scheduler: error: "), done.stderr


@pytest.mark.parametrize("package", ["octavo", "scheduler_svc", "worker_svc", "gateway_svc", "kernels"])
def test_no_process_is_started_with_the_current_folder_first(package: str) -> None:
    first = re.compile(r'sys\.executable,\s*"-m"')
    assert [str(each) for each in (ROOT / package).rglob("*.py") if first.search(each.read_text("utf-8"))] == []
