"""The chart of deploy/kubernetes: it is what its script writes, and gives the same manifests as the kustomizations."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path

import jsonschema
import pytest
import yaml

from deploy.kubernetes import make_chart
from tests.kubernetes_cases import CASES, folder_of, named, rendered, templates, values_of
from tests.kubernetes_renderers import ChartRefused, Manifest, documents, helm, merged, pods

every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture
def manifests(case: str) -> list[Manifest]:
    """As kustomize makes them; the test's own."""
    return deepcopy(rendered(case))


def test_the_chart_is_as_it_would_be_written_now() -> None:
    chart = make_chart.chart()
    assert {path: (make_chart.CHART / path).read_text(encoding="utf-8") for path in chart} == chart, (
        "python -m deploy.kubernetes.make_chart"
    )
    by_hand = {
        "values-nvidia.yaml",
        "values-one-node.yaml",
        "values-keys.yaml",
        "values-tls.yaml",
        "templates/NOTES.txt",
    }
    there = {str(path.relative_to(make_chart.CHART)) for path in make_chart.CHART.rglob("*") if path.is_file()}
    assert there == {*chart, *by_hand}


@every_case
def test_the_chart_and_the_kustomization_agree(case: str, manifests: list[Manifest]) -> None:
    # A chart leaves the namespace to Helm, and names what changes in other ways than kustomize.
    by_kustomize, by_helm = named(of_both(manifests)), named(of_both(helm(templates(), values_of(case))))
    assert by_helm.keys() == by_kustomize.keys()
    for name, manifest in by_kustomize.items():
        assert by_helm[name] == manifest, name


def of_both(manifests: list[Manifest]) -> list[Manifest]:
    """Without what only one of the two has."""
    shown = []
    for each in (each for each in manifests if each["kind"] != "Namespace"):
        each["metadata"].pop("namespace", None)
        for pod in pods(each):
            pod["metadata"].pop("annotations", None)
        if each["kind"] == "Job":
            each["metadata"]["name"] = re.sub(r"-[0-9a-f]{8}$", "", each["metadata"]["name"])
        shown.append(each)
    return shown


@every_case
def test_values_are_those_of_the_schema(case: str) -> None:
    schema = yaml.safe_load((make_chart.CHART / "values.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(values_of(case), schema)
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate(merged(values_of(case), {"worker": {"replica": 3}}), schema)


def test_two_releases_have_nothing_in_common() -> None:
    for of_workers in ("hpa", "ranks"):
        values = merged(values_of("cpu"), {name: {"enabled": True} for name in (of_workers, "gatewayApi", "ingress")})
        one, other = (named(helm(templates(), values, release=name, namespace=name)) for name in ("one", "other"))
        assert not one.keys() & other.keys()
        assert "octavo-" not in re.sub(r"octavo-(worker|scheduler|gateway):latest|octavo-client\b", "", str(one))


@pytest.mark.parametrize(("one", "other"), [("hpa", "ranks"), ("keda", "ranks"), ("hpa", "keda")])
def test_what_scales_workers_in_two_ways_is_refused(one: str, other: str) -> None:
    values = merged(values_of("cpu"), {one: {"enabled": True}, other: {"enabled": True}})
    with pytest.raises(ChartRefused, match=f"^{one} and {other} do not go together"):
        helm(templates(), values)


@pytest.mark.parametrize("case", ["cpu", "tls", "tls-keys-ranks"])
def test_a_worker_has_as_long_to_start_as_the_value_says_over_tls_too(case: str) -> None:
    manifests = named(helm(templates(), merged(values_of(case), {"worker": {"startupFailures": 721}})))
    workers = ("Deployment", "octavo-worker"), ("LeaderWorkerSet", "octavo-ranks")
    pod = pods(next(each for (kind, name), each in manifests.items() if (kind, name) in workers))[0]
    probe = next(each["startupProbe"] for each in pod["spec"]["containers"] if "startupProbe" in each)
    seconds = probe["periodSeconds"] * probe["failureThreshold"]
    assert 721 * 5 <= seconds < 721 * 5 + probe["periodSeconds"]


@pytest.mark.parametrize("autoscaler", ["hpa", "keda"])
def test_an_autoscaler_that_is_turned_on_takes_over_the_workers_that_are_there(autoscaler: str) -> None:
    """A number that goes out of a manifest is 1 from then on."""
    live = helm(templates(), merged(values_of("cpu"), {"worker": {"replicas": 5}}))
    for each in live:
        each["metadata"]["namespace"] = "octavo"
    values, worker = merged(values_of("cpu"), {autoscaler: {"enabled": True}}), ("Deployment", "octavo-worker")
    assert named(helm(templates(), values, live=live))[worker]["spec"]["replicas"] == 5
    assert "replicas" not in named(helm(templates(), values, namespace="new", live=live))[worker]["spec"]


@every_case
def test_kubectl_makes_the_same(case: str, manifests: list[Manifest], tmp_path: Path) -> None:
    made = run(program("kubectl"), "kustomize", str(folder_of(case, tmp_path / "kubernetes")))
    generated = {name for kind, name in named(manifests) if kind == "ConfigMap"}
    for name in generated:
        assert len(set(re.findall(rf"\b{name}-[0-9a-z]+\b", made))) == 1, "all name it as it is"
        made = re.sub(rf"\b({name})-[0-9a-z]+\b", r"\1", made)
    assert named(documents(made)) == named(manifests)


@every_case
def test_helm_makes_the_same(case: str) -> None:
    files = [f"--values={make_chart.CHART / name}" for name in CASES[case][2]]
    flags = [f"--set={name}.enabled=true" for name in CASES[case][3]]
    made = run(program("helm"), "template", "octavo", str(make_chart.CHART), "--namespace", "octavo", *files, *flags)
    assert named([each for each in documents(made) if each]) == named(helm(templates(), values_of(case)))
    assert "0 chart(s) failed" in run(program("helm"), "lint", str(make_chart.CHART), *files, *flags)


def program(name: str) -> str:
    """Its path; skips where there is none, and fails in CI."""
    if (path := shutil.which(name)) is None:
        missing = f"no {name}: tests/kubernetes_renderers.py alone rendered deploy/kubernetes; .ci/run installs it"
        if {"CI", "TESTS_IN_CI"} & os.environ.keys():
            pytest.fail(missing)
        pytest.skip(missing)
    return path


def run(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
