"""How long weights take from disk to a model: `python -m benchmarks.loading` (SmolLM2, float32 and bfloat16).

Beside each load the same files are read and thrown away, which is what the disk, or the page cache, allows. All of it
in processes of their own, in turns, since memory that a process touches for the first time is a good part of the cost.
`cold` asks the system to forget the files before; how much of them it does, and what the disk's own cache keeps, cannot
be seen from here. Peak memory is the process's, with torch and the compiled kernels (`read`: without them).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from octavo.bench import machine
from octavo.models.resolve import resolve_model

RESULTS = Path(__file__).parent / "results"
_BUFFER_BYTES = 8 << 20


def forget(paths: list[Path]) -> None:
    """Asks for the files' pages to be dropped from memory."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read(paths: list[Path]) -> float:
    """Seconds to read all bytes into one buffer."""
    buffer = bytearray(_BUFFER_BYTES)
    started_s = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started_s


def load(folder: Path, dtype: str) -> float:
    """Seconds to load the model, with everything imported before."""
    from kernels.select import kernels_for
    from worker_svc.models.config import ModelConfig
    from worker_svc.models.loader import load_model

    kernels_for("cpu")
    started_s = time.perf_counter()
    model = load_model(folder, ModelConfig.from_folder(folder, dtype), "cpu")
    seconds = time.perf_counter() - started_s
    assert model.weights_bytes > 0
    return seconds


def measure_here(folder: Path, paths: list[Path], kind: str) -> dict[str, float]:
    """`kind`: read, or the dtype to load."""
    seconds = read(paths) if kind == "read" else load(folder, kind)
    return {"seconds": seconds, "peak_mb": _peak_bytes() / 1e6}


def _peak_bytes() -> int:
    """The most memory that this program held; `getrusage` would count what the process was before it."""
    found = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, "Linux tells"
    return int(found.group(1)) * 1024


def measure(model: str, kind: str, is_cold: bool, paths: list[Path]) -> dict[str, float]:
    """In a process of its own."""
    if is_cold:
        forget(paths)
    command = [sys.executable, "-m", "benchmarks.loading", "--model", model, "--only", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def weight_files(folder: Path) -> list[Path]:
    """The files that a worker would load from this folder."""
    from worker_svc.models.checkpoint.checkpoint_files import checkpoint_paths, detect_format

    return checkpoint_paths(folder, detect_format(folder))


def main() -> None:
    """Prints seconds and peak memory; keeps them in benchmarks/results/."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="where the JSON goes (default: benchmarks/results/)")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # one measurement, here, for the process above
    arguments = parser.parse_args()
    folder = resolve_model(arguments.model)
    paths = weight_files(folder)
    if arguments.only:
        print(json.dumps(measure_here(folder, paths, arguments.only)))
        return
    facts = machine.describe()
    cases = [(kind, is_cold) for is_cold in (False, True) for kind in ("read", *arguments.dtypes)]
    found: dict[tuple[str, bool], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(arguments.rounds):
        for case in cases:
            found[case].append(measure(arguments.model, *case, paths))
    megabytes = sum(path.stat().st_size for path in paths) / 1e6
    rows = [_row(kind, is_cold, found, megabytes) for kind, is_cold in cases]
    _show(rows, megabytes)
    name = f"{datetime.date.today()}-loading-{machine.slug(facts)}.json"
    output = arguments.output or RESULTS / name
    content = {
        "machine": facts,
        "model": arguments.model,
        "megabytes": megabytes,
        "rounds": arguments.rounds,
        "rows": rows,
    }
    output.write_text(json.dumps(content, indent=2) + "\n")
    print(f"kept in {output}")


def _row(
    kind: str, is_cold: bool, found: dict[tuple[str, bool], list[dict[str, float]]], megabytes: float
) -> dict[str, Any]:
    """Medians over rounds, and what a load takes as a multiple of the read beside it."""
    runs, reads = found[kind, is_cold], found["read", is_cold]
    seconds = statistics.median(run["seconds"] for run in runs)
    ratios = [run["seconds"] / other["seconds"] for run, other in zip(runs, reads, strict=True)]
    return {
        "what": kind if kind == "read" else f"load {kind}",
        "page_cache": "cold" if is_cold else "warm",
        "seconds": round(seconds, 3),
        "seconds_least_and_most": [round(pick(run["seconds"] for run in runs), 3) for pick in (min, max)],
        "mb_per_s": round(megabytes / seconds),
        "of_read": round(statistics.median(ratios), 2),
        "peak_mb": round(max(run["peak_mb"] for run in runs)),
    }


def _show(rows: list[dict[str, Any]], megabytes: float) -> None:
    print(f"{megabytes:.0f} MB; seconds: median (least to most)")
    for row in rows:
        least, most = row["seconds_least_and_most"]
        print(
            f"{row['page_cache']}  {row['what']:14} {row['seconds']:7.3f} ({least:.3f} to {most:.3f}) "
            f"{row['mb_per_s']:6} MB/s  {row['of_read']:5.2f} x read  peak {row['peak_mb']} MB"
        )


if __name__ == "__main__":
    main()
