"""Who may use the links inside `octavo serve`: a token for workers, and a socket to a scheduler with certificates."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.serving.links import locked_links, private_folder
from octavo.serving.plan import PlanError, ServeConfig, plan
from octavo.shared.ports import free_port
from octavo.shared.processes.supervisor import Child
from scheduler_svc.config import SchedulerConfig
from tests.processes import started
from worker_svc.config import WorkerConfig

ROOT = Path(__file__).parents[1]
TLS: dict[str, Any] = {"tls_cert_file": Path("c.pem"), "tls_key_file": Path("k.pem")}


def flags(child: Child) -> set[str]:
    return {argument for argument in child.command if argument.startswith("--")}


def planned(folder: Path, scheduler: SchedulerConfig, worker: WorkerConfig, **serve: Any) -> tuple[list[Child], str]:
    address, children = plan(ServeConfig(workers=2, **serve), *locked_links(scheduler, worker, folder))
    return children, address


def test_workers_want_a_token_of_this_start_which_no_command_line_shows(tmp_path: Path) -> None:
    (scheduler, *workers), _ = planned(tmp_path, SchedulerConfig(port=0), WorkerConfig())
    file = tmp_path / "worker-token"
    assert f"--worker-token-file={file}" in flags(scheduler)
    assert all(f"--token-file={file}" in flags(worker) for worker in workers)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text()
    assert len(token) >= 40
    for child in (scheduler, *workers):
        assert not any(token in text for text in (*child.command, *child.environment.values()))
    (other := tmp_path / "other").mkdir()
    planned(other, SchedulerConfig(port=0), WorkerConfig())
    assert (other / "worker-token").read_text() != token


@pytest.mark.parametrize("given", [{"token_file": Path("t")}, {"worker_token_file": Path("t")}])
def test_a_token_that_is_given_is_that_of_both_sides(given: dict[str, Any], tmp_path: Path) -> None:
    worker = WorkerConfig(**{name: value for name, value in given.items() if name == "token_file"})
    scheduler = SchedulerConfig(port=0, **{name: value for name, value in given.items() if name != "token_file"})
    (scheduler_child, *workers), _ = planned(tmp_path, scheduler, worker)
    assert "--worker-token-file=t" in flags(scheduler_child)
    assert all("--token-file=t" in flags(each) for each in workers)
    assert not any(tmp_path.iterdir())


def test_certificates_are_for_clients_and_the_gateway_comes_by_a_socket(tmp_path: Path) -> None:
    scheduler = SchedulerConfig(port=0, frontends=2, tls_client_ca_file=Path("ca.pem"), **TLS)
    worker = WorkerConfig(tls_client_ca_file=Path("ca.pem"), **TLS)  # as one command line gives them to all parts
    (scheduler_child, gateway, *workers), address = planned(tmp_path, scheduler, worker, http_port=free_port())
    shown = {"--tls-cert-file=c.pem", "--tls-key-file=k.pem", "--tls-client-ca-file=ca.pem"}
    assert shown < flags(scheduler_child) and shown < flags(gateway)
    assert not any("tls" in flag for each in workers for flag in flags(each))
    sockets = f"unix:{tmp_path}/frontend-0,unix:{tmp_path}/frontend-1"
    assert f"--scheduler={sockets}" in flags(gateway) and f"--socket-folder={tmp_path}" in flags(scheduler_child)
    without = planned(tmp_path, SchedulerConfig(port=0), WorkerConfig(), http_port=free_port())
    assert f"--scheduler={without[1]}" in flags(without[0][1]), "without certificates by the port, as clients do"
    assert address.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("scheduler", "worker", "why"),
    [
        ({"worker_tls_ca_file": Path("ca")}, {}, "worker_tls_ca_file is for workers with certificates"),
        ({}, {**TLS, "tls_client_ca_file": Path("ca"), "tls_client_name": ("a",)}, "tls_client_name is for workers"),
        ({"worker_token_file": Path("a")}, {"token_file": Path("b")}, "two files, and of one token"),
    ],
)
def test_what_means_nothing_here_is_refused(
    scheduler: dict[str, Any], worker: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=why):
        locked_links(SchedulerConfig(**scheduler), WorkerConfig(**worker), tmp_path)


def test_the_folder_is_for_this_user_and_gone_at_the_end() -> None:
    with private_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "a").touch()
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_folder_is_gone_after_a_signal_that_nobody_else_hears(number: signal.Signals, tmp_path: Path) -> None:
    """As while a model is downloaded."""
    program = """if True:
        import time
        from octavo.serving.links import private_folder
        with private_folder():
            print("made", flush=True)
            time.sleep(600)
    """
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with started([sys.executable, "-c", program], cwd=ROOT, env=environ, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"made\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(number)
        assert process.wait(30) == -number
    assert not any(tmp_path.iterdir())
