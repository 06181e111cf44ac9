"""`octavo bench kernels`: what the GPU kernels take when compiled, and how fast they are on the GPU that is here."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="compile every variant, for which no GPU is needed: registers and bytes spilled of a thread, shared "
        "memory of a block; exit code 1 where one does not compile, spills and may not, or does not fit",
    )
    parser.add_argument(
        "--target", metavar="SM[,SM...]", help="architectures to compile for (default: sm_80,sm_90,sm_100)"
    )
    parser.add_argument("--op", metavar="NAME", help="one operation, a module of `kernels` (default: all of them)")
    parser.add_argument("--jobs", type=_count, metavar="N", help="processes that compile (default: one a core)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise ValueError(text)
    return count


def run(arguments: argparse.Namespace) -> int:
    from octavo.cli import CommandError

    if not arguments.compile_only:
        raise CommandError("timing kernels needs a GPU; --compile-only needs none")
    flags = [f"--{name}={value}" for name in ("target", "op", "jobs") if (value := getattr(arguments, name))]
    flags += ["--json"] if arguments.json else []
    # Where Triton's interpreter is on, kernels cannot be compiled, and it counts when they are imported.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.bench.compile_all", *flags]
    return subprocess.run(command, env=environment).returncode
