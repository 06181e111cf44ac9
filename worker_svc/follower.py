"""A rank that is not the first: it computes its part of what rank 0 begins, and serves nobody."""

from __future__ import annotations

import gc
import signal
from functools import partial

import structlog

from octavo.shared.signals import terminating
from protos import ranks_pb2
from worker_svc.parallel.group import ParallelGroup, end_group
from worker_svc.steps.worker import Worker

log = structlog.get_logger()


def follow(worker: Worker, group: ParallelGroup) -> int:
    """Runs until rank 0 ends the group; the exit code. Signals are rank 0's to act on, which may finish requests yet.

    For the main thread: commands are read here while the model thread computes earlier ones.
    """
    for number in (signal.SIGINT, *terminating()):
        signal.signal(number, signal.SIG_IGN)

    def begin(command: ranks_pb2.RankCommand) -> None:
        try:
            worker.follow(command)
        except Exception as error:  # this rank is no longer where the others are
            log.exception("a rank has failed")
            end_group(f"rank {group.member.rank}: {error}")
        if command.HasField("initialize"):
            group.ready()
            gc.freeze()  # the model is for life: no collection has to look at it again
            gc.enable()

    log.info("rank ready", rank=group.member.rank, of=group.member.size)
    for command in group.commands():
        worker.thread.submit(partial(begin, command))
    worker.thread.stop(timeout_s=1.0)
    log.info("rank stopped", rank=group.member.rank)
    return 0
