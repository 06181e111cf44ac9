"""The front of several processes: frontends share the port, and this process, the core, serves them over a socket."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc

from octavo.shared.options import to_arguments
from octavo.shared.ports import reserve_port
from octavo.shared.processes.module_command import module_command
from octavo.shared.rpc import LINK_SERVER_OPTIONS
from protos import frontend_pb2_grpc
from scheduler_svc.api import control_service
from scheduler_svc.api.control_server import ControlServer, serve_control
from scheduler_svc.api.control_service import ControlService
from scheduler_svc.api.public_server import GRACE_S
from scheduler_svc.api.request_guard import RequestGuard
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine.engine import Engine
from scheduler_svc.frontends.core_service import CoreService
from scheduler_svc.frontends.frontend_links import FrontendLinks
from scheduler_svc.frontends.kept_processes import KeptProcesses
from scheduler_svc.frontends.told_state import ToldState
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.serving import Serving


class ProcessFront:
    """A `Front` of `config.frontends` processes.

    Socket and tokenizer files lie in a folder that nobody but this user can enter.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.outputs = self._links = FrontendLinks(asyncio.get_running_loop())
        self._config = config
        self._server = grpc.aio.server(options=LINK_SERVER_OPTIONS, interceptors=(RequestGuard(),))
        self._reserved: socket.socket  # keeps the port while no frontend listens
        self._files: tempfile.TemporaryDirectory[str]
        self._state: ToldState
        self._engine: Engine
        self._processes: KeptProcesses
        self._control: ControlServer | None = None

    async def open(self, serving: Serving, drain: Callable[[], None]) -> int:
        """See `Front`; frontends start listening by themselves, after this returns."""
        config = self._config
        self._engine = serving.engine
        self._reserved, port = reserve_port(config.host, config.port)
        self._files = tempfile.TemporaryDirectory(prefix="octavo-", ignore_cleanup_errors=True)
        folder = Path(self._files.name)
        self._state = ToldState(self._links, folder)
        address = f"unix:{folder}/core"
        frontend_pb2_grpc.add_CoreServicer_to_server(CoreService(serving, self._links), self._server)
        add_control = partial(control_service.add_to_server, ControlService(serving, config, drain))
        add_control(self._server)
        self._server.add_insecure_port(address)
        await self._server.start()
        self._control = await serve_control(config, add_control)
        options = to_arguments(dataclasses.replace(config, port=port))
        command = module_command("scheduler_svc.frontend_process", f"--core={address}", *options)
        self._processes = KeptProcesses(
            "frontend", lambda number: [*command, f"--number={number}"], config.frontends, serving.vital
        )
        self._processes.start()
        return port

    async def show(self, is_ready: bool, models: ServedModels) -> None:
        """See `Shown`; frontends read tokenizers from files that this writes."""
        await self._state.show(is_ready, models)

    async def drain(self) -> None:
        """See `Front`."""
        self._state.drain()

    @property
    def is_idle(self) -> bool:
        """See `Front`."""
        return not self._engine.num_live  # what has ended here has been handed to its frontend, and has its grace there

    def break_off(self) -> None:
        """See `Front`."""
        self._state.break_off(not self.is_idle)

    async def close(self) -> None:
        """See `Front`; frontends end by themselves once their links are closed."""
        self._links.close()
        await self._processes.stop()
        if self._control is not None:
            await self._control.close()
        await self._server.stop(GRACE_S)
        self._reserved.close()
        self._files.cleanup()
