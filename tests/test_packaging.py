"""What pyproject.toml promises: which extra brings what, and that nobody takes our `kernels` for another."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "triton", "numba", "transformers"}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    """Distribution names of requirements, in the normal form of their index."""
    return {re.split(r"[\s<>=!~\[;]", each)[0].lower().replace("_", "-") for each in requirements}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in found}


def test_a_scheduler_installs_without_device_code() -> None:
    assert not HEAVY & names(project()["dependencies"] + project()["optional-dependencies"]["scheduler"])


def test_everything_asked_for_is_pinned_for_ci() -> None:
    asked = names([each for group in project()["optional-dependencies"].values() for each in group])
    assert asked | names(project()["dependencies"]) <= pins().keys() | {"octavo"}
    assert pins()["torch"] == "2.13.0"
    assert pins()["triton"] == "3.7.1", "what a CUDA build of this torch asks for: with another, pip finds no solution"


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    program = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "False", ended.stderr
    # The test above reads the installed version, which an old editable install may have from an older file.
    assert not project()["version"].startswith("0.18.")
