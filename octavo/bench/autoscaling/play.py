"""Plays one day with a rule, with a plan, or with a fixed pool, and finds the pools to compare a rule with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.bench.autoscaling.control import HpaControl, follow
from octavo.bench.autoscaling.hpa import Rule
from octavo.bench.autoscaling.judged import WINDOW_S, Judged, Objective, judge
from octavo.bench.autoscaling.pods import Deployment
from octavo.bench.fleet.requests import Request
from octavo.bench.fleet.simulation import TICK_NS, Simulation
from octavo.bench.fleet.worker import WorkerKind

Plan = list[tuple[float, int]]  # (second, replicas from then on)
UTILIZATIONS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
NUM_OF_BACKLOG = 800


@dataclass(frozen=True, slots=True)
class Scene:
    """What all pools that are compared have in common.

    Attributes:
        kind: of all workers, in simulated tokens and steps.
        tokens_each: real tokens that a simulated one stands for.
    """

    kind: WorkerKind
    requests: Sequence[Request]
    objective: Objective
    start_s: float
    tokens_each: int = 1
    seed: int = 0
    length_s: float = 0.0

    @property
    def until_s(self) -> float:
        """Worker-hours are counted for the scene's length, at least until the last arrival."""
        return max(self.length_s, self.requests[-1].at_ns / 1e9)


def coarse_kind(kind: WorkerKind, tokens_each: int) -> WorkerKind:
    """The worker whose step is as many steps of `kind`, and whose tokens are as many of its tokens."""
    return dataclasses.replace(
        kind,
        step_ms=kind.step_ms * tokens_each,
        token_us=kind.token_us * tokens_each,
        cache_tokens=kind.cache_tokens // tokens_each,
    )


def with_rule(name: str, scene: Scene, rule: Rule) -> Judged:
    """Begins with the fewest workers of the rule. Raises ValueError for a metric that is not simulated, NeverEnds."""
    simulation, deployment = _pool(scene, rule.min_replicas)
    HpaControl(simulation, deployment, rule, scene.tokens_each)
    return _play(name, scene, simulation, deployment)


def with_plan(name: str, scene: Scene, plan: Plan) -> Judged:
    """`plan`: begins at 0. Raises NeverEnds."""
    simulation, deployment = _pool(scene, plan[0][1])
    follow(simulation, deployment, plan[1:])
    return _play(name, scene, simulation, deployment)


def fixed(scene: Scene, least: int, most: int = 64) -> Judged:
    """The smallest pool that keeps the objective, from `least` workers on. Raises ValueError where none does."""
    for count in range(least, most + 1):
        found = with_plan(f"{count} workers", scene, [(0.0, count)])
        if found.is_kept:
            return found
    raise ValueError(f"not even {most} workers keep the objective: one request alone takes too long")


def capacity(scene: Scene) -> float:
    """Requests a second that one worker works off of a backlog of every n-th request of the day, its end aside."""
    stride = max(1, len(scene.requests) // NUM_OF_BACKLOG)
    backlog = [dataclasses.replace(request, at_ns=0) for request in scene.requests[::stride]]
    run = _simulation(scene, 1, backlog).run()
    ended_ns = sorted(outcome.ended_ns for outcome in run.outcomes)
    counted = ended_ns[: max(1, len(ended_ns) * 9 // 10)]
    return len(counted) / (counted[-1] / 1e9)


def plan_of_one_who_knows(scene: Scene, per_s: float, utilization: float, least: int = 1) -> Plan:
    """For each WINDOW_S the fewest workers that do its arrivals at that share of `per_s`, created `start_s` before.

    Workers go at the end of their last window.
    """
    counts = [0] * math.ceil((scene.until_s + 1e-9) / WINDOW_S)
    for request in scene.requests:
        counts[min(len(counts) - 1, int(request.at_ns / 1e9 / WINDOW_S))] += 1
    wanted = [max(least, math.ceil(count / WINDOW_S / per_s / utilization)) for count in counts]
    begins_s = [place * WINDOW_S for place in range(len(wanted))]
    plan: Plan = []
    for at_s in sorted({*begins_s, *(max(0.0, begin_s - scene.start_s) for begin_s in begins_s)}):
        # A pod that is created now is ready within the last of these windows.
        until = int((at_s + scene.start_s) / WINDOW_S)
        replicas = max(wanted[int(at_s / WINDOW_S) : until + 1])
        if not plan or plan[-1][1] != replicas:
            plan.append((at_s, replicas))
    return plan


def ideal(scene: Scene, least: int = 1, utilizations: Sequence[float] = UTILIZATIONS) -> Judged:
    """The plan of the highest utilization that keeps the objective when it is played. Raises ValueError without one."""
    per_s = capacity(scene)
    for utilization in utilizations:
        plan = plan_of_one_who_knows(scene, per_s, utilization, least)
        found = with_plan(f"ideal, at {utilization:.0%}", scene, plan)
        if found.is_kept:
            return found
    raise ValueError("no plan keeps the objective: one request alone takes too long")


def _pool(scene: Scene, count: int) -> tuple[Simulation, Deployment]:
    simulation = _simulation(scene, count, scene.requests)
    return simulation, Deployment(simulation, scene.kind, scene.start_s)


def _simulation(scene: Scene, count: int, requests: Sequence[Request]) -> Simulation:
    """One step in flight: steps follow one another without a gap as it is, since deciding takes no virtual time."""
    tick_ns = TICK_NS * scene.tokens_each
    return Simulation([scene.kind] * count, requests, seed=scene.seed, tick_ns=tick_ns, steps_in_flight=1)


def _play(name: str, scene: Scene, simulation: Simulation, deployment: Deployment) -> Judged:
    run = simulation.run()
    return judge(name, run, deployment, scene.objective, scene.until_s, scene.tokens_each)
