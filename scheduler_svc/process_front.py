"""Clients are served by frontend processes that share the port; this process, the core, serves those over a socket."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import grpc

from octavo.options import to_arguments
from octavo.ports import reserve_port
from octavo.rpc import SERVER_OPTIONS
from protos import frontend_pb2, frontend_pb2_grpc
from scheduler_svc import control_service
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.control_service import ControlService
from scheduler_svc.core_service import CoreService
from scheduler_svc.frontend_links import FrontendLinks
from scheduler_svc.frontend_processes import FrontendProcesses
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.model_description import encode_models
from scheduler_svc.public_server import GRACE_S
from scheduler_svc.request_guard import RequestGuard
from scheduler_svc.served_model import ServedModel
from scheduler_svc.served_models import ServedModels
from scheduler_svc.serving import Serving


class ProcessFront:
    """A `Front` of `config.frontends` processes.

    Socket and tokenizer files lie in a folder that nobody but this user can enter.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.outputs = self._links = FrontendLinks(asyncio.get_running_loop())
        self._config = config
        self._state = frontend_pb2.CoreState()
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(RequestGuard(),))
        self._reserved: socket.socket  # keeps the port while no frontend listens
        self._folder: Path
        self._live: LiveRequests
        self._processes: FrontendProcesses

    async def open(self, serving: Serving, drain: Callable[[], None]) -> int:
        config = self._config
        self._live = serving.engine.live
        self._reserved, port = reserve_port(config.host, config.port)
        self._folder = Path(tempfile.mkdtemp(prefix="octavo-"))
        address = f"unix:{self._folder}/core"
        frontend_pb2_grpc.add_CoreServicer_to_server(CoreService(serving, self._links), self._server)
        control_service.add_to_server(ControlService(serving, config, drain), self._server)
        self._server.add_insecure_port(address)
        await self._server.start()
        options = to_arguments(dataclasses.replace(config, port=port))
        command = [sys.executable, "-m", "scheduler_svc.frontend_process", f"--core={address}", *options]
        self._processes = FrontendProcesses(command, config.frontends, serving.vital)
        self._processes.start()
        return port

    async def show(self, is_ready: bool, models: ServedModels) -> None:
        await asyncio.to_thread(self._keep_tokenizers, models)
        self._state.models.CopyFrom(encode_models(models, self._tokenizer_folder))
        self._state.is_ready = is_ready
        self._links.set_state(self._state)

    def _tokenizer_folder(self, model: ServedModel) -> Path:
        return self._folder / f"tokenizer-{model.fingerprint}"

    def _keep_tokenizers(self, models: ServedModels) -> None:
        """The files of those that are served, and of no others."""
        folders = {self._tokenizer_folder(each.model): each.model.tokenizer for each in models.known}
        for folder in set(self._folder.glob("tokenizer-*")) - folders.keys():
            shutil.rmtree(folder, ignore_errors=True)
        for folder, tokenizer in folders.items():
            if not folder.exists():
                tokenizer.save(folder)

    async def drain(self) -> None:
        self._state.is_draining = True
        self._links.set_state(self._state)

    @property
    def is_idle(self) -> bool:
        return not len(self._live)  # what has ended here has been handed to its frontend, and has its grace there

    def break_off(self) -> None:
        self._state.is_broken_off = not self.is_idle
        self._links.set_state(self._state)

    async def close(self) -> None:
        self._links.close()
        await self._processes.stop()
        await self._server.stop(GRACE_S)
        self._reserved.close()
        shutil.rmtree(self._folder, ignore_errors=True)
