"""`octavo scheduler` as a process, with its log and its `Control` service at hand."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from octavo.shared.ports import free_port
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.forkserver import WITHOUT_TORCH, ForkedCommand

READY_S = 60.0
STOP_S = 15.0
CALL_S = 5.0


class SchedulerProcess:
    """Started at once; `wait_for_workers` before use. What it starts is forked as well, if it `forks_children`."""

    def __init__(
        self, workers: Sequence[str], options: Sequence[str], log: Path, *, forks_children: bool = True
    ) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.log = log
        arguments = ["scheduler", f"--port={port}", *(f"--worker={address}" for address in workers)]
        arguments += ["--text-processes=1", *options]
        with log.open("wb") as file:
            self._process = ForkedCommand(arguments, file.fileno(), WITHOUT_TORCH, forks_children=forks_children)
        self._channel = grpc.insecure_channel(self.address)
        self._control = inference_pb2_grpc.ControlStub(self._channel)

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self) -> pb.Load:
        return self._control.GetLoad(pb.GetLoadRequest(), timeout=CALL_S)

    def workers(self) -> list[pb.WorkerState]:
        return list(self._control.ListWorkers(pb.ListWorkersRequest(), timeout=CALL_S).workers)

    def blocks_in_use(self) -> list[pb.BlockState]:
        blocks = self._control.GetBlocks(pb.GetBlocksRequest(page_size=10_000), timeout=CALL_S).blocks
        return [block for block in blocks if block.ref_count]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of its log with that event."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def wait_for_workers(self, count: int) -> None:
        """So many serve, and nothing is left of earlier requests."""

        def is_whole() -> bool:
            load = self.load()
            serving = [worker for worker in load.workers if worker.health == pb.WORKER_HEALTH_SERVING]
            return len(serving) == count and not (load.num_requests_running or load.num_requests_waiting)

        self.wait_until(is_whole, f"{count} workers that serve nothing any more")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + READY_S
        while not self._holds(condition):
            assert time.monotonic() < deadline, f"no {what}:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.05)

    def _holds(self, condition: Callable[[], bool]) -> bool:
        try:
            return condition()
        except grpc.RpcError:
            assert self._process.poll() is None, f"the scheduler has ended:\n{self.log.read_text()[-4000:]}"
            return False  # it is about to listen

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """As a service manager does."""
        self._channel.close()
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
