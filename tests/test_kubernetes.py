"""deploy/kubernetes, as far as it can be judged without a cluster: each way to install it, rendered and looked at."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from starlette.routing import Route

from deploy.kubernetes import make_chart
from gateway_svc.config import GatewayConfig
from gateway_svc.http.app import new_app
from gateway_svc.http.generating import Service
from gateway_svc.http.metrics_server import METRICS_PORT as GATEWAY_METRICS_PORT
from gateway_svc.http.metrics_server import PATH as GATEWAY_METRICS_PATH
from octavo.commands import health
from octavo.retrying import RetryPolicy
from octavo.shared.command_line import Parser
from octavo.shared.options import NOT_OPTIONS, add_arguments, from_namespace
from protos import inference_pb2, worker_pb2
from scheduler_svc.api.metrics_server import METRICS_PORT, PATHS
from scheduler_svc.api.public_server import GRACE_S
from scheduler_svc.config import SchedulerConfig
from tests.gateway.running import Gateway, gateway
from tests.integration.fake_inference import FakeServer
from tests.kubernetes_cases import (
    CASES,
    KUBERNETES,
    all_pods,
    component,
    matches,
    named,
    of_kind,
    rendered,
    services,
    serving,
    templates,
    values_of,
    variables,
    who,
)
from tests.kubernetes_renderers import Manifest, containers, helm, pods, read
from tests.pages import PAGES, ROOT, blocks_of, commands_of
from tests.test_containers import TARGETS, said
from worker_svc.config import WorkerConfig
from worker_svc.parallel.membership import membership_of
from worker_svc.server import DRAIN_LIMIT_S, SERVICE_NAME

CONFIGS: dict[str, Any] = {"scheduler": SchedulerConfig, "worker": WorkerConfig, "gateway": GatewayConfig}
METRICS_PORTS = {"scheduler": METRICS_PORT, "gateway": GATEWAY_METRICS_PORT, "worker": None}
PORTS = {"scheduler": SchedulerConfig().port, "worker": WorkerConfig().port, "gateway": GatewayConfig().port}
VERSIONS = ("1.30", "1.37")  # of Kubernetes: the oldest that the chart takes, and the newest whose schema is here
# Schemas of these are not in the package; the page says how they were checked once.
CUSTOM = {"Certificate", "Gateway", "HTTPRoute", "Issuer", "LeaderWorkerSet", "ScaledObject", "ServiceMonitor"}
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture
def manifests(case: str) -> list[Manifest]:
    """As kustomize makes them; the test's own."""
    return deepcopy(rendered(case))


# ---- every manifest -------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_keep_to_the_schema_of_kubernetes(case: str, version: str, manifests: list[Manifest]) -> None:
    built_in = [each for each in manifests if each["kind"] not in CUSTOM]
    assert len(built_in) >= 19
    for group in of_kind(manifests, "LeaderWorkerSet"):  # whose pods are Kubernetes' own
        for pod in pods(group):
            name = {"name": group["metadata"]["name"]}
            built_in.append({**pod, "apiVersion": "v1", "kind": "Pod", "metadata": name | pod["metadata"]})
    assert [problem for each in built_in if (problem := problem_of(each, version))] == []


def problem_of(manifest: Manifest, version: str) -> str:
    """Of a manifest by the strict schema of that version; empty where there is none."""
    return _problem_of(json.dumps(manifest, sort_keys=True), version)


@cache  # most manifests are the same in several cases
def _problem_of(text: str, version: str) -> str:
    import kubernetes_validate  # here, as it takes seconds, and all processes of a run collect all files

    manifest = json.loads(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", _schema())
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            return f"{manifest['kind']} {manifest['metadata']['name']}: {error.message}"
    return ""


@cache
def _schema() -> Callable[..., object]:
    """Of a version, once: it has megabytes, and is read for each manifest otherwise."""
    import kubernetes_validate

    return cache(kubernetes_validate.utils.schema_contents)


def test_the_schema_is_strict() -> None:
    (service,) = (each for each in read(KUBERNETES / "base" / "worker.yaml") if each["kind"] == "Service")
    for version in VERSIONS:
        assert not problem_of(service, version)
        assert "clusterIp" in problem_of(service | {"spec": {"clusterIp": "None"}}, version)


@every_case
def test_selectors_match_the_labels_of_pods(case: str, manifests: list[Manifest]) -> None:
    for each in of_kind(manifests, "Deployment"):
        assert matches(each["spec"]["selector"]["matchLabels"], each["spec"]["template"])
    chosen = [(each, each["spec"]["selector"]) for each in of_kind(manifests, "Service")]
    chosen += [(each, each["spec"]["selector"]["matchLabels"]) for each in of_kind(manifests, "PodDisruptionBudget")]
    for each, selector in chosen:
        found = [pod for pod in all_pods(manifests) if matches(selector, pod)]
        assert len(found) == 1 and component(found[0]) == component(each), each["metadata"]["name"]
    for pod in all_pods(manifests):
        for spread in pod["spec"].get("topologySpreadConstraints", []):
            assert matches(spread["labelSelector"]["matchLabels"], pod)
            assert spread["whenUnsatisfiable"] == "ScheduleAnyway", "one node is enough"
    for each in of_kind(manifests, "ServiceMonitor"):
        (service,) = (
            other
            for other in of_kind(manifests, "Service")
            if each["spec"]["selector"]["matchLabels"].items() <= other["metadata"]["labels"].items()
        )
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in each["spec"]["endpoints"]} <= ports


@every_case
def test_whatever_is_named_is_there(case: str, manifests: list[Manifest]) -> None:
    there, ports = named(manifests), services(manifests)
    for pod in all_pods(manifests):
        volumes = {each["name"]: each for each in pod["spec"].get("volumes", [])}
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in there
            assert volume.get("secret", {"optional": True})["optional"] is True, "made by somebody else, if at all"
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes.keys()
            for each in container.get("envFrom", []):
                assert ("ConfigMap", each["configMapRef"]["name"]) in there
            for each in container.get("env", []):
                source = each.get("valueFrom", {})
                if reference := source.get("configMapKeyRef"):
                    data = there["ConfigMap", reference["name"]]["data"]
                    assert reference["key"] in data or reference.get("optional")
                assert source.get("secretKeyRef", {"optional": True})["optional"] is True
            for name, port in re.findall(r"\b(octavo-\w+):(\d+)", " ".join(container.get("args", []))):
                assert int(port) in ports[name]
    for kind, field in (("HorizontalPodAutoscaler", "scaleTargetRef"), ("ScaledObject", "scaleTargetRef")):
        for each in of_kind(manifests, kind):
            target = each["spec"][field]
            assert there[target["kind"], target["name"]]["apiVersion"] == target["apiVersion"]
            assert "replicas" not in there[target["kind"], target["name"]]["spec"], "applying would undo it"
    for each in of_kind(manifests, "Ingress"):
        for path in (path for rule in each["spec"]["rules"] for path in rule["http"]["paths"]):
            backend = path["backend"]["service"]
            names = [port["name"] for port in there["Service", backend["name"]]["spec"]["ports"]]
            assert backend["port"]["name"] in names and path["path"] == "/v1", "neither metrics nor the page"
    for each in of_kind(manifests, "HTTPRoute"):
        assert all(("Gateway", parent["name"]) in there for parent in each["spec"]["parentRefs"])
        for rule in each["spec"]["rules"]:
            assert [match["path"]["value"] for match in rule["matches"]] == ["/v1"]
            assert all(backend["port"] in ports[backend["name"]] for backend in rule["backendRefs"])


# ---- options, probes, times -----------------------------------------------------------------------------------------


@every_case
def test_services_get_options_that_they_take(case: str, manifests: list[Manifest]) -> None:
    there = named(manifests)
    for service, _, container in serving(manifests):
        config = CONFIGS[service]
        assert "command" not in container, "the image's own"
        (source,) = container["envFrom"]
        given = there["ConfigMap", source["configMapRef"]["name"]]["data"]
        known = {f"OCTAVO_{field.name.upper()}" for field in dataclasses.fields(config)} | NOT_OPTIONS
        assert {name for name in given if name.startswith("OCTAVO_")} <= known
        assert {name for name in given if not name.startswith("OCTAVO_")} <= {"TRITON_CACHE_DIR"}
        parser = Parser(prog=f"octavo {service}")
        add_arguments(parser, config)
        options = from_namespace(config, parser.parse_args(container.get("args", [])), given)
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        assert set(ports.values()) <= {options.port, METRICS_PORTS[service]}
        if service == "worker":
            assert options.device == ("cuda" if CASES[case][0].startswith("nvidia") else "auto")
        if service == "scheduler":
            assert options.worker == ("dns:///octavo-worker:50061",) and ports["metrics"] == METRICS_PORT
        if service == "gateway":
            assert options.scheduler == "octavo-scheduler:50051"


@every_case
def test_a_service_that_others_reach_is_locked_or_says_that_it_is_not(case: str, manifests: list[Manifest]) -> None:
    there = named(manifests)
    has_keys, has_tls = (name in CASES[case][1] for name in ("keys", "tls"))
    for service, pod, container in serving(manifests):
        given = there["ConfigMap", f"octavo-{service}-options"]["data"]
        options = vars(from_namespace(CONFIGS[service], Namespace(), given))
        keys = {name for name in ("keys_file", "token_file") if options.get(name) is not None}
        assert bool(keys) is (has_keys and service != "gateway")
        assert (options["tls_cert_file"] is not None) is (has_tls and service != "gateway"), "HTTPS ends before it"
        assert options["insecure"] is (not keys and options["tls_cert_file"] is None)
        for name, path in ((name, path) for name, path in options.items() if isinstance(path, Path)):
            assert path.name in files_in(container, pod, str(path.parent)), name
        if service == "worker":
            assert files_in(container, pod, "/access") == {"worker-token"}, "nothing that it need not know"
    for each in of_kind(manifests, "ServiceMonitor"):
        is_scheduler = each["metadata"]["name"] == "octavo-scheduler"
        (endpoint,) = each["spec"]["endpoints"]
        assert ("authorization" in endpoint) is (has_keys and is_scheduler)
        assert (endpoint.get("scheme"), "tlsConfig" in endpoint) == (
            ("https", True) if has_tls and is_scheduler else (None, False)
        )


def files_in(container: dict[str, Any], pod: dict[str, Any], folder: str) -> set[str]:
    """What a Secret's volume there has: cert-manager's files, unless it says which."""
    (mount,) = (each for each in container["volumeMounts"] if each["mountPath"] == folder)
    assert mount["readOnly"] is True
    (volume,) = (each["secret"] for each in pod["spec"]["volumes"] if each["name"] == mount["name"])
    return {each["path"] for each in volume.get("items", [])} or {"tls.crt", "tls.key", "ca.crt"}


def test_certificates_have_the_names_that_are_asked_for() -> None:
    found = named(rendered("tls"))
    names = {}
    for service in ("scheduler", "worker", "gateway"):
        spec = found["Certificate", f"octavo-{service}"]["spec"]
        assert ("Issuer", spec["issuerRef"]["name"]) in found
        names[service] = [*spec["dnsNames"], *spec["uris"]]
        (pod,) = (pod for name, pod, _ in serving(list(found.values())) if name == service)
        secrets = [volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume]
        assert spec["secretName"] in secrets
    authority = found["Issuer", "octavo-authority"]["spec"]["ca"]["secretName"]
    assert found["Certificate", "octavo-authority"]["spec"]["secretName"] == authority
    of_scheduler, of_worker = (found["ConfigMap", f"octavo-{name}-options"]["data"] for name in ("scheduler", "worker"))
    assert of_scheduler["OCTAVO_WORKER_TLS_NAME"] in names["worker"]
    assert of_worker["OCTAVO_TLS_CLIENT_NAME"] in names["scheduler"]
    assert "octavo-scheduler" in names["scheduler"], "by which the gateway calls it"
    monitor = found["ServiceMonitor", "octavo-scheduler"]["spec"]["endpoints"][0]
    assert monitor["tlsConfig"]["serverName"] in names["scheduler"]
    assert "localhost" in names["scheduler"] and "localhost" in names["worker"], "by which probes call"


@every_case
def test_no_service_is_taken_for_an_option(case: str, manifests: list[Manifest]) -> None:
    for pod in all_pods(manifests):
        assert pod["spec"]["enableServiceLinks"] is False
        assert pod["spec"]["automountServiceAccountToken"] is False


@every_case
def test_images_are_targets_of_the_dockerfile(case: str, manifests: list[Manifest]) -> None:
    for service, pod, container in serving(manifests):
        assert container["image"].partition(":")[0] == f"octavo-{service}" and service in TARGETS
        for each in [*pod["spec"].get("initContainers", []), container]:
            assert each["image"] == container["image"] and each["imagePullPolicy"] == "IfNotPresent"
    (fetch,) = (each for each in manifests if each["kind"] == "Job")
    images = {each["image"] for each in containers(fetch)}
    assert images == {container["image"] for service, _, container in serving(manifests) if service == "worker"}


def paths_of_the_gateway() -> set[str]:
    return {route.path for route in new_app(cast(Service, None), GatewayConfig()).routes if isinstance(route, Route)}


@every_case
def test_probes_ask_what_is_there(case: str, manifests: list[Manifest]) -> None:
    readiness = {"scheduler": "octavo.v1.Inference", "worker": SERVICE_NAME}
    assert {f"octavo.v1.{name}" for name in inference_pb2.DESCRIPTOR.services_by_name} >= {readiness["scheduler"]}
    assert {f"octavo.v1.{name}" for name in worker_pb2.DESCRIPTOR.services_by_name} == {readiness["worker"]}
    for service, pod, container in serving(manifests):
        probes = {name: container[name] for name in container if name.endswith("Probe")}
        if component(pod) == "rank":
            assert not probes and "ports" not in container, "only rank 0 serves"
            continue
        assert set(probes) == {"startupProbe", "readinessProbe", "livenessProbe"}
        for name, probe in probes.items():
            if service == "gateway":
                path = "/ready" if name == "readinessProbe" else "/version"
                assert probe["httpGet"] == {"path": path, "port": "http"}
                continue
            asked = readiness[service] if name == "readinessProbe" else ""
            if "tls" not in CASES[case][1]:
                assert probe["grpc"] == {"port": PORTS[service], "service": asked}
                continue
            assert probe["exec"]["command"][:2] == ["octavo", "health"], "Kubernetes' own speak no TLS"
            parser = Parser(prog="octavo health")
            health.add_arguments(parser)
            options = parser.parse_args(probe["exec"]["command"][2:])
            assert (options.position, options.service) == (f"localhost:{PORTS[service]}", asked)
            shown = [options.tls_client_cert_file, options.tls_client_key_file]
            assert str(options.tls_ca_file) == "/tls/ca.crt"
            assert [each and str(each) for each in shown] == (
                ["/tls/tls.crt", "/tls/tls.key"] if service == "worker" else [None, None]
            )
        assert all(probe["timeoutSeconds"] >= 5 for probe in probes.values())
        startup = probes["startupProbe"]
        limit_s = startup["periodSeconds"] * startup["failureThreshold"]
        assert limit_s >= (1200 if service == "worker" else 60), "a large model takes long to load"
    assert paths_of_the_gateway() >= {"/version", "/ready"}


def test_a_gateway_is_ready_once_it_has_found_a_scheduler_and_stays_so_without_one() -> None:
    """Its Service would lead to none while a scheduler starts anew; but a rollout is to end at one that finds none."""
    (probe,) = (it["readinessProbe"] for service, _, it in serving(rendered("cpu")) if service == "gateway")

    def answers(of: Gateway) -> list[int]:
        return [of.ask("GET", path)[0] for path in (probe["httpGet"]["path"], "/health")]

    with FakeServer() as scheduler, gateway(scheduler.address, RetryPolicy(window_s=0.0)) as found:
        assert answers(found) == [200, 200]
        scheduler.stop()
        assert answers(found) == [200, 503]
    with gateway("127.0.0.1:1", RetryPolicy(window_s=0.0)) as alone:
        assert answers(alone) == [503, 503]


@every_case
def test_what_is_stopped_has_time_to_finish(case: str, manifests: list[Manifest]) -> None:
    finish_s = {
        "scheduler": SchedulerConfig().drain_timeout + GRACE_S,
        "worker": WorkerConfig().finish_timeout + DRAIN_LIMIT_S,
        "gateway": GatewayConfig().drain_timeout,
    }
    for service, pod, container in serving(manifests):
        before_s = container.get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})["sleep"]["seconds"]
        # Kubernetes tells a Service's clients while the pod is told; a worker's come from the scheduler alone.
        assert before_s == (0 if service == "worker" else 5)
        assert pod["spec"]["terminationGracePeriodSeconds"] >= before_s + finish_s[service] + 10
        assert pod["spec"]["shareProcessNamespace"] is True  # as process 1 it would be deaf to SIGTERM at first
    (scheduler,) = (each for each in manifests if each["metadata"]["name"] == "octavo-scheduler" and pods(each))
    assert scheduler["spec"]["replicas"] == 1 and scheduler["spec"]["strategy"] == {"type": "Recreate"}


# ---- what is allowed ------------------------------------------------------------------------------------------------


@every_case
def test_pods_may_do_nothing_that_they_need_not(case: str, manifests: list[Manifest]) -> None:
    (namespace,) = of_kind(manifests, "Namespace")
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    (user,) = said("worker", "USER")
    for pod in all_pods(manifests):
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True and context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context["runAsUser"] == context["runAsGroup"] == int(user)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod["spec"])
        kinds = {kind for volume in pod["spec"].get("volumes", []) for kind in volume if kind != "name"}
        assert kinds <= {"emptyDir", "persistentVolumeClaim", "secret"}, "nothing of the host"
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]
            writable = {each["mountPath"] for each in container.get("volumeMounts", []) if not each.get("readOnly")}
            assert writable <= {"/tmp", "/dev/shm", *(["/cache"] if container["name"] == "fetch" else [])}


@every_case
def test_weights_are_fetched_once_and_then_read_only(case: str, manifests: list[Manifest]) -> None:
    (fetch,) = of_kind(manifests, "Job")
    (container,) = containers(fetch)
    script = container["command"][-1]
    assert "octavo model fetch" in script
    given = {each["name"]: each["valueFrom"].get("configMapKeyRef", {}) for each in container["env"]}
    for name in ("MODEL", "LOAD_FORMAT", "TOKENIZER"):
        assert given[name]["key"] == f"OCTAVO_{name}" and given[name].get("optional", False) == (name != "MODEL")
    variables_of_image = " ".join(said("worker", "ENV")).split()
    assert {"OCTAVO_CACHE=/cache", "HF_HOME=/cache/huggingface"} <= set(variables_of_image)
    assert script.rstrip().endswith('touch "/cache/fetched/$MODEL/done"'), "the last thing that it does"
    for service, pod, worker in serving(manifests):
        if service == "worker":
            (waiting,) = pod["spec"]["initContainers"]
            assert "/cache/fetched/$OCTAVO_MODEL/done" in waiting["command"][-1]
            for each in (waiting, worker):
                (mount,) = (mount for mount in each["volumeMounts"] if mount["name"] == "models")
                assert mount == {"name": "models", "mountPath": "/cache", "readOnly": True}
            assert {"name": "shared-memory", "mountPath": "/dev/shm"} in worker["volumeMounts"]
            (memory,) = (each for each in pod["spec"]["volumes"] if each["name"] == "shared-memory")
            assert memory["emptyDir"]["medium"] == "Memory"


def test_the_mark_is_made_only_after_a_whole_fetch(tmp_path: Path) -> None:
    """The script of the Job and that of whoever waits, by a shell, with programs that only say what they are asked."""
    (job,) = (each for each in read(KUBERNETES / "base" / "model.yaml") if each["kind"] == "Job")
    (fetch,) = containers(job)
    wait = containers(read(KUBERNETES / "base" / "worker.yaml")[0])[0]["command"]
    mark = tmp_path / "cache/fetched/OWNER/NAME@main/done"
    for ending in ("false", "true"):
        for program in ("octavo", "python"):
            (tmp_path / program).write_text(f"#!/bin/sh\necho {program} $* >> {tmp_path}/called\n{ending}\n")
            (tmp_path / program).chmod(0o755)
        script = [word.replace("/cache", f"{tmp_path}/cache") for word in fetch["command"]]
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MODEL": "OWNER/NAME@main", "TOKENIZER": "OWNER/OTHER"}
        environment |= {"LOAD_FORMAT": "bin"} if ending == "true" else {}
        code = subprocess.run(script, env=environment, timeout=10).returncode
        assert (code == 0) == mark.exists() == (ending == "true")
    environment["OCTAVO_MODEL"] = environment.pop("MODEL")
    script = [word.replace("/cache", f"{tmp_path}/cache") for word in wait]
    assert subprocess.run(script, env=environment, timeout=10).returncode == 0
    assert (tmp_path / "called").read_text().splitlines() == [
        "octavo model fetch OWNER/NAME@main --load-format auto",
        "octavo model fetch OWNER/NAME@main --load-format bin",
        "octavo model fetch OWNER/OTHER --load-format tokenizer",
    ]


@every_case
def test_only_what_has_to_talk_may(case: str, manifests: list[Manifest]) -> None:
    policies = named(of_kind(manifests, "NetworkPolicy"))
    nothing = policies.pop(("NetworkPolicy", "octavo-nothing-else"))["spec"]
    assert nothing["policyTypes"] == ["Ingress", "Egress"] and not {"ingress", "egress"} & set(nothing)
    assert all(matches(nothing["podSelector"]["matchLabels"], pod) for pod in all_pods(manifests))
    allowed = set[tuple[str, str, int | str, str]]()
    for policy in policies.values():
        spec = policy["spec"]
        chosen = [pod for pod in all_pods(manifests) if matches(spec["podSelector"]["matchLabels"], pod)]
        assert chosen, "a policy for nobody"
        for direction, peers in (("ingress", "from"), ("egress", "to")):
            for rule in spec.get(direction, []):
                for port in rule.get("ports", [{"protocol": "TCP", "port": "any"}]):
                    for peer in rule[peers]:
                        for pod in chosen:
                            ends = [who(peer), component(pod)]
                            ends = ends if direction == "ingress" else ends[::-1]
                            allowed.add((*ends, port["port"], direction))
    clients = ("client", "client's namespace")
    scheduler, worker, gateway = PORTS["scheduler"], PORTS["worker"], PORTS["gateway"]
    expected: set[tuple[str, str, int | str, str]]
    expected = {(client, "scheduler", scheduler, "ingress") for client in (*clients, "gateway")}
    expected |= {(client, "gateway", gateway, "ingress") for client in clients}
    expected |= {("monitoring", "gateway", GATEWAY_METRICS_PORT, "ingress")}
    expected |= {("monitoring", "scheduler", METRICS_PORT, "ingress"), ("scheduler", "worker", worker, "ingress")}
    expected |= {("scheduler", "worker", worker, "egress"), ("gateway", "scheduler", scheduler, "egress")}
    expected |= {("fetch", "outside", 443, "egress")}
    asks_names = {"scheduler", "gateway", "fetch"}
    if "ranks" in case:  # one rank and another, at ports that they choose
        asks_names |= {"worker", "rank"}
        for rank in ("worker", "rank"):
            expected |= {("octavo-ranks", rank, "any", "ingress"), (rank, "octavo-ranks", "any", "egress")}
    assert allowed == expected | {(pod, "dns", 53, "egress") for pod in asks_names}
    for name in ("scheduler", "worker", "gateway"):
        (ports,) = (ports for service, ports in services(manifests).items() if service == f"octavo-{name}")
        opened = {port for _, pod, port, direction in allowed if (pod, direction) == (name, "ingress")} - {"any"}
        assert opened == set(ports), name


# ---- autoscaling, metrics, ranks ------------------------------------------------------------------------------------


def test_autoscalers_ask_for_metrics_that_exist() -> None:
    told = re.findall(r"^\| `(octavo:\w+)` \| (\w+) \|", PAGES["docs/metrics.md"], flags=re.MULTILINE)
    names = {f"{name}{end}" for name, kind in told for end in (("_sum", "_count") if kind == "histogram" else ("",))}
    (hpa,) = read(KUBERNETES / "components" / "hpa" / "hpa.yaml")
    (keda,) = read(KUBERNETES / "components" / "keda" / "keda.yaml")
    (adapter,) = read(KUBERNETES / "prometheus-adapter.yaml")
    rules = {rule["name"]["as"]: rule for rule in adapter["rules"]["external"]}
    asked = [metric["external"]["metric"]["name"] for metric in hpa["spec"]["metrics"]]
    assert asked == list(rules) == ["octavo_requests", "octavo_waiting_tokens", "octavo_kv_cache_usage"]
    queries = [rule["metricsQuery"] for rule in rules.values()]
    assert queries == [
        trigger["metadata"]["query"].replace('namespace="octavo"', "<<.LabelMatchers>>")
        for trigger in keda["spec"]["triggers"]
    ]
    used = set(re.findall(r"octavo:\w+", " ".join([*queries, *(rule["seriesQuery"] for rule in rules.values())])))
    assert used <= names and len(used) == 6
    of_hpa = [metric["external"]["target"] for metric in hpa["spec"]["metrics"]]
    for target, trigger in zip(of_hpa, keda["spec"]["triggers"], strict=True):
        assert target["type"] == trigger["metricType"]
        limit = target.get("averageValue", target.get("value"))
        assert float(re.sub(r"(\d+)m", lambda found: str(int(found[1]) / 1000), limit)) == float(
            trigger["metadata"]["threshold"]
        )
    assert hpa["spec"]["behavior"] == keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert 1 <= hpa["spec"]["minReplicas"] < hpa["spec"]["maxReplicas"] <= SchedulerConfig().max_workers
    assert keda["spec"]["minReplicaCount"] == hpa["spec"]["minReplicas"]


def test_monitors_scrape_paths_that_are_served() -> None:
    scheduler, gateway = read(KUBERNETES / "components" / "service-monitor" / "service-monitor.yaml")
    assert scheduler["spec"]["endpoints"][0]["path"] in PATHS
    assert gateway["spec"]["endpoints"][0]["path"] == GATEWAY_METRICS_PATH
    assert GATEWAY_METRICS_PATH not in paths_of_the_gateway(), "clients get there"


@pytest.mark.parametrize("release", ["octavo", "another"])
def test_monitors_name_the_jobs_that_rules_expect(release: str) -> None:
    (configuration,) = read(KUBERNETES.parent / "monitoring" / "prometheus.yml")
    by_helm = helm(templates(), values_of("service-monitor"), release)
    for manifests in (by_helm, rendered("service-monitor")):
        monitors = of_kind(manifests, "ServiceMonitor")
        jobs = [job_of(endpoint) for each in monitors for endpoint in each["spec"]["endpoints"]]
        assert jobs == [each["job_name"] for each in configuration["scrape_configs"]]


def job_of(endpoint: dict[str, Any]) -> str | None:
    """None: the Service's name, which is what the operator says of itself."""
    rules = [rule["replacement"] for rule in endpoint.get("relabelings", []) if rule["targetLabel"] == "job"]
    return rules[-1] if rules else None


@pytest.mark.parametrize("case", ["ranks", "nvidia-ranks"])
def test_a_group_of_pods_is_a_group_of_ranks(case: str, manifests: list[Manifest]) -> None:
    (group,) = of_kind(manifests, "LeaderWorkerSet")
    assert not [each for each in of_kind(manifests, "Deployment") if component(each) == "worker"], "in its place"
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart", "ranks end together"
    assert group["spec"]["startupPolicy"] == "LeaderCreated", "the leader is ready only with the others"
    leader, other = pods(group)
    assert (component(leader), component(other)) == ("worker", "rank")
    for index, pod in enumerate((leader, other)):
        (container,) = pod["spec"]["containers"]
        parser = Parser(prog="octavo worker")
        add_arguments(parser, WorkerConfig)
        config = from_namespace(WorkerConfig, parser.parse_args(container["args"]), {})
        assert config.num_ranks == template["size"]
        # What LeaderWorkerSet sets in each pod, before the variables that name it.
        set_by_it = {
            "LWS_WORKER_INDEX": str(index),
            "LWS_GROUP_SIZE": str(template["size"]),
            "LWS_LEADER_ADDRESS": "octavo-ranks-0.octavo-ranks.octavo",
        }
        given = variables(container)
        environment = {name: set_by_it.get(value.strip("$()"), value) for name, value in given.items()}
        member = membership_of(config.num_ranks, environment)
        assert member is not None
        assert (member.rank, member.size, member.local_rank, member.local_size) == (index, template["size"], 0, 1)
        assert (member.address, member.port) == ("octavo-ranks-0.octavo-ranks.octavo", 29400)
    alike = [pod["spec"] for pod in (leader, other)]
    for served in ("ports", "startupProbe", "readinessProbe", "livenessProbe"):
        alike[0]["containers"][0].pop(served)
    assert alike[0] == alike[1]


def cores_of(quantity: str) -> float:
    """Of "2" or "500m"."""
    return float(quantity.removesuffix("m")) / (1000 if quantity.endswith("m") else 1)


def test_one_node_has_room_for_all_at_once() -> None:
    """Workers wait for the Job, which must not wait for them. A core and 2 GiB are for the system's pods."""
    cores = gib = 0.0
    for each in rendered("one-node"):
        for pod in pods(each):
            for container in pod["spec"]["containers"]:
                asked = container["resources"]["requests"]
                cores += each["spec"].get("replicas", 1) * cores_of(asked["cpu"])
                gib += each["spec"].get("replicas", 1) * float(asked["memory"].replace("256Mi", "0.25").rstrip("Gi"))
    assert (cores, gib) == (2.0, 11.25), "docs/kubernetes.md: four cores and 16 GiB"


@every_case
def test_only_nvidias_workers_ask_for_gpus(case: str, manifests: list[Manifest]) -> None:
    is_nvidia = CASES[case][0].startswith("nvidia")
    for service, pod, container in serving(manifests):
        gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert gpus == (1 if service == "worker" and is_nvidia else 0)
        tolerated = [each["key"] for each in pod["spec"]["tolerations"]]
        assert tolerated == (["nvidia.com/gpu"] if gpus else [])


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_names_what_is_there() -> None:
    page = PAGES["docs/kubernetes.md"]
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL))
    folders = set(re.findall(r"--kustomize (\S+)", blocks))
    assert folders and all((make_chart.HERE.parents[1] / folder / "kustomization.yaml").exists() for folder in folders)
    there = {(kind.lower(), name) for case in CASES for kind, name in named(rendered(case))}
    for kind, name in re.findall(r"\b(deployment|service|job)/(\S+)", blocks):
        assert (kind, name) in there, name
    for path in re.findall(r"--set (\S+)=", blocks):
        value: Any = values_of("cpu")
        for part in path.split("."):
            value = value[part]
    for overlay in (KUBERNETES / "overlays").iterdir():
        assert f"`overlays/{overlay.name}`" in page
    for name in (KUBERNETES / "components").iterdir():
        assert f"`{name.name}`" in page


def test_the_page_says_after_how_long_workers_are_taken_away() -> None:
    (hpa,) = read(KUBERNETES / "components" / "hpa" / "hpa.yaml")
    minutes = hpa["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] // 60
    assert f"after {minutes} quiet minutes" in PAGES["docs/kubernetes.md"]
    assert f"stays for {minutes} minutes (`stabilizationWindowSeconds`)" in PAGES["docs/scaling.md"]


def test_the_key_of_prometheus_has_no_newline(tmp_path: Path) -> None:
    """It goes into a header as the Secret has it."""
    (command,) = (line for line in commands_of(PAGES["docs/kubernetes.md"]) if line.endswith("> metrics-key"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, check=True, timeout=60)
    assert re.fullmatch(r"\S+", (tmp_path / "metrics-key").read_text(encoding="ascii"))


def test_the_policy_of_the_page_lets_the_scheduler_out_and_nobody_else() -> None:
    texts = [block.text for block in blocks_of(PAGES["docs/kubernetes.md"]) if "NetworkPolicy" in block.text]
    (policy,) = (yaml.safe_load(text) for text in texts)
    assert [problem for version in VERSIONS if (problem := problem_of(policy, version))] == []
    selector, all_there = policy["spec"]["podSelector"]["matchLabels"], all_pods(rendered("cpu"))
    assert [component(pod) for pod in all_there if matches(selector, pod)] == ["scheduler"]
