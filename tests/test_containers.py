"""Dockerfile and compose.yaml, as far as they can be judged without an engine."""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from gateway_svc.config import GatewayConfig
from octavo.commands import certs, health
from octavo.shared.command_line import Parser
from octavo.shared.options import NOT_OPTIONS, add_arguments, from_namespace
from protos import inference_pb2
from scheduler_svc.config import SchedulerConfig
from worker_svc.config import WorkerConfig

ROOT = Path(__file__).parents[1]
TARGETS = ("scheduler", "worker", "gateway")
COMPOSE_FILES = (
    "compose.yaml",
    "compose.gpu.yaml",
    "compose.ranks.yaml",
    "compose.shards.yaml",
    "compose.locked.yaml",
)
LOCKS = {
    "scheduler": "scheduler,jwt,tracing",
    "gateway": "gateway,tracing",
    "worker": "worker,tracing",
    "worker-cuda": "worker,tracing",
}  # name -> extra of pyproject.toml
LIMITS = ("mem_limit", "cpus")
RENEW = "renew the locks: make locks"


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


def declared(stage: str) -> set[str]:
    """Names of the build arguments that a stage takes."""
    return {rest.partition("=")[0] for rest in said(stage, "ARG")}


def locked(name: str) -> dict[str, str]:
    """Package to version, by the file of that name in deploy/locks. Every line has to be one of these."""
    text = (ROOT / "deploy" / "locks" / f"{name}.txt").read_text(encoding="utf-8")
    found = {}
    for entry in filter(None, re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "").splitlines()):
        match = re.fullmatch(r"([a-z0-9.-]+)==(\S+)(?: +--hash=sha256:[0-9a-f]{64})+", entry)
        assert match, entry
        found[match[1]] = match[2]
    return found


def normal(name: str) -> str:
    """A package's name as locks write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(("name", "extras"), LOCKS.items())
def test_images_install_by_hash_what_the_project_asks_for(name: str, extras: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = project["project"]["dependencies"] + project["build-system"]["requires"]
    for extra in extras.split(","):
        asked += project["project"]["optional-dependencies"][extra]
    for line in asked:
        requirement = Requirement(line)
        version = locked(name).get(normal(requirement.name))
        assert version is not None and requirement.specifier.contains(version), f"{line}: {RENEW}"


@pytest.mark.parametrize("name", LOCKS)
def test_locks_have_the_versions_that_are_tested(name: str) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    for package, version in locked(name).items():
        for tested_name in tested:
            if normal(tested_name) == package:
                assert version.removesuffix("+cpu") == tested[tested_name], f"{package}: {RENEW}"


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_installed_without_its_hash(target: str) -> None:
    first, second = (rest for rest in said(target, "RUN") if "pip install" in rest)
    assert "--require-hashes --requirement" in first and "deploy/locks/" in first
    assert "pip install --no-deps --no-build-isolation . " in second, "Octavo itself, and nothing to build it with"


def compose(file_name: str = "compose.yaml") -> dict[str, Any]:
    return yaml.safe_load((ROOT / file_name).read_text(encoding="utf-8"))


def seconds(duration: str) -> int:
    (number,) = re.fullmatch(r"(\d+)s", duration).groups()  # type: ignore[union-attr]  # None fails
    return int(number)


def test_compose_files_keep_to_the_schema_of_the_compose_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *COMPOSE_FILES]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("file_name", COMPOSE_FILES)
def test_compose_files_also_suit_docker_compose_1_29(file_name: str) -> None:
    content = compose(file_name)
    assert {key for key in content if not key.startswith("x-")} <= {"services", "networks", "volumes"}
    for service in content["services"].values():
        assert "gpus" not in service
        assert all(isinstance(port, str) for port in service.get("ports", []))


def test_only_what_clients_call_is_published_and_only_on_loopback() -> None:
    content = compose()
    services = content["services"]
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {
        "scheduler": ["127.0.0.1:${PORT:-50051}:50051"],
        "gateway": ["127.0.0.1:${HTTP_PORT:-8000}:8000"],
    }
    assert services["gateway"]["profiles"] == ["http"] and services["gateway"]["networks"] == ["outside"]
    assert services["worker"]["networks"] == ["inside"] and content["networks"]["inside"]["internal"] is True
    assert "inside" in services["scheduler"]["networks"] and services["fetch"]["networks"] == ["outside"]


def test_services_may_do_nothing_that_they_need_not() -> None:
    for name, service in compose()["services"].items():
        assert service["read_only"] is True and service["tmpfs"] == ["/tmp"], name
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "cap_add", "user", "network_mode", "pid", "ipc", "devices"} & set(service), name
        assert all(volume.startswith("cache:") for volume in service.get("volumes", [])), name  # nothing of the host


def test_services_may_take_no_more_than_is_said() -> None:
    for name, service in compose()["services"].items():
        memory, cores = (re.fullmatch(r"\$\{[A-Z]+_(MEMORY|CPUS):-(\d+)g?\}", str(service[key])) for key in LIMITS)
        assert memory and cores and memory[1] == "MEMORY" and cores[1] == "CPUS", name
        assert 2 <= int(memory[2]) <= 16 and int(cores[2]) <= 2, name  # an engine refuses more cores than it has
        assert 128 <= service["pids_limit"] <= 1024, name  # threads count


def test_compose_builds_targets_that_exist_with_arguments_that_exist() -> None:
    everywhere = {*declared("base"), *declared("")}
    services = compose()["services"]
    assert {service["build"]["target"] for service in services.values()} == set(TARGETS) <= set(stages())
    for service in services.values():
        assert set(service["build"]["args"]) <= everywhere | declared(service["build"]["target"])
    # One tag, so one image, whichever is built last.
    assert services["fetch"]["image"] == services["worker"]["image"]
    assert services["fetch"]["build"] == services["worker"]["build"]


def test_weights_are_fetched_once_into_one_volume() -> None:
    services = compose()["services"]
    assert services["fetch"]["volumes"] == ["cache:/cache"]
    assert services["worker"]["volumes"] == ["cache:/cache:ro"]  # or one worker could change what the others run
    assert "OCTAVO_CACHE=/cache" in " ".join(said("worker", "ENV")).split()
    assert services["worker"]["depends_on"] == {"fetch": {"condition": "service_completed_successfully"}}
    assert services["fetch"]["entrypoint"] == ["octavo", "model", "fetch"]
    assert services["worker"]["command"] == ["--model", *services["fetch"]["command"]]
    # What its message about gated models asks for; nobody else needs it.
    assert "HF_TOKEN" in services["fetch"]["environment"] and "HF_TOKEN" not in services["worker"]["environment"]


def test_what_died_comes_back_and_what_is_stopped_has_time_to_finish() -> None:
    from scheduler_svc.api.public_server import GRACE_S
    from worker_svc.config import WorkerConfig
    from worker_svc.server import DRAIN_LIMIT_S

    services = compose()["services"]
    worker_limit_s = WorkerConfig().finish_timeout + DRAIN_LIMIT_S
    for name, own_limit_s in (("scheduler", GRACE_S), ("worker", worker_limit_s)):
        assert services[name]["restart"] == "unless-stopped"
        assert services[name]["init"] is True  # as process 1 it would be deaf to SIGTERM until it has a handler
        assert seconds(services[name]["stop_grace_period"]) >= 2 * own_limit_s
    assert "restart" not in services["fetch"]
    assert services["scheduler"]["depends_on"] == ["worker"]  # so that compose stops the scheduler first


def test_the_gpu_file_reserves_one_and_builds_both_users_of_the_image_alike() -> None:
    services = compose("compose.gpu.yaml")["services"]
    assert set(services) == {"fetch", "worker"}
    assert services["fetch"]["build"] == services["worker"]["build"]
    (device,) = services["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "${GPUS:-1}", "capabilities": ["gpu"]}


def test_the_file_with_ranks_gives_the_worker_options_that_it_takes_and_room_for_them() -> None:
    (worker,) = compose("compose.ranks.yaml")["services"].values()
    alone = compose()["services"]["worker"]
    flags = [re.sub(r"\$\{\w+:-([\w.-]+)\}", r"\1", word) for word in worker["command"]]
    parser = Parser(prog="octavo worker")
    add_arguments(parser, WorkerConfig)
    config = from_namespace(WorkerConfig, parser.parse_args(flags))
    assert worker["command"][:2] == alone["command"]
    assert (config.tensor_parallel_size, config.pipeline_parallel_size) == (3, 1)
    assert worker["shm_size"] == "${SHARED_MEMORY:-1g}"
    for limit in ("mem_limit", "cpus"):
        name = re.match(r"\$\{(\w+):-", worker[limit])[1]  # type: ignore[index]  # None fails
        assert alone[limit].startswith(f"${{{name}:-"), "whoever has set it means both"


def test_the_file_with_locks_gives_each_service_options_that_it_takes_and_its_own_files_alone() -> None:
    made = {"ca.pem", "keys.yaml", *(f"{role}.{kind}" for role in certs.ROLES for kind in ("pem", "key"))}
    services = compose("compose.locked.yaml")["services"]
    assert set(services) == {"worker", "scheduler", "gateway"}
    for name, config in (("worker", WorkerConfig), ("scheduler", SchedulerConfig), ("gateway", GatewayConfig)):
        mounted = dict(volume.removesuffix(":ro").rsplit(":", 1)[::-1] for volume in services[name]["volumes"])
        assert all(f"/locked/{own.rpartition('/')[2]}" == path for path, own in mounted.items())
        assert {path.rpartition("/")[2] for path in mounted} <= made - {
            f"{other}.key" for other in services if other != name
        }
        variables = dict(line.split("=", 1) for line in services[name]["environment"])
        parser = Parser(prog=f"octavo {name}")
        add_arguments(parser, config)
        options: Any = from_namespace(config, parser.parse_args([]), variables)
        files = {str(value) for value in vars(options).values() if isinstance(value, Path)}
        assert files == set(mounted) and (name == "gateway" or not options.insecure)
        if "healthcheck" in services[name]:
            words = services[name]["healthcheck"]["test"][3:]
            health.add_arguments(of_health := Parser(prog="octavo health"))
            asked = of_health.parse_args(words)
            own = {asked.tls_ca_file, asked.tls_client_cert_file, asked.tls_client_key_file} - {None}
            assert asked.tls_ca_file and own <= set(mounted)


def test_the_file_with_shards_gives_the_scheduler_options_that_it_takes_and_room_for_them() -> None:
    (scheduler,) = compose("compose.shards.yaml")["services"].values()
    flags = [re.sub(r"\$\{\w+:-(\d+)\}", r"\1", word) for word in scheduler["command"]]
    parser = Parser(prog="octavo scheduler")
    add_arguments(parser, SchedulerConfig)
    config = from_namespace(SchedulerConfig, parser.parse_args(flags))
    alone = compose()["services"]["scheduler"]
    assert flags[:2] == alone["command"] and config.shards == config.frontends == 2
    assert scheduler["pids_limit"] > alone["pids_limit"]
    for limit in LIMITS:
        name = re.match(r"\$\{(\w+):-", scheduler[limit])[1]  # type: ignore[index]  # None fails
        assert alone[limit].startswith(f"${{{name}:-"), "whoever has set it means both"


@pytest.mark.parametrize("service", TARGETS)
def test_variables_that_compose_hands_on_are_options_of_the_command(service: str) -> None:
    handed_on = {word.partition("=")[0] for word in compose()["services"][service]["environment"]} | {
        word.partition("=")[0] for word in " ".join(said(service, "ENV")).split() if word.startswith("OCTAVO_")
    }
    config = {"scheduler": SchedulerConfig, "worker": WorkerConfig, "gateway": GatewayConfig}[service]
    known = {f"OCTAVO_{field.name.upper()}" for field in dataclasses.fields(config)}
    assert handed_on <= known | NOT_OPTIONS


def test_the_trial_names_files_and_methods_that_exist() -> None:
    script = (ROOT / "deploy" / "try-compose.sh").read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=10).returncode == 0
    services = inference_pb2.DESCRIPTOR.services_by_name
    methods = set(re.findall(r"(?:octavo\.v1\.|call )(\w+)/(\w+)", script))
    assert len(methods) >= 3
    for service, method in methods:
        assert method in services[service].methods_by_name
    assert all((ROOT / name).exists() for name in re.findall(r"--file (compose\S+)", script))
    more = re.findall(r"for more in ([\w ]+);", script)[0].split()
    assert {f"compose.{name}.yaml" for name in more} == set(COMPOSE_FILES) - {"compose.yaml"}


def test_the_last_trial_that_is_told_passed_and_tried_all_files() -> None:
    told = (ROOT / "deploy" / "try-compose.txt").read_text(encoding="utf-8").splitlines()
    assert re.match(r"20\d\d-\d\d-\d\d, \d+ cores of ", told[0])
    assert told[-1].endswith("passed: nothing is left of it")
    tried = {match[1] for line in told if (match := re.fullmatch(r"[0-9a-f]{16}  (\S+)", line))}
    assert tried == {"Dockerfile", *COMPOSE_FILES}


def test_the_scheduler_image_asks_for_no_device_code() -> None:
    installs = [rest for rest in said("scheduler", "RUN") if "pip install" in rest]
    assert re.findall(r"deploy/locks/(\S+)\.txt", " ".join(installs)) == ["scheduler"]
    assert not {"torch", "triton"} & locked("scheduler").keys()
    assert not {"kernels", "worker_svc"} & {word for rest in said("scheduler", "COPY") for word in rest.split()}
    assert not any(re.search(r"torch|triton|\[all\]|\[worker\]", rest) for rest in said("base", "RUN") + installs)


@pytest.mark.parametrize("target", TARGETS)
def test_images_run_as_nobody_special_and_take_signals_themselves(target: str) -> None:
    assert said(target, "FROM") == [f"base AS {target}"]
    assert said(target, "USER") == ["10001"]
    assert said(target, "ENTRYPOINT") == [f'["octavo", "{target}"]']  # exec form: no shell between it and SIGTERM
    (check,) = said(target, "HEALTHCHECK")
    assert (
        re.findall(r'CMD \["octavo", "health", "(?:http://)?127\.0\.0\.1:(\d+)"', check) == said(target, "EXPOSE")[:1]
    )


def test_a_build_may_use_another_base_image_and_other_wheels() -> None:
    (base,) = said("", "ARG")
    assert re.fullmatch(r"BASE_IMAGE=python:3\.11-slim@sha256:[0-9a-f]{64}", base)
    assert said("base", "FROM") == ["${BASE_IMAGE} AS base"]
    for service in compose()["services"].values():  # where nothing is asked for, what the Dockerfile says
        assert "BASE_IMAGE" in service["build"]["args"] and service["build"]["args"]["BASE_IMAGE"] is None
    for target in TARGETS:  # declared in each: engines without BuildKit do not hand them on
        assert said(target, "ARG")[:2] == ["PIP_FIND_LINKS=", "PIP_EXTRA_INDEX_URL="]
    assert not (ROOT / "Dockerfile").read_text(encoding="utf-8").startswith("# syntax")


def test_the_worker_image_takes_a_cpu_build_of_torch_unless_told_otherwise() -> None:
    (default,) = (rest for rest in said("worker", "ARG") if rest.startswith("TORCH_INDEX_URL="))
    (install,) = (rest for rest in said("worker", "RUN") if "--require-hashes" in rest)
    assert default.endswith("/cpu") and "$TORCH_INDEX_URL" in install
    assert "LOCK=worker" in said("worker", "ARG") and "deploy/locks/$LOCK.txt" in install
    assert locked("worker")["torch"].endswith("+cpu") and not locked("worker-cuda")["torch"].endswith("+cpu")
    args = compose()["services"]["worker"]["build"]["args"]
    assert args["TORCH_INDEX_URL"] == "${TORCH_INDEX_URL-" + default.partition("=")[2] + "}"  # empty counts as said


def test_the_gpus_image_has_what_triton_needs_to_compile_kernels_and_a_place_to_keep_them() -> None:
    assert "APT_PACKAGES=" in said("worker", "ARG"), "none by default"
    (install,) = (rest for rest in said("worker", "RUN") if "apt-get" in rest)
    assert "--no-install-recommends $APT_PACKAGES" in install
    services = compose("compose.gpu.yaml")["services"]
    for name in ("fetch", "worker"):  # one image
        args = services[name]["build"]["args"]
        expected = {"LOCK": "worker-cuda", "TORCH_INDEX_URL": "${TORCH_INDEX_URL:-}", "APT_PACKAGES": "gcc libc6-dev"}
        assert args == expected
    (folder,) = re.findall(r"TRITON_CACHE_DIR=(\S+)", " ".join(services["worker"]["environment"]))
    assert f"{folder}:exec,mode=1777" in services["worker"]["tmpfs"], "all else is read-only, or runs nothing"
    parser = argparse.ArgumentParser()
    add_arguments(parser, WorkerConfig)
    assert from_namespace(WorkerConfig, parser.parse_args(services["worker"]["command"]), {}).device == "cuda"


def test_everything_that_is_copied_gets_past_dockerignore() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for stage in ("base", *TARGETS):
        for copied in said(stage, "COPY"):
            if not copied.startswith("--from="):
                for source in copied.split()[:-1]:
                    assert f"!{source}" in lines and (ROOT / source).exists()


def test_cpu_kernels_are_compiled_for_every_processor_and_no_compiler_gets_into_an_image() -> None:
    assert said("native", "FROM") == ["base AS native"]
    assert said("native", "COPY") == ["kernels/cpu/native kernels/cpu/native"]  # nothing else renews it
    assert said("native", "RUN")[-1] == "python kernels/cpu/native/build.py --all"
    built = "/src/kernels/cpu/native/built kernels/cpu/native/built"
    assert f"--from=native {built}" in said("worker", "COPY")
    assert (ROOT / "kernels" / "cpu" / "native" / "build.py").exists()
    assert "kernels/cpu/native/built" in (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for stage in ("base", *TARGETS):
        assert not any(re.search(r"g\+\+|gcc|clang", rest) for rest in said(stage, "RUN")), stage
