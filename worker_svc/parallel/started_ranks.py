"""The other ranks of a group on one machine, started by rank 0 as `octavo worker` with the same options."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable

from octavo.shared.options import environment_without_options, to_arguments
from octavo.shared.ports import LOOPBACK, free_port
from octavo.shared.processes.end_with_parent import ends_with_parent
from octavo.shared.processes.module_command import module_command
from worker_svc.config import WorkerConfig
from worker_svc.parallel.membership import Membership
from worker_svc.parallel.step_channel import SharedMemoryChannel

CHANNEL = "RANK_CHANNEL"  # variable: descriptors that a started rank has inherited


class StartedRanks:
    """Starts them at construction; to be made on a thread that lives as long as they are to. None outlives this
    process."""

    def __init__(self, config: WorkerConfig, size: int, on_end: Callable[[str], None]) -> None:
        """`on_end`: called on some thread when a rank ends, with which and how."""
        self.membership = Membership(0, size, 0, size, LOOPBACK, free_port())
        self.channel = SharedMemoryChannel.create(size)
        self._on_end, self._is_over = on_end, False
        self._processes = [self._start(config, rank) for rank in range(1, size)]

    def _start(self, config: WorkerConfig, rank: int) -> subprocess.Popen[bytes]:
        first = self.membership
        member = Membership(rank, first.size, rank, first.size, first.address, first.port)
        environment = environment_without_options() | member.variables()
        environment[CHANNEL] = ",".join(map(str, self.channel.descriptors))
        process = subprocess.Popen(
            ends_with_parent(module_command("octavo", "worker", *to_arguments(config))),
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=self.channel.descriptors,
            process_group=0,  # a Ctrl-C is rank 0's to act on
        )

        def wait() -> None:
            code = process.wait()
            if not self._is_over:
                self._on_end(f"rank {rank} has ended with exit code {code}")

        threading.Thread(target=wait, name=f"end of rank {rank}", daemon=True).start()
        return process

    def end(self, timeout_s: float) -> None:
        """Waits for those that were told to end; the rest are killed after `timeout_s`."""
        self._is_over = True
        for process in self._processes:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def inherited_channel(rank: int) -> SharedMemoryChannel | None:
    """In a rank that was started by `StartedRanks`."""
    text = os.environ.get(CHANNEL)
    return None if text is None else SharedMemoryChannel.inherited(text, rank)
