"""Dockerfile and compose.yaml, as far as they can be judged without an engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TARGETS = ("scheduler", "worker")


def stages() -> dict[str, list[tuple[str, str]]]:
    """Stage name to its (instruction, rest) pairs, in order; comments left out, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: dict[str, list[tuple[str, str]]] = {"": []}
    current = ""
    for line in filter(None, text.replace("\\\n", " ").splitlines()):
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "FROM":
            current = rest.rpartition(" AS ")[2]
            found[current] = []
        found[current].append((instruction, rest.strip()))
    return found


def said(stage: str, instruction: str) -> list[str]:
    return [rest for name, rest in stages()[stage] if name == instruction]


def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))


def test_compose_file_keeps_to_the_schema_of_the_compose_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_compose_file_also_suits_docker_compose_1_29() -> None:
    content = compose()
    assert set(content) <= {"services", "networks", "volumes"}
    for service in content["services"].values():
        assert "gpus" not in service
        assert all(isinstance(port, str) for port in service.get("ports", []))


def test_only_the_scheduler_is_published_and_only_on_loopback() -> None:
    content = compose()
    published = {name: service["ports"] for name, service in content["services"].items() if "ports" in service}
    assert published == {"scheduler": ["127.0.0.1:50051:50051"]}
    assert content["services"]["worker"]["networks"] == ["inside"] and content["networks"]["inside"]["internal"] is True


def test_compose_builds_targets_that_exist_and_shares_one_volume_of_models() -> None:
    services = compose()["services"]
    assert {service["build"]["target"] for service in services.values()} == set(TARGETS) <= set(stages())
    assert services["fetch"]["volumes"] == services["worker"]["volumes"] == ["cache:/cache"]
    assert ("ENV", "OCTAVO_CACHE=/cache") in [
        (name, word) for name, rest in stages()["worker"] for word in rest.split()
    ]


def test_the_scheduler_image_asks_for_no_device_code() -> None:
    installs = [rest for rest in said("scheduler", "RUN") if "pip install" in rest]
    assert re.findall(r"\.\[(.*?)\]", " ".join(installs)) == ["scheduler"]
    assert not {"kernels", "worker_svc"} & {word for rest in said("scheduler", "COPY") for word in rest.split()}
    assert not any(re.search(r"torch|triton|\[all\]|\[worker\]", rest) for rest in said("base", "RUN") + installs)


@pytest.mark.parametrize("target", TARGETS)
def test_images_run_as_nobody_special_and_take_signals_themselves(target: str) -> None:
    assert said(target, "FROM") == [f"base AS {target}"]
    assert said(target, "USER") == ["10001"]
    assert said(target, "ENTRYPOINT") == [f'["octavo", "{target}"]']  # exec form: no shell between it and SIGTERM
    (check,) = said(target, "HEALTHCHECK")
    assert re.search(r'CMD \["octavo", "health", "127\.0\.0\.1:(\d+)"', check)[1] == said(target, "EXPOSE")[0]  # type: ignore[index]


def test_a_build_may_use_another_base_image_and_other_wheels() -> None:
    assert said("", "ARG") == ["BASE_IMAGE=python:3.11-slim"] and said("base", "FROM") == ["${BASE_IMAGE} AS base"]
    for target in TARGETS:  # declared in each: engines without BuildKit do not hand them on
        assert said(target, "ARG") == ["PIP_FIND_LINKS=", "PIP_EXTRA_INDEX_URL="]
    assert not (ROOT / "Dockerfile").read_text(encoding="utf-8").startswith("# syntax")


def test_everything_that_is_copied_gets_past_dockerignore() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for stage in ("base", *TARGETS):
        for copied in said(stage, "COPY"):
            for source in copied.split()[:-1]:
                assert f"!{source}" in lines and (ROOT / source).exists()
