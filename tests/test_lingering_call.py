"""Calls that are given up no sooner than a while after they began: by a stand-in for one of grpc.aio."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from octavo.calls import lingering_call
from octavo.calls.lingering_call import LingeringCall
from tests.waiting import until


class FakeCall:
    """Gives 0 and 1, waits until it is told to go on, and fails. As one of grpc.aio it ends with its reader."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.is_waiting = self.is_cancelled = self.has_failed = False

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(2):
            yield number
        self.is_waiting = True
        try:
            await self.goes_on.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self.has_failed = True
        raise OSError("lost")

    def done(self) -> bool:
        return self.is_cancelled or self.has_failed

    def cancel(self) -> None:
        self.is_cancelled = True


async def left_while_it_waits(call: FakeCall) -> None:
    """Reads what there is, and is cancelled in front of what is not there yet."""
    lingering = LingeringCall(call)

    async def read() -> None:
        try:
            assert [await anext(lingering), await anext(lingering)] == [0, 1]
            await anext(lingering)
        finally:
            lingering.cancel()

    reading = asyncio.create_task(read())
    await until(lambda: call.is_waiting)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_call_goes_on_for_a_while_when_its_reader_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering_call, "LEAST_S", 3600.0)
    call = FakeCall()
    await left_while_it_waits(call)
    assert not call.is_cancelled
    lost: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    call.goes_on.set()
    await until(lambda: call.has_failed)
    await asyncio.sleep(0)
    gc.collect()
    assert lost == [], "an error that nobody waits for any more is no news"


async def test_and_ends_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering_call, "LEAST_S", 0.05)
    call = FakeCall()
    await left_while_it_waits(call)
    await until(lambda: call.is_cancelled)
    assert not call.goes_on.is_set()


async def test_one_that_is_older_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering_call, "LEAST_S", 0.0)
    call = FakeCall()
    await left_while_it_waits(call)
    assert call.is_cancelled


@pytest.mark.parametrize("least_s", [0.0, 3600.0])
async def test_its_messages_and_its_error_come_as_they_are(monkeypatch: pytest.MonkeyPatch, least_s: float) -> None:
    monkeypatch.setattr(lingering_call, "LEAST_S", least_s)
    call = FakeCall()
    call.goes_on.set()
    lingering, came = LingeringCall(call), []
    with pytest.raises(OSError, match="lost"):
        async for number in lingering:
            came.append(number)
    lingering.cancel()
    assert came == [0, 1] and not call.is_cancelled, "it has ended by itself"


@pytest.mark.parametrize("least_s", [0.0, 3600.0])
async def test_it_ends_where_the_call_does(monkeypatch: pytest.MonkeyPatch, least_s: float) -> None:
    class Short(FakeCall):
        async def __aiter__(self) -> AsyncIterator[int]:
            yield 7

    monkeypatch.setattr(lingering_call, "LEAST_S", least_s)
    assert [number async for number in LingeringCall(Short())] == [7]
