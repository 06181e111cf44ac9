"""Reads a rule from the manifest that a cluster gets: a HorizontalPodAutoscaler, or KEDA's ScaledObject.

KEDA makes an HPA of a ScaledObject and answers its metrics; of its own are only the steps from none to one and back,
which Octavo's rule has not: a minimum of none is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from octavo.bench.autoscaling.hpa import DEFAULT_DOWN, DEFAULT_UP, Behavior, Metric, Policy, Rule

SHIPPED = Path(__file__).parents[3] / "deploy/kubernetes/components/hpa/hpa.yaml"
_NAMESPACE = re.compile(r'namespace="[^"]*"')
_SUFFIXES = {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 1024.0, "Mi": 1024.0**2, "Gi": 1024.0**3}


def read(path: Path) -> Rule:
    """The only autoscaler of a file. Raises ValueError that names the file and what is wrong; OSError."""
    try:
        documents = [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if isinstance(each, Mapping)]
        found = [each for each in documents if each.get("kind") in ("HorizontalPodAutoscaler", "ScaledObject")]
        if len(found) != 1:
            raise ValueError(f"{len(found)} HorizontalPodAutoscalers or ScaledObjects in it, not one")
        (manifest,) = found
        return (_of_hpa if manifest["kind"] == "HorizontalPodAutoscaler" else _of_keda)(manifest["spec"])
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ValueError(f"{path}: no YAML") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: a field is missing, or of another type: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def quantity(text: str | float) -> float:
    """A number as Kubernetes writes it: 800m is 0.8. Raises ValueError."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)(m|k|M|G|Ki|Mi|Gi)?", str(text))
    if match is None:
        raise ValueError(f"{text!r} is no quantity")
    return float(match[1]) * _SUFFIXES[match[2] or ""]


def _of_hpa(spec: Mapping[str, Any]) -> Rule:
    return _rule(
        spec.get("minReplicas", 1), spec["maxReplicas"], [_metric(each) for each in spec["metrics"]],
        spec.get("behavior") or {},
    )  # fmt: skip


def _metric(said: Mapping[str, Any]) -> Metric:
    kind = said["type"]
    if kind == "External":
        name, target = said["external"]["metric"]["name"], said["external"]["target"]
    elif kind == "Pods":
        name, target = said["pods"]["metric"]["name"], said["pods"]["target"]
    elif kind == "Resource":
        name, target = said["resource"]["name"], said["resource"]["target"]
    else:
        raise ValueError(f"metrics of type {kind} are not simulated: External, Pods and Resource are")
    fields = {"Value": "value", "AverageValue": "averageValue", "Utilization": "averageUtilization"}
    accepted = {"External": ("Value", "AverageValue"), "Pods": ("AverageValue",), "Resource": ("Utilization",)}[kind]
    if target["type"] not in accepted:
        raise ValueError(f"a target of type {target['type']} for a metric of type {kind}")
    value = quantity(target[fields[target["type"]]])
    return _positive(Metric(name, kind, target["type"], value / 100 if target["type"] == "Utilization" else value))


def _of_keda(spec: Mapping[str, Any]) -> Rule:
    if not spec.get("minReplicaCount", 0):
        raise ValueError("minReplicaCount is 0: a scheduler without workers knows no model, and refuses requests")
    metrics = []
    for trigger in spec["triggers"]:
        if trigger["type"] != "prometheus":
            raise ValueError(f"a trigger of type {trigger['type']}: only prometheus is simulated")
        query = _NAMESPACE.sub("<<.LabelMatchers>>", trigger["metadata"]["query"])
        threshold = quantity(trigger["metadata"]["threshold"])
        kind = trigger.get("metricType", "AverageValue")
        if kind not in ("Value", "AverageValue"):
            raise ValueError(f"a trigger of metricType {kind}")
        metrics.append(_positive(Metric(query, "External", kind, threshold)))
    behavior = spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {}).get("behavior", {})
    return _rule(spec["minReplicaCount"], spec.get("maxReplicaCount", 100), metrics, behavior)


def _rule(least: Any, most: Any, metrics: list[Metric], behavior: Mapping[str, Any]) -> Rule:
    if type(least) is not int or type(most) is not int or not 1 <= least <= most:
        raise ValueError(f"from {least} to {most} replicas: the first is at least 1, and at most the second")
    if not metrics:
        raise ValueError("there is no metric in it")
    up, down = behavior.get("scaleUp") or {}, behavior.get("scaleDown") or {}
    return Rule(least, most, tuple(metrics), _behavior(up, DEFAULT_UP), _behavior(down, DEFAULT_DOWN))


def _behavior(said: Mapping[str, Any], default: Behavior) -> Behavior:
    policies = tuple(
        Policy(each["type"], int(each["value"]), float(each["periodSeconds"])) for each in said.get("policies", ())
    )
    if any(each.kind not in ("Pods", "Percent") or each.value < 1 or each.period_s <= 0 for each in policies):
        raise ValueError("a policy is of Pods or Percent, with a value and a period above 0")
    select = said.get("selectPolicy", "Max")
    if select not in ("Max", "Min", "Disabled"):
        raise ValueError(f"selectPolicy is {select!r}")
    window_s = float(said.get("stabilizationWindowSeconds", default.stabilization_s))
    return Behavior(window_s, policies or default.policies, select)


def _positive(metric: Metric) -> Metric:
    if metric.target <= 0:
        raise ValueError(f"the target of {metric.name} is {metric.target:g}, and not above 0")
    return metric
