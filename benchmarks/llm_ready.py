"""How long a script waits for its `LLM`: `python -m benchmarks.llm_ready` (half a minute, two idle cores).

Each round is a Python process of its own, from its start to an `LLM` that is ready, and to the first token; with the
most memory that its worker held. `--kinds` has weights of other types: those that are quantised when a model is loaded
are made by a first start and kept, and found by a second one (`int8 kept`), in a cache of their own. `--beside` has
another checkout of Octavo take turns with this one. Files are read once before, so that they are in memory as far as
that goes, and kernels are compiled before, as `make setup` does. `--keep` writes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.loading import RESULTS, read
from octavo.bench import machine
from octavo.models.resolve import resolve_model

PROGRAM = """
import json, sys
from pathlib import Path
import psutil
from octavo import LLM, SamplingParams
with LLM(sys.argv[1], max_model_len=2048, **json.loads(sys.argv[2])) as llm:
    print("ready", flush=True)
    llm.generate(prompt_token_ids=[[1, 2, 3]], sampling_params=SamplingParams(max_tokens=1), use_tqdm=False)
    worker = max(psutil.Process().children(recursive=True), key=lambda process: process.memory_info().rss)
    status = Path(f"/proc/{worker.pid}/status").read_text()
    print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")), flush=True)
"""
KINDS: dict[str, dict[str, str]] = {
    "auto": {},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
}
Times = dict[str, float]  # ready_s, first_token_s, peak_mb


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Measures how long a script waits for its LLM.")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a folder or a GGUF file")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=["auto"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--beside", type=Path, metavar="DIR", help="another checkout, its kernels compiled")
    parser.add_argument("--keep", action="store_true", help="write the results")
    arguments = parser.parse_args()
    facts, model = machine.describe(), resolve_model(arguments.model)
    print(json.dumps(facts))
    trees = {"here": Path.cwd()} | ({"beside": arguments.beside.resolve()} if arguments.beside else {})
    found: dict[tuple[str, str], list[Times]] = {}
    read([model] if model.is_file() else sorted(model.glob("*.safetensors")))
    for _ in range(arguments.rounds):
        for kind in arguments.kinds:
            for name, tree in trees.items():
                for what, times in measure(tree, model, kind):
                    found.setdefault((what, name), []).append(times)
    rows = [{"kind": what, "tree": name, "rounds": rounds} for (what, name), rounds in found.items()]
    for (what, name), rounds in found.items():
        print(f"{what:10} {name:7}" + "".join(f"  {key} {_range(rounds, key)}" for key in rounds[0]))
    if arguments.keep:
        name = model.parent.name + "-" + model.stem if model.is_file() else model.name
        path = RESULTS / f"{datetime.date.today()}-ready-{name}-{machine.slug(facts)}.json"
        path.write_text(json.dumps({"machine": facts, "model": name, "rows": rows}, indent=1) + "\n")
        print(f"kept in {path}")
    return 0


def measure(tree: Path, model: Path, kind: str) -> list[tuple[str, Times]]:
    """By what was measured: of weights that are quantised a first and a second start. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="octavo-ready-") as cache:
        first = kind, _start(tree, model, kind, cache)
        if "quantization" not in KINDS[kind]:
            return [first]
        return [first, (f"{kind} kept", _start(tree, model, kind, cache))]


def _start(tree: Path, model: Path, kind: str, cache: str) -> Times:
    command = [sys.executable, "-c", PROGRAM, str(model), json.dumps(KINDS[kind])]
    environment = os.environ | {"PYTHONPATH": str(tree), "OCTAVO_CACHE": cache}
    begun_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tree, env=environment)
    assert process.stdout is not None
    moments = []
    peak_kb = ""
    for line in process.stdout:
        moments.append(time.perf_counter() - begun_s)
        peak_kb = line
    if process.wait() or len(moments) < 2:
        raise subprocess.CalledProcessError(process.returncode, command)
    ready_s, first_token_s, *_ = moments
    return {"ready_s": ready_s, "first_token_s": first_token_s, "peak_mb": int(peak_kb) * 1024 / 1e6}


def _range(rounds: list[Times], key: str) -> str:
    values = [times[key] for times in rounds]
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


if __name__ == "__main__":
    sys.exit(main())
