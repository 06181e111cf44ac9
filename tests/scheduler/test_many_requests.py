"""Many requests over one call: each answered, held, cancelled and refused by itself, and what is new in one message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as pb
from scheduler_svc.api import allowance, many_requests
from scheduler_svc.api.inference_service import InferenceService
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.output.mailboxes import Mailboxes
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.frontend import Frontend
from scheduler_svc.requests.request_checks import TextSettings
from scheduler_svc.requests.request_text import RequestText
from tests.scheduler.scripted_core import InlineTexts, ScriptedCore
from tests.scheduler.tiny_served_model import tiny_served_model

Told = dict[int, list[pb.GenerateManyResponse.Part]]


class Call:
    """A client's side of one call, and the context of it."""

    def __init__(self, core: ScriptedCore, service: InferenceService) -> None:
        self.core, self.service = core, service
        self.messages: list[pb.GenerateManyResponse] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.status: tuple[grpc.StatusCode, str] | None = None
        self._requests: asyncio.Queue[pb.GenerateManyRequest | None] = asyncio.Queue()
        self.task = asyncio.create_task(service.GenerateMany(self._read(), self))

    async def _read(self) -> AsyncIterator[pb.GenerateManyRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def write(self, message: pb.GenerateManyResponse) -> None:
        await self.may_write.wait()
        self.messages.append(message)

    async def abort(self, code: grpc.StatusCode, message: str, trailing_metadata: Any = ()) -> None:
        self.status = code, message
        raise grpc.aio.AbortError

    def send(self, key: int, **kind: Any) -> None:
        self._requests.put_nowait(pb.GenerateManyRequest(key=key, **kind))

    def ask(self, key: int, name: str, *, stream: bool = True, **params: Any) -> None:
        sampling = pb.SamplingParams(seed=1, **{"max_tokens": 99, **params})
        request = pb.GenerateRequest(request_id=name, prompt="abc", stream=stream, sampling_params=sampling)
        self.send(key, request=request.SerializeToString())

    def half_close(self) -> None:
        self._requests.put_nowait(None)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0)

    async def begun(self, *names: str) -> None:
        await self.until(lambda: set(names) <= set(self.core.groups) and self.told_all_admissions(len(names)))

    def told_all_admissions(self, number: int) -> bool:
        return sum(part.response.HasField("admission") for message in self.messages for part in message.parts) >= number

    def told(self) -> Told:
        found: Told = {}
        for message in self.messages:
            for part in message.parts:
                found.setdefault(part.key, []).append(part)
        return found

    def texts(self, key: int) -> list[str]:
        parts = [part for part in self.told().get(key, []) if part.response.outputs]
        return [part.response.outputs[0].text for part in parts]


@pytest.fixture
async def call(tmp_path: Any) -> AsyncIterator[Call]:
    model, core = tiny_served_model(tmp_path), ScriptedCore()
    core.boxes = Mailboxes(asyncio.get_running_loop())
    frontend = Frontend(lambda: ServedModels.of(model), lambda _: None)
    any_texts: Any = InlineTexts(RequestText(model, TextSettings()))
    any_core: Any = core
    one = Call(core, InferenceService(frontend, any_texts, any_core, core.boxes, Admission(100, 1 << 24)))
    yield one
    one.task.cancel()
    await asyncio.wait([one.task])


async def test_what_is_new_of_all_of_them_comes_in_one_message(call: Call) -> None:
    for key in (1, 2, 3):
        call.ask(key, f"r{key}")
    await call.begun("r1", "r2", "r3")
    num_messages = len(call.messages)
    call.core.say({"r1": "x", "r2": "y", "r3": "z"})
    await call.until(lambda: len(call.messages) > num_messages)
    (message,) = call.messages[num_messages:]
    assert [(part.key, part.response.outputs[0].text) for part in message.parts] == [(1, "x"), (2, "y"), (3, "z")]
    call.core.say({"r2": "!"}, FinishReason.LENGTH)
    await call.until(lambda: call.core.forgotten == ["r2"])
    *_, last = call.told()[2]
    assert last.response.usage.completion_tokens == 2 and last.response.outputs[0].finish_reason == FinishReason.LENGTH
    call.core.say({"r1": "v", "r3": "w"})
    await call.until(lambda: call.texts(3) == ["z", "w"])
    assert call.texts(1) == ["x", "v"] and call.core.abandoned == []


async def test_a_refusal_is_of_one_request(call: Call) -> None:
    call.ask(1, "r1")
    call.ask(2, "full")
    call.ask(3, "r3", temperature=9.0)
    call.send(4, request=b"\xff\xff")
    await call.begun("r1")
    await call.until(lambda: len(call.told()) == 4)
    refused = {key: call.told()[key][0].ending for key in (2, 3, 4)}
    codes = {key: ending.code for key, ending in refused.items()}
    invalid = grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert codes == {2: grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], 3: invalid, 4: invalid}
    assert "temperature" in refused[3].message and b"RetryInfo" in refused[2].details
    call.ask(5, "r5")
    await call.begun("r1", "r5")
    call.core.say({"r1": "x", "r5": "y"}, FinishReason.LENGTH)
    await call.until(lambda: len(call.core.forgotten) == 2)
    assert call.status is None


async def test_who_holds_gets_what_came_meanwhile_in_one_message(call: Call) -> None:
    call.ask(1, "r1")
    call.ask(2, "r2")
    await call.begun("r1", "r2")
    call.send(1, hold=True)
    for letter in "abc":
        call.core.say({"r1": letter, "r2": letter})
        await call.until(lambda letter=letter: call.texts(2)[-1:] == [letter])  # type: ignore[misc]  # of mypy's own
    assert call.texts(1) == []
    call.send(1, hold=False)
    await call.until(lambda: call.texts(1))
    assert call.texts(1) == ["abc"]
    call.core.say({"r1": "d"})
    await call.until(lambda: call.texts(1) == ["abc", "d"])


async def test_while_nobody_reads_nothing_piles_up(call: Call) -> None:
    call.ask(1, "r1")
    call.ask(2, "r2")
    await call.begun("r1", "r2")
    call.may_write.clear()
    num_messages = len(call.messages)
    for letter in "abcdef":
        call.core.say({"r1": letter, "r2": letter})
        for _ in range(10):
            await asyncio.sleep(0)
    call.may_write.set()
    await call.until(lambda: len(call.messages) == num_messages + 2)
    assert call.texts(1) == call.texts(2) == ["a", "bcdef"]


async def test_who_cancels_ends_one_request_and_hears_no_more_of_it(call: Call) -> None:
    call.ask(1, "r1")
    call.ask(2, "r2")
    await call.begun("r1", "r2")
    call.send(1, cancel=True)
    call.send(77, cancel=True)  # has ended, for all that a client knows
    call.send(77, hold=True)
    await call.until(lambda: call.core.abandoned == ["r1"])
    num_told = len(call.told()[1])
    call.core.say({"r1": "x", "r2": "y"})
    await call.until(lambda: call.texts(2) == ["y"])
    assert len(call.told()[1]) == num_told
    assert call.core.abandoned == ["r1"]


async def test_all_end_with_a_client_that_goes(call: Call) -> None:
    call.ask(1, "r1")
    call.ask(2, "r2")
    await call.begun("r1", "r2")
    assert not call.service.is_idle
    call.task.cancel()
    await call.until(lambda: sorted(call.core.abandoned) == ["r1", "r2"])
    await call.until(lambda: call.service.is_idle)


async def test_the_call_ends_when_its_client_sends_no_more_and_all_have_ended(call: Call) -> None:
    call.ask(1, "r1")
    call.half_close()
    await call.begun("r1")
    assert not call.task.done()
    call.core.say({"r1": "x"}, FinishReason.LENGTH)
    await call.until(call.task.done)
    assert call.texts(1) == ["x"] and call.status is None


async def test_a_call_without_requests_ends(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_requests, "IDLE_S", 0.01)
    call.ask(1, "r1")
    await call.begun("r1")
    await asyncio.sleep(0.03)
    assert not call.task.done()
    call.core.say({"r1": "x"}, FinishReason.LENGTH)
    await asyncio.wait([call.task], timeout=20)
    assert call.task.done() and call.status is None


async def test_a_call_does_not_end_before_a_request_that_has_nothing_to_say_for_long(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began while the call waited for one, and wakes nobody before its end."""
    monkeypatch.setattr(many_requests, "IDLE_S", 0.05)
    other = Call(call.core, call.service)
    other.ask(1, "r1", stream=False)
    await other.until(lambda: "r1" in call.core.groups)
    await asyncio.sleep(0.2)
    assert not other.task.done() and not call.core.abandoned
    call.core.say({"r1": "x"}, FinishReason.LENGTH)
    await other.until(lambda: other.texts(1) == ["x"])
    await asyncio.wait([other.task], timeout=20)
    assert other.task.done() and other.status is None


async def test_a_server_that_drains_lets_live_requests_end_and_refuses_others(call: Call) -> None:
    call.ask(1, "r1")
    await call.begun("r1")
    call.service.drain()
    call.ask(2, "r2")
    await call.until(lambda: 2 in call.told())
    assert call.told()[2][0].ending.code == grpc.StatusCode.UNAVAILABLE.value[0] and not call.task.done()
    call.core.say({"r1": "x"}, FinishReason.LENGTH)
    await call.until(call.task.done)
    assert call.texts(1) == ["x"]


async def test_a_server_that_breaks_off_says_so_to_each(call: Call) -> None:
    call.ask(1, "r1")
    call.ask(2, "r2")
    await call.begun("r1", "r2")
    call.service.drain()
    call.service.break_off()
    await call.until(call.task.done)
    for key in (1, 2):
        ending = call.told()[key][-1].ending
        assert ending.code == grpc.StatusCode.UNAVAILABLE.value[0] and "resume" in ending.message
    assert sorted(call.core.abandoned) == ["r1", "r2"]


@pytest.mark.parametrize("wrong", [{}, {"key": 1, "request": b""}])
async def test_what_is_no_request_ends_the_call(call: Call, wrong: dict[str, Any]) -> None:
    call.ask(1, "r1")
    await call.begun("r1")
    call.send(**{"key": 5, **wrong})
    await call.until(call.task.done)
    assert call.status is not None and call.status[0] is grpc.StatusCode.INVALID_ARGUMENT
    await call.until(lambda: call.core.abandoned == ["r1"])


async def test_a_fault_in_one_output_is_of_that_request(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    call.ask(1, "r1")
    call.ask(2, "r2")
    await call.begun("r1", "r2")

    def fail() -> None:
        raise KeyError("of ours")

    monkeypatch.setattr(call.core.groups["r1"].output, "next_message", fail)
    call.core.say({"r1": "x", "r2": "y"})
    await call.until(lambda: call.texts(2) == ["y"] and call.told()[1][-1].HasField("ending"))
    assert call.told()[1][-1].ending.code == grpc.StatusCode.INTERNAL.value[0]
    assert call.core.abandoned == ["r1"] and not call.task.done()


async def test_live_requests_and_the_size_of_a_message_are_bounded(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_requests, "MAX_REQUESTS", 5)
    monkeypatch.setattr(many_requests, "MAX_PARTS_A_MESSAGE", 2)
    names = [f"r{key}" for key in range(6)]
    for key, name in enumerate(names):
        call.ask(1 + key, name)
    await call.begun(*names[:5])
    await call.until(lambda: 6 in call.told())
    assert call.told()[6][0].ending.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    num_messages = len(call.messages)
    call.core.say(dict.fromkeys(names[:5], "x"))
    await call.until(lambda: len(call.messages) == num_messages + 3)
    assert [len(message.parts) for message in call.messages[num_messages:]] == [2, 2, 1]
    monkeypatch.setattr(many_requests, "MAX_BYTES_A_MESSAGE", 1)
    call.core.say(dict.fromkeys(names[:5], "y"))
    await call.until(lambda: len(call.messages) == num_messages + 8)


async def test_where_requests_are_begun_and_given_up_too_often_new_ones_are_refused_and_no_other_is_lost(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowance, "AT_ONCE", 2)
    monkeypatch.setattr(allowance, "PER_S", 0)
    monkeypatch.setattr(many_requests, "QUICK_S", 3600.0)
    call.ask(1, "stays")
    await call.begun("stays")
    for key in (2, 3):
        call.ask(key, f"r{key}")
        call.send(key, cancel=True)
    call.ask(4, "late")
    await call.until(lambda: 4 in call.told())
    assert call.told()[4][0].ending.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    monkeypatch.setattr(allowance, "PER_S", 1_000_000)
    call.ask(5, "later")
    await call.begun("later")
    call.core.say({"stays": "x"})
    await call.until(lambda: call.texts(1) == ["x"])


async def test_what_a_client_sends_and_does_not_read_the_answers_of_is_left_unread(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of its messages would leave something in memory."""
    monkeypatch.setattr(many_requests, "MAX_NEWS", 20)
    monkeypatch.setattr(many_requests, "MAX_REQUESTS", 0)
    call.may_write.clear()
    for key in range(1, 501):
        call.ask(key, f"r{key}")
    await call.until(lambda: call.service._shared_calls)
    (many,) = call.service._shared_calls
    await call.until(lambda: len(many._news) == 20)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert len(many._news) == 20 and call._requests.qsize() > 300
    call.may_write.set()
    await call.until(lambda: len(call.told()) == 500)
