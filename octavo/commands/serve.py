"""`octavo serve`: a scheduler and workers on this machine, which end together."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING

from octavo.serving.links import OF_THE_SCHEDULER, locked_links, private_folder
from octavo.serving.plan import ServeConfig, plan
from octavo.serving.wanted_models import fetch_models
from octavo.shared.options import add_arguments as add_options
from octavo.shared.options import add_position, from_namespace
from octavo.shared.ports import free_ports, reachable

if TYPE_CHECKING:
    from scheduler_svc.config import SchedulerConfig
    from worker_svc.config import WorkerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The fields of all three configurations, but for those that the command itself decides."""
    from scheduler_svc.config import SchedulerConfig
    from worker_svc.config import WorkerConfig

    parser.usage = "octavo serve [MODEL] [options]"
    # The bounds of a step and the tokenizer are the worker's: the scheduler learns them from it.
    add_options(parser, WorkerConfig, without=("host", "port", "log_level", *OF_THE_SCHEDULER))
    add_options(parser, ServeConfig)
    add_options(parser, SchedulerConfig, without=("worker",))
    add_position(parser, "model")
    parser.add_argument("--json", action="store_true", help="say as one object of JSON where the server is, once ready")


def run(arguments: argparse.Namespace) -> int:
    """Starts workers and scheduler, and serves until it is told to stop or one of them fails for good."""
    from scheduler_svc.config import SchedulerConfig
    from worker_svc.config import WorkerConfig

    serve = from_namespace(ServeConfig, arguments)
    scheduler = from_namespace(SchedulerConfig, arguments)
    if serve.http_port == 0:
        [port] = free_ports(1, besides=[scheduler.port])
        serve = dataclasses.replace(serve, http_port=port)
    worker = from_namespace(WorkerConfig, arguments)
    with private_folder() as folder:
        return _serve(serve, *locked_links(scheduler, worker, folder), as_json=arguments.json)


def _serve(serve: ServeConfig, scheduler: SchedulerConfig, worker: WorkerConfig, *, as_json: bool) -> int:
    from octavo.serving.announcement import Announcement

    address, children = plan(serve, scheduler, worker)
    http = None if serve.http_port is None else reachable(scheduler.host, serve.http_port)
    announcement = Announcement.of(scheduler, worker.model, serve.workers, address, http)
    announcement = dataclasses.replace(announcement, model=scheduler.model_names().model(fetch_models(worker)))

    import asyncio

    from octavo.shared import log
    from octavo.shared.processes.supervisor import Supervisor

    log.configure(scheduler.log_level)

    def announce(seconds: float) -> None:
        print(announcement.as_json(seconds) if as_json else announcement.as_text(seconds), flush=True)

    # By the socket, where there is one: only clients know whom to trust.
    supervisor = Supervisor(children, lambda: _wait_until_serving(scheduler.local_socket() or address, http))
    code = asyncio.run(supervisor.run(announce))
    if supervisor.reason:
        print(f"octavo serve: error: {supervisor.reason}", file=sys.stderr)
    return code


async def _wait_until_serving(address: str, http: str | None) -> None:
    # Children are being started meanwhile; they need no part of this.
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from octavo.shared.rpc import CHANNEL_OPTIONS

    quick = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100)]
    request = health_pb2.HealthCheckRequest(service="octavo.v1.Inference")
    async with grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, *quick]) as channel:
        async for response in health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True):
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                break
    if http is not None:
        await _wait_until_listening(http)


async def _wait_until_listening(address: str) -> None:
    import asyncio

    host, _, port = address.rpartition(":")
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            return
        await asyncio.sleep(0.05)
