"""The server that clients call: `Inference`, `Control`, health, reflection and channelz."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from octavo.shared.access.tls import server_tls
from octavo.shared.rpc import Health, add_introspection, bind
from scheduler_svc.api import inference_service
from scheduler_svc.api.authority import Authority
from scheduler_svc.api.grpc_server import new_server
from scheduler_svc.api.inference_service import InferenceService
from scheduler_svc.config import SchedulerConfig

INFERENCE, CONTROL = "octavo.v1.Inference", "octavo.v1.Control"
GRACE_S = 1.0  # for streams to read their last message


def credentials_of(config: SchedulerConfig) -> grpc.ServerCredentials | None:
    """What its port shows; None: no TLS. Raises OptionError."""
    tls = server_tls(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
    return None if tls is None else tls.credentials()


def listen(server: grpc.aio.Server, config: SchedulerConfig, frontend: int = 0) -> int:
    """Binds a public server, and returns its port. Raises BindError, OptionError.

    Where the options name a folder for it there is a socket as well, for whoever may enter that folder: keys are asked
    for there, too, and no certificates.
    """
    if (socket := config.local_socket(frontend)) is not None:
        server.add_insecure_port(socket)
    return bind(server, config.host, config.port, credentials_of(config))


def public_server(
    config: SchedulerConfig,
    inference: InferenceService,
    add_control: Callable[[grpc.aio.Server], None],
    *,
    shares_port: bool = False,
    authority: Authority | None = None,
) -> tuple[grpc.aio.Server, Health]:
    """A server that is neither bound nor started, and its health; `add_control` adds whatever answers `Control`, unless
    that has a port of its own."""
    server = new_server(config, shares_port=shares_port, authority=authority)
    inference_service.add_to_server(inference, server)
    if config.control_port is not None:
        return server, add_introspection(server, [INFERENCE])
    add_control(server)
    return server, add_introspection(server, [INFERENCE, CONTROL])
