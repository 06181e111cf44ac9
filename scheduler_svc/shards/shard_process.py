"""A shard: `python -m scheduler_svc.shards.shard_process --socket=unix:SOCKET --index=N` and a scheduler's options.

It is a scheduler without a front: an engine, some of the workers, and what frontends and the parent ask of them over
the socket. It ends when the parent closes their link or is lost.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import sys
import time

import grpc
import structlog

from octavo.shared import log as logging
from octavo.shared.command_line import Parser
from octavo.shared.options import add_arguments, from_namespace
from octavo.shared.rpc import WORKER_SERVER_OPTIONS
from octavo.shared.signals import terminating
from protos import frontend_pb2_grpc, shards_pb2_grpc
from scheduler_svc.api import control_service
from scheduler_svc.api.control_service import ControlService
from scheduler_svc.api.public_server import GRACE_S
from scheduler_svc.api.request_guard import RequestGuard
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine.statistics import log_statistics
from scheduler_svc.frontends.core_service import CoreService
from scheduler_svc.frontends.frontend_links import FrontendLinks
from scheduler_svc.frontends.readiness import follow_readiness
from scheduler_svc.frontends.told_state import ToldState
from scheduler_svc.serving import SWITCH_INTERVAL_S, Serving
from scheduler_svc.shards.shard_reporter import ShardReporter
from scheduler_svc.shards.shard_service import ShardService, request_numbers
from scheduler_svc.shards.shards import tokenizer_folder
from scheduler_svc.vital_parts import ServiceBroken

log = structlog.get_logger()


def main() -> int:
    """Returns the process's exit code."""
    parser = Parser(prog="scheduler_svc.shards.shard_process")
    parser.add_argument("--socket", required=True, metavar="unix:SOCKET")
    parser.add_argument("--index", required=True, type=int)
    add_arguments(parser, SchedulerConfig)
    arguments = parser.parse_args()
    config = from_namespace(SchedulerConfig, arguments)
    logging.configure(config.log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    for number in (signal.SIGINT, *terminating()):  # meant for the parent, which ends its shards in order
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(serve(arguments.socket, arguments.index, share_of(config)))
    return 0


def share_of(config: SchedulerConfig) -> SchedulerConfig:
    """A shard's options: its workers come from the parent, and of what may wait it has its part."""
    return dataclasses.replace(
        config,
        worker=(),
        max_waiting_requests=-(-config.max_waiting_requests // config.shards),
        max_waiting_tokens=-(-config.max_waiting_tokens // config.shards),
    )


async def serve(socket: str, index: int, config: SchedulerConfig) -> None:
    """Serves until the parent closes the link. Where a part breaks that it needs, the process ends here."""
    links = FrontendLinks(asyncio.get_running_loop())
    serving = Serving(config, links)
    serving.engine.number_requests_by(request_numbers(index, time.monotonic_ns))
    shard = ShardService(serving)
    server = grpc.aio.server(options=WORKER_SERVER_OPTIONS, interceptors=(RequestGuard(),))
    frontend_pb2_grpc.add_CoreServicer_to_server(CoreService(serving, links), server)
    shards_pb2_grpc.add_ShardServicer_to_server(shard, server)
    control_service.add_to_server(ControlService(serving, config, shard.ended.set), server)
    server.add_insecure_port(socket)
    await server.start()
    serving.start()
    vital = serving.vital
    folder = tokenizer_folder(socket)
    tasks = [
        vital.task("readiness", follow_readiness(serving, ToldState(links, folder)), shard.ended.is_set),
        vital.task("reports", ShardReporter(serving.engine, links).run(), shard.ended.is_set),
    ]
    if not config.disable_log_stats:
        structlog.contextvars.bind_contextvars(shard=index)  # which the line's task takes over
        tasks.append(asyncio.create_task(log_statistics(serving.engine)))
    ended, broken = asyncio.create_task(shard.ended.wait()), asyncio.create_task(vital.broken())
    try:
        await asyncio.wait([ended, broken], return_when=asyncio.FIRST_COMPLETED)
        if broken.done():
            await broken  # raises
    except ServiceBroken as error:
        log.critical("shard has ended", index=index, why=str(error))
        os._exit(1)  # at once, whatever hangs: others go on with its requests as soon as it is gone
    finally:
        shard.ended.set()
        for task in (*tasks, ended, broken):
            task.cancel()
        await asyncio.to_thread(serving.stop)
        links.close()
        await server.stop(GRACE_S)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
