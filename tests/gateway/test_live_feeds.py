"""A feed for each key: who may see what, that it is asked with that key alone, and when it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest

from gateway_svc.errors import HttpError
from gateway_svc.live import live_feeds
from gateway_svc.live.live_feeds import LiveFeeds, Metadata
from octavo.errors import RequestFailed
from protos import inference_pb2 as pb

CODE = grpc.StatusCode


def key(name: str) -> Metadata:
    return [("authorization", f"Bearer {name}")]


class Scheduler:
    """Shows all to `ops`, the load to `eyes`, nothing to `web`, and knows nobody else. `asked`: each with its key."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.known = {"ops", "eyes", "web"}
        self.is_away = False

    def _check(self, method: str, metadata: Metadata, *allowed: str) -> None:
        name = metadata[0][1].removeprefix("Bearer ") if metadata else ""
        self.asked.append((method, name))
        if self.is_away:
            raise RequestFailed(CODE.UNAVAILABLE, "it is away")
        if name not in self.known:
            raise RequestFailed(CODE.UNAUTHENTICATED, "no known key")
        if name not in allowed:
            raise RequestFailed(CODE.PERMISSION_DENIED, f"key {name!r} is not for this call; it takes role control")

    async def watch_steps(self, metadata: Metadata) -> AsyncGenerator[pb.StepSummary, None]:
        self._check("watch", metadata, "ops")
        await asyncio.Event().wait()
        yield pb.StepSummary()

    async def view(self, request: pb.GetViewRequest, metadata: Metadata) -> pb.View:
        self._check("view", metadata, "ops")
        return pb.View(load=pb.Load(num_requests_running=1), requests=[pb.RequestState(request_id="a")])

    async def load(self, metadata: Metadata) -> pb.Load:
        self._check("load", metadata, "ops", "eyes")
        return pb.Load(num_requests_running=2)


async def first_frame(feeds: LiveFeeds, name: str) -> Any:
    async with asyncio.timeout(10), feeds.frames(key(name)) as frames:
        return json.loads(await anext(frames))


async def test_a_key_of_role_control_sees_all_and_one_of_role_metrics_the_load() -> None:
    feeds = LiveFeeds(scheduler := Scheduler(), demo=True)
    shown = await first_frame(feeds, "ops")
    assert [each["id"] for each in shown["requests"]] == ["a"] and shown["demo"] and "load_alone" not in shown
    shown = await first_frame(feeds, "eyes")
    assert (shown["running"], shown["requests"], shown["load_alone"]) == (2, [], True)
    assert "demo" not in shown, "it may not withhold anything"
    assert {name for method, name in scheduler.asked if method == "watch"} == {"ops"}


@pytest.mark.parametrize(("name", "code"), [("web", CODE.PERMISSION_DENIED), ("nobody", CODE.UNAUTHENTICATED)])
async def test_who_may_see_nothing_is_told_so_at_once(name: str, code: grpc.StatusCode) -> None:
    with pytest.raises(RequestFailed) as raised:
        await first_frame(LiveFeeds(Scheduler()), name)
    assert raised.value.code is code
    assert code is CODE.UNAUTHENTICATED or "role control" in raised.value.message


async def test_viewers_of_one_key_share_a_feed_and_others_do_not() -> None:
    feeds = LiveFeeds(scheduler := Scheduler())
    scheduler.known.add("")
    async with feeds.frames(key("ops")) as one, feeds.frames(key("ops")) as other, feeds.frames(key("eyes")) as third:
        for frames in (one, other, third):
            await anext(frames)
        assert scheduler.asked.count(("watch", "ops")) == 1
    await first_frame(feeds, "ops")
    assert scheduler.asked.count(("watch", "ops")) == 2, "the first feed is gone"


async def test_a_scheduler_that_is_away_says_so_in_the_feed() -> None:
    feeds = LiveFeeds(scheduler := Scheduler())
    scheduler.is_away = True
    assert "it is away" in (await first_frame(feeds, "ops"))["problem"]


async def test_a_key_that_was_taken_away_is_asked_for_again() -> None:
    feeds = LiveFeeds(scheduler := Scheduler())
    async with asyncio.timeout(10), feeds.frames(key("ops")) as frames:
        await anext(frames)
        scheduler.known.remove("ops")
        with pytest.raises(StopAsyncIteration):
            await anext(frames)
        with pytest.raises(RequestFailed):
            await first_frame(feeds, "ops")
        scheduler.known.add("ops")
        assert (await first_frame(feeds, "ops"))["running"] == 1, "by a feed of its own"


async def test_too_many_are_refused_and_the_end_of_the_service_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feeds, "MAX_VIEWERS", 2)
    feeds = LiveFeeds(Scheduler())
    async with feeds.frames(key("ops")) as one, feeds.frames(key("eyes")) as other:
        with pytest.raises(HttpError, match="at most 2 may"):
            await first_frame(feeds, "ops")
        await anext(one)
        await anext(other)
        feeds.close()
        for frames in (one, other):
            with pytest.raises(StopAsyncIteration):
                await anext(frames)
    with pytest.raises(StopAsyncIteration):
        await first_frame(feeds, "ops")


async def test_who_is_not_let_in_yet_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feeds, "MAX_VIEWERS", 2)
    feeds, is_let = LiveFeeds(scheduler := Scheduler()), asyncio.Event()

    async def view(request: pb.GetViewRequest, metadata: Metadata) -> pb.View:
        await is_let.wait()
        return pb.View()

    scheduler.view = view  # type: ignore[method-assign]  # a slow one
    looking = [asyncio.create_task(first_frame(feeds, "ops")) for _ in range(5)]
    await asyncio.sleep(0)
    is_let.set()
    found = await asyncio.gather(*looking, return_exceptions=True)
    assert [isinstance(each, HttpError) for each in found] == [False, False, True, True, True]
    await first_frame(feeds, "ops")
