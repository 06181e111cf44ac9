"""`octavo top`: what a server does right now: models with their queues, workers with their blocks and steps."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from octavo.commands import connection

if TYPE_CHECKING:
    from protos import inference_pb2 as pb

CLEAR = "\x1b[H\x1b[2J"  # of a terminal
SHOWN_DIGITS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How often to look, and at which server."""
    parser.add_argument(
        "--interval", type=connection.seconds, default=1.0, metavar="SECONDS", help="default: %(default)s"
    )
    parser.add_argument("--once", action="store_true", help="look once, and end")
    connection.add_address(parser)
    connection.add_tls_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Draws the state again and again until interrupted; raises CommandError where no server answers."""
    import grpc

    from octavo.cli import CommandError
    from octavo.shared.rpc import CHANNEL_OPTIONS
    from protos import inference_pb2 as pb
    from protos import inference_pb2_grpc

    credentials = connection.credentials(arguments)
    channel = (
        grpc.insecure_channel(arguments.address, CHANNEL_OPTIONS)
        if credentials is None
        else grpc.secure_channel(arguments.address, credentials, CHANNEL_OPTIONS)
    )
    num_steps: dict[str, int] = {}
    looked_s = time.monotonic()
    with channel:
        while True:
            try:
                load = inference_pb2_grpc.ControlStub(channel).GetLoad(pb.GetLoadRequest(), timeout=5.0)
            except grpc.RpcError as error:
                raise CommandError(f"{arguments.address}: {error.code().name}: {error.details()}") from None
            now_s = time.monotonic()
            lines = list(screen(load, num_steps, now_s - looked_s))
            num_steps, looked_s = {worker.address: worker.num_steps for worker in load.workers}, now_s
            print(
                "\n".join(lines) if arguments.once or not sys.stdout.isatty() else CLEAR + "\n".join(lines), flush=True
            )
            if arguments.once:
                return 0
            time.sleep(arguments.interval)


def screen(load: pb.Load, num_steps: Mapping[str, int], seconds: float) -> Iterator[str]:
    """Lines to show. `num_steps`: what each worker had done so many seconds ago, where it was there."""
    from protos import inference_pb2 as pb

    yield f"{load.num_requests_running} running, {load.num_requests_waiting} waiting ({load.num_tokens_waiting} tokens)"
    yield ""
    yield f"{'model':<44}{'running':>8}{'waiting':>8}{'workers':>8}{'draining':>9}"
    for model in load.models:
        name = f"{model.name}@{model.fingerprint[:SHOWN_DIGITS]}"
        yield (
            f"{name:<44}{model.num_requests_running:>8}{model.num_requests_waiting:>8}"
            f"{model.num_workers_serving:>8}{model.num_workers_draining:>9}"
        )
    yield ""
    yield f"{'worker':<28}{'state':<14}{'model':<24}{'running':>8}{'preempted':>10}{'blocks':>8}{'steps/s':>9}"
    for worker in load.workers:
        state = pb.WorkerHealth.Name(worker.health).removeprefix("WORKER_HEALTH_").lower()
        used = worker.num_device_blocks - worker.num_free_device_blocks
        blocks = f"{100 * used / worker.num_device_blocks:.0f}%" if worker.num_device_blocks else "-"
        before = num_steps.get(worker.address)
        is_known = before is not None and worker.num_steps >= before and seconds > 0
        speed = f"{(worker.num_steps - before) / seconds:.1f}" if is_known and before is not None else "-"
        line = f"{worker.address:<28}{state:<14}{worker.model:<24}{worker.num_running:>8}{worker.num_preempted:>10}"
        yield f"{line}{blocks:>8}{speed:>9}  {worker.problem}".rstrip()
