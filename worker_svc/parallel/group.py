"""A worker's parallel group: its ranks, met and found to be alike, and what they tell each other.

Rank 0 serves. It tells the others what it begins, in order; they do the same with their part of the model, and answer
nobody. Tensors go from rank to rank within that work (`ranks`, `stages`). A rank that ends, is stopped or fails ends
the group (`Watch`). One whose work never ends does not: it counts on, and a scheduler has deadlines.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TypeVar

import structlog
import torch
import torch.distributed as dist
from google.protobuf.message import Message
from torch._C._distributed_c10d import PrefixStore, TCPStore

from octavo.shared.ports import is_loopback
from protos import ranks_pb2
from worker_svc.errors import GroupError, StartupError
from worker_svc.parallel.layout import Layout
from worker_svc.parallel.meeting import join_meeting
from worker_svc.parallel.membership import Membership
from worker_svc.parallel.process_ranks import ProcessRanks
from worker_svc.parallel.process_stages import ProcessStages
from worker_svc.parallel.ranks import OnlyRank, Ranks
from worker_svc.parallel.stages import OnlyStage, Stages
from worker_svc.parallel.step_channel import GroupChannel, StepChannel
from worker_svc.parallel.watch import BEAT_S, Watch

log = structlog.get_logger()

MEETING_S = 300.0  # pods of one group start when there is room for each
_FOR_EVER = timedelta(days=365)  # it is `Watch` that ends a group; an idle one waits for its next step

M = TypeVar("M", bound=Message)


class ParallelGroup:
    """One rank's view; `meet` makes it.

    Attributes:
        ranks: those that share the layers of this rank's stage.
        stages: of the pipeline, one or more.
        answers: from the first rank of the last stage to all stages before it; None where this rank is in neither role.
    """

    def __init__(
        self,
        member: Membership,
        ranks: Ranks,
        stages: Stages,
        channel: StepChannel,
        answers: StepChannel | None,
        watch: Watch,
        aside: dist.ProcessGroup,
    ) -> None:
        self.member, self.ranks, self.stages, self.answers = member, ranks, stages, answers
        self._channel, self._watch, self._aside = channel, watch, aside

    @property
    def is_first(self) -> bool:
        """Whether this rank serves."""
        return self.member.rank == 0

    def tell(self, command: ranks_pb2.RankCommand) -> None:
        """On rank 0: the others begin the same after what they were told before."""
        self._channel.send(command.SerializeToString())

    def commands(self) -> Iterator[ranks_pb2.RankCommand]:
        """On the others: what rank 0 begins, until it ends the group."""
        while not (command := ranks_pb2.RankCommand.FromString(self._channel.receive())).HasField("end_group"):
            yield command

    def exchange(self, message: M) -> list[M]:
        """The message that each rank gives, in the order of ranks. All of them have to call this together."""
        return self._exchange(message, None)

    def exchange_aside(self, message: M) -> list[M]:
        """As `exchange`, on one thread of each rank that is not the model's: steps go on meanwhile."""
        return self._exchange(message, self._aside)

    def _exchange(self, message: M, group: dist.ProcessGroup | None) -> list[M]:
        data = message.SerializeToString()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.member.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group)
        longest = max(max(map(int, lengths)), 1)
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
        dist.all_gather(parts, padded, group)
        return [
            type(message).FromString(part[: int(length)].numpy().tobytes())
            for part, length in zip(parts, lengths, strict=True)
        ]

    def ready(self) -> None:
        """From now on a rank that is silent ends the group within 2 s."""
        self._watch.ready()

    def tell_end(self) -> None:
        """Rank 0 has served, and the others are to end too; nothing on these."""
        if self.is_first:
            self.tell(ranks_pb2.RankCommand(end_group=ranks_pb2.EndGroup()))

    def leave(self) -> None:
        """The end of others is no failure from now on."""
        self._watch.stop()

    def tell_failure(self, error: Exception) -> None:
        """This rank ends with an error that the others do not have; returns when they have had time to see it, before
        connections to it break."""
        self._watch.stop()  # whoever ends now ends because of this rank
        self._watch.tell_failure(" ".join(str(error).split())[:500] or type(error).__name__)
        time.sleep(3 * BEAT_S)

    def check_alike(self, model_hash: str, settings: Mapping[str, str]) -> None:
        """Raises GroupError on every rank where one has another model, other versions, settings or kernels."""
        own = ranks_pb2.RankIdentity(
            octavo_version=_octavo_version(),
            torch_version=str(torch.__version__),
            model_hash=model_hash,
            settings=settings,
            processor=_processor(),
        )
        first, *others = self.exchange(own)
        for rank, other in enumerate(others, 1):
            for field in ("octavo_version", "torch_version", "model_hash", "processor"):
                _demand_alike(rank, field.replace("_", " "), getattr(first, field), getattr(other, field))
            for name in first.settings:
                _demand_alike(rank, name, first.settings[name], other.settings[name])


def _demand_alike(rank: int, what: str, of_first: str, of_other: str) -> None:
    if of_first != of_other:
        raise GroupError(f"rank {rank} has {what} {of_other[:200]}, rank 0 has {of_first[:200]}")


def meet(
    member: Membership,
    device: torch.device,
    channel: StepChannel | None = None,
    *,
    num_stages: int = 1,
    is_ordered: bool,
    end_process: Callable[[str], None] | None = None,
) -> ParallelGroup:
    """Waits for all ranks of the group. Raises StartupError where one does not come.

    Args:
        device: where this rank computes, made current.
        channel: how rank 0 tells the others; None: through the process group, as on several machines.
        num_stages: of the pipeline; the ranks divide among them.
        is_ordered: see `ProcessRanks`; CPUs have it so always.
        end_process: called with why when another rank is lost; None: the process ends at once.
    """
    where = f"{member.address}:{member.port}"
    log.info("meeting the other ranks", rank=member.rank, of=member.size, at=where)
    if member.local_size == member.size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    watch: Watch | None = None
    try:
        has_store = member.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun
        store, name = join_meeting(_store(member, is_master=has_store), member.rank, member.size, MEETING_S)
        watched = PrefixStore(name, _store(member, is_master=False))
        watch = Watch(watched, member.rank, member.size, end_process or end_group)
        watch.start()  # what follows waits for ever for a rank that ends
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=member.rank, world_size=member.size, timeout=_FOR_EVER)
        if channel is None:
            channel = GroupChannel(dist.new_group(backend="gloo", timeout=_FOR_EVER))
        aside = _new_group(list(range(member.size)), "gloo")
        layout = Layout(member.size // num_stages, num_stages)
        is_ordered = is_ordered or device.type == "cpu"
        ranks, stages = _ranks(member.rank, layout, is_ordered=is_ordered), _stages(member.rank, layout)
        answers = _answers(member.rank, layout) if num_stages > 1 else None
    except (OSError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        if watch is not None:
            watch.stop()
        raise StartupError(f"rank {member.rank} of {member.size} has not met the others at {where}: {why}") from None
    return ParallelGroup(member, ranks, stages, channel, answers, watch, aside)


def _ranks(rank: int, layout: Layout, *, is_ordered: bool) -> Ranks:
    """All ranks call this together, as they do the next two."""
    if layout.tensor_size == 1:
        return OnlyRank()
    groups = [None] if layout.num_stages == 1 else [_new_group(layout.ranks_of(i)) for i in range(layout.num_stages)]
    own = groups[layout.stage_of(rank)]
    return ProcessRanks(rank % layout.tensor_size, layout.tensor_size, own, is_ordered=is_ordered)


def _stages(rank: int, layout: Layout) -> Stages:
    if layout.num_stages == 1:
        return OnlyStage()
    before, behind = rank - layout.tensor_size, rank + layout.tensor_size
    return ProcessStages(layout.stage_of(rank), layout.num_stages, before, behind)


def _answers(rank: int, layout: Layout) -> StepChannel | None:
    source = layout.first_of_last_stage
    group = _new_group(list(range(source + 1)), "gloo")
    return GroupChannel(group, source) if rank <= source else None


def _new_group(ranks: list[int], backend: str | None = None) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=_FOR_EVER)
    return group


def end_group(why: str) -> None:
    """Ends this process under whatever it waits for; the other ranks follow."""
    log.critical("the parallel group ends", why=why)
    sys.stderr.flush()
    os._exit(1)


def _store(member: Membership, *, is_master: bool) -> TCPStore:
    """A connection to where the ranks meet; the master has it in this process."""
    return TCPStore(
        member.address,
        member.port,
        None,
        is_master,
        timeout=timedelta(seconds=MEETING_S),
        wait_for_workers=False,
        master_listen_fd=_listener(member) if is_master and is_loopback(member.address) else None,
    )


def _listener(member: Membership) -> int:
    """The descriptor of a socket that this machine alone reaches, for a store to own: by itself one listens on every
    interface, whatever its address, and lets in whoever comes. Raises OSError."""
    family = socket.AF_INET6 if ":" in member.address else socket.AF_INET
    return socket.create_server((member.address, member.port), family=family).detach()


def _octavo_version() -> str:
    from importlib.metadata import version

    return version("octavo")


def _processor() -> str:
    """Which kernels compute: machine and widest vectors, or the GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
