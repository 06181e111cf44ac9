"""`octavo completion`, with the shells that there are: bash always, zsh and fish where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.cli import COMMANDS, main
from octavo.commands.completion import SHELLS


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    with pytest.MonkeyPatch.context() as patch:
        for shell in SHELLS:
            with (folder / shell).open("w") as file:
                patch.setattr("sys.stdout", file)
                assert main(["completion", shell]) == 0
    return folder


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("octavo se", ["serve"]),
        ("octavo top --int", ["--interval"]),
        ("octavo model ", ["fetch", "list", "show", "rm", "calibrate"]),
        ("octavo worker --load-format ", ["auto", "safetensors", "gguf", "bin", "dummy"]),
        ("octavo generate x --early-stopping ", ["NO", "YES", "NEVER"]),
        ("octavo completion ", list(SHELLS)),
    ],
)
def test_bash_completes(scripts: Path, typed: str, found: list[str]) -> None:
    words = typed.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    script = f"source {scripts}/bash; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; "
    function = "$(complete -p octavo | sed 's/.*-F \\([^ ]*\\) .*/\\1/')"
    done = subprocess.run(
        ["bash", "--norc", "-c", f'{script} {function}; printf "%s\\n" "${{COMPREPLY[@]}}"'],
        text=True,
        capture_output=True,
        check=True,
    )
    assert done.stdout.split() == found


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shells_script_reads_and_names_every_command(scripts: Path, shell: str) -> None:
    text = (scripts / shell).read_text()
    assert [name for name in COMMANDS if name not in text] == []
    if shutil.which(shell):
        assert subprocess.run([shell, "-n", scripts / shell], capture_output=True, text=True).stderr == ""


def test_fish_completes(scripts: Path) -> None:
    if not shutil.which("fish"):
        pytest.skip("fish is not installed")
    asked = f"source {scripts}/fish; complete -C 'octavo top --int'"
    done = subprocess.run(["fish", "--no-config", "-c", asked], text=True, capture_output=True, check=True)
    assert done.stdout.split()[0] == "--interval"
