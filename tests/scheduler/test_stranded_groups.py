"""Who waits for a worker that is not there: since when, for how long, and what it costs those who run meanwhile."""

from __future__ import annotations

from protos import inference_pb2, worker_pb2
from scheduler_svc.core.queues.policy import POLICIES
from scheduler_svc.core.queues.waiting_queue import WaitingQueue
from scheduler_svc.core.scheduler_settings import SchedulerSettings
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.routing.stranded_groups import MIN_GONE, StrandedGroups
from tests.scheduler.hand_turned_loop import FakeLink


class CountedQueue(WaitingQueue):
    num_asked = 0

    def __contains__(self, group: SequenceGroup) -> bool:
        self.num_asked += 1
        return super().__contains__(group)


def small_worker() -> WorkerHandle:
    sizes = worker_pb2.InitializeResponse(
        num_device_blocks=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=16
    )
    info, lease = worker_pb2.WorkerInfo(block_size=4), worker_pb2.LeaseGranted(epoch=1)
    return WorkerHandle(FakeLink("worker"), info, sizes, lease, SchedulerSettings())


def too_large(waiting: WaitingQueue) -> SequenceGroup:
    group = SequenceGroup("", [1] * 40, inference_pb2.SamplingParams(), max_num_tokens=50, arrival_ns=0)
    waiting.push(group)
    return group


def test_who_is_due_is_told_once_and_in_order_and_nobody_else_is_looked_at() -> None:
    waiting = CountedQueue(POLICIES["fcfs"])
    stranded = StrandedGroups(waiting, [small_worker()])
    groups = [too_large(waiting) for _ in range(1000)]
    for since_ns, group in enumerate(groups):
        stranded.look([group], since_ns)
    waiting.remove(groups[1])
    waiting.num_asked = 0
    for _ in range(100):  # steps
        assert stranded.overdue(-1) == []
    assert waiting.num_asked == 0
    assert stranded.overdue(2) == [groups[0], groups[2]]
    assert stranded.overdue(3) == [groups[3]]


def test_who_has_left_the_queue_is_not_kept() -> None:
    waiting = WaitingQueue(POLICIES["fcfs"])
    stranded = StrandedGroups(waiting, [small_worker()])
    for now_ns in range(1000):
        group = too_large(waiting)
        stranded.look([group], now_ns)
        waiting.remove(group)
        assert stranded.overdue(-1) == []
    assert len(stranded._since_ns) <= MIN_GONE + 2
