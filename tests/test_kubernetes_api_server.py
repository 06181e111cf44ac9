"""deploy/kubernetes on a real API server: it takes every way to install, keeps what is written, and admits the pods.

Run by `make try-kubernetes`. CRDS is a folder with the definitions of custom kinds; without it they are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.kubernetes import make_chart
from tests.kubernetes_api_server import PROGRAMS, ApiServer, api_server, program
from tests.kubernetes_cases import CASES, folder_of, named, of_kind, rendered
from tests.kubernetes_renderers import Manifest, pods
from tests.pages import PAGES, ROOT
from tests.test_kubernetes import CUSTOM

pytestmark = pytest.mark.api_server
every_case = pytest.mark.parametrize("case", CASES)
STRICT = ("--server-side", "--validate=strict", "--filename", "-")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    missing = [name for name in PROGRAMS if program(name) is None]
    assert not missing, f"not here: {', '.join(missing)}"
    with api_server(tmp_path_factory.mktemp("api-server")) as it:
        definitions = [each for path in _definitions() for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
        if definitions := [each for each in definitions if each and each["kind"] == "CustomResourceDefinition"]:
            it.kubectl("apply", "--server-side", "--filename", "-", manifests=definitions)
            it.kubectl("wait", "--for", "condition=established", "--timeout", "30s", "crd", "--all")
        yield it


def _definitions() -> list[Path]:
    return sorted(Path(os.environ["CRDS"]).rglob("*.y*ml")) if "CRDS" in os.environ else []


@pytest.fixture(scope="module")
def known(server: ApiServer) -> set[str]:
    """Custom kinds that the server knows."""
    return {each["spec"]["names"]["kind"] for each in server.get("crd")["items"]} & CUSTOM


def moved(manifests: list[Manifest], namespace: str, known: set[str]) -> list[Manifest]:
    """Into a namespace of their own; what is custom and unknown stays behind."""
    found = [deepcopy(each) for each in manifests if each["kind"] not in CUSTOM or each["kind"] in known]
    for each in found:
        if each["kind"] == "Namespace":
            each["metadata"]["name"] = namespace
        else:
            each["metadata"]["namespace"] = namespace
    return found


@every_case
def test_what_kubectl_makes_is_taken_and_kept(case: str, server: ApiServer, known: set[str], tmp_path: Path) -> None:
    """By the strict rules, in which an unknown field is an error; a second look finds nothing to change."""
    made = list(yaml.safe_load_all(server.kubectl("kustomize", str(folder_of(case, tmp_path / "kubernetes")))))
    manifests = moved(made, f"by-kubectl-{case}", known)
    server.kubectl("apply", *STRICT, manifests=of_kind(manifests, "Namespace"))
    said = server.kubectl("apply", *STRICT, manifests=manifests)
    assert said.count("serverside-applied") == len(manifests) >= 19
    assert server.kubectl("diff", "--server-side", "--filename", "-", manifests=manifests) == ""


@every_case
def test_pods_are_admitted_by_the_security_standard_of_the_namespace(case: str, server: ApiServer) -> None:
    """As pods: of what a Deployment would make of its template an API server only warns."""
    namespace = f"pods-{case}"
    manifests = moved(rendered(case), namespace, set())
    (space,) = of_kind(manifests, "Namespace")
    assert space["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    server.kubectl("apply", *STRICT, manifests=[space])
    made = [deepcopy(pod) for each in rendered(case) for pod in pods(each)]
    for number, pod in enumerate(made):
        pod |= {"apiVersion": "v1", "kind": "Pod"}
        pod["metadata"] |= {"name": f"it-{number}", "namespace": namespace}
    assert len(made) >= 4 and server.kubectl("create", "--validate=strict", "--filename", "-", manifests=made)


@every_case
def test_helm_installs_changes_and_removes_it(case: str, server: ApiServer, known: set[str]) -> None:
    kinds = {each["kind"] for each in rendered(case)} & CUSTOM
    if kinds - known:
        pytest.skip(f"CRDS has no definition of {', '.join(sorted(kinds - known))}")
    namespace = f"by-helm-{case}"
    files = [f"--values={make_chart.CHART / name}" for name in CASES[case][2]]
    flags = [f"--set={name}.enabled=true" for name in CASES[case][3]]
    place = ("--namespace", namespace)
    server.helm("install", "octavo", str(make_chart.CHART), *place, "--create-namespace", *files, *flags)
    before = server.get("deployments", *place)
    chart = (str(make_chart.CHART), *place, "--reset-then-reuse-values", "--set", "gateway.replicas=4")
    server.helm("upgrade", "octavo", *chart)
    after = named(server.get("deployments", *place)["items"])
    assert after.keys() == named(before["items"]).keys()
    assert after["Deployment", "octavo-gateway"]["spec"]["replicas"] == 4
    server.helm("uninstall", "octavo", *place, "--wait=false")
    assert server.get("services", *place)["items"] == []


def test_an_autoscaler_that_is_turned_on_takes_over_the_workers_that_are_there(server: ApiServer) -> None:
    chart = (str(make_chart.CHART), "--namespace", "turned-on")
    server.helm("install", "octavo", *chart, "--create-namespace", "--set", "worker.replicas=3")
    server.helm("upgrade", "octavo", *chart, "--reset-then-reuse-values", "--set", "hpa.enabled=true")
    deployments = named(server.get("deployments", "--namespace", "turned-on")["items"])
    assert deployments["Deployment", "octavo-worker"]["spec"]["replicas"] == 3


def test_the_walk_through_of_the_page_names_what_is_there(server: ApiServer) -> None:
    """As a user types it: not `--server-side`, and into the namespace that it makes."""
    overlay = "deploy/kubernetes/overlays/one-node"
    assert f"kubectl apply --kustomize {overlay}\n" in PAGES["docs/kubernetes.md"]
    apply = ("apply", "--validate=strict", "--kustomize", str(ROOT / overlay))
    assert all(line.endswith(" created") for line in server.kubectl(*apply).splitlines())
    server.kubectl(*apply)
    deployments = server.get("--namespace", "octavo", "deployments")["items"]
    assert [each["metadata"]["generation"] for each in deployments] == [1, 1, 1], "no pod starts anew for nothing"
    commands = PAGES["docs/kubernetes.md"]
    named_there = set(re.findall(r"--namespace octavo .*?((?:job|deployment|service)/octavo-\w+)", commands))
    assert len(named_there) >= 5
    for each in named_there:
        assert server.get("--namespace", "octavo", each)["metadata"]["labels"]["app.kubernetes.io/name"] == "octavo"


def test_what_is_wrong_is_refused(server: ApiServer) -> None:
    """So that a pass above says something."""
    manifests = moved(rendered("cpu"), "wrong", set())
    server.kubectl("apply", *STRICT, manifests=of_kind(manifests, "Namespace"))
    worker = deepcopy(named(manifests)["Deployment", "octavo-worker"])
    worker["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    assert "readynessProbe" in server.try_kubectl("apply", *STRICT, manifests=[worker])
    worker = deepcopy(named(manifests)["Deployment", "octavo-worker"])
    worker["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] = "gateway"
    assert "does not match template" in server.try_kubectl("apply", *STRICT, manifests=[worker])
    worker = deepcopy(named(manifests)["Deployment", "octavo-worker"])
    pod: dict[str, Any] = worker["spec"]["template"]
    pod["metadata"] |= {"name": "root", "namespace": "wrong"}
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    pod |= {"apiVersion": "v1", "kind": "Pod"}
    assert 'violates PodSecurity "restricted' in server.try_kubectl("create", "--filename", "-", manifests=[pod])
