"""Every way to install Octavo that deploy/kubernetes has, as manifests, and what tests ask of manifests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from deploy.kubernetes import make_chart
from tests.kubernetes_renderers import Manifest, kustomize, merged, pods, read

KUBERNETES = make_chart.HERE
# A way to install: overlay, components beside it, files of values, and values.
CASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "cpu": ("cpu", (), (), {}),
    "one-node": ("one-node", (), ("values-one-node.yaml",), {}),
    "nvidia": ("nvidia", (), ("values-nvidia.yaml",), {}),
    "nvidia-ranks": ("nvidia-ranks", (), ("values-nvidia.yaml",), {"ranks": {"enabled": True}}),
    "ingress": ("cpu", ("ingress",), (), {"ingress": {"enabled": True}}),
    "gateway-api": ("cpu", ("gateway-api",), (), {"gatewayApi": {"enabled": True}}),
    "service-monitor": ("cpu", ("service-monitor",), (), {"serviceMonitor": {"enabled": True}}),
    "keys": ("cpu", ("service-monitor", "keys"), ("values-keys.yaml",), {"serviceMonitor": {"enabled": True}}),
    "tls": ("cpu", ("service-monitor", "tls"), ("values-tls.yaml",), {"serviceMonitor": {"enabled": True}}),
    "tls-keys-ranks": (
        "cpu",
        ("ranks", "keys", "tls"),
        ("values-keys.yaml", "values-tls.yaml"),
        {"ranks": {"enabled": True}},
    ),
    "hpa": ("cpu", ("hpa",), (), {"hpa": {"enabled": True}}),
    "keda": ("nvidia", ("keda",), ("values-nvidia.yaml",), {"keda": {"enabled": True}}),
    "ranks": ("cpu", ("ranks",), (), {"ranks": {"enabled": True}}),
}


def folder_of(case: str, into: Path) -> Path:
    """A kustomization of the overlay and the components, as a user's own would be."""
    overlay, components, _, _ = CASES[case]
    shutil.copytree(KUBERNETES, into, ignore=shutil.ignore_patterns("chart", "*.py", "__pycache__"))
    (into / "mine").mkdir()
    mine = {"resources": [f"../overlays/{overlay}"], "components": [f"../components/{name}" for name in components]}
    kinds = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "namespace": "octavo"}
    (into / "mine" / "kustomization.yaml").write_text(yaml.safe_dump(kinds | mine), encoding="utf-8")
    return into / "mine"


@cache
def rendered(case: str) -> list[Manifest]:
    """As kustomize makes them. For nobody to change."""
    overlay, components, _, _ = CASES[case]
    found = kustomize(KUBERNETES / "overlays" / overlay)
    for name in components:
        found = kustomize(KUBERNETES / "components" / name, found)
    for each in found:
        if each["kind"] != "Namespace":
            each["metadata"]["namespace"] = "octavo"
    return found


def values_of(case: str) -> dict[str, Any]:
    """What the chart gets."""
    (values,) = read(make_chart.CHART / "values.yaml")
    for name in CASES[case][2]:
        values = merged(values, read(make_chart.CHART / name)[0])
    return merged(values, CASES[case][3])


def templates() -> list[str]:
    """The chart's."""
    return [path.read_text(encoding="utf-8") for path in sorted((make_chart.CHART / "templates").glob("*.yaml"))]


def named(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    """By kind and name, each once."""
    found = {(each["kind"], each["metadata"]["name"]): each for each in manifests}
    assert len(found) == len(manifests), "two of one name"
    return found


def component(labelled: dict[str, Any]) -> str:
    """Which part of Octavo it is, by its label."""
    return labelled["metadata"]["labels"]["app.kubernetes.io/component"]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    """Those of these kinds."""
    return [each for each in manifests if each["kind"] in kinds]


def all_pods(manifests: list[Manifest]) -> list[dict[str, Any]]:
    """Of all manifests."""
    return [pod for each in manifests for pod in pods(each)]


def services(manifests: list[Manifest]) -> dict[str, list[int]]:
    """Service to the numbers of its ports."""
    return {
        each["metadata"]["name"]: [port["port"] for port in each["spec"]["ports"]]
        for each in of_kind(manifests, "Service")
    }


def matches(selector: dict[str, str], pod: dict[str, Any]) -> bool:
    """Whether a selector chooses a pod, with what LeaderWorkerSet adds to its own."""
    added = {"leaderworkerset.sigs.k8s.io/name": "octavo-ranks"} if pod_is_of_a_group(pod) else {}
    return selector.items() <= (pod["metadata"]["labels"] | added).items()


def pod_is_of_a_group(pod: dict[str, Any]) -> bool:
    """Whether LeaderWorkerSet makes it."""
    return any("RANK" in variables(each) for each in pod["spec"]["containers"])


def variables(container: dict[str, Any]) -> dict[str, Any]:
    """Name to value; None where it comes from elsewhere."""
    return {each["name"]: each.get("value") for each in container.get("env", [])}


def serving(manifests: list[Manifest]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Service, its pod and the container in it; ranks that serve nobody are workers too."""
    for pod in all_pods(manifests):
        if component(pod) != "fetch":
            (container,) = pod["spec"]["containers"]
            yield container["name"], pod, container


def who(peer: dict[str, Any]) -> str:
    """A peer of a policy in a word."""
    match peer:
        case {"podSelector": {"matchLabels": {"app.kubernetes.io/component": name}}}:
            return name
        case {"podSelector": {"matchLabels": {"octavo-client": "true"}}}:
            return "client"
        case {"namespaceSelector": {"matchLabels": {"octavo-client": "true"}}}:
            return "client's namespace"
        case {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}:
            return name
        case {"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}:
            return "dns"
        case {"podSelector": {"matchLabels": {"leaderworkerset.sigs.k8s.io/name": name}}}:
            return name
        case {"ipBlock": _}:
            return "outside"
    raise AssertionError(peer)
