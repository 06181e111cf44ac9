"""Which worker gets whom: cached prefixes, load, sizes and adapters, over real schedulers and simulated workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from protos import inference_pb2, worker_pb2
from scheduler_svc.core.queues.policy import POLICIES
from scheduler_svc.core.queues.served_tokens import ServedTokens
from scheduler_svc.core.scheduler_settings import SchedulerSettings
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step_plan import SchedulerOutputs
from scheduler_svc.engine.messages.step_encoder import decode, encode
from scheduler_svc.leases.adapter_gate import AdapterGate
from scheduler_svc.leases.worker_handle import AdapterRequest, WorkerHandle
from scheduler_svc.routing.expected_outputs import FIRST_NUM_OUTPUTS
from scheduler_svc.routing.rebinding import PAUSE_NS, Rebinding
from scheduler_svc.routing.router import OVERRUN_NS, Router
from scheduler_svc.routing.routing_cost import cheapest
from scheduler_svc.routing.worker_queue import LOOK_AHEAD, WorkerQueue
from tests.scheduler.simulated_worker import SimulatedWorker

MAX_MODEL_LEN, BLOCK_SIZE = 64, 4


class Pool:
    """Workers of a router; `turn` lets one of them make a step, and takes its answer after `step_s`."""

    def __init__(self, *workers: dict[str, Any], policy: str = "fcfs") -> None:
        self.now_ns = 0
        self.policy = POLICIES[policy]
        self.served = ServedTokens()
        self.router = Router(self.policy, self.served, lambda: self.now_ns)
        self.rebinding = Rebinding(self.router, lambda: self.now_ns)
        self.handles: list[WorkerHandle] = []
        self._simulated: list[SimulatedWorker] = []
        self._step_ids: list[int] = []
        self._num_groups = 0
        for worker in workers:
            self.join(**worker)

    def join(
        self,
        num_slots: int = 4,
        num_blocks: int = 64,
        adapters: Sequence[str] = (),
        max_loras: int = 1,
        tokens_per_s: float = 1000.0,
        model: str = "",
    ) -> WorkerHandle:
        info = worker_pb2.WorkerInfo(block_size=BLOCK_SIZE, max_loras=max_loras)
        sizes = worker_pb2.InitializeResponse(
            num_device_blocks=num_blocks,
            max_num_seqs=num_slots,
            max_num_batched_tokens=64,
            max_model_len=MAX_MODEL_LEN,
            prefill_tokens_per_s=tokens_per_s,
        )
        settings = SchedulerSettings(self.policy, served=self.served)
        handle = WorkerHandle(_Link(), info, sizes, worker_pb2.LeaseGranted(epoch=1), settings, model=model)
        handle.adapters.update(dict.fromkeys(adapters, 1))
        worker = SimulatedWorker(num_slots, MAX_MODEL_LEN, BLOCK_SIZE, num_blocks, max_loras=max_loras)
        for name in adapters:
            worker.load_adapter(name)
        self.handles.append(handle)
        self._simulated.append(worker)
        self._step_ids.append(0)
        self.router.join(handle)
        return handle

    def add(self, prompt: list[int], max_tokens: int = 8, **options: Any) -> SequenceGroup:
        self._num_groups += 1
        group = SequenceGroup(
            f"request-{self._num_groups}",
            prompt,
            inference_pb2.SamplingParams(seed=1),
            max_num_tokens=len(prompt) + max_tokens,
            arrival_ns=self.now_ns,
            **options,
        )
        self.router.place(group)
        self.router.check_integrity()
        return group

    def add_at(self, number: int, prompt: list[int], max_tokens: int = 8, **options: Any) -> SequenceGroup:
        """A group that waits for one worker, whatever others cost."""
        group = self.add(prompt, max_tokens, **options)
        self.router.bind(group, self.handles[number], len(prompt))
        return group

    def turn(self, number: int, step_s: float = 0.02) -> SchedulerOutputs | None:
        handle = self.handles[number]
        outputs = handle.scheduler.schedule(WorkerQueue(self.router, handle), self.now_ns)
        if outputs is not None:
            self._step_ids[number] += 1
            step = handle.sent(self._step_ids[number], outputs, self.now_ns)
            data = encode(outputs, self._step_ids[number]).SerializeToString()
            result = self._simulated[number].run(worker_pb2.Step.FromString(data))
            self.now_ns += int(step_s * 1e9)
            handle.in_flight.popleft()
            tokens = handle.scheduler.process_outputs(outputs.rows, decode(result.outputs, outputs.rows.num_answers))
            handle.went_well(step, self.now_ns)
            handle.scheduler.check_integrity()
            for entry in tokens.finish_reasons.nonzero()[0]:
                self.router.ended(tokens.sequences[entry].group)
            self.router.touch(handle)
        self.router.check_integrity()
        return outputs

    def where(self, group: SequenceGroup) -> int | None:
        """The worker that it runs on or waits for."""
        worker = self.router.worker_of(group)
        return None if worker is None else self.handles.index(worker)

    def run_to_end(self) -> None:
        while len(self.router.queues) or any(handle.scheduler.groups.has_work for handle in self.handles):
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
    first = pool.add_at(1, list(range(30)), max_tokens=1)
    pool.turn(1)
    assert first.is_finished
    again = pool.add(list(range(30)))
    assert pool.where(again) == 1
    pool.turn(1)
    assert again.num_cached_tokens == 28


def test_a_short_prefix_does_not_outweigh_a_crowd():
    """One shared block is worth less than what waiting behind others costs."""
    pool = Pool(*[{"num_slots": 40, "num_blocks": 400}] * 2)
    shared = list(range(BLOCK_SIZE))
    pool.add_at(0, [*shared, 60], max_tokens=1)
    pool.turn(0)
    groups = [pool.add([*shared, *[20 + number] * 20], max_tokens=20) for number in range(40)]
    counts = [sum(pool.where(group) == number for group in groups) for number in (0, 1)]
    assert min(counts) >= 15, counts


def test_what_is_reserved_counts_from_the_moment_of_the_decision():
    """Nothing has been sent to anybody yet."""
    pool = Pool(*[{"num_slots": 16, "num_blocks": 200}] * 4)
    groups = [pool.add([number] * 20) for number in range(40)]
    assert [sum(pool.where(group) == number for group in groups) for number in range(4)] == [10] * 4


def test_equals_go_to_the_one_with_less_in_its_cache_and_then_to_any():
    pool = Pool(*[{}] * 3)
    pool.add_at(0, list(range(30)), max_tokens=1)
    pool.turn(0)
    taken = set()
    for number in range(30):
        group = pool.add([number], max_tokens=1)
        taken.add(pool.where(group))
        pool.router.ended(group)
    assert taken == {1, 2}


def test_a_faster_worker_gets_more():
    pool = Pool({"tokens_per_s": 4000.0, "num_slots": 64, "num_blocks": 400}, {"num_slots": 64, "num_blocks": 400})
    groups = [pool.add([number] * 20, max_tokens=1) for number in range(50)]
    assert 35 <= sum(pool.where(group) == 0 for group in groups) <= 45


@pytest.mark.parametrize("speeds", [(1000.0, 1e12), (1e12, 1000.0)], ids=["joins later", "is there first"])
def test_whoever_claims_to_be_fast_beyond_belief_does_not_get_all(speeds: tuple[float, float]) -> None:
    pool = Pool(*({"num_slots": 64, "num_blocks": 512, "tokens_per_s": speed} for speed in speeds))
    groups = [pool.add([number] * 20, max_tokens=1) for number in range(50)]
    honest = speeds.index(1000.0)
    assert 8 <= sum(pool.where(group) == honest for group in groups) <= 15


def test_a_small_model_s_workers_are_believed_to_be_faster_than_those_of_a_large_one():
    pool = Pool(*({"model": "large"}, {"model": "small", "tokens_per_s": 50_000.0}) * 2)
    assert [round(1 / handle.pace.token_s) for handle in pool.handles] == [1000, 50_000] * 2


def test_a_worker_that_is_found_to_be_slow_gets_less():
    """It said that it is as fast as the other one."""
    pool = Pool(*[{"num_slots": 8, "num_blocks": 200}] * 2)
    for number in (0, 1):
        for _ in range(20):
            pool.add_at(number, [50 + number] * 2, max_tokens=2)
            pool.add_at(number, list(range(number, 40 + number)), max_tokens=2)
            while pool.handles[number].scheduler.groups.has_work or len(pool.handles[number].waiting):
                pool.turn(number, step_s=0.2 if number else 0.02)
    groups = [pool.add([20 + number] * 20) for number in range(30)]
    assert sum(pool.where(group) == 0 for group in groups) >= 20


def test_who_does_not_answer_gets_nothing_more():
    pool = Pool({"num_slots": 8, "num_blocks": 200}, {"num_slots": 8, "num_blocks": 200})
    stuck = pool.handles[0]
    pool.add_at(0, [1] * 20)
    outputs = stuck.scheduler.schedule(WorkerQueue(pool.router, stuck), 0)
    assert outputs is not None
    stuck.sent(1, outputs, 0)
    pool.router.touch(stuck)
    pool.now_ns += 10_000_000_000
    groups = [pool.add([20 + number] * 20) for number in range(20)]
    assert all(pool.where(group) == 1 for group in groups)


def test_nothing_goes_to_a_worker_that_takes_nobody():
    """It has the prompt cached and nothing to do, and is about to leave."""
    pool = Pool({}, {})
    first = pool.add_at(1, list(range(30)), max_tokens=1)
    pool.turn(1)
    assert first.is_finished
    waiting = pool.add(list(range(30)))
    assert pool.where(waiting) == 1
    for group in pool.router.close(pool.handles[1]):
        pool.router.place(group)
    assert pool.where(waiting) == 0
    assert pool.where(pool.add(list(range(30)))) == 0


def test_a_large_group_goes_to_a_large_worker_and_waits_for_one():
    pool = Pool({"num_blocks": 6})
    large, small = pool.add(list(range(40))), pool.add([1, 2, 3])
    assert pool.where(large) is None and large in pool.router.queues.unbound and pool.where(small) == 0
    pool.join(num_blocks=64)
    pool.router.place(large)
    assert pool.where(large) == 1
    pool.run_to_end()
    assert large.is_finished and small.is_finished


def test_each_model_has_its_own_workers():
    pool = Pool({"model": "a"}, {"model": "b"})
    found = [pool.where(pool.add([1] * 9, model=model)) for model in ("a", "b", "a", "b", "c", "a", "a")]
    assert found == [0, 1, 0, 1, None, 0, 0]


def test_an_urgent_group_does_not_wait_behind_those_who_are_not():
    """It goes where its prompt is cached, though many wait there: it is the first of them."""
    pool = Pool(*[{"num_slots": 2, "num_blocks": 200}] * 2, policy="priority")
    pool.add_at(0, list(range(40)), max_tokens=1)
    pool.turn(0)
    for number in range(20):
        pool.add_at(0, [60 + number] * 20, priority=5)
    assert pool.where(pool.add(list(range(40)), priority=5)) == 1
    assert pool.where(pool.add(list(range(40)), priority=1)) == 0


def test_an_urgent_group_displaces_nobody_while_another_worker_has_room():
    pool = Pool({"num_slots": 1}, {"num_slots": 1}, policy="priority")
    ordinary = pool.add_at(0, [1, 2, 3], priority=5)
    pool.turn(0)
    urgent = pool.add([4, 5, 6], priority=1)
    pool.turn(0)
    pool.turn(1)
    assert (pool.where(ordinary), pool.where(urgent)) == (0, 1)
    more_urgent = pool.add_at(0, [7, 8, 9], priority=0)
    pool.turn(0)
    assert more_urgent in pool.handles[0].scheduler.groups.running and ordinary.num_preemptions == 1
    pool.run_to_end()


def test_a_tenant_that_has_nothing_waiting_does_not_count_the_flood_of_another():
    pool = Pool(*[{"num_slots": 2, "num_blocks": 200}] * 2, policy="fair")
    pool.add_at(0, list(range(40)), max_tokens=1, tenant="calm")
    pool.turn(0)
    for number in range(20):
        pool.add_at(0, [60 + number] * 20, tenant="flood")
    assert pool.where(pool.add(list(range(40)), tenant="flood")) == 1
    assert pool.where(pool.add(list(range(40)), tenant="calm")) == 0


# ---- who waits goes elsewhere ---------------------------------------------------------------------------------------


def test_a_worker_without_anything_to_begin_takes_over_what_waits_for_others():
    pool = Pool({"num_slots": 2}, {"num_slots": 2})
    groups = [pool.add_at(0, [number] * 9) for number in range(8)]
    pool.turn(0)
    assert pool.rebinding.is_due(pool.handles[1]) and not pool.rebinding.is_due(pool.handles[0])
    num_taken = pool.rebinding.take_over(pool.handles[1])
    there = [group for group in groups if pool.where(group) == 1]
    assert 2 <= num_taken == len(there) <= 6
    pool.run_to_end()
    assert all(group.is_finished for group in groups)


def test_a_worker_takes_over_what_waits_for_others_of_its_model_however_many_wait_for_another_model():
    pool = Pool(*[{"num_slots": 2, "model": "a"}] * 8, *[{"num_slots": 2, "model": "b"}] * 2)
    for number in range(8):
        for _ in range(12):
            pool.add_at(number, [number] * 9, model="a")
    groups = [pool.add_at(8, [number] * 9, model="b") for number in range(8)]
    num_taken = pool.rebinding.take_over(pool.handles[9])
    assert 2 <= num_taken == sum(pool.where(group) == 9 for group in groups) <= 6


def test_what_outputs_of_one_model_have_says_nothing_of_another():
    """A turn on the worker of short outputs is soon over, whatever another model's have."""
    pool = Pool({"model": "a"}, {"model": "a"}, {"model": "b"})
    for number in range(20):
        pool.add([number] * 4, max_tokens=1, model="a").first_token_ns = 0
        pool.run_to_end()
    waits = [pool.add([number] * 4, max_tokens=600, model=model) for number, model in enumerate("ab")]
    expected = [pool.router.expected_outputs(group) for group in waits]
    assert expected[0] < 0.75 * FIRST_NUM_OUTPUTS and expected[1] == FIRST_NUM_OUTPUTS
    for handle in pool.handles:
        pool.router.touch(handle)
    pool.router.look()
    for handle, num_outputs in zip(pool.handles, (expected[0], expected[0], expected[1]), strict=True):
        step_s = handle.pace.mean_s or handle.pace.seconds(4)
        assert pool.router.load_of(handle)[0].turnover_s == pytest.approx(num_outputs * step_s)


def test_what_is_cached_where_it_waits_is_left_there_and_looked_at_again_later(monkeypatch: pytest.MonkeyPatch):
    pool = Pool({"num_slots": 1, "tokens_per_s": 100.0}, {"num_slots": 1, "tokens_per_s": 100.0})
    pool.add_at(0, list(range(40)), max_tokens=1)
    pool.turn(0)
    monkeypatch.setattr(pool.router.outputs, "of", lambda model: 2.0)
    busy = pool.add_at(0, [50, 51], max_tokens=2)
    pool.turn(0)
    waits = pool.add_at(0, list(range(40)), max_tokens=2)
    assert pool.rebinding.is_due(pool.handles[1])
    assert pool.rebinding.take_over(pool.handles[1]) == 0 and pool.where(waits) == 0
    assert not pool.rebinding.is_due(pool.handles[1]), "not every time that the loop turns"
    pool.now_ns += PAUSE_NS
    assert pool.rebinding.is_due(pool.handles[1])
    pool.run_to_end()
    assert busy.is_finished


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
def test_preempted_groups_move_to_an_idle_worker(policy: str):
    pool = Pool({"num_slots": 4, "num_blocks": 12}, policy=policy)
    groups = [pool.add([number] * 14, max_tokens=26) for number in range(3)]
    while not pool.handles[0].scheduler.groups.preempted:
        pool.turn(0)
    (preempted,) = pool.handles[0].scheduler.groups.preempted
    pool.join(num_blocks=64)
    assert pool.rebinding.take_over(pool.handles[1]) == 1
    assert pool.where(preempted) == 1 and preempted in pool.handles[1].waiting and preempted.num_moves == 1
    pool.router.check_integrity()
    pool.run_to_end()
    assert all(group.is_finished for group in groups)


def test_who_waits_much_longer_than_expected_goes_where_it_is_much_cheaper():
    pool = Pool({"num_slots": 2}, {"num_slots": 2})
    for number in (0, 1):
        pool.add_at(number, [number] * 9, max_tokens=50)
        pool.add_at(number, [3 + number] * 9, max_tokens=50)
        pool.turn(number)
    waits = pool.add_at(0, [7] * 9)
    stuck = pool.handles[0]
    outputs = stuck.scheduler.schedule(WorkerQueue(pool.router, stuck), pool.now_ns)
    assert outputs is not None
    stuck.sent(2, outputs, pool.now_ns)
    pool.router.touch(stuck)
    assert not pool.rebinding.look_at_late() and not pool.rebinding.look_at_late()
    pool.now_ns += OVERRUN_NS + 60_000_000_000
    moved = [*pool.rebinding.look_at_late(), *pool.rebinding.look_at_late()]
    assert moved == [pool.handles[1]] and pool.where(waits) == 1


def test_a_cost_that_is_no_number_is_that_of_no_worker():
    none, all_open = np.zeros(3, np.int64), np.ones(3, np.bool_)
    nan, infinite = float("nan"), float("inf")
    assert cheapest(np.array([nan, 2.0, 1.0]), none, all_open).tolist() == [2]
    assert cheapest(np.array([nan, infinite, 1.0]), none, np.array([True, True, False])).tolist() == [0, 1]
    assert cheapest(np.array([nan, infinite, nan]), none, ~all_open).tolist() == []


# ---- adapters -------------------------------------------------------------------------------------------------------


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
    assert pool.where(pool.add([1, 2, 3], adapter="a")) == 1
    pool.run_to_end()
    assert pool.where(pool.add([1, 2, 3], adapter="b")) is None


def test_groups_whose_adapter_finds_no_room_hide_nobody_without_one():
    pool = Pool({"num_slots": 3, "adapters": ("a", "b"), "max_loras": 1})
    first = pool.add([1] * 5, adapter="a")
    pool.turn(0)
    blocked = [pool.add([number] * 5, adapter="b") for number in range(LOOK_AHEAD - 1)]
    plain = pool.add([7] * 5)
    pool.turn(0)
    assert first in pool.handles[0].scheduler.groups.running and plain in pool.handles[0].scheduler.groups.running
    pool.run_to_end()
    assert all(group.is_finished for group in blocked)


def test_where_no_adapter_has_room_the_rest_of_the_queue_is_not_read(monkeypatch: pytest.MonkeyPatch):
    pool = Pool({"num_slots": 3, "adapters": ("a", "b"), "max_loras": 1})
    pool.add([1] * 5, adapter="a", max_tokens=9)
    pool.turn(0)
    for number in range(3 * LOOK_AHEAD):
        pool.add([number] * 5, adapter="b")
    asked: list[str] = []
    admits = AdapterGate.admits

    def noted(gate: AdapterGate, adapter: str) -> bool:
        asked.append(adapter)
        return admits(gate, adapter)

    monkeypatch.setattr(AdapterGate, "admits", noted)
    pool.turn(0)
    assert asked == ["b"] * LOOK_AHEAD
    plain = pool.add([7] * 5)
    pool.turn(0)
    assert plain in pool.handles[0].scheduler.groups.running
    pool.router.check_integrity()
