"""What pyproject.toml promises: which extra brings what, and that nobody takes our `kernels` for another."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import octavo
from octavo.shared import version as installed

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "triton", "transformers"}


# Modules of kernels that mypy checks less strictly. It never grows: a new one has types, or its compiler gets stubs.
MOST_EXCEPTED = 28  # of kernels that Triton compiles


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def project() -> dict[str, Any]:
    return settings()["project"]


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


def test_a_wheel_has_what_the_cpu_kernels_are_compiled_from_and_what_was_compiled() -> None:
    folder, patterns = (
        ROOT / "kernels/cpu/native",
        settings()["tool"]["setuptools"]["package-data"]["kernels.cpu.native"],
    )
    carried = {path for pattern in patterns for path in folder.glob(pattern)}
    assert {
        path for path in folder.rglob("*") if path.suffix in (".cpp", ".h", ".so") and "tmp" not in path.parent.name
    } == carried
    assert folder / "vec.h" in carried


@pytest.mark.parametrize("library", ["", "octavo-x86_64-avx2-0.so"])
def test_a_wheel_with_compiled_kernels_is_for_machines_of_this_kind_alone(tmp_path: Path, library: str) -> None:
    (tmp_path / "setup.py").write_text((ROOT / "setup.py").read_text(encoding="utf-8"))
    (built := tmp_path / "kernels/cpu/native/built").mkdir(parents=True)
    if library:
        (built / library).touch()
    program = """
import setuptools
from distutils.core import run_setup
wheel = run_setup("setup.py", stop_after="init").get_command_obj("bdist_wheel")
wheel.ensure_finalized()
print(*wheel.get_tag())
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    tag = f"linux_{platform.machine()}" if library else "any"
    assert ended.stdout == f"py3 none {tag}\n", ended.stderr


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    program = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "False", ended.stderr
    # The test above reads the installed version, which an old editable install may have from an older file.
    assert not project()["version"].startswith("0.18.")


def test_one_place_says_which_version_this_is() -> None:
    shown = subprocess.run([sys.executable, "-m", "octavo", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert shown.stdout == f"octavo {octavo.__version__}\n"
    assert octavo.__version__ == importlib.metadata.version("octavo") == project()["version"], (
        "`make setup` installs it"
    )
    copies = [path for path in Path(ROOT, "octavo").rglob("*.py") if project()["version"] in path.read_text("utf-8")]
    assert copies == []
    assert f"## [{project()['version']}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_hooks_run_what_the_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    entries = [hook["entry"].replace(" --force-exclude", "") for hook in hooks]  # for files by their names
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint: setup\n")[2].partition("\n\n")[0]
    lines = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    assert entries == [line.removesuffix(" .").removesuffix(" $(CXX_FILES)") for line in lines]


def test_the_makefile_says_once_what_a_variable_is() -> None:
    names = re.findall(r"^(\w+) :?= ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) > 5 and len(names) == len(set(names))


def test_strict_types_have_few_exceptions_which_get_fewer() -> None:
    mypy = settings()["tool"]["mypy"]
    assert mypy["strict"]
    ours = {*mypy["packages"], "protos"}
    loosened = [each for override in mypy["overrides"] for each in override["module"] if each.partition(".")[0] in ours]
    excepted = set(loosened) - {"tests.*", "protos.*"}
    assert len(excepted) <= MOST_EXCEPTED
    for module in excepted:
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert re.search(r"^(import|from) triton\b", text, re.M), f"{module} needs no exception"


def test_whoever_ignores_a_type_says_which_error_and_why() -> None:
    """In kernels, arguments without types need no reason: their compilers give them."""
    for path in sorted(ROOT.glob("[!.]*/**/*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            if re.search(r"#\s*type: ignore(?!\[no-untyped-def\])", line) and path != Path(__file__):
                assert re.search(r"# type: ignore\[[a-z-]+\]  # \S", line), f"{path.relative_to(ROOT)}:{number}"


def test_a_script_beside_a_clone_that_is_called_octavo_imports_the_package(tmp_path: Path) -> None:
    """Installed as `make setup` does, by a path: the clone's folder, which has no file of its own, gives way to it."""
    (tmp_path / "octavo").symlink_to(ROOT)
    command = [sys.executable, "-S", "-E", str(tmp_path / "script.py"), str(tmp_path / "octavo")]
    found = "import sys; sys.path.append(sys.argv[1]); import importlib.util as u; print(u.find_spec('octavo').origin)"
    (tmp_path / "script.py").write_text(found)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "octavo" / "octavo" / "__init__.py")
    assert "$(EDITABLE)" in (makefile := (ROOT / "Makefile").read_text()) and "editable_mode=compat" in makefile


def test_sources_that_nobody_installed_have_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installed, "version", not_found)
    assert octavo.__version__ == installed.FROM_SOURCES
