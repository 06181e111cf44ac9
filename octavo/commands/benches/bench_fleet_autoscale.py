"""`octavo bench fleet --autoscale`: a day of requests, in virtual time, under the rule of a Kubernetes manifest."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.commands.flags.numbers import count, number

if TYPE_CHECKING:
    from octavo.bench.autoscaling.hpa import Rule
    from octavo.bench.autoscaling.judged import Judged
    from octavo.bench.autoscaling.play import Scene

START_S = 120.0  # a large image from a registry nearby, and the weights of some 10 GB at 0.2 GB/s
TOKENS_EACH = 25
SHIPPED = Path("-")  # of the checkout
_NEEDS_IT = ("day", "peak_rate", "start_s", "tokens_each", "slo_first_token_s", "slo_token_ms", "slo_share")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the rule, of the day and of the objective. They count with --autoscale alone."""
    from octavo.bench.autoscaling.days import DAYS
    from octavo.bench.autoscaling.judged import Objective

    objective = Objective()
    group = parser.add_argument_group("autoscaling")
    group.add_argument("--autoscale", type=Path, nargs="?", const=SHIPPED, metavar="FILE",
                       help="one pool that this HorizontalPodAutoscaler or ScaledObject changes, for a day or a trace"
                       " (no FILE: deploy/kubernetes/components/hpa/hpa.yaml of the checkout)")  # fmt: skip
    group.add_argument("--day", choices=list(DAYS), help="which made-up day (default: chat)")
    group.add_argument("--peak-rate", type=number(above=0), metavar="R",
                       help="arrivals a second at the top of its curve (default: the day's own)")  # fmt: skip
    group.add_argument("--start-s", type=number(0), metavar="S",
                       help=f"from a pod's creation until it computes (default: {START_S:g})")  # fmt: skip
    group.add_argument("--tokens-each", type=count(1024), metavar="N",
                       help="real tokens and steps that a simulated one stands for, to play a day in a minute"
                       f" (default: {TOKENS_EACH})")  # fmt: skip
    group.add_argument("--slo-first-token-s", type=number(above=0), metavar="S",
                       help="objective: the first token comes so soon"
                       f" (default: {objective.first_token_s:g})")  # fmt: skip
    group.add_argument("--slo-token-ms", type=number(above=0), metavar="X",
                       help="objective: the others, on average over a request"
                       f" (default: {objective.between_tokens_ms:g})")  # fmt: skip
    group.add_argument("--slo-share", type=number(0, 1), metavar="X",
                       help=f"of all requests that have to keep both (default: {objective.share:g})")  # fmt: skip
    group.add_argument("--compare", action="store_true",
                       help="plays also the fixed pool and the plan that suffice: several times as long")  # fmt: skip


def check(arguments: argparse.Namespace, of_load: tuple[str, ...]) -> None:
    """Raises OptionError for flags that contradict one another."""
    from octavo.shared.options import OptionError

    def flag(name: str) -> str:
        return "--" + name.replace("_", "-")

    if arguments.autoscale is None:
        given = [name for name in _NEEDS_IT if getattr(arguments, name) is not None]
        if given or arguments.compare:
            raise OptionError(f"{flag(given[0] if given else 'compare')} goes with --autoscale")
        return
    others = ("workers", "lose_at", "return_at", *(() if arguments.trace else ("requests",)), *of_load)
    given = [name for name in others if getattr(arguments, name) is not None]
    if given:
        raise OptionError(f"{flag(given[0])} does not go with --autoscale, where the rule and the day say it")
    if arguments.shards != 1:
        raise OptionError("--shards does not go with --autoscale")
    for name in ("speeds", "cache_tokens", "max_num_seqs"):
        if len(getattr(arguments, name)) > 1:
            raise OptionError(f"{flag(name)} takes one number with --autoscale: all workers are alike")
    if arguments.trace and (arguments.day or arguments.peak_rate):
        raise OptionError(f"{flag('day' if arguments.day else 'peak_rate')} does not go with --trace")
    if arguments.autoscale == SHIPPED:
        from octavo.bench.autoscaling import manifest

        if not manifest.SHIPPED.exists():
            raise OptionError(f"--autoscale needs a FILE: there is no {manifest.SHIPPED}")


def rows(arguments: argparse.Namespace) -> list[Judged]:
    """The day under the rule, and what it is compared with. Raises ValueError, OSError and NeverEnds."""
    from octavo.bench.autoscaling import manifest, play

    rule: Rule = manifest.read(manifest.SHIPPED if arguments.autoscale == SHIPPED else arguments.autoscale)
    scene = _scene(arguments)
    found = [play.with_rule("rule", scene, rule)]
    if arguments.compare:
        found += [play.ideal(scene, rule.min_replicas), play.fixed(scene, rule.min_replicas)]
    return found


def show(found: list[Judged], as_json: bool) -> str:
    """A table, or JSON with the windows of the day."""
    from octavo.bench.autoscaling.shown import table

    return json.dumps([row.as_dict() for row in found], indent=1) if as_json else table(found)


def _scene(arguments: argparse.Namespace) -> Scene:
    import dataclasses

    from octavo.bench.autoscaling import days, play
    from octavo.bench.autoscaling.judged import Objective
    from octavo.bench.fleet import traces
    from octavo.bench.fleet.worker import WorkerKind

    tokens_each = arguments.tokens_each or TOKENS_EACH
    if arguments.trace:
        read = traces.read(arguments.trace, arguments.requests, arguments.speedup or 1.0)
        requests = days.coarser(read, tokens_each)
    else:
        day = days.DAYS[arguments.day or "chat"]
        day = dataclasses.replace(day, peak_rate=arguments.peak_rate or day.peak_rate)
        requests = day.requests(arguments.seed, tokens_each)
    kind = WorkerKind(
        step_ms=arguments.step_ms,
        token_us=arguments.token_us,
        speed=arguments.speeds[0],
        cache_tokens=arguments.cache_tokens[0],
        max_num_seqs=arguments.max_num_seqs[0],
        max_num_batched_tokens=arguments.max_num_batched_tokens,
    )
    default = Objective()
    objective = Objective(
        arguments.slo_first_token_s or default.first_token_s,
        arguments.slo_token_ms or default.between_tokens_ms,
        default.share if arguments.slo_share is None else arguments.slo_share,
    )
    start_s = START_S if arguments.start_s is None else arguments.start_s
    length_s = 0.0 if arguments.trace else days.DAY_S
    kind = play.coarse_kind(kind, tokens_each)
    return play.Scene(kind, requests, objective, start_s, tokens_each, arguments.seed, length_s)
