"""Every variant for every target: the process behind `octavo bench kernels --compile-only`.

One of its own, because Triton's interpreter must be off when kernels are imported. It exits with 1 where a variant does
not compile, multiplies in TF32, spills and may not, or takes more of a block's memory than the target has, and with 2
for bad usage.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from kernels.bench import targets
from kernels.bench.compiled import Compiled, loops, table
from kernels.bench.targets import Target
from kernels.gpu.variant import Variant

Job = tuple[str, Variant, Target]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and returns the exit code; `argv` None: this process's arguments."""
    parser = argparse.ArgumentParser(prog="octavo bench kernels --compile-only", description=__doc__)
    parser.add_argument("--target", default=",".join(targets.TARGETS))
    parser.add_argument("--op")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile; 0: one a core")
    parser.add_argument("--loops", action="store_true", help="print what loops over products consist of")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--package", default="kernels.gpu", help="whose modules have variants()")
    arguments = parser.parse_args(argv)
    # Triton's own default, which version 3.9 warns of at every start.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    from kernels.bench import operations

    try:
        chosen = targets.parse(arguments.target)
        found = operations.variants(arguments.package, arguments.op)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"{parser.prog}: error: {error.name} is missing; kernels are compiled by triton", file=sys.stderr)
        return 1
    jobs = [
        (op, variant, target)
        for op, of_one in found.items()
        for variant in of_one
        for target in chosen
        if target.capability in variant.capabilities
    ]
    order = {(op, variant.name, target.name): place for place, (op, variant, target) in enumerate(jobs)}
    results = []
    for one in compile_jobs(jobs, arguments.jobs or len(os.sched_getaffinity(0))):
        results.append(one)
        if sys.stderr.isatty():
            print(f"\r{len(results)} of {len(jobs)} ", end="", file=sys.stderr, flush=True)
    results.sort(key=lambda one: order[one.op, one.variant, one.target])
    if arguments.json:
        print(json.dumps([one.as_dict() for one in results], indent=1))
    elif arguments.loops:
        print(loops(results))
    else:
        print(table(results, [target.name for target in chosen]))
    faulty = [one for one in results if one.fault]
    for one in faulty:
        print(f"{one.target}, {one.variant}: {one.fault}", file=sys.stderr)
    for one in results:
        if one.remark and not arguments.json:
            print(f"{one.target}, {one.variant}: {one.remark}")
    return 1 if faulty else 0


def compile_jobs(jobs: Sequence[Job], num_processes: int) -> Iterator[Compiled]:
    """Results as they come. A job at which the compiler dies, taking its process along, is an error of that job."""
    _jobs[:] = jobs
    lost = []
    with _processes(num_processes) as pool:
        futures = {pool.submit(_compile, place): place for place in range(len(jobs))}
        for future in as_completed(futures):
            try:
                yield future.result()
            except BrokenProcessPool:  # all that were not done fail with the one that died
                lost.append(futures[future])
    for place in lost:
        with _processes(1) as pool:
            try:
                yield pool.submit(_compile, place).result()
            except BrokenProcessPool:
                op, variant, target = jobs[place]
                yield Compiled(
                    op,
                    variant.name,
                    target.name,
                    variant.spills_are_allowed(target.capability),
                    error="the compiler died",
                )


_jobs: list[Job] = []  # kernels do not travel between processes: a place in this list, which all of them have, does


def _processes(count: int) -> ProcessPoolExecutor:
    """Processes that begin as copies of this one, with every kernel imported."""
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("fork"))


def _compile(place: int) -> Compiled:
    from kernels.bench.compiler import compile_variant

    return compile_variant(*_jobs[place])


if __name__ == "__main__":
    sys.exit(main())
