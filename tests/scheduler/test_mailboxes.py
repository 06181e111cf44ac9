"""Who writes when: readers that are behind, turns, and the time between two messages of a stream."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import scheduler_svc.output.mailboxes
from protos import inference_pb2 as pb
from protos import worker_pb2
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.output import prompt_logprobs
from scheduler_svc.output.mailboxes import WRITES_AT_ONCE, Mailboxes, Pace
from scheduler_svc.output.request_stream import RequestStream
from scheduler_svc.text.tokenizer import Tokenizer
from tests.tiny_models import write_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, 400)
    return Tokenizer.from_folder(folder)


def stream(tokenizer: Tokenizer, num_tokens: int = 1, params: pb.SamplingParams | None = None) -> RequestStream:
    prompt = [1] * num_tokens
    group = SequenceGroup("request", prompt, params or pb.SamplingParams(), max_num_tokens=20_000, arrival_ns=0)
    group.output = RequestStream(
        group, tokenizer, "model", streams=True, returns_prompt=False, finish_sequence=lambda sequence: None
    )
    return group.output


def say(mailboxes: Mailboxes, text: bytes, *streams: RequestStream, reason: FinishReason = FinishReason.NONE) -> None:
    """An answer with the same tokens for all of them."""

    def take() -> list[RequestStream]:
        for each in streams:
            for token_id in text:
                each.take(each.group.sequences[0], token_id, reason, came_ns=1)
        return list(streams)

    mailboxes.ring(take)


async def test_what_came_while_nobody_read_is_one_message(tokenizer):
    mailboxes, one = Mailboxes(asyncio.get_running_loop()), stream(tokenizer)
    box = mailboxes.open(one)
    for text in (b"a", b"b", b"c"):
        say(mailboxes, text, one)
    assert (await box.receive()).outputs[0].text == "abc"


async def test_a_reader_that_waits_is_woken(tokenizer):
    mailboxes, one = Mailboxes(asyncio.get_running_loop()), stream(tokenizer)
    box = mailboxes.open(one)
    waiting = asyncio.create_task(box.receive())
    await asyncio.sleep(0)
    assert not waiting.done()
    say(mailboxes, b"a", one)
    assert (await waiting).outputs[0].text == "a"


async def test_a_reader_that_left_is_passed_over(tokenizer):
    mailboxes, gone, other = Mailboxes(asyncio.get_running_loop()), stream(tokenizer), stream(tokenizer)
    waiting, box = asyncio.create_task(mailboxes.open(gone).receive()), mailboxes.open(other)
    await asyncio.sleep(0)
    waiting.cancel()
    say(mailboxes, b"a", gone, other)
    assert (await box.receive()).outputs[0].text == "a"


class Readers:
    """Coroutines that each take one message, and go on writing it until they are let go."""

    def __init__(self, mailboxes: Mailboxes, streams: list[RequestStream]) -> None:
        self.writing: list[int] = []
        self._may_go_on = [asyncio.Event() for _ in streams]
        self._boxes = [mailboxes.open(each) for each in streams]
        self.tasks = [asyncio.create_task(self._read(number)) for number in range(len(streams))]

    async def _read(self, number: int) -> None:
        await self._boxes[number].receive()
        self.writing.append(number)
        await self._may_go_on[number].wait()
        await self._boxes[number].receive()

    async def let_go(self, number: int) -> None:
        self._may_go_on[number].set()
        await rounds()

    async def leave(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def rounds() -> None:
    """As many rounds of the loop as anything here takes."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def endless_turns(monkeypatch) -> None:
    monkeypatch.setattr(scheduler_svc.output.mailboxes, "LONGEST_TURN_S", 3600.0)


async def test_only_so_many_write_at_once_and_the_others_follow_in_order(tokenizer, endless_turns):
    mailboxes = Mailboxes(asyncio.get_running_loop())
    streams = [stream(tokenizer) for _ in range(WRITES_AT_ONCE + 2)]
    readers = Readers(mailboxes, streams)
    await rounds()
    say(mailboxes, b"a", *streams)
    await rounds()
    assert readers.writing == list(range(WRITES_AT_ONCE))
    await readers.let_go(3)
    assert readers.writing[WRITES_AT_ONCE:] == [WRITES_AT_ONCE]
    mailboxes.close(streams[5])
    await rounds()
    assert readers.writing[WRITES_AT_ONCE:] == [WRITES_AT_ONCE, WRITES_AT_ONCE + 1], "who is gone has no turn"
    await readers.leave()


async def test_clients_that_do_not_read_keep_nobody_from_writing(tokenizer, monkeypatch):
    monkeypatch.setattr(scheduler_svc.output.mailboxes, "LONGEST_TURN_S", 0.001)
    mailboxes = Mailboxes(asyncio.get_running_loop())
    streams = [stream(tokenizer) for _ in range(3 * WRITES_AT_ONCE)]
    readers = Readers(mailboxes, streams)
    await rounds()
    say(mailboxes, b"a", *streams)
    deadline = time.monotonic() + 10
    while len(readers.writing) < len(streams):
        assert time.monotonic() < deadline, f"{len(readers.writing)} of {len(streams)} had a turn"
        await asyncio.sleep(0.001)
    assert readers.writing == sorted(readers.writing), "first come, first served"
    await readers.leave()


async def test_a_turn_of_one_that_left_meanwhile_is_the_next_ones(tokenizer, endless_turns):
    mailboxes = Mailboxes(asyncio.get_running_loop())
    streams = [stream(tokenizer) for _ in range(WRITES_AT_ONCE + 2)]
    readers = Readers(mailboxes, streams)
    await rounds()
    say(mailboxes, b"a", *streams)
    await rounds()
    readers.tasks[WRITES_AT_ONCE].cancel()
    await rounds()
    await readers.let_go(0)
    assert readers.writing[WRITES_AT_ONCE:] == [WRITES_AT_ONCE + 1]
    await readers.leave()


INTERVAL_S = 3600.0  # nothing below waits for it to pass


async def test_between_two_messages_of_a_stream_others_make_it_wait_but_its_end_does_not(tokenizer):
    mailboxes, one, other = Mailboxes(asyncio.get_running_loop(), INTERVAL_S), stream(tokenizer), stream(tokenizer)
    boxes = mailboxes.open(one), mailboxes.open(other)
    say(mailboxes, b"a", one, other)
    assert [(await box.receive()).outputs[0].text for box in boxes] == ["a", "a"], "a first message never waits"
    waiting = asyncio.create_task(boxes[0].receive())
    say(mailboxes, b"b", one)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    say(mailboxes, b"c", one, reason=FinishReason.LENGTH)
    assert (await waiting).outputs[0].text == "bc"


async def test_a_lone_stream_never_waits(tokenizer):
    mailboxes, one, idle = Mailboxes(asyncio.get_running_loop(), INTERVAL_S), stream(tokenizer), stream(tokenizer)
    box = mailboxes.open(one)
    mailboxes.open(idle)
    for text in (b"a", b"b", b"c"):
        say(mailboxes, text, one)
        assert (await asyncio.wait_for(box.receive(), 5)).outputs[0].text == text.decode()


class Sent:
    """A pace without a loop: `at(who, now_s)` is a message."""

    def __init__(self) -> None:
        self.pace = Pace(1.0)
        self.boxes: dict[str, Any] = {}

    def delay_s(self, who: str, now_s: float) -> float:
        return self.pace.delay_s(self.boxes.setdefault(who, SimpleNamespace(last_sent_s=None)), now_s)

    def at(self, who: str, now_s: float) -> None:
        self.delay_s(who, now_s)
        self.pace.sent(self.boxes[who], now_s)


def test_delays():
    sent = Sent()
    assert sent.delay_s("a", 0.0) == 0.0
    sent.at("a", 0.0)
    assert sent.delay_s("a", 0.1) <= 0.0, "alone"
    sent.at("b", 0.2)
    assert sent.delay_s("a", 0.5) == pytest.approx(0.5), "an interval after its own last"
    assert sent.delay_s("a", 1.1) <= 0.0
    sent.at("a", 1.1)
    assert sent.delay_s("a", 1.15) == pytest.approx(0.95)
    assert sent.delay_s("a", 1.3) <= 0.0, "b is quiet for an interval: alone again"


def of_prompt(num_tokens: int) -> worker_pb2.SequenceOutputs:
    return worker_pb2.SequenceOutputs(
        token_ids_i32=np.arange(num_tokens, dtype="<i4").tobytes(),
        logprobs_f32=np.zeros(num_tokens, "<f4").tobytes(),
        ranks_u32=np.ones(num_tokens, "<u4").tobytes(),
    )


def asking(tokenizer: Tokenizer, num_tokens: int) -> RequestStream:
    return stream(tokenizer, num_tokens + 1, pb.SamplingParams(prompt_logprobs=0))


async def test_logprobs_of_long_prompts_are_made_in_turns_and_hold_up_nobody_else(tokenizer, monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "LOGPROBS_A_PIECE", 10)
    mailboxes = Mailboxes(asyncio.get_running_loop())
    long, longer, plain = asking(tokenizer, 35), asking(tokenizer, 45), stream(tokenizer)
    boxes = [mailboxes.open(each) for each in (long, longer, plain)]
    for each in (long, longer):
        mailboxes.take_prompt_logprobs(each.group, of_prompt(each.group.num_prompt_tokens - 1))
    waiting = [asyncio.create_task(box.receive()) for box in boxes]
    await asyncio.sleep(0)
    say(mailboxes, b"a", long, longer, plain)
    assert [each.is_ready for each in (long, longer, plain)] == [False, False, True]
    for read in asyncio.as_completed(waiting, timeout=20):
        message = await read
        assert message.outputs[0].text == "a"
        told = [each.token.token_id for each in message.prompt_logprobs[1:]]
        assert told == list(range(len(told))) and len(told) in (0, 35, 45)
    assert not mailboxes._behind


async def test_logprobs_of_a_prompt_whose_reader_left_are_made_no_further(tokenizer, monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "LOGPROBS_A_PIECE", 10)
    mailboxes, gone, other = Mailboxes(asyncio.get_running_loop()), asking(tokenizer, 10_000), asking(tokenizer, 20)
    for each in (gone, other):
        mailboxes.open(each)
        mailboxes.take_prompt_logprobs(each.group, of_prompt(each.group.num_prompt_tokens - 1))
    mailboxes.close(gone)
    async with asyncio.timeout(20):
        while mailboxes._behind:
            await asyncio.sleep(0)
    assert gone.make_prompt_logprobs() and not other.make_prompt_logprobs()


async def test_logprobs_of_a_prompt_that_cannot_be_made_end_their_request_alone(tokenizer):
    mailboxes, bad, good = Mailboxes(asyncio.get_running_loop()), asking(tokenizer, 9), asking(tokenizer, 9)
    boxes = [mailboxes.open(each) for each in (bad, good)]
    broken = of_prompt(9)
    broken.ranks_u32 = b""
    mailboxes.take_prompt_logprobs(bad.group, broken)
    mailboxes.take_prompt_logprobs(good.group, of_prompt(9))
    say(mailboxes, b"a", good)
    messages = [await box.receive() for box in boxes]
    assert [message.outputs[0].finish_reason for message in messages] == [FinishReason.ERROR, FinishReason.NONE]
    assert [len(message.prompt_logprobs) for message in messages] == [0, 10]


async def test_a_request_that_ended_before_logprobs_of_its_prompt_failed_ends_with_an_error(tokenizer, monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "LOGPROBS_A_PIECE", 10)
    mailboxes, first, bad = Mailboxes(asyncio.get_running_loop()), asking(tokenizer, 35), asking(tokenizer, 9)
    mailboxes.open(first)
    box = mailboxes.open(bad)
    mailboxes.take_prompt_logprobs(first.group, of_prompt(35))
    broken = of_prompt(9)
    broken.ranks_u32 = b""
    mailboxes.take_prompt_logprobs(bad.group, broken)  # made when its turn comes
    say(mailboxes, b"a", bad, reason=FinishReason.LENGTH)
    async with asyncio.timeout(20):
        message = await box.receive()
    assert message.outputs[0].finish_reason == FinishReason.ERROR
