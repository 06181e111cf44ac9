"""How many pods Kubernetes' HorizontalPodAutoscaler wants, by its documented algorithm (autoscaling/v2).

Knows no clock and no cluster: times, pods and readings come in, a number goes out. Between calls it keeps what the
controller keeps: what it would have recommended of late, and when it last scaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

TOLERANCE = 0.1  # --horizontal-pod-autoscaler-tolerance
SYNC_S = 15.0  # --horizontal-pod-autoscaler-sync-period


@dataclass(frozen=True, slots=True)
class Policy:
    """So many pods, or percent of the pods, may come or go within `period_s`."""

    kind: Literal["Pods", "Percent"]
    value: int
    period_s: float


@dataclass(frozen=True, slots=True)
class Behavior:
    """Of one direction. `select`: the policy that counts is that of the largest change, or of the smallest."""

    stabilization_s: float
    policies: tuple[Policy, ...]
    select: Literal["Max", "Min", "Disabled"] = "Max"


DEFAULT_UP = Behavior(0.0, (Policy("Percent", 100, 15.0), Policy("Pods", 4, 15.0)))
DEFAULT_DOWN = Behavior(300.0, (Policy("Percent", 100, 15.0),))


@dataclass(frozen=True, slots=True)
class Metric:
    """What is read, and what it should be.

    Attributes:
        source: External is one number of the whole; Pods and Resource are a number a pod.
        target_kind: Value is compared as it is read, AverageValue is for each pod, Utilization a share of the request.
    """

    name: str
    source: Literal["External", "Pods", "Resource"]
    target_kind: Literal["Value", "AverageValue", "Utilization"]
    target: float


@dataclass(frozen=True, slots=True)
class Rule:
    """What a manifest says."""

    min_replicas: int
    max_replicas: int
    metrics: tuple[Metric, ...]
    up: Behavior = DEFAULT_UP
    down: Behavior = DEFAULT_DOWN
    tolerance: float = TOLERANCE


Reading = float | Mapping[str, float] | None  # of the whole, by pod, or nobody knows


class Autoscaler:
    """One HorizontalPodAutoscaler. `decide` at every sync, in order of time."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._recommended: list[tuple[float, int]] = []
        self._came: list[tuple[float, int]] = []
        self._went: list[tuple[float, int]] = []

    def decide(self, now_s: float, current: int, pods: Mapping[str, bool], readings: Sequence[Reading]) -> int:
        """How many replicas there shall be.

        Args:
            current: how many the target is to have now.
            pods: those that there are, and whether each is ready.
            readings: one for each metric of the rule, in its order.
        """
        rule = self.rule
        if current > rule.max_replicas or current < rule.min_replicas:
            wanted = min(max(current, rule.min_replicas), rule.max_replicas)
        else:
            proposed = self._proposed(current, pods, readings)
            if proposed is None:
                return current
            wanted = self._at_most(now_s, current, self._stabilized(now_s, current, proposed))
        if wanted > current:
            self._came.append((now_s, wanted - current))
        elif wanted < current:
            self._went.append((now_s, current - wanted))
        return wanted

    def _proposed(self, current: int, pods: Mapping[str, bool], readings: Sequence[Reading]) -> int | None:
        """The largest of what the metrics ask for; None where too little is known to change anything."""
        asked = [
            replicas_for(metric, current, pods, reading, self.rule.tolerance)
            for metric, reading in zip(self.rule.metrics, readings, strict=True)
        ]
        known = [count for count in asked if count is not None]
        if not known or (len(known) < len(asked) and max(known) < current):
            return None
        return max(known)

    def _stabilized(self, now_s: float, current: int, proposed: int) -> int:
        """Up to the least, down to the most, of what was proposed within the windows."""
        up_s, down_s = self.rule.up.stabilization_s, self.rule.down.stabilization_s
        if not self._recommended:
            self._recommended.append((now_s, current))
        least = min([proposed, *(count for at_s, count in self._recommended if at_s > now_s - up_s)])
        most = max([proposed, *(count for at_s, count in self._recommended if at_s > now_s - down_s)])
        kept_s = max(up_s, down_s)
        self._recommended = [each for each in self._recommended if each[0] > now_s - kept_s]
        self._recommended.append((now_s, proposed))
        return min(max(current, least), most)

    def _at_most(self, now_s: float, current: int, wanted: int) -> int:
        rule = self.rule
        if wanted > current:
            limit = max(current, self._limit(now_s, current, rule.up, 1))
            return min(wanted, limit, rule.max_replicas)
        if wanted < current:
            limit = min(current, self._limit(now_s, current, rule.down, -1))
            return max(wanted, limit, rule.min_replicas)
        return current

    def _limit(self, now_s: float, current: int, behavior: Behavior, sign: int) -> int:
        """How far the policies of one direction let it go. `sign`: 1 up, -1 down."""
        if behavior.select == "Disabled":
            return current
        limits = []
        for policy in behavior.policies:
            came, went = (_within(events, now_s - policy.period_s) for events in (self._came, self._went))
            at_start = current - came + went
            if policy.kind == "Pods":
                limits.append(at_start + sign * policy.value)
            elif sign > 0:  # in whole hundredths, as 1 + 10 / 100 is more than 1.1 to a float
                limits.append(-(-at_start * (100 + policy.value) // 100))
            else:
                limits.append(at_start * (100 - policy.value) // 100)
        is_up_or_least = (sign > 0) == (behavior.select == "Max")
        return max(limits) if is_up_or_least else min(limits)


def _within(events: Sequence[tuple[float, int]], since_s: float) -> int:
    return sum(count for at_s, count in events if at_s > since_s)


def replicas_for(
    metric: Metric, current: int, pods: Mapping[str, bool], reading: Reading, tolerance: float = TOLERANCE
) -> int | None:
    """What one metric alone asks for; None without a reading."""
    if reading is None:
        return None
    if isinstance(reading, Mapping):
        return _by_pod(metric, current, pods, reading, tolerance)
    if metric.target_kind == "AverageValue":
        if _is_near(reading / (metric.target * current), tolerance):
            return current
        return _ceil(reading / metric.target)
    ratio = reading / metric.target
    if _is_near(ratio, tolerance):
        return current
    return _ceil(ratio * sum(pods.values()))  # pods that are not ready do not count


def _by_pod(
    metric: Metric, current: int, pods: Mapping[str, bool], readings: Mapping[str, float], tolerance: float
) -> int | None:
    """Pods without a reading count as on target where pods would go, and as idle where they would come; pods that are
    not ready are left out of a Resource metric, and count as idle where pods would come."""
    ignored = {pod for pod, is_ready in pods.items() if not is_ready and metric.source == "Resource"}
    values = {pod: readings[pod] for pod in pods if pod in readings and pod not in ignored}
    missing = [pod for pod in pods if pod not in readings and pod not in ignored]
    if not values:
        return None
    ratio = sum(values.values()) / len(values) / metric.target
    adds_ignored = bool(ignored) and ratio > 1
    if not adds_ignored and not missing:
        return current if _is_near(ratio, tolerance) else _ceil(ratio * sum(pods.values()))
    on_target = max(1.0, metric.target) if metric.target_kind == "Utilization" else metric.target
    values |= dict.fromkeys(missing, on_target if ratio < 1 else 0.0)
    if adds_ignored:
        values |= dict.fromkeys(ignored, 0.0)
    again = sum(values.values()) / len(values) / metric.target
    if _is_near(again, tolerance) or (ratio < 1) != (again < 1):
        return current
    wanted = _ceil(again * len(values))
    return current if (wanted > current) != (again > 1) else wanted


def _is_near(ratio: float, tolerance: float) -> bool:
    return abs(1.0 - ratio) <= tolerance + 1e-12


def _ceil(value: float) -> int:
    """A product that is a whole number but for its last bits is that number."""
    return math.ceil(round(value, 9))
