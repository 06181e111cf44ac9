"""`octavo bench fleet`: pools of several sizes in virtual time, the real engine over simulated workers.

With `--autoscale` it plays one pool of changing size: `bench_fleet_autoscale`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.commands.flags.numbers import count, counts, number, numbers

if TYPE_CHECKING:
    from octavo.bench.fleet.figures import FleetFigures
    from octavo.bench.fleet.outcomes import Loss
    from octavo.bench.fleet.requests import Load, Request
    from octavo.bench.fleet.worker import WorkerKind

DEFAULT_WORKERS = [1, 2, 8]
MAX_WORKERS, MAX_REQUESTS, MAX_TOKENS = 4096, 10_000_000, 1 << 22
_OF_LOAD = (
    "prompt_tokens",
    "output_tokens",
    "shared_tokens",
    "tenants",
    "spread",
    "rate",
    "burst",
    "turns",
    "think_s",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the pool, of its load and of what is printed; defaults are those of `WorkerKind` and `Load`."""
    from octavo.bench.fleet.requests import Load
    from octavo.bench.fleet.worker import WorkerKind
    from octavo.commands.benches import bench_fleet_autoscale

    kind, load = WorkerKind(), Load()
    pool = parser.add_argument_group("workers")
    pool.add_argument("--workers", type=counts(MAX_WORKERS), metavar="W[,W...]",
                      help="workers in the pool; each number is measured (default: 1,2,8)")  # fmt: skip
    pool.add_argument("--step-ms", type=number(0), default=kind.step_ms, metavar="X",
                      help="what a step takes beside its tokens (default: %(default)g)")  # fmt: skip
    pool.add_argument("--token-us", type=number(0), default=kind.token_us, metavar="X",
                      help="what each token that a step computes takes (default: %(default)g)")  # fmt: skip
    pool.add_argument("--speeds", type=numbers, default=[kind.speed], metavar="X[,X...]",
                      help="of workers in turn: 0.5 takes twice as long (default: 1)")  # fmt: skip
    pool.add_argument("--cache-tokens", type=counts(1 << 30), default=[kind.cache_tokens], metavar="N[,N...]",
                      help=f"that a worker's cache holds, likewise (default: {kind.cache_tokens})")  # fmt: skip
    pool.add_argument("--max-num-seqs", type=counts(1 << 15), default=[kind.max_num_seqs], metavar="N[,N...]",
                      help=f"that run at once on a worker, likewise (default: {kind.max_num_seqs})")  # fmt: skip
    pool.add_argument("--max-num-batched-tokens", type=count(1 << 20), default=kind.max_num_batched_tokens,
                      metavar="N", help="that one step computes at most (default: %(default)s)")  # fmt: skip
    pool.add_argument("--shards", type=count(256), default=1, metavar="N",
                      help="step loops that share them, behind a front that chooses (default: 1)")  # fmt: skip
    pool.add_argument("--lose-at", type=number(0), metavar="S", help="the first worker is lost after so many seconds")
    pool.add_argument("--return-at", type=number(0), metavar="S", help="and comes back then, with an empty cache")
    asked = parser.add_argument_group("requests")
    asked.add_argument("--requests", type=count(MAX_REQUESTS), metavar="N",
                       help=f"how many, or conversations (default: {load.requests}; all of a trace)")  # fmt: skip
    asked.add_argument("--prompt-tokens", type=count(MAX_TOKENS), metavar="N",
                       help=f"of each request's own (default: {load.prompt_tokens})")  # fmt: skip
    asked.add_argument("--output-tokens", type=count(MAX_TOKENS), metavar="N",
                       help=f"of each (default: {load.output_tokens})")  # fmt: skip
    asked.add_argument("--spread", type=number(0, 1), metavar="X",
                       help="both are drawn from (1 - X) to (1 + X) times that (default: 0)")  # fmt: skip
    asked.add_argument("--shared-tokens", type=count(MAX_TOKENS, least=0), metavar="N",
                       help="in front of every prompt of a tenant (default: 0)")  # fmt: skip
    asked.add_argument("--tenants", type=count(MAX_REQUESTS), metavar="N",
                       help="with shared tokens of their own, at random (default: 1)")  # fmt: skip
    asked.add_argument("--rate", type=number(above=0), metavar="R",
                       help="arrivals a second, at random (default: all at the start)")  # fmt: skip
    asked.add_argument("--rate-per-worker", type=number(above=0), metavar="R", help="the same for each worker")
    asked.add_argument("--burst", type=count(MAX_REQUESTS), metavar="N",
                       help="that always arrive together, at the same rate (default: 1)")  # fmt: skip
    asked.add_argument("--turns", type=count(10_000), metavar="N",
                       help="of a conversation; each has all before in its prompt (default: 1)")  # fmt: skip
    asked.add_argument("--think-s", type=number(0), metavar="S",
                       help=f"from an answer to the next turn (default: {load.think_s:g})")  # fmt: skip
    asked.add_argument("--trace", type=Path, metavar="FILE",
                       help="requests of a trace: JSON lines as Mooncake's, CSV as Azure's")  # fmt: skip
    asked.add_argument("--speedup", type=number(above=0), metavar="X",
                       help="a trace's time goes so many times as fast (default: 1)")  # fmt: skip
    asked.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn (default: %(default)s)")
    bench_fleet_autoscale.add_arguments(parser)
    shown = parser.add_argument_group("output")
    shown.add_argument("--json", action="store_true", help="print JSON in place of the table")
    shown.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw throughput and times to the first token")


def run(arguments: argparse.Namespace) -> int:
    """Prints a row for each size of pool, or JSON; raises OptionError, and CommandError for a run that never ends."""
    from octavo.bench import picture
    from octavo.bench.fleet.figures import table
    from octavo.bench.fleet.pictures import sizes_of_pool
    from octavo.bench.fleet.simulation import NeverEnds
    from octavo.cli import CommandError
    from octavo.commands.benches import bench_fleet_autoscale
    from octavo.shared import log
    from octavo.shared.options import OptionError

    bench_fleet_autoscale.check(arguments, (*_OF_LOAD, "rate_per_worker"))
    arguments.workers = arguments.workers or DEFAULT_WORKERS
    _check(arguments)
    if arguments.picture:
        try:
            picture.check_path(arguments.picture)
        except ValueError as error:
            raise OptionError(f"--picture {error}") from None
    log.configure_library("error")  # that workers join, and are lost as planned, is no news
    try:
        if arguments.autoscale is not None:
            return _run_day(arguments)
        rows = [_measure(arguments, size) for size in arguments.workers]
        if arguments.picture:
            picture.write(arguments.picture, sizes_of_pool(rows))
    except (ValueError, NeverEnds) as error:
        raise CommandError(str(error)) from None
    print(json.dumps([row.as_dict() for row in rows], indent=1) if arguments.json else table(rows))
    return 0


def _run_day(arguments: argparse.Namespace) -> int:
    from octavo.bench import picture
    from octavo.bench.autoscaling.shown import charts
    from octavo.commands.benches import bench_fleet_autoscale

    days = bench_fleet_autoscale.rows(arguments)
    if arguments.picture:
        picture.write(arguments.picture, charts(days))
    print(bench_fleet_autoscale.show(days, arguments.json))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raises OptionError for flags that contradict one another."""
    from octavo.shared.options import OptionError

    if arguments.trace:
        given = [name for name in (*_OF_LOAD, "rate_per_worker") if getattr(arguments, name) is not None]
        if given:
            raise OptionError(f"--{given[0].replace('_', '-')} does not go with --trace, which says it")
    elif arguments.speedup is not None:
        raise OptionError("--speedup goes with --trace")
    if arguments.rate is not None and arguments.rate_per_worker is not None:
        raise OptionError("--rate and --rate-per-worker do not go together")
    if arguments.burst is not None and arguments.rate is None and arguments.rate_per_worker is None:
        raise OptionError("--burst goes with --rate or --rate-per-worker")
    if arguments.return_at is not None and (arguments.lose_at is None or arguments.return_at <= arguments.lose_at):
        raise OptionError("--return-at is a time after --lose-at")
    if arguments.lose_at is not None and arguments.return_at is None and min(arguments.workers) == 1:
        raise OptionError("--lose-at of the only worker needs --return-at")


def _measure(arguments: argparse.Namespace, num_workers: int) -> FleetFigures:
    from octavo.bench.fleet.figures import measure
    from octavo.bench.fleet.simulation import Simulation

    requests = _requests(arguments, num_workers)
    simulation = Simulation(
        _pool(arguments, num_workers), requests, _losses(arguments), arguments.seed, arguments.shards
    )
    return measure(simulation.run(), num_workers)


def _requests(arguments: argparse.Namespace, num_workers: int) -> list[Request]:
    from octavo.bench.fleet import traces
    from octavo.bench.fleet.requests import Load

    if arguments.trace:
        return traces.read(arguments.trace, arguments.requests, arguments.speedup or 1.0)
    given = {name: getattr(arguments, name) for name in ("requests", *_OF_LOAD)}
    if arguments.rate_per_worker is not None:
        given["rate"] = arguments.rate_per_worker * num_workers
    load: Load = Load(**{name: value for name, value in given.items() if value is not None})
    return load.arrivals(arguments.seed)


def _pool(arguments: argparse.Namespace, num_workers: int) -> list[WorkerKind]:
    from octavo.bench.fleet.worker import WorkerKind

    def each(values: Sequence[float], place: int) -> float:
        return values[place % len(values)]

    return [
        WorkerKind(
            step_ms=arguments.step_ms,
            token_us=arguments.token_us,
            speed=each(arguments.speeds, number),
            cache_tokens=int(each(arguments.cache_tokens, number)),
            max_num_seqs=int(each(arguments.max_num_seqs, number)),
            max_num_batched_tokens=arguments.max_num_batched_tokens,
        )
        for number in range(num_workers)
    ]


def _losses(arguments: argparse.Namespace) -> list[Loss]:
    from octavo.bench.fleet.outcomes import Loss

    return [] if arguments.lose_at is None else [Loss(0, arguments.lose_at, arguments.return_at)]
