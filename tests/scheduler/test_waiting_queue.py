"""The waiting queue: order, removal, and what it keeps of what was removed."""

from __future__ import annotations

from protos import inference_pb2
from scheduler_svc.policy import POLICIES
from scheduler_svc.sequence import SequenceGroup
from scheduler_svc.waiting_queue import WaitingQueue


def group(num_tokens: int = 10) -> SequenceGroup:
    params = inference_pb2.SamplingParams()
    return SequenceGroup("request", [1] * num_tokens, params, max_num_tokens=num_tokens + 1, arrival_ns=0)


def test_a_group_that_comes_back_has_the_place_that_it_had():
    queue = WaitingQueue(POLICIES["fcfs"])
    first, second, third = group(), group(), group()
    queue.push(first)
    queue.push(second)
    assert queue.pop() is first
    queue.push(third)
    queue.push(first)
    assert [queue.pop() for _ in range(3)] == [first, second, third]


def test_tokens_and_members_are_counted_whatever_leaves():
    queue = WaitingQueue(POLICIES["fcfs"])
    groups = [group(number) for number in range(1, 5)]
    for each in groups:
        queue.push(each)
    assert (len(queue), queue.num_tokens) == (4, 10)
    assert queue.remove(groups[0]) and not queue.remove(groups[0])
    assert queue.pop() is groups[1]
    assert (len(queue), queue.num_tokens) == (2, 7)
    assert queue.remove(groups[2]) and queue.remove(groups[3])
    assert (len(queue), queue.num_tokens) == (0, 0) and queue.peek() is None


def test_removed_groups_do_not_pile_up_behind_a_head_that_stays():
    queue = WaitingQueue(POLICIES["fcfs"])
    head, tail = group(), group()
    queue.push(head)
    for _ in range(1000):
        each = group()
        queue.push(each)
        queue.remove(each)
    queue.push(tail)
    assert len(queue._heap) < 100
    assert queue.pop() is head and queue.pop() is tail
