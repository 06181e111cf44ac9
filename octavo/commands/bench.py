"""`octavo bench`: tokens a second and times to tokens, costs of steps, of pools and of kernels, as a table or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.commands.benches import bench_fleet, bench_kernels, bench_serve
from octavo.commands.flags import connection
from octavo.commands.flags.numbers import count, counts, number
from octavo.shared.options import OptionError

if TYPE_CHECKING:
    from octavo.bench.figures import Figures
    from octavo.bench.workloads import Workload

_MOST, _MOST_PROCESSES = 10**8, 256
_DEFAULT_MODEL = "smollm2-135m-instruct"
_OF_SIMULATION = ("seconds", "step_ms", "stream_interval_ms", "frontends")  # options of bench serve --simulated-worker
_OF_BOTH = ("streams", "json", "simulated_worker")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of all kinds; what a kind needs is imported when it is run."""
    from octavo.bench.workloads import WORKLOADS

    kinds = parser.add_subparsers(dest="kind", required=True, metavar="offline|serve|compare|steps|fleet|kernels")
    offline = kinds.add_parser("offline", help="over LLM: scheduler core in this process, a worker beside it")
    offline.add_argument(
        "--model",
        default=_DEFAULT_MODEL,
        metavar="MODEL",
        help="folder, GGUF file, known name, or OWNER/NAME on the hub (default: %(default)s)",
    )
    offline.add_argument(
        "--quantization", default="none", choices=("none", "int8", "int4", "int4-128", "fp8"), help="(default: none)"
    )
    offline.add_argument("--batch-invariant", action="store_true", help="as `octavo worker` takes it")
    serve = kinds.add_parser("serve", help="load on a server that runs, in an open or a closed loop")
    serve.add_argument(
        "--streams",
        type=counts(_MOST),
        metavar="N[,N...]",
        help="streams at once; each number is measured (default: one per request, at most 64)",
    )
    serve.add_argument(
        "--simulated-worker",
        action="store_true",
        help="start a scheduler on one core, and on another a worker that computes nothing and N streams that never "
        "pause (default: 1, then 64, then 1024): what reaches clients, and the scheduler's CPU time",
    )
    serve.add_argument(
        "--seconds", type=number(above=0), default=10.0, help="length of such a run (default: %(default)s)"
    )
    serve.add_argument(
        "--step-ms", type=number(least=0), default=0.0, help="how long a step takes there (default: %(default)s)"
    )
    serve.add_argument("--stream-interval-ms", type=number(least=0), metavar="MS", help="option of that scheduler")
    serve.add_argument(
        "--frontends",
        type=count(_MOST_PROCESSES),
        default=1,
        metavar="N",
        help="likewise; each has a core, if there are",
    )
    bench_serve.add_arguments(serve)
    connection.add_arguments(serve)
    bench_serve.add_compare_arguments(kinds.add_parser("compare", help="two results of serve, beside each other"))
    steps = kinds.add_parser("steps", help="what a step costs the scheduler, with workers that are only simulated")
    steps.add_argument(
        "--sequences", type=counts(_MOST), default=[64, 256, 1024], metavar="N[,N...]", help="running at once"
    )
    steps.add_argument(
        "--workers", type=count(_MOST), default=1, metavar="W", help="workers that they are spread over (default: 1)"
    )
    steps.add_argument("--steps", type=count(_MOST), default=256, help="steps to measure (default: %(default)s)")
    steps.add_argument(
        "--waiting", type=count(_MOST, 0), default=0, metavar="N", help="requests that wait beside those that run"
    )
    steps.add_argument(
        "--cached-blocks", type=count(_MOST, 0), default=0, metavar="N", help="unused blocks in each prefix cache"
    )
    steps.add_argument("--json", action="store_true", help="print JSON in place of the table")
    bench_fleet.add_arguments(kinds.add_parser("fleet", help="pools of simulated workers in virtual time, of any size"))
    bench_kernels.add_arguments(kinds.add_parser("kernels", help="GPU kernels: compiled, or timed on the GPU here"))
    texts = "; ".join(f"{name}: {text}" for name, (text, _) in WORKLOADS.items())
    for kind in (offline, serve):
        kind.add_argument("--workload", choices=tuple(WORKLOADS), default="W2", help=f"default: %(default)s. {texts}")
        kind.add_argument("--requests-file", type=Path, metavar="FILE.jsonl", help="requests of your own instead")
        kind.add_argument(
            "--repeat", type=count(_MOST), default=1, metavar="N", help="runs after the warm-up (default: 1)"
        )
        kind.add_argument("--json", action="store_true", help="print JSON in place of the table")
    serve.set_defaults(defaults={action.dest: action.default for action in serve._actions})


def run(arguments: argparse.Namespace) -> int:
    """Prints a table or JSON; exit code 1 where a kernel fails to compile, 2 where flags contradict each other."""
    if arguments.kind == "serve":
        _check_kind(arguments)
    if arguments.kind == "serve" and arguments.simulated_worker:
        return _streaming(arguments)
    if arguments.kind == "steps":
        return _steps(arguments)
    if arguments.kind == "fleet":
        return bench_fleet.run(arguments)
    if arguments.kind == "kernels":
        return bench_kernels.run(arguments)
    if arguments.kind == "serve":
        return bench_serve.run(arguments)
    if arguments.kind == "compare":
        return bench_serve.run_compare(arguments)
    rows = _offline(arguments)
    if arguments.json:
        print(json.dumps([row.as_dict() for row in rows], indent=1))
    else:
        from octavo.bench.figures import table

        print(table(rows))
    return 0


def _check_kind(arguments: argparse.Namespace) -> None:
    """Raises OptionError for an option of the other kind of load, which would do nothing."""
    given = [name for name, default in arguments.defaults.items() if getattr(arguments, name, default) != default]
    if arguments.simulated_worker:
        others = [name for name in given if name not in _OF_SIMULATION + _OF_BOTH]
        why = "does not go with --simulated-worker, which has a server and requests of its own"
    else:
        others, why = [name for name in given if name in _OF_SIMULATION], "goes with --simulated-worker"
    if others:
        raise OptionError(f"--{others[0].replace('_', '-')} {why}")


def _workload(arguments: argparse.Namespace, vocab_size: int) -> Workload:
    from octavo.bench import workloads
    from octavo.cli import CommandError

    if not arguments.requests_file:
        return workloads.make(arguments.workload, vocab_size)
    try:
        return workloads.read(arguments.requests_file)
    except ValueError as error:
        raise CommandError(str(error)) from None


def _offline(arguments: argparse.Namespace) -> list[Figures]:
    from octavo.bench import offline, workloads
    from octavo.llm import LLM

    options = {"quantization": arguments.quantization, "batch_invariant": arguments.batch_invariant}
    started_s = time.monotonic()
    with LLM(model=arguments.model, **options) as llm:
        ready_s = time.monotonic() - started_s
        vocab_size = llm.get_tokenizer().vocab_size
        workload = _workload(arguments, vocab_size)
        offline.run(llm, workloads.warm_up(vocab_size))
        rows = [offline.run(llm, workload)[0] for _ in range(arguments.repeat)]
        peak_gib = llm.worker_peak_bytes() / 2**30
    return [dataclasses.replace(row, ready_s=ready_s, worker_peak_gib=peak_gib) for row in rows]


def _streaming(arguments: argparse.Namespace) -> int:
    from octavo.bench import streaming
    from octavo.cli import CommandError

    interval_ms = arguments.stream_interval_ms
    flags = [] if interval_ms is None else [f"--stream-interval-ms={interval_ms}"]
    try:
        rows = streaming.measure(
            arguments.streams or [1, 64, 1024],
            arguments.seconds,
            step_ms=arguments.step_ms,
            frontends=arguments.frontends,
            scheduler_flags=flags,
        )
    except RuntimeError as error:
        raise CommandError(str(error)) from None
    if arguments.json:
        print(json.dumps([row.as_dict() for row in rows], indent=1))
    else:
        print(streaming.table(rows))
    return 0


def _steps(arguments: argparse.Namespace) -> int:
    from octavo.bench import steps

    rows = [
        steps.measure(count, arguments.workers, arguments.steps, arguments.waiting, arguments.cached_blocks)
        for count in arguments.sequences
    ]
    if arguments.json:
        values = [row.as_dict() for row in rows]
        print(json.dumps(values[0] if len(values) == 1 else values, indent=1))
    else:
        print(steps.table(rows))
    return 0
