"""One request's messages by themselves: text, stops, logprobs, times."""

from __future__ import annotations

import time
from typing import Any

import pytest

from protos import inference_pb2 as pb
from scheduler_svc.request_stream import RequestStream
from scheduler_svc.sequence import FinishReason, Sequence, SequenceGroup
from scheduler_svc.tokenizer import Tokenizer
from tests.tiny_models import IM_END, write_byte_tokenizer

NONE, STOP, LENGTH = FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, 400)
    return Tokenizer.from_folder(folder)


class Reader:
    """A stream and everything that came out of it."""

    def __init__(self, tokenizer: Tokenizer, streams: bool = True, **params: Any) -> None:
        self.told: list[Sequence] = []
        self.group = SequenceGroup(
            "request",
            [1, 2],
            pb.SamplingParams(**params),
            max_num_tokens=50,
            arrival_ns=time.monotonic_ns(),
        )
        self.sequence = self.group.sequences[0]
        self.stream = RequestStream(
            self.group, tokenizer, "model", streams=streams, returns_prompt=False, finish_sequence=self.told.append
        )
        self.deltas: list[pb.OutputDelta] = []
        self.last: pb.GenerateResponse | None = None

    def take(self, data: bytes | list[int], reason: FinishReason = NONE, logprob: float | None = None) -> None:
        """Tokens one by one; `reason` goes with the last of them."""
        for position, token_id in enumerate(data, start=1):
            logprobs = None if logprob is None else pb.TokenLogprobs(token=pb.Logprob(logprob=logprob))
            is_last = position == len(data)
            self.keep(self.stream.take(self.sequence, token_id, reason if is_last else NONE, logprobs))

    def keep(self, response: pb.GenerateResponse | None) -> None:
        if response is not None:
            assert self.last is None, "a message after the last"
            self.deltas += response.outputs
            if response.HasField("usage"):
                self.last = response

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def reason(self) -> int:
        return self.deltas[-1].finish_reason


def test_a_stop_string_ends_the_output_and_later_tokens_are_not_shown(tokenizer):
    reader = Reader(tokenizer, stop=["two"])
    reader.take(b"one two")
    assert (reader.text, reader.reason, reader.deltas[-1].matched_stop.text) == ("one ", STOP, "two")
    assert reader.told == [reader.sequence], "the step loop has to hear of it"
    reader.take(b" three")
    assert reader.text == "one " and reader.last is not None
    assert reader.last.usage.completion_tokens == 7


def test_a_stop_string_at_the_last_token_is_not_told_to_a_loop_that_knows(tokenizer):
    reader = Reader(tokenizer, stop=["two"])
    reader.take(b"one two", LENGTH)
    assert (reader.text, reader.reason, reader.told) == ("one ", STOP, [])


def test_a_match_in_text_that_was_held_back_at_the_length_limit_is_a_stop(tokenizer):
    reader = Reader(tokenizer, stop=["\N{REPLACEMENT CHARACTER}"])
    reader.take(b"one \xe6", LENGTH)
    assert (reader.text, reader.reason) == ("one ", STOP)
    assert reader.deltas[-1].matched_stop.text == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("streams", [True, False])
def test_text_that_was_held_back_is_shown_at_the_end(tokenizer, streams):
    reader = Reader(tokenizer, streams, stop=["two"])
    reader.take(b"one t")
    assert reader.text == ("one " if streams else "")
    reader.take(b"w", LENGTH)
    assert (reader.text, reader.reason) == ("one tw", LENGTH)
    assert not reader.deltas[-1].HasField("matched_stop")


def test_text_that_was_held_back_is_shown_after_an_abort(tokenizer):
    reader = Reader(tokenizer, stop=["two"])
    reader.take(b"one tw\xe6")
    reader.keep(reader.stream.end(FinishReason.ABORT, ""))
    assert (reader.text, reader.reason) == ("one tw\N{REPLACEMENT CHARACTER}", FinishReason.ABORT)


def test_a_stop_token_is_named_and_has_no_text(tokenizer):
    reader = Reader(tokenizer)
    reader.take([*b"one", IM_END], STOP)
    assert (reader.text, reader.reason, reader.deltas[-1].matched_stop.token_id) == ("one", STOP, IM_END)
    assert reader.told == []


def test_logprobs_add_up(tokenizer):
    reader = Reader(tokenizer, logprobs=0)
    reader.take(b"one", LENGTH, logprob=-0.5)
    assert reader.deltas[-1].cumulative_logprob == pytest.approx(-1.5)
    assert [len(delta.logprobs) for delta in reader.deltas] == [1, 1, 1]


def test_times_count_from_arrival(tokenizer):
    reader = Reader(tokenizer)
    reader.group.first_scheduled_ns = reader.group.arrival_ns + 1000
    reader.take(b"one", LENGTH)
    assert reader.last is not None
    timings = reader.last.timings
    assert timings.queue_ns == 1000
    assert 0 < timings.first_token_ns <= timings.total_ns


def test_a_failure_ends_the_output_without_a_look_at_its_text(tokenizer):
    reader = Reader(tokenizer, stop=["two"])
    reader.take(b"one tw")
    reader.keep(reader.stream.fail())
    assert (reader.text, reader.reason, reader.told) == ("one ", FinishReason.ERROR, [reader.sequence])
    assert reader.deltas[-1].error.code == "INTERNAL"
