"""One engine of `benchmarks.peers`: how it is installed and started, and the process while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.instruction_sets import InstructionSet
from octavo.bench.workloads import Workload

_MEMORY_EVERY_S = 0.2
_LONGEST_RUN_S = 1200.0  # W3 of a large model takes an engine that computes every prefix anew some minutes


class EngineFailed(Exception):
    """The engine did not start, ended, or answered with an error."""


@dataclass(frozen=True)
class EngineKind:
    """`type`: of its weights. `command` gets the folder of environments and the model's folder. `needs`: paths below
    the first, all of them, `{model}` for the model's name; `needs_limited`: those that it needs besides to be limited
    to `{instructions}`, a name of `instruction_sets.SETS`."""

    type: str
    command: Callable[[Path, Path], list[str]]
    needs: tuple[str, ...] = ()
    how_to_install: str = ""
    needs_limited: tuple[str, ...] = ()
    # Of folder of environments, model's folder and variables of its processes: `token_bytes`.
    token_bytes: Callable[[Path, Path, dict[str, str]], int] = lambda *_: 0

    def missing(self, environments: Path, model: Path, limits: InstructionSet | None = None) -> str | None:
        """The first path that is not there."""
        names = {"model": model.name, "instructions": "" if limits is None else limits.level}
        needs = self.needs + (() if limits is None else self.needs_limited)
        paths = [environments / path.format(**names) for path in needs]
        return next((str(path) for path in paths if not path.exists()), None)

    def variables(self, environments: Path, limits: InstructionSet | None = None) -> dict[str, str]:
        """Of its processes: this process's, and those that limit them."""
        if limits is None:
            return dict(os.environ)
        libraries = str(environments / "llamacpp" / limits.level)  # llama.cpp has a library for each set
        return {**os.environ, **limits.variables(), "LD_LIBRARY_PATH": libraries}


class PeerEngine:
    """A running engine. Methods raise EngineFailed."""

    def __init__(
        self, kind: EngineKind, environments: Path, model: Path, variables: dict[str, str] | None = None
    ) -> None:
        """Starts it with these variables (default: this process's) and waits until it is ready: after `ready_s`."""
        started = time.monotonic()
        self._errors = _Tail()
        self._process = subprocess.Popen(
            kind.command(environments, model),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
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
