"""`octavo bench`: tokens a second and times to tokens, as a table or JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.commands import connection

if TYPE_CHECKING:
    from octavo.bench.figures import Figures
    from octavo.bench.workloads import Workload

_DEFAULT_MODEL = "smollm2-135m-instruct"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from octavo.bench.workloads import WORKLOADS

    kinds = parser.add_subparsers(dest="kind", required=True, metavar="offline|serve")
    offline = kinds.add_parser("offline", help="over LLM: scheduler core in this process, a worker beside it")
    offline.add_argument("--model", default=_DEFAULT_MODEL, help="name or folder (default: %(default)s)")
    serve = kinds.add_parser("serve", help="over Generate, against a server that runs: N streams in a closed loop")
    serve.add_argument("--streams", type=int, metavar="N", help="default: one a request, at most 64")
    connection.add_arguments(serve)
    texts = "; ".join(f"{name}: {text}" for name, (text, _) in WORKLOADS.items())
    for kind in (offline, serve):
        kind.add_argument("--workload", choices=tuple(WORKLOADS), default="W2", help=f"default: %(default)s. {texts}")
        kind.add_argument("--requests-file", type=Path, metavar="FILE.jsonl", help="requests of your own instead")
        kind.add_argument("--repeat", type=int, default=1, metavar="N", help="runs after the warm-up (default: 1)")
        kind.add_argument("--json", action="store_true", help="print JSON in place of the table")


def run(arguments: argparse.Namespace) -> int:
    rows = _offline(arguments) if arguments.kind == "offline" else _serve(arguments)
    if arguments.json:
        print(json.dumps([row.as_dict() for row in rows], indent=1))
    else:
        from octavo.bench.figures import table

        print(table(rows))
    return 0


def _workload(arguments: argparse.Namespace, vocab_size: int) -> Workload:
    from octavo.bench import workloads
    from octavo.cli import CommandError

    if not arguments.requests_file:
        return workloads.make(arguments.workload, vocab_size)
    try:
        return workloads.read(arguments.requests_file)
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from None


def _offline(arguments: argparse.Namespace) -> list[Figures]:
    from octavo.bench import offline, workloads
    from octavo.llm import LLM

    with LLM(model=arguments.model) as llm:
        vocab_size = llm.get_tokenizer().vocab_size
        workload = _workload(arguments, vocab_size)
        offline.run(llm, workloads.warm_up(vocab_size))
        return [offline.run(llm, workload)[0] for _ in range(arguments.repeat)]


def _serve(arguments: argparse.Namespace) -> list[Figures]:
    import asyncio

    from octavo.bench import closed_loop, workloads
    from octavo.client import AsyncClient

    with connection.connect(arguments) as blocking:
        vocab_size = blocking.model_info().vocab_size
    workload = _workload(arguments, vocab_size)
    streams = arguments.streams or min(64, len(workload.requests))

    async def measure() -> list[Figures]:
        credentials = connection.credentials(arguments)
        async with AsyncClient(arguments.address, api_key=arguments.api_key, credentials=credentials) as client:
            await closed_loop.run(client, workloads.warm_up(vocab_size), 1)
            return [await closed_loop.run(client, workload, streams) for _ in range(arguments.repeat)]

    return asyncio.run(measure())
