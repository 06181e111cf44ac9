"""What holds a parallel group together: who is which rank, what rank 0 passes on, sums, and the watch over all."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.resource_sharer import DupFd
from unittest.mock import MagicMock

import psutil
import pytest
import torch

from octavo.shared.ports import free_port
from protos import ranks_pb2
from tests import forkserver
from tests.worker.fake_model import fake_config
from worker_svc.config import WorkerConfig
from worker_svc.errors import GroupError, StartupError
from worker_svc.parallel import group as group_module
from worker_svc.parallel import step_channel
from worker_svc.parallel import watch as watch_module
from worker_svc.parallel.group import ParallelGroup, _store, meet
from worker_svc.parallel.meeting import join_meeting
from worker_svc.parallel.membership import Membership, membership_of
from worker_svc.parallel.step_channel import SharedMemoryChannel
from worker_svc.parallel.watch import BEAT_S, SILENCE_S, STARTING_SILENCE_S, Watch, count_key
from worker_svc.server import _shared_settings


def test_a_rank_reads_its_place_from_the_variables_of_torchrun() -> None:
    member = Membership(rank=3, size=4, local_rank=1, local_size=2, address="host-0", port=29500)
    assert membership_of(4, member.variables()) == member
    assert membership_of(4, {}) is None  # nobody has started a group: this process is to
    assert membership_of(1, member.variables()) is None  # of some other program's group
    alone = {name: value for name, value in member.variables().items() if not name.startswith("LOCAL")}
    assert membership_of(4, alone) == Membership(3, 4, local_rank=0, local_size=1, address="host-0", port=29500)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but the model is to be split over 4 ranks"),
        ({"RANK": "4"}, "RANK is 4, not below WORLD_SIZE, 4"),
        ({"RANK": "one"}, "RANK is 'one', not a number"),
        ({"MASTER_ADDR": None}, "RANK is set, as for a rank of a parallel group, but not MASTER_ADDR"),
    ],
)
def test_variables_that_contradict_themselves_are_refused(changed: dict[str, str | None], complaint: str) -> None:
    variables = Membership(0, 4, 0, 4, "127.0.0.1", 29500).variables() | changed
    given = {name: value for name, value in variables.items() if value is not None}
    with pytest.raises(StartupError, match=complaint):
        membership_of(4, given)


@pytest.mark.parametrize(
    ("address", "family"), [("127.0.0.1", socket.AF_INET), ("localhost", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_ranks_of_one_machine_meet_where_no_other_machine_reaches_them(
    address: str, family: socket.AddressFamily
) -> None:
    try:
        with socket.create_server((address, 0), family=family) as free:
            host, port = free.getsockname()[:2]
    except OSError:
        if family is not socket.AF_INET6:
            raise
        pytest.skip("this machine has no IPv6")
    member = Membership(0, 2, local_rank=0, local_size=2, address=address, port=port)
    store = _store(member, is_master=True)
    _store(member, is_master=False).set("key", "value")
    assert store.get("key") == b"value"
    places = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert [place.ip for place in places if place.port == port] == [host]


def test_ranks_whose_meeting_place_is_taken_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # which `meet` would leave behind
    with socket.create_server(("127.0.0.1", 0)) as taken:
        member = Membership(0, 2, local_rank=0, local_size=2, address="127.0.0.1", port=taken.getsockname()[1])
        complaint = f"^rank 0 of 2 has not met the others at 127.0.0.1:{member.port}: .*ddress already in use"
        with pytest.raises(StartupError, match=complaint):
            meet(member, torch.device("cpu"), is_ordered=False)


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(group_module, "MEETING_S", 0.5)
    member = Membership(0, 3, local_rank=0, local_size=3, address="127.0.0.1", port=free_port())
    with ThreadPoolExecutor() as pool:
        meetings = [
            pool.submit(meet, dataclasses.replace(member, rank=rank), torch.device("cpu"), is_ordered=False)
            for rank in (0, 1)
        ]
        for rank, meeting in enumerate(meetings):
            with pytest.raises(StartupError, match=f"^rank {rank} of 3 has not met the others at "):
                meeting.result(20)


def _meet_one_that_ends(member: Membership, said: Connection) -> None:
    """Rank 0 of two: the other was there, and does nothing more."""
    watch_module.STARTING_SILENCE_S = 0.5
    told = threading.Thread(target=lambda: join_meeting(_store(member, is_master=False), 1, 2, timeout_s=20.0))
    told.start()

    def end(why: str) -> None:
        said.send(why)
        os._exit(1)

    meet(member, torch.device("cpu"), is_ordered=False, end_process=end)


def test_a_rank_that_ends_while_they_meet_is_missed() -> None:
    member = Membership(0, 2, local_rank=0, local_size=2, address="127.0.0.1", port=free_port())
    heard, said = forkserver.CONTEXT.Pipe(duplex=False)
    process = forkserver.CONTEXT.Process(target=_meet_one_that_ends, args=(member, said))
    process.start()
    try:
        assert heard.poll(30) and heard.recv().startswith("rank 1 has been silent for ")
    finally:
        process.kill()
        process.join()


def test_ranks_that_are_started_anew_meet_in_a_store_with_what_others_left() -> None:
    """As torchrun's agent keeps it, whatever its machines count; one rank had come and ended before it met them."""
    member = Membership(0, 3, local_rank=0, local_size=3, address="127.0.0.1", port=free_port())
    kept, names = _store(member, is_master=True), set[str]()
    ends: list[str] = []
    for _ in range(3):
        kept.set("octavo/hello/2", "one that has ended")
        with ThreadPoolExecutor() as pool:
            joining = [pool.submit(join_meeting, _store(member, is_master=False), rank, 3, 20.0) for rank in (2, 0, 1)]
            met = [each.result(20) for each in joining]
        assert len({name for _, name in met}) == 1 and met[0][1] not in names
        names.add(met[0][1])
        watch = Watch(met[1][0], 0, 3, ends.append)
        assert watch.look() == ""
        watch.tell_failure("one bad moment")
        assert watch.look() == "rank 0: one bad moment"


def test_every_reader_gets_every_message_whole_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a ring so small that messages wrap around its end, and that the writer waits for the slower reader."""
    monkeypatch.setattr(step_channel, "_RING_BYTES", 5000)
    monkeypatch.setattr(step_channel, "_REUSED_BYTES", 2000)
    writer = SharedMemoryChannel.create(3)
    readers = [
        SharedMemoryChannel.inherited(",".join(map(str, map(os.dup, writer.descriptors))), rank) for rank in (1, 2)
    ]
    messages = [bytes([number % 251]) * (number * 37 % (4900 if number > 300 else 1500)) for number in range(400)]
    got: list[list[bytes]] = [[], []]

    def read(reader: SharedMemoryChannel, into: list[bytes]) -> None:
        into.extend(reader.receive() for _ in messages)

    threads = [threading.Thread(target=read, args=pair, daemon=True) for pair in zip(readers, got, strict=True)]
    threads[0].start()
    later = threading.Timer(0.05, threads[1].start)
    later.start()
    for message in messages:
        writer.send(message)
    later.join()
    for thread in threads:
        thread.join(10)
    assert got == [messages, messages]
    for channel in (writer, *readers):
        channel.close()


def test_a_ring_whose_readers_keep_up_takes_little_memory() -> None:
    with closing(SharedMemoryChannel.create(2)) as writer:
        descriptors = ",".join(map(str, map(os.dup, writer.descriptors)))
        with closing(SharedMemoryChannel.inherited(descriptors, 1)) as reader:
            for number in range(5000):
                message = bytes([number % 251]) * (number * 37 % 5000)
                writer.send(message)
                assert reader.receive() == message
        assert os.fstat(writer.descriptors[0]).st_blocks * 512 < 2 << 20


def _write_numbers(wakers: list[DupFd], memory: DupFd, count: int) -> None:
    channel = SharedMemoryChannel(memory.detach(), [waker.detach() for waker in wakers], 0)
    for number in range(count):
        channel.send(number.to_bytes(8, "little"))


def test_a_count_is_never_seen_half_written() -> None:
    """By a process that looks while another writes: threads of one take turns. Two cores have to be free to see it."""
    count, seen = 100_000, [0]
    forkserver.start()
    with closing(SharedMemoryChannel.create(2)) as channel:
        memory, *wakers = map(DupFd, channel.descriptors)
        writer = forkserver.CONTEXT.Process(target=_write_numbers, args=(wakers, memory, count))
        writer.start()
        try:
            with memoryview(channel._map)[:8].cast("Q") as written:
                while seen[-1] < count * 12:
                    if written[0] != seen[-1]:
                        seen.append(written[0])
        finally:
            writer.kill()
            writer.join()
    assert seen == sorted(seen) and not any(each % 12 for each in seen)


class FakeStore:
    """What all ranks see; a rank that was lost takes it along."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.timeout = timedelta()
        self.is_gone = False

    def set(self, key: str, value: str) -> None:
        self._check()
        self.values[key] = value

    def get(self, key: str) -> bytes:
        self._check()
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        self._check()
        return all(key in self.values for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def _check(self) -> None:
        if self.is_gone:
            raise RuntimeError("Connection reset by peer\n(of many lines)")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def watches(size: int) -> tuple[list[Watch], FakeStore, Clock]:
    store, clock = FakeStore(), Clock()
    store.values |= {count_key(rank): "0" for rank in range(size)}
    return [Watch(store, rank, size, pytest.fail, clock) for rank in range(size)], store, clock


def looked(all_watches: list[Watch], clock: Clock, seconds: float, but: int) -> list[str]:
    """What the watches say in `seconds` in which rank `but` does nothing."""
    said: list[str] = []
    for _ in range(round(seconds / BEAT_S)):
        clock.now_s += BEAT_S
        said += [why for rank, watch in enumerate(all_watches) if rank != but and (why := watch.look())]
    return said


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_rank_that_is_silent_is_lost_within_two_seconds(silent: int) -> None:
    all_watches, _, clock = watches(3)
    assert looked(all_watches, clock, 60, but=-1) == []
    for watch in all_watches:
        watch.ready()
    assert looked(all_watches, clock, 60, but=-1) == []
    assert looked(all_watches, clock, SILENCE_S, but=silent) == []
    said = looked(all_watches, clock, 2.0 - SILENCE_S, but=silent)
    assert said and said[0].startswith(f"rank {silent} has been silent for 1.")


def test_a_rank_that_still_starts_may_be_silent_for_longer() -> None:
    all_watches, store, clock = watches(2)
    assert looked(all_watches, clock, STARTING_SILENCE_S, but=1) == []
    assert looked(all_watches, clock, 2 * BEAT_S, but=1)[0].startswith("rank 1 has been silent for 30.")
    assert store.timeout.total_seconds() == STARTING_SILENCE_S  # a call may wait as long
    all_watches[1].ready()
    assert store.timeout.total_seconds() == SILENCE_S


def test_a_rank_that_fails_by_itself_tells_the_others_why() -> None:
    all_watches, store, _ = watches(3)
    assert [watch.look() for watch in all_watches] == ["", "", ""]
    all_watches[2].tell_failure("no tensor model.norm.weight")
    assert [watch.look() for watch in all_watches[:2]] == ["rank 2: no tensor model.norm.weight"] * 2
    store.is_gone = True
    all_watches[1].tell_failure("nobody is left to hear it")


def test_the_end_of_the_store_is_that_of_rank_0() -> None:
    (_, watch), store, _ = watches(2)
    store.is_gone = True
    assert watch.look() == "rank 0 cannot be reached: Connection reset by peer (of many lines)"


class StuckStore(FakeStore):
    """That of a process which was stopped: calls do not come back, whatever their timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()

    def get(self, key: str) -> bytes:
        self.may_answer.wait(60)
        return b""


def test_a_rank_0_that_answers_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "SILENCE_S", 0.4)
    store, ends, ended = StuckStore(), list[str](), threading.Event()

    def end(why: str) -> None:
        ends.append(why)
        ended.set()

    watch = Watch(store, 1, 2, end)
    watch.ready()
    watch.start()
    assert ended.wait(60)
    store.may_answer.set()
    watch._thread.join(5)
    assert [why[:30] for why in ends] == ["rank 0 has not answered for 0."]


def test_the_thread_ends_the_group_once_and_not_after_stop() -> None:
    store, ends, ended = FakeStore(), list[str](), threading.Event()
    store.values = {count_key(0): "0", count_key(1): "0"}

    def end(why: str) -> None:
        ends.append(why)
        ended.set()

    stopped = Watch(store, 1, 2, end)
    stopped.start()
    stopped.stop()
    watch = Watch(store, 1, 2, end)
    watch.start()
    store.is_gone = True
    assert ended.wait(60)
    watch._thread.join(5)
    stopped._thread.join(5)
    assert len(ends) == 1 and ends[0].startswith("rank 0 cannot be reached")


@pytest.mark.parametrize("field", ["octavo_version", "torch_version", "processor"])
def test_a_rank_of_another_version_or_processor_is_refused(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(_: ParallelGroup, own: ranks_pb2.RankIdentity) -> list[ranks_pb2.RankIdentity]:
        other = ranks_pb2.RankIdentity.FromString(own.SerializeToString())
        setattr(other, field, "another")
        return [own, own, other]

    monkeypatch.setattr(ParallelGroup, "exchange", exchange)
    nothing = MagicMock()
    group = ParallelGroup(nothing, nothing, nothing, nothing, None, nothing, nothing)
    with pytest.raises(GroupError, match=f"^rank 2 has {field.replace('_', ' ')} another, rank 0 has .+"):
        group.check_alike("hash", {"block_size": "16"})


def test_ranks_capture_alike_or_do_not_start() -> None:
    """A rank that captures no graphs would leave the others waiting in the sums of theirs."""
    found = [
        _shared_settings(WorkerConfig(model="a-model", cuda_graph_memory=gib), fake_config()) for gib in (0.0, 1.0)
    ]
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"cuda_graph_memory"}
