"""Adapters in the step loop: who may use one, which workers have it, and when it is taken from them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from protos import worker_pb2
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.errors import (
    InvalidRequest,
    NotReady,
    RequestRefused,
    UnknownName,
    Unsupported,
    WorkerFailed,
)
from scheduler_svc.routing.router import Router
from tests.scheduler.hand_turned_loop import FakeLink, Loop

Load, Unload = worker_pb2.LoadAdapterRequest, worker_pb2.UnloadAdapterRequest


class Turned(Loop):
    """A loop with workers that take adapters."""

    def join(
        self, name: str = "worker", epoch: int = 1, max_num_seqs: int = 4, max_loras: int = 2, model: str = ""
    ) -> FakeLink:
        link = super().join(name, epoch, max_num_seqs, max_loras, model)
        self.turn()
        return link

    def begin(self, call: Future[int]) -> Future[int]:
        self.turn()
        return call

    def reply(self, link: FakeLink, kind: type, problem: str = "") -> Any:
        """Answers the oldest call, which is of that kind; gives what it asked."""
        request, done = link.calls.pop(0)
        assert isinstance(request, kind), request
        done(problem)
        self.turn()
        return request

    def load(self, name: str, *links: FakeLink) -> int:
        call = self.begin(self.engine.load_adapter(name, f"/adapters/{name}"))
        for link in links:
            self.reply(link, Load)
        return call.result(0)

    def take(self, request_id: str, adapter: str) -> Any:
        group = self.group(request_id, adapter=adapter)
        self.engine.submit(group)
        self.turn()
        return group


def refused(call: Future[int]) -> str:
    error = call.exception(0)
    assert isinstance(error, RequestRefused)
    return f"{type(error).__name__}: {error}"


def test_an_adapter_is_there_when_every_worker_that_takes_any_has_it():
    loop = Turned()
    first, second, plain = loop.join("first"), loop.join("second", epoch=4), loop.join("plain", max_loras=0)
    call = loop.begin(loop.engine.load_adapter("a", "/adapters/a"))
    asked = loop.reply(first, Load)
    assert (asked.name, asked.path, asked.generation, asked.epoch) == ("a", "/adapters/a", 1, 1)
    with pytest.raises(UnknownName, match="adapter 'a' is being loaded; loaded: none"):
        loop.take("early", "a")
    assert not call.done() and loop.engine.adapter_names() == []
    assert loop.reply(second, Load).epoch == 4
    assert call.result(0) == 1 and not plain.calls
    assert loop.engine.adapter_names() == ["a"]
    loop.take("one", "a")
    assert sorted(len(link.steps) for link in (first, second)) == [0, 2] and not plain.steps
    assert (first.steps or second.steps)[0].groups[0].adapter == "a"


def test_what_cannot_be_named():
    loop = Turned()
    with pytest.raises(Unsupported, match="no worker of this server takes adapters"):
        loop.take("one", "a")
    assert "Unsupported: adapter: no worker of this server takes adapters" in refused(
        loop.begin(loop.engine.load_adapter("a", "/a"))
    )
    loop.join("plain", max_loras=0)
    with pytest.raises(Unsupported):
        loop.take("one", "a")
    link = loop.join()
    loop.load("b", link)
    loop.load("a", link)
    with pytest.raises(UnknownName, match="adapter 'x' is not here; loaded: 'a', 'b'"):
        loop.take("one", "x")
    assert (
        refused(loop.begin(loop.engine.unload_adapter("x"))) == "UnknownName: adapter 'x' is not here; loaded: 'a', 'b'"
    )
    for name, path in (("", "/a"), ("a", ""), ("n" * 257, "/a"), ("a\nb", "/a"), ("\x1b[2J", "/a")):
        assert isinstance(loop.begin(loop.engine.load_adapter(name, path)).exception(0), InvalidRequest)
    assert loop.begin(loop.engine.load_adapter("a", "/adapters/a")).result(0) == 2, "it is there already"
    assert not link.calls
    elsewhere = loop.begin(loop.engine.load_adapter("a", "/elsewhere"))
    assert refused(elsewhere).startswith("NameTaken: adapter 'a' is loaded from '/adapters/a'")
    loop.engine.worker_lost(link, "gone")
    assert "NotReady" in refused(loop.begin(loop.engine.load_adapter("c", "/c")))


def test_what_one_worker_cannot_load_is_taken_from_the_others():
    loop = Turned()
    first, second = loop.join("first"), loop.join("second")
    call = loop.begin(loop.engine.load_adapter("a", "/adapters/a"))
    loop.reply(first, Load)
    loop.reply(second, Load, "NOT_FOUND: no such folder")
    assert refused(call) == "WorkerFailed: adapter 'a': worker second: NOT_FOUND: no such folder"
    assert "being unloaded" in refused(loop.begin(loop.engine.load_adapter("a", "/adapters/a")))
    loop.reply(first, Unload)
    again = loop.begin(loop.engine.load_adapter("a", "/other"))
    assert loop.reply(first, Load).generation == 2
    loop.reply(second, Load)
    assert again.result(0) == 2


def test_a_worker_that_joins_later_gets_groups_of_an_adapter_once_it_has_it():
    loop = Turned()
    first = loop.join("first")
    loop.load("a", first)
    loop.engine.worker_lost(first, "gone")
    waiting = loop.take("one", "a")
    second = loop.join("second", epoch=2)
    assert not second.steps and loop.engine.workers[0].adapters == {}
    asked, _ = second.calls[0]
    assert isinstance(asked, worker_pb2.LoadAdapterRequest)
    loaded = worker_pb2.AdapterState(name="a", generation=asked.generation)
    notice = worker_pb2.StepResponse(epoch=2, notice=worker_pb2.Notice(adapter_loaded=loaded))
    loop.engine.worker_said(second, notice.SerializeToString())  # as good as the answer, whichever comes first
    loop.turn()
    assert second.steps[0].groups[0].request_id == "one" and not waiting.is_finished
    loop.reply(second, Load)
    loop.run_to_end(second)


def test_those_whom_a_worker_cannot_take_are_not_placed_again_when_it_has_an_adapter(monkeypatch: pytest.MonkeyPatch):
    loop = Turned()
    other, first = loop.join("other", model="o"), loop.join("first", 2, model="m")
    loop.load("x", other, first)
    loop.engine.worker_lost(other, "gone")
    for request_id in ("one", "two"):
        loop.engine.submit(loop.group(request_id, model="o"))
    of_other = loop.group("x", adapter="x", model="o")
    loop.engine.submit(of_other)
    loop.turn()
    placed: list[str] = []
    place = Router.place

    def noted(router: Router, group: SequenceGroup) -> Any:
        placed.append(group.request_id)
        return place(router, group)

    monkeypatch.setattr(Router, "place", noted)
    loop.load("a", first)
    second = loop.join("second", 3, model="m")
    assert placed == []
    last = loop.join("last", 4, model="o")
    assert sorted(placed) == ["one", "two"] and last.steps and not second.steps
    loop.reply(last, Load)
    assert placed[2:] == ["x"]


def test_a_worker_that_cannot_load_what_others_have_gets_none_of_its_groups_until_it_can():
    loop = Turned()
    first = loop.join("first")
    loop.load("a", first)
    second = loop.join("second")
    loop.reply(second, Load, "RESOURCE_EXHAUSTED: no memory")
    loop.engine.worker_lost(first, "gone")
    loop.take("one", "a")
    assert not second.steps
    call = loop.begin(loop.engine.load_adapter("a", "/adapters/a"))
    loop.reply(second, Load)
    assert call.result(0) == 1
    assert second.steps[0].groups[0].request_id == "one"


def test_an_adapter_of_one_of_two_models_is_loaded_where_it_can_be():
    loop = Turned()
    first, second, other = (
        loop.join("first", model="m"),
        loop.join("second", 2, model="m"),
        loop.join("o", 3, model="o"),
    )
    call = loop.begin(loop.engine.load_adapter("a", "/adapters/a"))
    for link in (first, second):
        loop.reply(link, Load)
    loop.reply(other, Load, "the model has no place for it")
    assert call.result(0) == 1 and loop.engine.adapter_names() == ["a"]
    loop.engine.submit(loop.group("one", adapter="a", model="m"))
    with pytest.raises(UnknownName, match="adapter 'a' is not for this model: its workers could not load it"):
        loop.engine.submit(loop.group("two", adapter="a", model="o"))
    loop.turn()
    assert first.steps or second.steps
    call = loop.begin(loop.engine.load_adapter("b", "/adapters/b"))
    loop.reply(first, Load)
    loop.reply(second, Load, "no memory")
    loop.reply(other, Load, "the model has no place for it")
    assert refused(call) == "WorkerFailed: adapter 'b': worker second: no memory", "of its own model all have to"


def test_what_many_workers_or_adapters_say_is_short():
    loop = Turned()
    links = [loop.join(f"worker-{number}", number + 1) for number in range(20)]
    call = loop.begin(loop.engine.load_adapter("a", "/adapters/a"))
    for link in links:
        loop.reply(link, Load, "no " * 200)
    assert refused(call).endswith("; and 17 more workers") and len(refused(call)) < 3000
    for number in range(20):
        loop.load(f"{number}" * 100, *links)
    with pytest.raises(UnknownName) as unknown:
        loop.take("one", "x" * 100_000)
    assert len(str(unknown.value)) < 2000


def test_a_worker_lost_while_loading_is_not_waited_for():
    loop = Turned()
    first, second = loop.join("first"), loop.join("second")
    call = loop.begin(loop.engine.load_adapter("a", "/adapters/a"))
    loop.reply(first, Load)
    loop.engine.worker_lost(second, "gone")
    loop.turn()
    assert call.result(0) == 1
    call = loop.begin(loop.engine.load_adapter("b", "/adapters/b"))
    loop.engine.worker_lost(first, "gone")
    loop.turn()
    assert refused(call).startswith("NotReady: adapter 'b': every worker that takes adapters left")
    loop.reply(second, Load, "CANCELLED: channel closed")  # too late to matter
    assert loop.engine.adapter_names() == ["a"]


def test_a_load_whose_only_worker_is_given_back_meanwhile_may_be_tried_again():
    """Of several shards, one whose worker moves has not refused the adapter: the others keep it."""
    loop = Turned()
    link = loop.join("only")
    call = loop.begin(loop.engine.load_adapter("a", "/adapters/a"))
    loop.drain("only")
    loop.turn()
    assert refused(call).startswith("NotReady:") and link.is_closed
    assert loop.engine.adapter_names() == []


def test_the_call_that_ends_with_a_lost_worker_is_no_failure_of_the_others():
    loop = Turned()
    first, second = loop.join("first"), loop.join("second")
    call = loop.begin(loop.engine.load_adapter("a", "/adapters/a"))
    loop.engine.worker_lost(second, "gone")
    loop.turn()
    loop.reply(second, Load, "UNAVAILABLE: the connection is closed")
    loop.reply(first, Load)
    assert call.result(0) == 1 and loop.engine.adapter_names() == ["a"]


def test_a_worker_that_is_drained_is_not_waited_for():
    loop = Turned()
    first, second = loop.join("first"), loop.join("second")
    loop.submit("one")
    loop.turn()
    busy = first if first.steps else second
    call = loop.begin(loop.engine.load_adapter("a", "/adapters/a"))
    loop.drain(busy.address)
    loop.turn()
    assert not busy.is_closed, "its steps are waited for"
    loop.reply(second if busy is first else first, Load)
    assert call.result(0) == 1


def test_a_call_that_a_closed_channel_refuses_costs_neither_requests_nor_those_who_wait(monkeypatch):
    """The step loop has yet to hear that the worker is lost."""
    loop = Turned(steps_in_flight=1)
    first = loop.join("first")
    loop.load("a", first)
    loop.submit("one")
    loop.turn()

    def refuse(*_: Any) -> None:
        raise ValueError("Cannot invoke RPC: Channel closed!")

    monkeypatch.setattr(first, "call", refuse)
    loop.answer(first)  # so that nothing of it is in flight
    failed, waits = (loop.engine.unload_adapter("a") for _ in range(2))
    loop.engine.worker_lost(first, "gone")
    loop.turn()
    assert isinstance(failed.exception(0), ValueError) and waits.result(0) == 1
    second = loop.join("second", epoch=2)
    assert second.steps[0].groups[0].request_id == "one"
    loop.run_to_end(second)
    assert loop.token_ids == {"one": [7] * 9} and loop.load("a", second) == 2


def test_what_is_being_unloaded_is_not_loaded_again_by_late_news_or_by_who_joins():
    loop = Turned()
    first = loop.join("first")
    loop.load("a", first)
    call = loop.begin(loop.engine.unload_adapter("a"))
    assert [type(request) for request, _ in first.calls] == [Unload]
    loaded = worker_pb2.Notice(adapter_loaded=worker_pb2.AdapterState(name="a", generation=1))
    loop.engine.worker_said(first, worker_pb2.StepResponse(epoch=1, notice=loaded).SerializeToString())
    second = loop.join("second", epoch=2)
    assert not second.calls
    loop.reply(first, Unload)
    assert call.result(0) == 1 and not first.calls and loop.engine.adapter_names() == []


def test_unloading_waits_for_requests_that_run_and_that_wait_and_for_the_last_step():
    loop = Turned()
    link = loop.join(max_num_seqs=1)
    loop.load("a", link)
    loop.take("runs", "a"), loop.take("waits", "a")
    call = loop.begin(loop.engine.unload_adapter("a"))
    with pytest.raises(UnknownName, match="adapter 'a' is being unloaded; loaded: none"):
        loop.take("late", "a")
    other = loop.begin(loop.engine.unload_adapter("a"))
    while loop.engine.live_groups():
        assert not link.calls and not call.done()
        loop.turn()
        loop.answer(link)
        loop.turn()
    assert loop.token_ids == {"runs": [7] * 9, "waits": [7] * 9}, "what was taken is served"
    last = link.steps[-1]
    assert last.released_slots_u16 == b"\0\0" and not last.rows.slots_u16, "a step that only says that the slot is free"
    assert not link.calls, "its answer is waited for"
    loop.answer(link)
    loop.turn()
    assert loop.reply(link, Unload).name == "a"
    assert call.result(0) == other.result(0) == 1
    assert loop.load("a", link) == 2, "what is loaded later is another one"


def test_a_failed_step_has_the_worker_told_again_before_it_unloads():
    loop = Turned(steps_in_flight=3)
    link = loop.join()
    loop.load("a", link)
    group = loop.group("one", adapter="a")
    group.max_num_tokens = 5
    loop.engine.submit(group)
    loop.turn()
    assert len(link.steps) == 2
    loop.engine.abort("one")
    call = loop.begin(loop.engine.unload_adapter("a"))
    assert link.steps[2].released_slots_u16
    for step_id, status in enumerate((worker_pb2.STEP_STATUS_FAILED, *[worker_pb2.STEP_STATUS_SKIPPED] * 2), start=1):
        assert len(link.steps) == 3 and not link.calls
        loop.answer(link, result=worker_pb2.StepResult(step_id=step_id, status=status))
        loop.turn()
    assert link.steps[3].resume_after == 1 and link.steps[3].released_slots_u16
    assert not link.calls, "the step that told of it was skipped"
    loop.answer(link)
    loop.turn()
    loop.reply(link, Unload)
    assert call.result(0) == 1


def test_requests_of_an_adapter_that_is_being_unloaded_move_to_a_worker_that_joins():
    loop = Turned()
    first = loop.join("first")
    loop.load("a", first)
    loop.take("one", "a")
    call = loop.begin(loop.engine.unload_adapter("a"))
    loop.engine.worker_lost(first, "gone")
    second = loop.join("second", epoch=2)
    loop.reply(second, Load)
    loop.run_to_end(second)
    while loop.engine.workers[0].in_flight:
        loop.answer(second)
        loop.turn()
    loop.reply(second, Unload)
    assert call.result(0) == 1


def test_a_request_that_was_refused_after_all_keeps_no_adapter():
    loop = Turned(max_waiting_requests=0)
    link = loop.join()
    loop.load("a", link)
    with pytest.raises(RequestRefused):
        loop.engine.submit(loop.group("one", adapter="a"))
    call = loop.begin(loop.engine.unload_adapter("a"))
    loop.reply(link, Unload)
    assert call.result(0) == 1


def test_what_a_worker_does_not_unload_is_told_and_the_name_is_free():
    loop = Turned()
    link = loop.join()
    loop.load("a", link)
    call = loop.begin(loop.engine.unload_adapter("a"))
    loop.reply(link, Unload, "INTERNAL: stuck")
    assert refused(call) == "WorkerFailed: adapter 'a': worker worker: INTERNAL: stuck"
    assert loop.load("a", link) == 2


def test_a_server_that_stops_answers_those_who_wait():
    loop = Turned()
    loop.join()
    call = loop.begin(loop.engine.load_adapter("a", "/adapters/a"))
    loop.engine.stop()
    assert isinstance(call.exception(0), NotReady)
    with pytest.raises(NotReady):
        loop.engine.unload_adapter("a")


def test_generations_of_one_name_share_no_prefix():
    loop = Turned()
    link = loop.join()
    loop.load("a", link)
    first, same = loop.group("one", adapter="a"), loop.group("two", adapter="a")
    for group in (first, same):
        loop.engine.submit(group)
        loop.engine.abort_group(group)
    loop.begin(loop.engine.unload_adapter("a"))
    loop.reply(link, Unload)
    loop.load("a", link)
    later = loop.group("three", adapter="a")
    loop.engine.submit(later)
    assert first.hash_root == same.hash_root != later.hash_root
    assert later.hash_root != loop.group("four").hash_root


def test_a_configured_adapter_waits_for_a_worker_that_can_load_it():
    loop = Turned(adapters={"a": "/adapters/a"})
    with pytest.raises(NotReady, match="adapter 'a' is being loaded: try again"):
        loop.take("early", "a")
    first = loop.join("first")
    assert loop.reply(first, Load, "no such folder").path == "/adapters/a"
    with pytest.raises(WorkerFailed, match="adapter 'a' could not be loaded: worker first: no such folder"):
        loop.take("late", "a")
    second = loop.join("second", epoch=4)
    with pytest.raises(NotReady, match="adapter 'a' is being loaded: try again"):
        loop.take("too early", "a")
    loop.reply(second, Load)
    assert loop.engine.adapter_names() == ["a"]
    loop.take("one", "a")
    assert second.steps[0].groups[0].adapter == "a" and not first.steps
    unloading = loop.begin(loop.engine.unload_adapter("a"))
    assert loop.engine.adapter_names() == [] and not unloading.done()


def test_a_configured_adapter_whose_path_is_wrong_can_be_loaded_from_another():
    loop = Turned(adapters={"a": "/typo"})
    assert loop.engine.adapter_names() == ["a"], "it is to come"
    link = loop.join()
    assert "NotReady: adapter 'a' is being loaded" in refused(loop.begin(loop.engine.unload_adapter("a")))
    loop.reply(link, Load, "adapter folder /typo does not exist")
    assert loop.begin(loop.engine.unload_adapter("a")).result(0) == 1
    assert loop.load("a", link) == 2


def test_many_requests_of_an_adapter_without_room_hide_nobody_behind_them():
    loop = Turned()
    link = loop.join(max_num_seqs=8, max_loras=1)
    loop.load("in use", link)
    loop.load("waits", link)
    loop.take("first", "in use")
    for number in range(100):
        loop.engine.submit(loop.group(f"waits {number}", adapter="waits"))
    behind = [loop.take("base", ""), loop.take("of the one in use", "in use")]
    for _ in range(4):
        loop.answer(link)
        loop.turn()
    assert all(group.first_scheduled_ns is not None for group in behind)
    for _ in range(2000):  # nor do those wait for ever
        if not loop.engine.num_live:
            break
        loop.answer(link)
        loop.turn()
    assert not loop.engine.num_live
