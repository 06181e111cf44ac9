"""Everything that is measured on a GPU, in under ten minutes: `python -m benchmarks.gpu`.

The kernels' tests come first; then every operation over its shapes, a decode step of a Llama 3 8B, mixed steps of a
Qwen3 0.6B, the whole service beside the first, and the second over the service beside `transformers`. Each section is a
process of its own with a time limit: whatever happens in one, figures that were found before stay, and the next one
finds the card's memory free. Results are written after each section: they outlast an end in the middle.
`--check` lists what must be installed; `--dry-run` runs every section on a CPU, at sizes whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_sections import figure, requirements
from octavo.bench import machine

RESULTS = Path(__file__).parent / "results"
# Module of `benchmarks.gpu_sections`, and the seconds it may take, besides those that the ones before it have left.
SECTIONS = {
    "correctness": 105.0,
    "kernels": 140.0,
    "decode_step": 70.0,
    "mixed_steps": 35.0,
    "graph_coverage": 45.0,
    "service": 55.0,
    "continuous_batching": 70.0,
}
START_S = 20.0  # to import torch, and to find out what the card is; with the sections a minute less than ten
_LAST_LINES = 8  # of what a section that failed printed


def main() -> int:
    """Prints figures as they come and keeps them in DIR; exit code 1 where a section failed or something is missing."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description="Measures everything that needs a GPU.")
    parser.add_argument("--check", action="store_true", help="list what is missing on this machine, and end")
    parser.add_argument("--dry-run", action="store_true", help="every section on the CPU, at sizes that mean nothing")
    parser.add_argument("--sections", nargs="+", choices=tuple(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--no-results", action="store_true", help="print only")
    parser.add_argument("--section", choices=tuple(SECTIONS), help=argparse.SUPPRESS)  # in the process of one
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        return _run_section(arguments.section, arguments.figures, arguments.dry_run)
    if absent := requirements.missing():
        print(requirements.how_to_bring(absent), file=sys.stderr)
        return 1
    if problem := requirements.problem():
        print(problem, file=sys.stderr)
        return 1
    if arguments.check:
        print("nothing is missing")
        return 0
    if not (arguments.dry_run or _has_gpu()):
        print("there is no GPU here; --dry-run shows that every section runs", file=sys.stderr)
        return 1
    if not arguments.no_results:
        try:
            arguments.results.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"--results: cannot make {arguments.results}: {error.strerror}", file=sys.stderr)
            return 1
    return _measure(arguments, started + START_S)


def _measure(arguments: argparse.Namespace, deadline: float) -> int:
    """`deadline`: by when the first section should have begun."""
    facts = machine.describe() | {"gpu": "none: a dry run" if arguments.dry_run else _gpu()}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    name = "dry-run" if arguments.dry_run else _slug(facts["gpu"]["name"])
    written = arguments.results / f"{date[:10]}-gpu-{name}.json"
    endings: dict[str, Any] = {section: {"ended": "not begun"} for section in arguments.sections}
    figures: list[figure.Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.jsonl"
        for section in arguments.sections:
            deadline += SECTIONS[section]
            limit_s = deadline - time.monotonic()
            print(f"{section} ...", end=" ", file=sys.stderr, flush=True)
            ending = endings[section] = _in_a_process(section, path, limit_s, arguments.dry_run)
            print(f"{ending['ended']}, {ending['seconds']:.0f} s", file=sys.stderr)
            num_before, figures = len(figures), figure.read(path)
            print(f"{figure.table(figures[num_before:])}\n", flush=True)
            if ending["ended"] != "well":
                print(f"{section}: {ending['ended']}\n{ending['last_lines']}\n", flush=True)
            if not arguments.no_results:
                result = {"date": date, "machine": facts, "is_dry_run": arguments.dry_run, "sections": endings}
                _write(written, result | {"figures": [asdict(one) for one in figures]})
    if not arguments.no_results:
        print(f"written: {written}")
    return 0 if all(ending["ended"] == "well" for ending in endings.values()) else 1


def _write(path: Path, result: dict[str, Any]) -> None:
    """All of it, or what was there before: whoever ends this process may do it at any moment."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


# ---- A section in its process ---------------------------------------------------------------------------------------


def _in_a_process(section: str, figures: Path, limit_s: float, is_dry_run: bool) -> dict[str, Any]:
    """How it ended. Whatever it started ends with it."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--section", section, "--figures", str(figures)]
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if is_dry_run:
        command.append("--dry-run")
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = time.monotonic()
    if limit_s <= 0:
        return {"ended": "no time was left", "seconds": 0.0, "last_lines": ""}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(timeout=limit_s)
            ended = "well" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"not within {limit_s:.0f} s"
        finally:
            _end_group(process)
        log.seek(0)
        last_lines = "" if ended == "well" else "\n".join(log.read().splitlines()[-_LAST_LINES:])
    return {"ended": ended, "seconds": time.monotonic() - started, "last_lines": last_lines}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """A server that the section started may still run when the section does not."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _run_section(section: str, path: Path, is_dry_run: bool) -> int:
    module = importlib.import_module(f"benchmarks.gpu_sections.{section}")
    try:
        module.run(lambda one: figure.write(path, one), figure.read(path), is_dry_run)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


# ---- The card -------------------------------------------------------------------------------------------------------


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


_FACTS = """
import json, torch
card = torch.cuda.get_device_properties(0)
facts = {"name": card.name, "memory_gib": round(card.total_memory / 2**30, 1), "cuda": torch.version.cuda}
facts |= {"multiprocessors": card.multi_processor_count, "capability": f"{card.major}.{card.minor}"}
print(json.dumps(facts))
"""


def _gpu() -> dict[str, Any]:
    """In a process of its own: a process that calls CUDA holds some of the card's memory until it ends."""
    facts: dict[str, Any] = json.loads(subprocess.check_output([sys.executable, "-c", _FACTS], text=True))
    return facts


def _slug(name: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", name.lower()))


if __name__ == "__main__":
    sys.exit(main())
