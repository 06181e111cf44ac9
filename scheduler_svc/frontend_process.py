"""A frontend process: `python -m scheduler_svc.frontend_process --core=unix:SOCKET OPTIONS`.

It listens on a port that it shares, checks, tokenises, streams and detokenises, and leaves all else to the core that
started it. It ends when the core closes their link or is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

import grpc
import structlog

from octavo.shared import log as logging
from octavo.shared.command_line import Parser
from octavo.shared.options import add_arguments, from_namespace
from octavo.shared.ports import BindError
from octavo.shared.rpc import LINK_CHANNEL_OPTIONS
from octavo.shared.signals import terminating
from protos import frontend_pb2
from protos import inference_pb2 as pb
from scheduler_svc.api.authority import Authority
from scheduler_svc.api.inference_service import InferenceService
from scheduler_svc.api.public_server import GRACE_S, listen, public_server
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.errors import NotReady
from scheduler_svc.frontends.core_link import CoreLink
from scheduler_svc.frontends.forwarding import forward
from scheduler_svc.output.mailboxes import Mailboxes
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.frontend import Frontend
from scheduler_svc.requests.tenants import Tenants
from scheduler_svc.requests.text_processes import TextProcesses

if TYPE_CHECKING:
    from scheduler_svc.shards.sharded_core import ShardedCore

log = structlog.get_logger()

CONTROL = pb.DESCRIPTOR.services_by_name["Control"]


def main() -> int:
    """Returns the process's exit code."""
    parser = Parser(prog="scheduler_svc.frontend_process")
    parser.add_argument("--core", required=True, metavar="unix:SOCKET")
    parser.add_argument("--number", type=int, default=0, help="which of the frontends this is, from 0 on")
    add_arguments(parser, SchedulerConfig)
    arguments = parser.parse_args()
    config = from_namespace(SchedulerConfig, arguments)
    logging.configure(config.log_level)
    for number in (signal.SIGINT, *terminating()):  # meant for the core, which ends its frontends in order
        signal.signal(number, signal.SIG_IGN)
    try:
        asyncio.run(serve(arguments.core, config, arguments.number))
        gc.collect()  # a server with TLS that only the interpreter's end finds keeps that waiting for two seconds
    except grpc.aio.AioRpcError as error:
        log.error("the core is lost", why=error.details())
        return 1
    except BindError as error:
        log.error("cannot start", why=str(error))
        return 1
    return 0


async def serve(core_address: str, config: SchedulerConfig, number: int = 0) -> None:
    """Serves until the core closes the link. Raises AioRpcError where it breaks."""
    mailboxes = Mailboxes(asyncio.get_running_loop(), config.stream_interval_ms / 1e3)
    async with grpc.aio.insecure_channel(core_address, options=LINK_CHANNEL_OPTIONS) as channel:
        link = _link(channel, mailboxes, config)
        frontend = Frontend(
            lambda: link.models,
            link.finish_sequence,
            config.text_settings(),
            enable_chunked_prefill=config.enable_chunked_prefill,
        )
        texts = TextProcesses(frontend.models, **config.text_options())
        admission = Admission(config.max_waiting_requests, config.max_preparing_bytes)
        authority = Authority.of(config)
        tenants = Tenants(config.tenant_metadata, None if authority is None else authority.callers)
        prompts = config.prompt_log()
        tracer = config.new_tracer()
        inference = InferenceService(frontend, texts, link, mailboxes, admission, tenants, prompts, tracer)
        server, health = public_server(
            config,
            inference,
            partial(forward, CONTROL, channel, probe="GetServerInfo"),
            shares_port=True,
            authority=authority,
        )

        async def on_state(state: frontend_pb2.CoreState) -> None:
            texts.expect(link.models)
            if state.is_draining:
                inference.drain()
            if state.is_broken_off:
                inference.break_off()
            await health.set_ready(state.is_ready and not state.is_draining)

        async def open_port() -> None:
            with contextlib.suppress(NotReady):  # the core ends already
                await link.catch_up()  # not before: a request would be told that there is no model
                listen(server, config, number)
                await server.start()
                link.say_listening(os.getpid())

        texts.start()
        if prompts is not None:
            prompts.start()
        try:
            await asyncio.gather(link.follow(on_state), open_port())
        finally:
            await texts.stop()
        await health.shut_down()
        await server.stop(GRACE_S)
        if prompts is not None:
            await asyncio.to_thread(prompts.stop)
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def _link(channel: grpc.aio.Channel, mailboxes: Mailboxes, config: SchedulerConfig) -> CoreLink | ShardedCore:
    if config.shards == 1:
        return CoreLink(channel, mailboxes)
    from scheduler_svc.shards.sharded_core import ShardedCore

    return ShardedCore(
        channel,
        mailboxes,
        num_shards=config.shards,
        wait_timeout_s=config.worker_wait_timeout,
        max_losses=config.max_worker_losses,
        counts_tokens=config.keys_file is not None,
    )


if __name__ == "__main__":
    sys.exit(main())
