"""What moves the number of replicas during a run: an HPA that looks every 15 s, or a plan of someone who knew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from octavo.bench.autoscaling.hpa import SYNC_S, Autoscaler, Rule
from octavo.bench.autoscaling.pods import Deployment
from octavo.bench.autoscaling.signals import SCRAPE_S, Scraper, signal_of
from octavo.bench.fleet.simulation import Simulation

SCRAPED_BEFORE_S = 10.0  # how old a sample is when the HPA looks: between none and a whole interval


class HpaControl:
    """Scrapes, looks and scales until all requests have ended. Raises ValueError for a metric that is not simulated."""

    def __init__(self, simulation: Simulation, deployment: Deployment, rule: Rule, tokens_each: int) -> None:
        self._simulation, self._deployment = simulation, deployment
        self._autoscaler = Autoscaler(rule)
        self._signals = [signal_of(metric) for metric in rule.metrics]
        self._scraper = Scraper(simulation, deployment, tokens_each)
        simulation.at(SYNC_S - SCRAPED_BEFORE_S, self._scrape)
        simulation.at(SYNC_S, self._sync)

    def _scrape(self) -> None:
        self._scraper.scrape()
        self._again(SCRAPE_S, self._scrape)

    def _sync(self) -> None:
        samples = list(self._scraper.samples)
        readings = [signal.read(samples) for signal in self._signals]
        pods = {pod.name: pod.link is not None for pod in self._deployment.present}
        now_s, current = self._simulation.now_ns / 1e9, self._deployment.replicas
        self._deployment.scale(self._autoscaler.decide(now_s, current, pods, readings))
        self._again(SYNC_S, self._sync)

    def _again(self, after_s: float, what: Callable[[], None]) -> None:
        if self._simulation.num_to_come:
            self._simulation.at(self._simulation.now_ns / 1e9 + after_s, what)


def follow(simulation: Simulation, deployment: Deployment, plan: Sequence[tuple[float, int]]) -> None:
    """Scales at the times of a plan: (second, replicas)."""
    for at_s, replicas in plan:
        simulation.at(at_s, partial(deployment.scale, replicas))
