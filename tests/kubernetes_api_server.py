"""A Kubernetes API server for tests: etcd and kube-apiserver on loopback, without nodes and controllers.

What is applied is checked, admitted and kept as on a cluster; nothing runs. The programs are those in the folder
`$KUBEBUILDER_ASSETS`, where `setup-envtest` puts them, or on the path.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from octavo.shared.ports import free_ports
from tests.kubernetes_renderers import Manifest
from tests.processes import started

PROGRAMS = ("etcd", "kube-apiserver", "kubectl", "helm")
READY_WITHIN_S = 60
TOKEN = "of-an-administrator"  # on loopback, for as long as the test runs


def program(name: str) -> str | None:
    """Its path, None where it is not here."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("KUBEBUILDER_ASSETS", ""), os.environ["PATH"]]))


class ApiServer:
    """One that runs. Commands raise AssertionError with what they said where they fail."""

    def __init__(self, config: Path) -> None:
        self._environment = {**os.environ, "KUBECONFIG": str(config), "HOME": str(config.parent)}

    def kubectl(self, *arguments: str, manifests: list[Manifest] | None = None) -> str:
        """`manifests` are its standard input, as `--filename -` reads it."""
        return self._run("kubectl", *arguments, given=None if manifests is None else yaml.safe_dump_all(manifests))

    def helm(self, *arguments: str) -> str:
        """What it said."""
        return self._run("helm", *arguments)

    def try_kubectl(self, *arguments: str, manifests: list[Manifest]) -> str:
        """What it said of manifests that it refuses."""
        try:
            said = self.kubectl(*arguments, manifests=manifests)
        except AssertionError as error:
            return str(error)
        raise AssertionError(f"not refused: {said}")

    def get(self, *arguments: str) -> Any:
        """From JSON."""
        return json.loads(self.kubectl("get", *arguments, "--output", "json"))

    def _run(self, name: str, *arguments: str, given: str | None = None) -> str:
        path = program(name)
        assert path is not None
        ended = subprocess.run(
            [path, *arguments], input=given, env=self._environment, capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 0, f"{name} {' '.join(arguments)}: {ended.stderr or ended.stdout}"
        return ended.stdout


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """From an empty store; `folder` gets logs and certificates."""
    client_port, peer_port, port = free_ports(3)
    subprocess.run([sys.executable, "-m", "octavo", "certs", str(folder)], check=True, capture_output=True)
    own_key = folder / "accounts.key"  # of the kind that the server takes
    subprocess.run(["openssl", "genrsa", "-out", str(own_key), "2048"], check=True, capture_output=True)
    (folder / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n", encoding="utf-8")
    store = [program("etcd"), f"--data-dir={folder / 'store'}", "--unsafe-no-fsync", "--log-level=warn"]
    store += [f"--{kind}-client-urls=http://127.0.0.1:{client_port}" for kind in ("listen", "advertise")]
    store += [f"--listen-peer-urls=http://127.0.0.1:{peer_port}"]
    store += [f"--initial-advertise-peer-urls=http://127.0.0.1:{peer_port}"]
    store += [f"--initial-cluster=default=http://127.0.0.1:{peer_port}"]
    server = [program("kube-apiserver"), f"--etcd-servers=http://127.0.0.1:{client_port}"]
    server += [
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={port}",
        "--service-cluster-ip-range=10.96.0.0/16",
    ]
    server += [f"--tls-cert-file={folder / 'scheduler.pem'}", f"--tls-private-key-file={folder / 'scheduler.key'}"]
    server += [f"--service-account-key-file={own_key}", f"--service-account-signing-key-file={own_key}"]
    server += ["--service-account-issuer=https://localhost", f"--token-auth-file={folder / 'tokens.csv'}"]
    server += ["--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount"]  # which a controller makes
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(_config(f"https://127.0.0.1:{port}", folder / "ca.pem")), encoding="utf-8")
    with ExitStack() as open_here:
        log = open_here.enter_context((folder / "log").open("w"))
        for command in (store, server):
            process = open_here.enter_context(started([str(word) for word in command], stderr=log, stdout=log))
            open_here.callback(process.terminate)
        it = ApiServer(config)
        deadline = time.monotonic() + READY_WITHIN_S
        while True:
            try:
                it.kubectl("get", "--raw", "/readyz")
                break
            except AssertionError as error:
                told = (folder / "log").read_text(encoding="utf-8")[-3000:]
                assert time.monotonic() < deadline and process.poll() is None, f"{error}\n{told}"
                time.sleep(0.3)
        yield it


def _config(address: str, authority: Path) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "it", "cluster": {"server": address, "certificate-authority": str(authority)}}],
        "users": [{"name": "admin", "user": {"token": TOKEN}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "admin"}}],
        "current-context": "it",
    }
