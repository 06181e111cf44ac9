"""`octavo bench kernels`: what the GPU kernels take when compiled, and how fast they are on the GPU that is here."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from octavo.commands.flags.numbers import count
from octavo.shared.processes.module_command import module_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of compiling and of measuring; `run` refuses those of the one with the other."""
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="compile every variant, for which no GPU is needed: registers and bytes spilled of a thread, shared "
        "memory of a block; exit code 1 where one does not compile, spills and may not, or does not fit",
    )
    parser.add_argument(
        "--target", metavar="SM[,SM...]", help="architectures to compile for, such as sm_80,sm_90 (default: all)"
    )
    parser.add_argument("--op", metavar="NAME", help="one operation, a module of `kernels.gpu` (default: all of them)")
    parser.add_argument("--jobs", type=count(1024), metavar="N", help="processes that compile (default: one a core)")
    parser.add_argument(
        "--loops", action="store_true", help="with --compile-only: what each loop over products consists of"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 where a kernel does not compile, spills and may not, or does not fit. Measuring needs a GPU."""
    return _compile(arguments) if arguments.compile_only else _measure(arguments)


def _compile(arguments: argparse.Namespace) -> int:
    flags = [f"--{name}={value}" for name in ("target", "op", "jobs") if (value := getattr(arguments, name))]
    flags += ["--loops"] * arguments.loops + ["--json"] * arguments.json
    # Where Triton's interpreter is on, kernels cannot be compiled, and it counts when they are imported.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = module_command("kernels.bench.compile_all", *flags)
    return subprocess.run(command, env=environment).returncode


def _measure(arguments: argparse.Namespace) -> int:
    import torch

    from octavo.cli import CommandError
    from octavo.shared.options import OptionError

    if arguments.target or arguments.jobs or arguments.loops:
        raise OptionError("--target, --jobs and --loops go with --compile-only")
    if not torch.cuda.is_available():
        raise CommandError("there is no GPU to time kernels on; --compile-only needs none")
    from kernels.bench import all_cases
    from kernels.bench.case import Setting
    from kernels.bench.clock import GraphClock
    from kernels.bench.measure import Row, is_lost, line, measure, table

    device = torch.device("cuda")
    try:
        cases = all_cases.cases(Setting(device), arguments.op)
    except ValueError as error:
        raise OptionError(str(error)) from None
    failures: list[str] = []
    rows: list[Row] = []
    try:
        for row in measure(cases, GraphClock(device), failures.append):
            print(line(row), file=sys.stderr, flush=True)  # it takes minutes, and may be ended before the table is here
            rows.append(row)
    except Exception:
        if not is_lost(device):
            raise
        failures.append("the GPU computes nothing more for this process: other operations were not timed")
    if arguments.json:
        name = torch.cuda.get_device_name(device)
        print(json.dumps({"gpu": name, "rows": [row.as_dict() for row in rows], "failures": failures}, indent=1))
    else:
        print(table(rows))
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0
