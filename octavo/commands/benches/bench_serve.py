"""`octavo bench serve`: load on a server, in an open or a closed loop, over gRPC or HTTP; and `bench compare`."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.load import lengths
from octavo.commands.flags import connection
from octavo.commands.flags.numbers import count, number, numbers
from octavo.shared.options import OptionError

if TYPE_CHECKING:
    from octavo.bench.load.grpc_target import GrpcTarget
    from octavo.bench.load.http_target import HttpTarget
    from octavo.bench.load.lengths import Lengths
    from octavo.bench.load.requests import PlannedRequest

DEFAULT_SEED = 20240
DEFAULT_COUNT = 100  # of random lengths
HTTP_VOCAB_SIZE = 32_000  # of numbers that words are made of
MOST = 10**9  # of requests and tokens
WORSE = 3  # exit code of `compare`: a figure is worse by more than the threshold


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags beside those of every bench: when, what, where, and what to show."""
    when = parser.add_argument_group("when requests are sent (default: a closed loop)")
    when.add_argument("--rate", type=numbers, metavar="R[,R...]",
                      help="open loop: requests a second; each rate is measured")  # fmt: skip
    when.add_argument("--burstiness", type=number(above=0, or_inf=True), default=1.0, metavar="X",
                      help="shape of the gamma distributed gaps: 1 is Poisson, less comes in bursts, `inf` evenly "
                      "(default: 1)")  # fmt: skip
    when.add_argument(
        "--ramp-to", type=number(above=0), metavar="R", help="the rate changes evenly from --rate to this"
    )
    when.add_argument("--speedup", type=number(above=0), metavar="X", help="a trace goes so many times as fast")
    when.add_argument("--warm-up", type=count(MOST, 0), default=0, metavar="N",
                      help="the first N requests are sent and left out of all figures (default: 0)")  # fmt: skip
    when.add_argument(
        "--timeout-s",
        type=number(above=0, or_inf=True),
        default=600.0,
        metavar="S",
        help="for a request (default: 600)",
    )
    what = parser.add_argument_group("what is sent (default: --workload)")
    what.add_argument("--prompt-tokens", type=_lengths, metavar="LENGTHS",
                      help=f"random prompts: {lengths.FORMS}")  # fmt: skip
    what.add_argument("--output-tokens", type=_lengths, metavar="LENGTHS", help="of the answers (default: 64)")
    what.add_argument(
        "--shared-tokens", type=count(MOST, 0), default=0, metavar="N", help="in front of each random prompt"
    )
    what.add_argument("--sharegpt", type=Path, metavar="FILE.json", help="first turns of ShareGPT's conversations")
    what.add_argument("--trace", type=Path, metavar="FILE",
                      help="times and lengths: JSON lines as Mooncake's, CSV as Azure's")  # fmt: skip
    what.add_argument(
        "--requests", type=count(MOST), metavar="N", help="how many (default: all there are; random: 100)"
    )
    what.add_argument("--seed", type=int, default=DEFAULT_SEED, help="of all that is drawn (default: %(default)s)")
    what.add_argument("--keep-eos", action="store_true", help="answers may end before their length")
    where = parser.add_argument_group("any server of OpenAI's API, in place of --address")
    where.add_argument("--url", metavar="URL", help="base with its version: http://127.0.0.1:8000/v1")
    where.add_argument("--chat", action="store_true", help="chat completions (default: completions)")
    where.add_argument("--model", default="", help="as the server names it")
    where.add_argument("--vocab-size", type=count(MOST, 2), metavar="N",
                       help="completions get token ids below N (default: text of about as many words)")  # fmt: skip
    shown = parser.add_argument_group("output")
    shown.add_argument("--slo-ttft-ms", type=number(above=0), metavar="MS", help="goodput: first token within")
    shown.add_argument("--slo-tpot-ms", type=number(above=0), metavar="MS", help="goodput: a token after it within")
    shown.add_argument("--out", type=Path, metavar="FILE.json", help="keep everything, each request too")
    shown.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw latency against load, and timelines")


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `octavo bench compare`."""
    parser.add_argument("a", type=Path, metavar="A.json", help="what `bench serve --out` wrote")
    parser.add_argument("b", type=Path, metavar="B.json", help="likewise, later")
    parser.add_argument("--threshold", type=number(above=0), metavar="PERCENT",
                        help=f"exit code {WORSE} where a median of B is worse by more")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")


def run(arguments: argparse.Namespace) -> int:
    """Measures each load in turn; exit code 1 where no request of a run ended well."""
    from octavo.bench.load import pictures, result
    from octavo.cli import CommandError

    _check(arguments)
    if arguments.pictures:
        _need("matplotlib", "pictures", "--pictures")  # before minutes of load, not after
        arguments.pictures.mkdir(parents=True, exist_ok=True)
    if arguments.url:
        _need("aiohttp", "load", "--url")
    try:
        found, rows = asyncio.run(_measure(arguments))
    except ValueError as error:
        raise CommandError(str(error)) from None
    if arguments.json:
        runs = [run["figures"] for run in found["runs"]]
        print(json.dumps({**found, "runs": runs}, indent=1))
    else:
        print(result.table(rows))
    if arguments.out:  # behind what has been printed: a disk may be full
        arguments.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    drawn = pictures.write(arguments.pictures, found) if arguments.pictures else []
    for line in [warning for row in rows for warning in row.warnings] + [f"wrote {path}" for path in drawn]:
        print(line, file=sys.stderr)
    return 1 if any(row.failed == row.requests for row in rows) else 0


def _need(module: str, extra: str, flag: str) -> None:
    """Raises CommandError where the library behind a flag is not installed."""
    from octavo.cli import CommandError

    try:
        import_module(module)
    except ModuleNotFoundError:
        raise CommandError(f"{flag} needs {module}; pip install '.[{extra}]' in a clone brings it") from None


def run_compare(arguments: argparse.Namespace) -> int:
    """Prints ratios; what differs goes to standard error."""
    from octavo.bench.load import compare, result
    from octavo.cli import CommandError

    try:
        a, b = result.read(arguments.a), result.read(arguments.b)
    except ValueError as error:
        raise CommandError(str(error)) from None
    try:
        ratios, notes = compare.compare(a, b), compare.differences(a, b)
    except (AttributeError, KeyError, TypeError):
        written = "is not what `octavo bench serve --out` writes"
        raise CommandError(f"one of {arguments.a} and {arguments.b} {written}") from None
    if not ratios:
        raise CommandError("the two have no load in common")
    threshold = arguments.threshold
    worse = [each for each in ratios if threshold is not None and each.is_worse_by(threshold)]
    if arguments.json:
        values = [vars(each) for each in ratios]
        print(json.dumps({"ratios": values, "differences": notes, "worse": [vars(each) for each in worse]}, indent=1))
    else:
        print(compare.table(ratios))
    for line in [*notes, *(f"worse by more than {threshold:g} %: {each.figure} at {each.load}" for each in worse)]:
        print(line, file=sys.stderr)
    return WORSE if worse else 0


def _check(arguments: argparse.Namespace) -> None:
    """Raises OptionError for flags that contradict one another."""
    sources = ("prompt_tokens", "sharegpt", "trace", "requests_file")
    given = [name for name in sources if getattr(arguments, name) is not None]
    if len(given) > 1:
        raise OptionError(" and ".join(f"--{name.replace('_', '-')}" for name in given[:2]) + " do not go together")
    is_open = arguments.rate is not None or arguments.trace is not None
    if arguments.rate is not None and arguments.trace is not None:
        raise OptionError("--rate does not go with --trace, which says when")
    if is_open and arguments.streams:
        raise OptionError("--streams is of a closed loop, --rate and --trace are of an open one")
    if (arguments.ramp_to or arguments.burstiness != 1) and arguments.rate is None:
        raise OptionError("--ramp-to and --burstiness go with --rate")
    if arguments.speedup is not None and arguments.trace is None:
        raise OptionError("--speedup goes with --trace")
    if (arguments.shared_tokens and arguments.prompt_tokens is None) or (
        arguments.output_tokens and arguments.prompt_tokens is None and arguments.sharegpt is None
    ):
        raise OptionError("--shared-tokens and --output-tokens go with --prompt-tokens")
    if arguments.url and not arguments.url.startswith(("http://", "https://")):
        raise OptionError(f"--url begins with http:// or https://, as http://{arguments.url} does")
    if arguments.url and arguments.url.startswith("http://") and connection.uses_tls(arguments):
        raise OptionError("--tls and its files go with a --url of https://")
    if arguments.url is None and (arguments.chat or arguments.vocab_size):
        raise OptionError("--chat and --vocab-size go with --url")
    if arguments.url and (arguments.address != connection.DEFAULT_ADDRESS or arguments.retry_window is not None):
        raise OptionError("--address and --retry-window do not go with --url")
    if arguments.out:
        _check_file(arguments.out)


def _check_file(path: Path) -> None:
    """Raises OptionError where it cannot be written: before minutes of load, not after."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise OptionError(
            f"--out: {path} {'is a folder' if path.is_dir() else 'is to be in a folder that is not there'}"
        )
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise OptionError(f"--out: {path} may not be written")


async def _measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Any]]:
    from octavo.bench import machine
    from octavo.bench.load import runner
    from octavo.bench.load.figures import Slo, measure
    from octavo.bench.load.requests import PlannedRequest
    from octavo.bench.load.result import SCHEMA
    from octavo.shared.connections import allow_open_files

    vocab_size = arguments.vocab_size or HTTP_VOCAB_SIZE
    if arguments.url is None:
        with connection.connect(arguments) as blocking:
            vocab_size = blocking.model_info(arguments.model).vocab_size
    slo = None
    if arguments.slo_ttft_ms is not None or arguments.slo_tpot_ms is not None:
        slo = Slo(arguments.slo_ttft_ms, arguments.slo_tpot_ms)
    hardware, runs, rows = machine.describe(), [], []
    target = _target(arguments)
    try:
        short = PlannedRequest(4, tuple(1 + number % (vocab_size - 1) for number in range(8)), at_s=0.0)
        first = await runner.run(target, [short] * 4, 1, arguments.timeout_s)
        if arguments.url and all(record.error for record in first.records):
            failed = first.records[0]
            raise ValueError(f"{arguments.url}: {failed.reason or failed.error}")
        for number, (load, repeat) in enumerate(
            (load, repeat) for load in _loads(arguments) for repeat in range(arguments.repeat)
        ):
            requests = _requests(arguments, vocab_size, number)
            if arguments.warm_up >= len(requests):
                raise ValueError(f"a warm-up of {arguments.warm_up} leaves none of {len(requests)} requests")
            requests, name, streams = _planned(arguments, requests, load)
            allow_open_files(len(requests))
            await target.prepare()
            done = await runner.run(target, requests, streams, arguments.timeout_s)
            rate = load if arguments.rate is not None and arguments.ramp_to is None else None
            rows.append(
                measure(done, load=name, rate=rate, streams=streams, repeat=repeat, warm_up=arguments.warm_up, slo=slo)
            )
            records = [record.as_dict() for record in done.records]
            runs.append({"figures": rows[-1].as_dict(), "warm_up": arguments.warm_up, "requests": records})
    finally:
        await target.close()
    found = {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware,
        "target": {"over": _over(arguments), "model": arguments.model},
        "workload": _described(arguments),
        "runs": runs,
    }
    return found, rows


def _target(arguments: argparse.Namespace) -> GrpcTarget | HttpTarget:
    if arguments.url is None:
        from octavo.bench.load.grpc_target import GrpcTarget

        return GrpcTarget(
            arguments.address,
            model=arguments.model,
            api_key=connection.api_key(arguments),
            plaintext_key=arguments.plaintext_key,
            credentials=connection.credentials(arguments),
            ignore_eos=not arguments.keep_eos,
            retry_window_s=connection.retry_window(arguments) or 0.0,
        )
    from octavo.bench.load.http_target import HttpTarget

    return HttpTarget(
        arguments.url,
        model=arguments.model,
        api_key=connection.api_key_for(arguments.url, arguments),
        chat=arguments.chat,
        takes_ids=arguments.vocab_size is not None,
        ignore_eos=not arguments.keep_eos,
        context=connection.ssl_context(arguments) if arguments.url.startswith("https://") else None,
    )


def _over(arguments: argparse.Namespace) -> str:
    return "Generate" if arguments.url is None else "chat completions" if arguments.chat else "completions"


def _loads(arguments: argparse.Namespace) -> list[float | None]:
    """Rates or numbers of streams, each to be measured; None: a trace, or as many streams as requests."""
    if arguments.trace is not None:
        return [None]
    return arguments.rate or arguments.streams or [None]


def _requests(arguments: argparse.Namespace, vocab_size: int, run: int) -> list[PlannedRequest]:
    """Raises ValueError and OSError for a file that cannot be read."""
    from octavo.bench import workloads
    from octavo.bench.load import requests

    count, seed = arguments.requests, arguments.seed
    if arguments.trace is not None:
        return requests.trace(
            arguments.trace, count, arguments.speedup or 1.0, vocab_size=vocab_size, seed=seed, run=run
        )
    if arguments.sharegpt is not None:
        return requests.share_gpt(arguments.sharegpt, count, arguments.output_tokens, seed)
    if arguments.prompt_tokens is not None:
        output = arguments.output_tokens or lengths.parse("64")
        return requests.random_lengths(
            count or DEFAULT_COUNT,
            arguments.prompt_tokens,
            output,
            shared=arguments.shared_tokens,
            vocab_size=vocab_size,
            seed=seed,
            run=run,
        )
    if arguments.requests_file is not None:
        return requests.of_workload(workloads.read(arguments.requests_file).requests, count)
    return requests.of_workload(workloads.make(arguments.workload, vocab_size).requests, count)


def _planned(
    arguments: argparse.Namespace, requests: list[PlannedRequest], load: float | None
) -> tuple[list[PlannedRequest], str, int | None]:
    """The requests with their times, the load by its name, and the streams of a closed loop."""
    from octavo.bench.load import arrivals
    from octavo.bench.load.requests import at_times

    if arguments.trace is not None:
        return requests, "trace", None
    if arguments.rate is None:
        streams = int(load or min(64, len(requests)))
        return requests, f"{streams} streams", streams
    assert load is not None
    times = arrivals.times(
        len(requests), load, burstiness=arguments.burstiness, ramp_to=arguments.ramp_to, seed=arguments.seed
    )
    ramp = "" if arguments.ramp_to is None else f" to {arguments.ramp_to:g}"
    return at_times(requests, times), f"{load:g}{ramp} requests/s", None


def _described(arguments: argparse.Namespace) -> dict[str, Any]:
    """What two measurements must have in common to be compared; files by their names alone."""
    names = ("workload", "prompt_tokens", "output_tokens", "shared_tokens", "requests", "burstiness", "ramp_to")
    values = {name: getattr(arguments, name) for name in (*names, "speedup", "warm_up", "seed", "keep_eos")}
    values |= {name: path and path.name for name in ("sharegpt", "trace", "requests_file")
               for path in [getattr(arguments, name)]}  # fmt: skip
    if any(values[name] for name in ("sharegpt", "trace", "requests_file", "prompt_tokens")):
        values["workload"] = None
    return {
        name: _lengths_as_dict(value) if isinstance(value, lengths.Lengths) else "inf" if value == math.inf else value
        for name, value in values.items()
    }


def _lengths_as_dict(value: Lengths) -> dict[str, Any]:
    """For JSON."""
    return {"low": value.low, "high": value.high, "median": value.median, "sigma": value.sigma}


def _lengths(text: str) -> Lengths:
    try:
        return lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
