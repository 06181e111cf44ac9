"""Which worker takes whom: cached prefixes, load, sizes and adapters, over real schedulers and simulated workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protos import inference_pb2, worker_pb2
from scheduler_svc.dispatcher import LOOK_AHEAD, MAX_PASSED_OVER, Dispatcher
from scheduler_svc.policy import POLICIES
from scheduler_svc.scheduler import SchedulerSettings
from scheduler_svc.sequence import SequenceGroup
from scheduler_svc.step_encoder import decode, encode
from scheduler_svc.step_plan import SchedulerOutputs
from scheduler_svc.waiting_queue import WaitingQueue
from scheduler_svc.worker_handle import AdapterRequest, WorkerHandle
from tests.scheduler.simulated_worker import SimulatedWorker

MAX_MODEL_LEN, BLOCK_SIZE = 64, 4


class Pool:
    """Workers on one queue; `turn` lets one of them make a step, and takes its answer."""

    def __init__(self, *workers: dict[str, Any], policy: str = "fcfs") -> None:
        self.policy = POLICIES[policy]
        self.waiting = WaitingQueue(self.policy)
        self.dispatcher = Dispatcher(self.waiting)
        self.handles = [self._handle(**worker) for worker in workers]
        self._simulated = [self._simulate(**worker) for worker in workers]
        self._step_ids = [0] * len(workers)

    def _handle(self, num_slots: int = 4, num_blocks: int = 64, adapters: tuple[str, ...] = (), max_loras: int = 1):
        info = worker_pb2.WorkerInfo(block_size=BLOCK_SIZE, max_loras=max_loras)
        sizes = worker_pb2.InitializeResponse(
            num_device_blocks=num_blocks, max_num_seqs=num_slots, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN
        )
        handle = WorkerHandle(_Link(), info, sizes, worker_pb2.LeaseGranted(epoch=1), SchedulerSettings(self.policy))
        handle.adapters.update(dict.fromkeys(adapters, 1))
        return handle

    def _simulate(self, num_slots: int = 4, num_blocks: int = 64, adapters: tuple[str, ...] = (), max_loras: int = 1):
        worker = SimulatedWorker(num_slots, MAX_MODEL_LEN, BLOCK_SIZE, num_blocks, max_loras=max_loras)
        for name in adapters:
            worker.load_adapter(name)
        return worker

    def add(self, prompt: list[int], max_tokens: int = 8, adapter: str = "", priority: int = 0) -> SequenceGroup:
        group = SequenceGroup(
            f"request-{len(self.waiting)}",
            prompt,
            inference_pb2.SamplingParams(seed=1),
            max_num_tokens=len(prompt) + max_tokens,
            arrival_ns=0,
            adapter=adapter,
            priority=priority,
        )
        self.waiting.push(group)
        return group

    def turn(self, number: int) -> SchedulerOutputs | None:
        handle = self.handles[number]
        outputs = handle.scheduler.schedule(self.dispatcher.view(handle, self.handles), 0)
        if outputs is not None:
            self._step_ids[number] += 1
            data = encode(outputs, self._step_ids[number]).SerializeToString()
            result = self._simulated[number].run(worker_pb2.Step.FromString(data))
            handle.scheduler.process_outputs(outputs.rows, decode(result.outputs, outputs.rows.num_answers))
            handle.scheduler.check_integrity()
        return outputs

    def where(self, group: SequenceGroup) -> int | None:
        return next((n for n, handle in enumerate(self.handles) if handle.scheduler.holds(group)), None)

    def run_to_end(self) -> None:
        while len(self.waiting) or any(handle.scheduler.groups.has_work for handle in self.handles):
            sent = [self.turn(number) for number in range(len(self.handles))]
            assert any(outputs is not None for outputs in sent), "work is there, and nobody gets on"


class _Link:
    address = "worker"
    last_heard_ns = 0

    def send(self, data: bytes) -> None:
        raise AssertionError("steps are carried by hand")

    def call(self, request: AdapterRequest, done: Callable[[str], None]) -> None:
        raise AssertionError("adapters are there from the start")

    def distrust(self) -> None:
        raise AssertionError("it says nothing wrong")

    def close(self) -> None:
        pass


def test_a_group_goes_where_its_prefix_is_cached():
    pool = Pool({}, {})
    first = pool.add(list(range(30)), max_tokens=1)
    pool.turn(1)
    assert first.is_finished
    again = pool.add(list(range(30)))
    pool.turn(0)
    assert pool.where(again) is None, "worker 0 leaves it to worker 1"
    pool.turn(1)
    assert pool.where(again) == 1
    assert again.num_cached_tokens == 28


def test_a_worker_looks_ahead_for_prefixes_and_passes_nobody_over_for_ever():
    pool = Pool({"num_slots": 1}, {"num_slots": 1})
    for number in (1, 0):  # so that it is worker 1's turn among equals
        pool.add([number] * 20, max_tokens=1)
        pool.turn(number)
    blocker = pool.add([60], max_tokens=60 - 1)  # keeps worker 1 busy for longer than this test
    pool.turn(1)
    assert pool.where(blocker) == 1
    stranger = pool.add([77] * 6, max_tokens=1)
    known = [pool.add([0] * 20, max_tokens=1) for _ in range(MAX_PASSED_OVER + 4)]
    order: list[SequenceGroup] = []
    while len(order) < len(known) + 1:
        pool.turn(0)
        order += [group for group in (stranger, *known) if group.is_finished and group not in order]
    assert order.index(stranger) == MAX_PASSED_OVER


def test_equals_go_to_the_worker_with_less_to_do():
    pool = Pool({}, {})
    busy = pool.add(list(range(40)), max_tokens=20)
    pool.turn(0)
    assert pool.where(busy) == 0
    fresh = pool.add([50, 51, 52])
    pool.turn(0)
    pool.turn(1)
    assert pool.where(fresh) == 1


def test_what_is_cached_equally_goes_in_the_order_of_the_queue():
    pool = Pool({"num_slots": 1}, {"num_slots": 1})
    blocker = pool.add([60], max_tokens=30)
    pool.turn(1)
    assert pool.where(blocker) == 1
    first, second = pool.add([1, 2, 3], max_tokens=1), pool.add([4, 5, 6], max_tokens=1)
    pool.turn(0)
    assert first.is_finished and second in pool.waiting


def test_nothing_is_left_to_a_worker_that_takes_nobody():
    """It has the prompt cached and nothing to do, and is about to leave."""
    pool = Pool({}, {})
    first = pool.add(list(range(30)), max_tokens=1)
    pool.turn(1)
    assert first.is_finished
    pool.handles[1].is_draining = True
    again = pool.add(list(range(30)))
    pool.turn(0)
    assert pool.where(again) == 0


def test_a_small_worker_leaves_large_groups_to_a_large_one():
    pool = Pool({"num_blocks": 6}, {"num_blocks": 64})
    large, small = pool.add(list(range(40))), pool.add([1, 2, 3])
    pool.turn(0)
    assert pool.where(large) is None
    assert pool.where(small) == 0 or small in pool.waiting
    pool.run_to_end()
    assert large.is_finished and small.is_finished


def test_no_more_adapters_at_once_than_fit_and_none_waits_for_ever():
    """The simulated worker refuses a step of two adapters. Those of adapter a do not end together: one always runs."""
    pool = Pool({"adapters": ("a", "b"), "max_loras": 1, "num_slots": 3})
    rng = np.random.default_rng(0)

    def one_more(max_tokens: int = 6) -> SequenceGroup:
        return pool.add(rng.integers(0, 97, 6).tolist(), max_tokens, adapter="a")

    groups = [one_more(max_tokens) for max_tokens in (2, 4, 6)]
    other = pool.add([5, 6, 7], adapter="b")
    plain = pool.add([8, 9])
    num_turns = 0
    while not other.is_finished:
        groups.append(one_more())  # and they keep coming
        pool.turn(0)
        num_turns += 1
        assert num_turns < 200, "adapter b waits for ever"
    assert plain.is_finished, "a group without an adapter is held up by none"
    assert sum(group.is_finished for group in groups) > 3, "those behind the blocked one were served meanwhile"


def test_a_group_of_an_adapter_that_a_worker_lacks_goes_to_one_that_has_it():
    pool = Pool({}, {"adapters": ("a",)})
    group = pool.add([1, 2, 3], adapter="a")
    assert pool.turn(0) is None
    pool.turn(1)
    assert pool.where(group) == 1


def test_an_urgent_group_whose_adapter_a_full_worker_lacks_displaces_nobody():
    pool = Pool({"num_slots": 1}, {"num_slots": 1, "adapters": ("a",)}, policy="priority")
    ordinary = pool.add([1, 2, 3], priority=5)
    pool.turn(0)
    other = pool.add([4, 5, 6], priority=5)
    pool.turn(1)
    assert (pool.where(ordinary), pool.where(other)) == (0, 1)
    urgent = pool.add([7, 8, 9], adapter="a", priority=1)
    pool.turn(0)
    assert pool.where(ordinary) == 0 and ordinary.num_preemptions == 0
    pool.turn(1)
    assert pool.where(urgent) == 1 and other.num_preemptions == 1
    pool.run_to_end()


def test_an_urgent_group_displaces_nobody_while_another_worker_has_room():
    pool = Pool({"num_slots": 1}, {"num_slots": 1}, policy="priority")
    ordinary = pool.add([1, 2, 3], priority=5)
    pool.turn(0)
    urgent = pool.add([4, 5, 6], priority=1)
    pool.turn(0)
    pool.turn(1)
    assert (pool.where(ordinary), pool.where(urgent)) == (0, 1)
    more_urgent = pool.add([7, 8, 9], priority=0)
    pool.turn(0)
    assert pool.where(more_urgent) == 0 and ordinary.num_preemptions == 1, "and then there is none"
    pool.run_to_end()


def test_a_worker_without_room_for_an_adapter_is_no_better_place_for_its_groups():
    """Whatever it has cached: its groups of other adapters may run for long."""
    pool = Pool(*[{"adapters": ("a", "b"), "max_loras": 1}] * 2)
    first = pool.add(list(range(30)), max_tokens=1, adapter="a")
    pool.turn(0)
    assert first.is_finished
    pool.handles[0].took_last = 0  # its turn again among equals
    blocker = pool.add([40], max_tokens=40, adapter="b")
    pool.turn(0)
    assert pool.where(blocker) == 0
    again = pool.add(list(range(30)), adapter="a")
    pool.turn(0)
    pool.turn(1)
    assert pool.where(again) == 1


@pytest.mark.parametrize("max_loras", [0, 1])
def test_groups_that_wait_for_a_worker_with_their_adapter_hide_nobody_from_one_without(max_loras):
    pool = Pool({"max_loras": max_loras}, {"num_slots": 1, "adapters": ("one",)})
    with_adapter = [pool.add([number] * 5, adapter="one") for number in range(LOOK_AHEAD + 2)]
    plain = pool.add([7] * 5)
    pool.turn(1)
    pool.turn(0)
    assert pool.where(plain) == 0
    assert [pool.where(group) for group in with_adapter] == [1] + [None] * (LOOK_AHEAD + 1)
    pool.run_to_end()
