"""A frontend's core over several shards: a group that moves is taken by another shard, or its client hears why not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from protos import inference_pb2 as pb
from protos import shards_pb2
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.errors import DuplicateRequest, FieldViolation, InvalidRequest, QueueFull, UnknownName
from scheduler_svc.frontends.core_link import CoreLink
from scheduler_svc.output.mailboxes import Mailboxes
from scheduler_svc.shards import sharded_core
from scheduler_svc.shards.shard_link import ShardLink
from scheduler_svc.shards.sharded_core import ShardedCore
from scheduler_svc.shards.unserved_models import UnservedModels
from tests.fakes import FakeWorker
from tests.scheduler.test_core_link import Ends, both_ends
from tests.scheduler.test_routing_table import load, worker
from tests.waiting import until


class Reader:
    """What stands in a group's `output`, and is told of its end."""

    is_finished = False

    def __init__(self) -> None:
        self.ends: asyncio.Queue[tuple[FinishReason, str]] = asyncio.Queue()

    def begins_anew_elsewhere(self) -> None:
        pass

    def end(self, reason: FinishReason, message: str, is_invalid: bool) -> None:
        assert not is_invalid, "another attempt may do better"
        self.ends.put_nowait((reason, message))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (InvalidRequest(FieldViolation("prompt", "no")), "another one refused it: prompt: no"),
        (RuntimeError("the core failed over this request"), "another one failed over it"),
    ],
)
async def test_a_group_that_cannot_go_on_ends_whatever_the_reason(error: Exception, says: str) -> None:
    async with grpc.aio.insecure_channel("unix:/nowhere") as channel, asyncio.timeout(20):
        mailboxes = Mailboxes(asyncio.get_running_loop())
        core = ShardedCore(channel, mailboxes, num_shards=2, wait_timeout_s=20.0, max_losses=3)

        async def fail(*_: Any, **__: Any) -> None:
            raise error

        core._submit_anywhere = fail  # type: ignore[method-assign]  # what a shard answers
        reader = Reader()
        core._move(SequenceGroup("r", [1], pb.SamplingParams(), max_num_tokens=9, arrival_ns=0, output=reader))
        reason, message = await reader.ends.get()
        assert reason is FinishReason.ERROR and says in message
        assert not core._moves
        with capture_logs() as lines:
            core._failed.write()
        assert [(line["first"], line["why"]) for line in lines] == [(["r"], message)]


class AnyModels:
    """Those of a shard, or of all: "m", whose workers are in the table."""

    known = (SimpleNamespace(model=SimpleNamespace(fingerprint="m")),)

    def find(self, fingerprint: str) -> object:
        return SimpleNamespace(block_size=4)


@asynccontextmanager
async def two_shards() -> AsyncIterator[tuple[ShardedCore, list[ShardLink]]]:
    """A worker each with one slot, and links that nobody follows."""
    async with grpc.aio.insecure_channel("unix:/nowhere") as channel, asyncio.timeout(20):
        mailboxes = Mailboxes(asyncio.get_running_loop())
        core = ShardedCore(channel, mailboxes, num_shards=2, wait_timeout_s=20.0, max_losses=3)
        shards = [
            ShardLink(channel, mailboxes, index, core._table, core._drawn, core._shared_models, core._on_group_ended)
            for index in range(2)
        ]
        models: Any = AnyModels()
        core.models = models
        for shard in shards:
            core._links[str(shard.shard)], shard.models = shard, models
            core._table.set_workers(shard.shard, [1], {1: replace(worker(), takes_adapters=True)})
            core._table.report(shard.shard, 1, load(num_slots=1))
        yield core, shards


def group_of(adapter: str = "") -> SequenceGroup:
    params = pb.SamplingParams()
    return SequenceGroup("r", [1], params, max_num_tokens=9, arrival_ns=0, adapter=adapter, model="m", output=Reader())


async def test_where_a_shard_has_the_adapter_none_is_asked_that_would_know_of_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submitted = list[ShardLink]()

    async def refuse(link: ShardLink, group: SequenceGroup, **_: object) -> None:
        submitted.append(link)
        raise QueueFull("full", 1.0) if group.adapter in link.adapters_there else UnknownName("not here")

    async def claim(_: SequenceGroup) -> int:
        return 1

    async with two_shards() as (core, (with_it, _)):
        monkeypatch.setattr(core._front, "claim", claim)
        monkeypatch.setattr(ShardLink, "submit", refuse)
        with_it.adapters_there = {"x": "1"}
        with pytest.raises(QueueFull):
            await core.submit(group_of("x"), replaces=False)
        assert submitted == [with_it]
        with_it.adapters_there = {}
        with pytest.raises(UnknownName):  # nobody has it, and a shard says so
            await core.submit(group_of("x"), replaces=False)


@pytest.mark.parametrize("has_worker", [True, False])
async def test_a_waiting_request_moves_to_a_shard_that_has_its_adapter_and_to_no_other(
    monkeypatch: pytest.MonkeyPatch, has_worker: bool
) -> None:
    async with two_shards() as (core, (one, other)):
        unserved, moved = UnservedModels(core._table.serves, patience_s=0.0), list[SequenceGroup]()
        monkeypatch.setattr(core, "_move_away", lambda group, _: moved.append(group))
        group = group_of("x")
        one._groups[1], core._homes[group], one.adapters_there = group, one, {"x": "1"}
        if has_worker:
            core._table.report(0, 1, load(running=1, num_slots=1))
        else:
            core._table.set_workers(0, [], {})
        for there, wanted in (({}, []), ({"x": "2"}, [group])):
            one.waiting_there, other.adapters_there = [1] if has_worker else [], there
            await core._move_waiting(unserved, 1.0)
            assert moved == wanted


async def test_a_group_that_moves_is_offered_ever_more_rarely_until_its_adapter_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shard that comes loads the adapters one after the other."""
    monkeypatch.setattr(sharded_core, "RETRY_S", 0.002)
    offered, is_loaded = list[SequenceGroup](), asyncio.Event()

    async def submit(group: SequenceGroup, **_: object) -> None:
        offered.append(group)
        if not is_loaded.is_set():
            raise UnknownName("adapter 'x' is not here")

    async with two_shards() as (core, (shard, _)):
        monkeypatch.setattr(core, "_submit_anywhere", submit)
        core._wait_timeout_s = 0.3
        core._move(group := group_of("x"), shard)
        reason, message = await group.output.ends.get()
        assert reason is FinishReason.ERROR
        assert message == (
            "it has left its shard, and none took it within 0.3 s (--worker-wait-timeout): adapter 'x' is not here"
        )
        assert 3 < len(offered) < 12
        core._wait_timeout_s = 20.0
        core._move(group := group_of("x"))
        await until(lambda: group in offered)
        is_loaded.set()
        await until(lambda: not core._moves)
        assert group.output.ends.empty()


@pytest.mark.parametrize("where", ["before a shard has it", "at a shard that refuses it", "at a shard that is lost"])
async def test_a_request_that_is_aborted_on_its_way_ends_there(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The parent tells of an abort right behind its answer to the claim, and does not know where the request is."""
    group = group_of()
    reader = group.output
    chosen, submitted, aborted = list[ShardLink](), list[ShardLink](), list[SequenceGroup]()

    def choose(_: SequenceGroup, asked: set[ShardLink]) -> ShardLink | None:
        chosen.extend(links := [link for link in shards if link not in asked][:1])
        return links[0] if links else None

    async def claim(claimed: SequenceGroup) -> int:
        if where == "before a shard has it":
            assert core._abort_here(claimed) and not core._abort_here(claimed)
        return 1

    async def submit(link: ShardLink, group: SequenceGroup, **_: object) -> None:
        submitted.append(link)
        if where == "at a shard that refuses it":
            assert core._abort_here(group)
            raise QueueFull("full", retry_after_s=1.0)

    async with two_shards() as (core, shards):
        monkeypatch.setattr(core._front, "claim", claim)
        monkeypatch.setattr(core, "_choose", choose)
        monkeypatch.setattr(ShardLink, "submit", submit)
        monkeypatch.setattr(ShardLink, "abort_group", lambda _, group: aborted.append(group))
        monkeypatch.setattr(ShardLink, "unfinished", lambda _: [group])
        await core.submit(group, replaces=False)
        if where == "at a shard that is lost":
            assert reader.ends.empty() and core._abort_here(group) and aborted == [group]
            core._on_lost(shards[0])
        assert await reader.ends.get() == (FinishReason.ABORT, "")
        assert chosen == submitted == ([] if where == "before a shard has it" else shards[:1])
        assert not (core._moves or core._homes or core._ids or core._aborted)


async def test_a_request_that_is_aborted_while_the_last_shard_refuses_it_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = SequenceGroup("r", [1], pb.SamplingParams(), max_num_tokens=9, arrival_ns=0, output=Reader())
    refused = list[int]()

    async def claim(_: SequenceGroup) -> int:
        return 7

    async def refuse(_: SequenceGroup) -> None:
        assert core._abort_here(group)
        raise QueueFull("full", retry_after_s=1.0)

    async with grpc.aio.insecure_channel("unix:/nowhere") as channel:
        mailboxes = Mailboxes(asyncio.get_running_loop())
        core = ShardedCore(channel, mailboxes, num_shards=1, wait_timeout_s=20.0, max_losses=3)
        monkeypatch.setattr(core._front, "claim", claim)
        monkeypatch.setattr(core._front, "refuse", refused.append)
        monkeypatch.setattr(core, "_submit_anywhere", refuse)
        with pytest.raises(QueueFull):
            await core.submit(group, replaces=False)
        assert refused == [7] and not (core._ids or core._aborted)


async def test_an_id_that_the_parent_gave_and_the_shard_has_yet_to_free_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client has resumed before the step loop there has heard that it was cut off."""
    refusals, submit, goes_on = list[str](), CoreLink.submit, threading.Event()

    async def claim(_: SequenceGroup) -> int:
        return 1

    async def noted(link: CoreLink, group: SequenceGroup, **options: bool) -> None:
        try:
            await submit(link, group, **options)
        except DuplicateRequest as refusal:
            refusals.append(str(refusal))
            raise

    monkeypatch.setattr(CoreLink, "submit", noted)
    with FakeWorker(delay_s=0.01) as fake:
        async with both_ends(tmp_path, fake) as ends, grpc.aio.insecure_channel("unix:/nowhere") as channel:
            core = ShardedCore(channel, ends.mailboxes, num_shards=1, wait_timeout_s=20.0, max_losses=3)
            monkeypatch.setattr(core._front, "claim", claim)
            monkeypatch.setattr(core, "_choose", lambda *_: ends.link)
            request = pb.GenerateRequest(request_id="r", prompt="|", sampling_params=pb.SamplingParams(ignore_eos=True))
            former, again = ends.frontend.prepare(request), ends.frontend.prepare(request)
            await core.submit(former, replaces=False)
            ends.serving.engine.call(goes_on.wait)  # the step loop stands still
            core.abandon(former)
            submitting = asyncio.create_task(core.submit(again, replaces=True))
            await until(lambda: refusals or submitting.done())
            goes_on.set()
            await asyncio.wait_for(submitting, 20)
            assert core._homes.keys() == {again} and "is live already" in refusals[0]
            core.abandon(again)
            await ends.check_nothing_is_kept()


async def test_a_refusal_counts_once_and_only_where_no_shard_took_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"shards": 2, "max_waiting_requests": 1}
    goes_on = threading.Event()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()

    async def claim(_: SequenceGroup) -> int:
        return 1

    async def fill(ends: Ends, request_id: str) -> None:
        ends.serving.engine.call(goes_on.wait)  # the step loop stands still, and what comes waits
        group = ends.frontend.prepare(pb.GenerateRequest(request_id=request_id, prompt="|"))
        await ends.link.submit(group, replaces=False)

    with FakeWorker(delay_s=0.01) as first, FakeWorker(delay_s=0.01) as second:
        async with (
            both_ends(tmp_path / "one", first, **options) as one,
            both_ends(tmp_path / "other", second, **options) as other,
            grpc.aio.insecure_channel("unix:/nowhere") as channel,
        ):
            shards = [one, other]
            core = ShardedCore(channel, one.mailboxes, num_shards=2, wait_timeout_s=20.0, max_losses=3)
            links: dict[str, Any] = {str(number): ends.link for number, ends in enumerate(shards)}
            core._links = links
            monkeypatch.setattr(core._front, "claim", claim)
            monkeypatch.setattr(
                core, "_choose", lambda _, asked: next((ends.link for ends in shards if ends.link not in asked), None)
            )

            async def counted() -> int:
                for ends in shards:
                    await ends.link.catch_up()
                return sum(ends.serving.engine.metrics.num_rejected["queue_full"] for ends in shards)

            try:
                await fill(one, "fills one")
                served = one.frontend.prepare(pb.GenerateRequest(request_id="served", prompt="|"))
                await core.submit(served, replaces=False)
                assert core._homes == {served: other.link} and await counted() == 0
                there = other.serving.engine
                await until(lambda: all(group.first_scheduled_ns is not None for group in there.live_groups()))
                await fill(other, "fills the other")
                refused = one.frontend.prepare(pb.GenerateRequest(request_id="refused", prompt="|"))
                with pytest.raises(QueueFull):
                    await core.submit(refused, replaces=False)
                assert await counted() == 1
            finally:
                goes_on.set()


async def test_a_former_life_of_a_shard_that_ends_late_leaves_its_next_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = asyncio.Event()

    async def follow(self: ShardLink, on_state: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    monkeypatch.setattr(ShardLink, "follow", follow)
    async with grpc.aio.insecure_channel("unix:/nowhere") as channel, asyncio.timeout(20):
        mailboxes = Mailboxes(asyncio.get_running_loop())
        core = ShardedCore(channel, mailboxes, num_shards=1, wait_timeout_s=20.0, max_losses=3)
        for socket in ("unix:/former", "unix:/next"):
            state = shards_pb2.FrontState(shards=[shards_pb2.ShardAddress(index=0, socket=socket)])
            await core._take_front_state(state)
            while socket not in core._links:
                await asyncio.sleep(0)
        core._table.set_workers(0, [1], {1: worker()})
        assert "unix:/former" in core._links
        may_end.set()
        while "unix:/former" in core._links:
            await asyncio.sleep(0)
        assert core._table.serves(0, "m"), "its next report describes nothing that it has described"
        core._followers["unix:/next"].cancel()
        await asyncio.gather(*core._followers.values(), return_exceptions=True)
        assert not core._table.serves(0, "m")
