"""The HTTP service as a process, or as several that share a port."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace

import grpc
import structlog
import uvicorn
import uvloop

from gateway_svc.config import GatewayConfig
from gateway_svc.http.app import new_app
from gateway_svc.http.bounded_protocol import Bounds
from gateway_svc.http.generating import Service
from gateway_svc.http.listening import listen_at
from gateway_svc.http.listening_server import ListeningServer
from gateway_svc.http.metrics import SHARED_FOLDER, GatewayMetrics
from gateway_svc.http.metrics_server import metrics_listener, metrics_server, reserved_metrics
from gateway_svc.live.live_feeds import LiveFeeds
from gateway_svc.upstream.schedulers import Schedulers
from octavo.retrying import RetryPolicy
from octavo.shared import log as logging
from octavo.shared.access.exposure import check_exposure
from octavo.shared.access.tls import ServerTls, TlsError, client_credentials, server_tls
from octavo.shared.connections import allow_open_files
from octavo.shared.options import OptionError, environment_without_options, to_arguments
from octavo.shared.ports import check_port_is_free, reserve_port
from octavo.shared.processes.module_command import module_command
from octavo.shared.processes.supervisor import Child, Supervisor
from octavo.shared.signals import terminating
from octavo.shared.tracing.options import check_tracing_packages
from octavo.shared.tracing.tracer import Tracer
from octavo.shared.watched_files import LOOK_AGAIN_S

log = structlog.get_logger()

_BACKLOG = 2048


def main(config: GatewayConfig) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code. Raises BindError."""
    logging.configure(config.log_level)
    is_locked = config.tls_cert_file is not None
    check_exposure(config.host, is_locked=is_locked, insecure=config.insecure, locks="--tls-cert-file")
    if config.otlp_traces_endpoint:
        check_tracing_packages()
    if config.processes > 1:
        return _run_several(config)
    listener, for_metrics = listen(config), metrics_listener(config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, listener, for_metrics))
    return 0


async def serve(config: GatewayConfig, listener: socket.socket, for_metrics: socket.socket | None = None) -> None:
    """Runs the service in the current event loop until it is told to stop. `for_metrics` listens, too."""
    allow_open_files(config.max_connections)
    gc.freeze()  # what was imported is for life: no collection has to look at it again
    retry = RetryPolicy(window_s=config.retry_window)
    schedulers = Schedulers(
        config.scheduler, retry, config.pass_header, share_calls=config.share_calls, credentials=_credentials(config)
    )
    tls = server_tls(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
    tracer = config.new_tracer()
    service = new_service(config, schedulers, tracer)
    server, metrics = new_server(config, service, tls), metrics_server(service.metrics, tls)
    beside = [] if tls is None else [asyncio.create_task(_follow_certificates(tls))]
    if for_metrics is not None:
        beside.append(asyncio.create_task(metrics.serve(sockets=[for_metrics])))
    log.info("gateway is listening", host=config.host, port=listener.getsockname()[1], scheduler=config.scheduler)
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await schedulers.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
    log.info("gateway has ended")


async def _follow_certificates(tls: ServerTls) -> None:
    while True:
        await asyncio.sleep(LOOK_AGAIN_S)
        tls.look_again()


def _credentials(config: GatewayConfig) -> grpc.ChannelCredentials | None:
    """Raises OptionError."""
    if config.scheduler_tls_ca_file is None:
        return None
    try:
        return client_credentials(config.scheduler_tls_ca_file, config.tls_cert_file, config.tls_key_file)
    except TlsError as error:
        raise OptionError(f"TLS: {error}") from None


def new_service(config: GatewayConfig, schedulers: Schedulers, tracer: Tracer | None = None) -> Service:
    """What answers before these schedulers."""
    live = LiveFeeds(schedulers, demo=config.demo)
    return Service(schedulers, GatewayMetrics(), config.max_body_bytes, live, config.comment_interval, tracer)


def new_server(config: GatewayConfig, service: Service, tls: ServerTls | None = None) -> uvicorn.Server:
    """What listens, by HTTPS where there is `tls`; it ends when its `should_exit` is set, or at a signal."""
    bounds = Bounds(config.max_connections, config.read_timeout, config.write_timeout)
    server = _Server(
        new_app(service, config),
        bounds,
        None if tls is None else tls.context(),
        timeout_keep_alive=math.ceil(config.keep_alive),
        timeout_graceful_shutdown=math.ceil(config.drain_timeout),
        backlog=_BACKLOG,
    )
    server.live = service.live
    return server


class _Server(ListeningServer):
    """Ends in order at SIGTERM or SIGHUP, at once at SIGINT or a second SIGTERM; uvicorn's own would then end this
    process by it."""

    live: LiveFeeds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for requests, but not for pages that look on: those would never end."""
        self.live.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is threading.main_thread():  # elsewhere they cannot be heard
            for number in (signal.SIGINT, *terminating()):
                asyncio.get_running_loop().add_signal_handler(number, self._told_to_end, number)
        yield

    def _told_to_end(self, number: int) -> None:
        if number == signal.SIGINT or (self.should_exit and number != signal.SIGHUP):  # which may be told twice
            self.force_exit = True
        self.should_exit = True


def listen(config: GatewayConfig) -> socket.socket:
    """The socket of the service. Raises BindError."""
    if not config.shares_port:
        check_port_is_free(config.host, config.port)
    return listen_at(config.host, config.port, shares_port=config.shares_port)


def _run_several(config: GatewayConfig) -> int:
    """Children on one port, and one for metrics, which this process keeps from others. One that ends is started again;
    each tells metrics of all."""
    holder, port = reserve_port(config.host, config.port)
    for_metrics = reserved_metrics(config)
    folder = tempfile.mkdtemp(prefix="octavo-gateway-")
    own = replace(config, processes=1, port=port, shares_port=True, serves_metrics=for_metrics is not None)
    if for_metrics is not None:
        own = replace(own, metrics_port=for_metrics[1])
    command = module_command("octavo", "gateway", *to_arguments(own))
    environment = environment_without_options() | {SHARED_FOLDER: folder}
    children = [
        Child(f"gateway {number}", command, environment, essential=False, drain_s=config.drain_timeout)
        for number in range(config.processes)
    ]
    supervisor = Supervisor(children, _nothing)
    try:
        code = asyncio.run(supervisor.run(lambda seconds: None))
    finally:
        holder.close()
        if for_metrics is not None:
            for_metrics[0].close()
        shutil.rmtree(folder, ignore_errors=True)
    if supervisor.reason:
        print(f"octavo gateway: error: {supervisor.reason}", file=sys.stderr)
    return code


async def _nothing() -> None:
    """Each is ready by itself."""
