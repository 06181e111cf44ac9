"""What listens on the scheduler's port, between clients and the core: in this process or in others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

import grpc

from octavo.shared.rpc import Health
from scheduler_svc.api import control_service
from scheduler_svc.api.authority import Authority
from scheduler_svc.api.control_server import ControlServer, serve_control
from scheduler_svc.api.control_service import ControlService
from scheduler_svc.api.inference_service import InferenceService
from scheduler_svc.api.public_server import GRACE_S, listen, public_server
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine.engine_core import EngineCore
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.output.mailboxes import Mailboxes
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.tenants import Tenants
from scheduler_svc.requests.text_processes import TextProcesses
from scheduler_svc.serving import Outputs, Serving


class Shown(Protocol):
    """Whoever tells clients what there is."""

    async def show(self, is_ready: bool, models: ServedModels) -> None:
        """Tells whether requests can be served, and by which models; called when either changes."""


class Front(Shown, Protocol):
    """Opened once, before the `Serving` that writes to `outputs` is started; closed once, after that has stopped."""

    @property
    def outputs(self) -> Outputs:
        """Takes what the step loop hands out."""

    async def open(self, serving: Serving, drain: Callable[[], None]) -> int:
        """Lets clients in, and returns the port; `drain` is for a client who may end the server. Raises BindError."""

    async def drain(self) -> None:
        """No new requests, and not ready, from now on and for good."""

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for an answer; of interest while it drains."""

    def break_off(self) -> None:
        """Sends everyone who still waits to another scheduler."""

    async def close(self) -> None:
        """Lets what is written be read, and ends."""


class InProcessFront:
    """Everything on one event loop."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.outputs = self._mailboxes = Mailboxes(asyncio.get_running_loop(), config.stream_interval_ms / 1e3)
        self._config = config
        self._texts: TextProcesses
        self._inference: InferenceService
        self._server: grpc.aio.Server
        self._health: Health
        self._control: ControlServer | None = None
        self._prompts = config.prompt_log()

    async def open(self, serving: Serving, drain: Callable[[], None]) -> int:
        """See `Front`; starts the text processes, too."""
        self._texts = TextProcesses(serving.frontend.models, **self._config.text_options())
        admission = Admission(self._config.max_waiting_requests, self._config.max_preparing_bytes)
        core = EngineCore(serving.engine)
        authority = Authority.of(self._config)
        tenants = Tenants(self._config.tenant_metadata, None if authority is None else authority.callers)
        self._inference = InferenceService(
            serving.frontend,
            self._texts,
            core,
            self._mailboxes,
            admission,
            tenants,
            self._prompts,
            serving.tracer,
        )
        if self._prompts is not None:
            self._prompts.start()
        add_control = partial(control_service.add_to_server, ControlService(serving, self._config, drain))
        self._server, self._health = public_server(self._config, self._inference, add_control, authority=authority)
        port = listen(self._server, self._config)
        await self._server.start()
        self._control = await serve_control(self._config, add_control)
        self._texts.start()
        return port

    async def show(self, is_ready: bool, models: ServedModels) -> None:
        """See `Shown`; text processes load the models' tokenizers."""
        self._texts.expect(models)
        await self._health.set_ready(is_ready and not self._inference.is_draining)

    async def drain(self) -> None:
        """See `Front`."""
        self._inference.drain()
        await self._health.set_ready(False)

    @property
    def is_idle(self) -> bool:
        """No call is open and nothing is in preparation."""
        return self._inference.is_idle

    def break_off(self) -> None:
        """See `Front`."""
        self._inference.break_off()

    async def close(self) -> None:
        """See `Front`; open calls have GRACE_S to end."""
        await self._texts.stop()
        await self._health.shut_down()
        if self._control is not None:
            await self._control.close()
        await self._server.stop(GRACE_S)
        if self._prompts is not None:
            await asyncio.to_thread(self._prompts.stop)
