"""A scheduler process of its own, up within a moment, in which nothing can be imported that it must not need."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc
import psutil

from octavo.shared.ports import free_port
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.fakes import FakeWorker
from tests.forkserver import WITHOUT_TORCH, ForkedCommand
from tests.grpcurl import Answer, grpcurl
from tests.processes import is_alive, processes_of

# Or whoever starts in 10 s is looked at again after 16: attempts at a port where nobody listens come ever more rarely.
QUICK = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100))


@dataclass
class Service:
    address: str
    process: ForkedCommand | subprocess.Popen[str]
    worker: FakeWorker | None = None

    async def call(self, method: str, data: object = None, *flags: str) -> Answer:
        return await grpcurl(*flags, method, address=self.address, data=data)

    def children(self, module: str) -> list[psutil.Process]:
        """Those that run it."""
        if isinstance(self.process, ForkedCommand):
            return processes_of(self.process.children(module))
        return [child for child in psutil.Process(self.process.pid).children() if module in child.cmdline()]

    def restart(self, *flags: str) -> None:
        """Kills it, and starts it again at its address; `flags` come on top of those that it had."""
        assert isinstance(self.process, ForkedCommand)
        children = processes_of(self.process.children())
        self.process.kill()
        self.process.wait()
        # The kernel kills its frontends when it has ended, and they have its port. One that is not forked takes so long
        # to start that they are gone.
        deadline = time.monotonic() + 60
        while any(is_alive(child) for child in children):
            assert time.monotonic() < deadline, "its children go on without it"
            time.sleep(0.01)
        self.process = ForkedCommand([*self.process.args, *flags], missing=WITHOUT_TORCH)

    def wait_until_ready(self) -> None:
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        request = health_pb2.HealthCheckRequest(service="octavo.v1.Inference")
        deadline = time.monotonic() + 60  # a guard: a machine may be busy with others
        with grpc.insecure_channel(self.address, options=QUICK) as channel:
            while True:
                try:
                    answer = health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True, timeout=5)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                except grpc.RpcError:
                    pass
                assert time.monotonic() < deadline and self.process.poll() is None, "the scheduler did not get ready"
                time.sleep(0.05)


def in_a_new_interpreter(arguments: list[str]) -> list[str]:
    """The command of a scheduler where an import of torch fails, as it does where that is not installed."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({WITHOUT_TORCH}))\n"
        "from octavo.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    return [sys.executable, "-c", code, *arguments]


@contextmanager
def scheduler(*flags: str, is_forked: bool = True) -> Iterator[Service]:
    """With one text process a frontend, unless `flags` say otherwise: few tests have two large requests at once.

    Its log goes where pytest keeps and shows what failing tests print.
    """
    port = free_port()
    arguments = ["scheduler", f"--port={port}", "--text-processes=1", *flags]
    service = Service(
        f"127.0.0.1:{port}",
        ForkedCommand(arguments, missing=WITHOUT_TORCH)
        if is_forked
        else subprocess.Popen(in_a_new_interpreter(arguments), text=True),
    )
    try:
        yield service
    finally:
        service.process.terminate()
        service.process.wait(timeout=60)


@asynccontextmanager
async def stub_of(service: Service) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def read_last(call: grpc.aio.UnaryStreamCall) -> pb.GenerateResponse:
    """The last message of a stream of which some have been read."""
    last = None
    while (message := await call.read()) is not grpc.aio.EOF:
        last = message
    assert last is not None
    return last
