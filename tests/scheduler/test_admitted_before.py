"""Who resumes comes first and past the bounds of the queue, if it had its turn; claims alone gain nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest

from protos import worker_pb2
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.engine.requests.admitted_before import MAX_KNOWN, AdmittedBefore
from scheduler_svc.errors import QueueFull
from tests.scheduler.fake_language import expected_tokens
from tests.scheduler.pool import Faults, Pool, Size
from worker_svc.steps.recent_requests import RecentRequests

ONE = Size(num_slots=1, num_blocks=32, num_host_blocks=0, max_num_batched_tokens=64, max_model_len=64)
PROMPT = list(range(4, 12))


def pool_of(**settings: Any) -> Pool:
    return Pool(Faults(), **{"max_waiting_requests": 2, "max_waiting_tokens": 16, **settings})


def resume(pool: Pool, request_id: str, num_tokens: int = 2, **options: Any) -> SequenceGroup:
    tokens = expected_tokens(PROMPT, 0, 20)[len(PROMPT) :][:num_tokens]
    return pool.submit(PROMPT, 20, request_id=request_id, resumed=[tokens] if tokens else (), **options)


def order_of(pool: Pool) -> list[str]:
    """In which the groups that wait would be served."""
    pool.turn()
    return [group.request_id for group in pool.engine._waiting.unbound.candidates(10)]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_who_had_a_turn_is_first_and_past_the_bounds(policy: str) -> None:
    pool = pool_of(scheduling_policy=policy)
    pool.engine.admitted_before.learn(["a", "b"])
    pool.submit(PROMPT, 20, request_id="new", tenant="x")
    pool.submit(PROMPT, 20, request_id="new-too", tenant="y")
    with pytest.raises(QueueFull):
        pool.submit(PROMPT, 20, request_id="one-too-many")
    pool.engine.check_room("", "b", 5)
    with pytest.raises(QueueFull):
        pool.engine.check_room("", "c", 0)
    resume(pool, "b", tenant="y")
    resume(pool, "a", tenant="x")
    assert order_of(pool) == ["b", "a", "new", "new-too"]
    pool.join(ONE)
    pool.run_to_end(ONE)
    pool.check_outputs()


def test_urgency_counts_before_a_lost_turn() -> None:
    pool = pool_of(scheduling_policy="priority")
    pool.engine.admitted_before.learn(["a"])
    pool.submit(PROMPT, 20, request_id="urgent", priority=-1)
    resume(pool, "a")
    assert order_of(pool) == ["urgent", "a"]


def test_a_claim_alone_queues_as_a_new_request() -> None:
    pool = pool_of(max_waiting_tokens=21)
    pool.engine.admitted_before.learn(["nothing", "once"])
    pool.submit(PROMPT, 20, request_id="new")
    resume(pool, "made-up", num_tokens=5)
    with pytest.raises(QueueFull):
        resume(pool, "made-up-too", num_tokens=5)
    with pytest.raises(QueueFull):
        resume(pool, "nothing", num_tokens=0)  # a resume of nothing is a new request
    first = resume(pool, "once")
    pool.abort(first)
    pool.turn()
    with pytest.raises(QueueFull):
        resume(pool, "once")  # a turn is given back once
    assert order_of(pool) == ["new", "made-up"]


def test_a_worker_names_those_who_had_their_turn_to_the_next_scheduler() -> None:
    pool = pool_of()
    worker = pool.join(ONE)
    seen = RecentRequests(2)
    for name in ("first", "second", "third"):
        pool.submit(PROMPT, 12, request_id=name)
        pool.turn()
        for step in worker.received:
            seen.take(step)
        pool.run_to_end(ONE)
    assert seen.all() == ["second", "third"]
    pool.engine.worker_joined(
        worker, worker_pb2.WorkerInfo(block_size=4), _sizes(), worker_pb2.LeaseGranted(epoch=9, request_ids=seen.all())
    )
    known = pool.engine.admitted_before
    assert known.has("third", "anybody") and not known.has("first", "anybody"), "a worker knows of no tenants"


def test_a_client_that_lost_its_connection_gets_its_turn_back_and_one_that_only_waited_does_not() -> None:
    pool = pool_of()
    pool.join(ONE)
    running = pool.submit(PROMPT, 20, request_id="running")
    pool.turn()
    waiting = pool.submit(PROMPT, 20, request_id="waiting")
    pool.turn()
    for group in (running, waiting):
        pool.cut_short.add(group)
        pool.engine.abandon(group)
    known = pool.engine.admitted_before
    assert not known.take("running", "another"), "a turn is its tenant's own"
    assert known.take("running", "") and not known.take("waiting", "") and not known.take("running", "")


def test_under_fair_a_resumed_request_is_paid_for() -> None:
    """Its prompt and the tokens that it brings along, by its tenant."""
    pool = pool_of(scheduling_policy="fair")
    pool.engine.admitted_before.learn(["a"])
    group = resume(pool, "a", num_tokens=4, tenant="x")
    pool.join(ONE)
    served = pool.engine._served
    before = served.level(group.share)
    pool.run_to_end(ONE)
    assert served.level(group.share) - before >= len(PROMPT) + 4


def test_what_is_known_is_bounded() -> None:
    known = AdmittedBefore()
    known.learn(str(number) for number in range(MAX_KNOWN + 10))
    assert len(known) == MAX_KNOWN and not known.has("9", "") and known.has("10", "")
    known.learn(["10", "new"])
    assert len(known) == MAX_KNOWN and not known.has("11", "") and known.has("10", ""), "told of again, it is a new one"


def test_one_more_costs_the_same_however_many_are_known() -> None:
    """They are learned on the event loop. A look at all would cost 1,000 times as much with 1,000 times as many."""

    def learn(num_known: int) -> float:
        known = AdmittedBefore(num_known)
        known.learn(str(number) for number in range(num_known))
        started_s = time.thread_time()
        for number in range(2000):
            known.learn([f"more {number}"])
        assert len(known) == num_known
        return time.thread_time() - started_s

    assert learn(64_000) < 50 * learn(64)


def _sizes() -> worker_pb2.InitializeResponse:
    return worker_pb2.InitializeResponse(
        num_device_blocks=8, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=32, block_bytes=1
    )
