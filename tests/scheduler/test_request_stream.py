"""One request's messages by themselves: text, stops, logprobs, times."""

from __future__ import annotations

import time
from collections.abc import Sequence as AbstractSequence
from typing import Any

import numpy as np
import pytest

from protos import inference_pb2 as pb
from protos import worker_pb2
from scheduler_svc.core.sequences.beam_search import BeamHypothesis, BeamSearch
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.engine.messages.logprob_columns import LogprobColumns
from scheduler_svc.output import prompt_logprobs, request_stream
from scheduler_svc.output.request_stream import RequestStream
from scheduler_svc.output.resumed_outputs import ResumedOutput
from scheduler_svc.text.tokenizer import Tokenizer
from tests.tiny_models import IM_END, write_byte_tokenizer

NONE, STOP, LENGTH = FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, 400)
    return Tokenizer.from_folder(folder)


class Reader:
    """A stream and everything that came out of it; `is_behind` reads nothing until `read` is called."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        streams: bool = True,
        *,
        is_behind: bool = False,
        num_outputs: int = 1,
        best_of: int | None = None,
        beam_search: BeamSearch | None = None,
        prompt: AbstractSequence[int] = (1, 2),
        **params: Any,
    ) -> None:
        self.told: list[Sequence] = []
        self.group = SequenceGroup(
            "request",
            prompt,
            pb.SamplingParams(**params),
            max_num_tokens=50,
            arrival_ns=time.monotonic_ns(),
            num_outputs=num_outputs,
            best_of=best_of,
            beam_search=beam_search,
        )
        self.sequence = self.group.sequences[0]
        self.stream = RequestStream(
            self.group, tokenizer, "model", streams=streams, returns_prompt=False, finish_sequence=self.told.append
        )
        self.is_behind = is_behind
        self.messages: list[pb.GenerateResponse] = []
        self.last: pb.GenerateResponse | None = None

    def take(
        self, data: bytes | list[int], reason: FinishReason = NONE, logprob: float | None = None, index: int = 0
    ) -> None:
        """Tokens one by one; `reason` goes with the last of them."""
        sequence = self.group.sequences[index]
        for position, token_id in enumerate(data, start=1):
            if logprob is not None:
                self.stream.take_logprobs(sequence, one_logprob(token_id, logprob), 0)
            is_last = position == len(data)
            self.stream.take(sequence, token_id, reason if is_last else NONE, came_ns=self.group.arrival_ns + position)
            if not self.is_behind:
                self.read()

    def read(self) -> None:
        self.read_one()
        assert self.stream.next_message() is None, "nothing is new"

    def read_one(self) -> None:
        if (response := self.stream.next_message()) is not None:
            assert self.last is None, "a message after the last"
            self.messages.append(response)
            if response.HasField("usage"):
                self.last = response

    @property
    def deltas(self) -> list[pb.OutputDelta]:
        return [delta for message in self.messages for delta in message.outputs]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def reason(self) -> int:
        return self.deltas[-1].finish_reason


def one_logprob(token_id: int, logprob: float) -> LogprobColumns:
    return LogprobColumns(
        worker_pb2.SequenceOutputs(
            token_ids_i32=np.array([token_id], "<i4").tobytes(),
            logprobs_f32=np.array([logprob], "<f4").tobytes(),
            ranks_u32=np.array([1], "<u4").tobytes(),
        )
    )


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


def test_an_abort_stays_one_though_its_last_half_character_spells_a_stop_string(tokenizer):
    reader = Reader(tokenizer, stop=["\N{REPLACEMENT CHARACTER}"])
    reader.take(b"one \xe6")
    reader.stream.end(FinishReason.ABORT, "")
    reader.read()
    assert (reader.text, reader.reason) == ("one ", FinishReason.ABORT)
    assert not reader.deltas[-1].HasField("matched_stop")


def test_text_that_was_held_back_is_shown_after_an_abort(tokenizer):
    reader = Reader(tokenizer, stop=["two"])
    reader.take(b"one tw\xe6")
    reader.stream.end(FinishReason.ABORT, "")
    reader.read()
    assert (reader.text, reader.reason) == ("one tw\N{REPLACEMENT CHARACTER}", FinishReason.ABORT)


def test_a_stop_token_has_no_text_and_is_named_unless_it_is_only_the_model_s_own_end(tokenizer):
    for stop_token_ids in ([], [ord("x")], [ord("x"), IM_END]):
        reader = Reader(tokenizer, stop_token_ids=stop_token_ids)
        reader.take([*b"one", IM_END], STOP)
        assert (reader.text, reader.reason, reader.told) == ("one", STOP, [])
        last = reader.deltas[-1]
        assert (last.matched_stop.token_id if last.HasField("matched_stop") else None) == (
            IM_END if IM_END in stop_token_ids else None
        )


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
    assert timings.first_token_ns == 1 and timings.total_ns >= 3
    assert reader.stream.token_times_ns == [], "who reads along sees when tokens come"


def test_a_failure_ends_the_output_without_a_look_at_its_text(tokenizer):
    reader = Reader(tokenizer, stop=["two"])
    reader.take(b"one tw")
    reader.stream.fail()
    reader.read()
    assert (reader.text, reader.reason, reader.told) == ("one ", FinishReason.ERROR, [reader.sequence])
    assert reader.deltas[-1].error.code == "INTERNAL"


@pytest.mark.parametrize(
    ("streams", "bound"), [(True, "MAX_ENTRIES_A_MESSAGE"), (False, "MAX_ENTRIES_AT_ONCE")], ids=["streams", "waits"]
)
@pytest.mark.parametrize("stop", [[], ["\N{REPLACEMENT CHARACTER}x"]], ids=["plain", "held back for a stop string"])
def test_a_reader_far_behind_finds_messages_of_a_bounded_size(tokenizer, monkeypatch, stop, streams, bound):
    """Also one that wants all in one piece: what is larger than a server sends would be lost."""
    monkeypatch.setattr(request_stream, bound, 12)
    tokens = "naïve 漢字 👍🏽 fin".encode()[:-1] + b"\xe6"
    options = {"num_outputs": 2, "n": 2, "logprobs": 2, "stop": stop}
    prompt, behind = Reader(tokenizer, **options), Reader(tokenizer, streams, is_behind=True, **options)
    for reader in (prompt, behind):
        for index in (0, 1):
            reader.take(list(tokens), LENGTH, logprob=-0.5, index=index)
    while behind.stream.is_ready:
        behind.read_one()
    for message in behind.messages:
        assert 0 < sum(len(delta.token_ids) for delta in message.outputs) <= 4, "a token has two alternatives"
        assert all(len(delta.token_ids) == len(delta.logprobs) > 0 for delta in message.outputs)
    assert len(behind.messages) == 2 * len(tokens) // 4
    for index in (0, 1):
        theirs, ours = ([delta for delta in reader.deltas if delta.index == index] for reader in (prompt, behind))
        assert "".join(delta.text for delta in ours) == "".join(delta.text for delta in theirs)
        assert [token_id for delta in ours for token_id in delta.token_ids] == list(tokens)
        assert [delta.finish_reason for delta in ours if delta.finish_reason] == [pb.FINISH_REASON_LENGTH]
        assert ours[-1].finish_reason
    assert behind.last is behind.messages[-1]


def test_a_reader_that_is_behind_finds_one_message_with_the_same_text(tokenizer):
    data = [*"a 世界 b".encode(), 300, 310]  # characters over several tokens, and tokens of half a character
    prompt, behind = Reader(tokenizer), Reader(tokenizer, is_behind=True)
    for reader in (prompt, behind):
        reader.take(data, LENGTH)
    behind.read()
    assert len(prompt.messages) == len(data) and len(behind.messages) == 1
    assert behind.text == prompt.text
    assert behind.deltas[0].token_ids == [token for delta in prompt.deltas for token in delta.token_ids] == data
    assert behind.last is not None and behind.last.usage.completion_tokens == len(data)


def test_a_stop_string_is_found_although_nobody_reads(tokenizer):
    reader = Reader(tokenizer, is_behind=True, stop=["two"])
    reader.take(b"one two three")
    assert reader.told == [reader.sequence], "the step loop hears of it at once"
    reader.read()
    assert (reader.text, bytes(reader.deltas[0].token_ids)) == ("one ", b"one two")


def test_outputs_stream_side_by_side_and_each_ends_once(tokenizer):
    reader = Reader(tokenizer, num_outputs=2)
    reader.take(b"a", index=0)
    reader.take(b"b", LENGTH, index=1)
    reader.take(b"c", LENGTH, index=0)
    assert [(delta.index, delta.text, delta.finish_reason) for delta in reader.deltas] == [
        (0, "a", NONE),
        (1, "b", LENGTH),
        (0, "c", LENGTH),
    ]
    assert reader.last is not None and reader.last.usage.completion_tokens == 3


def test_best_of_gives_the_most_likely_in_their_order_at_the_end(tokenizer):
    reader = Reader(tokenizer, num_outputs=2, best_of=3)
    for index, logprob in enumerate((-1.0, -3.0, -0.5)):
        assert not reader.messages
        reader.take(b"abc"[index : index + 1] * 2, LENGTH, logprob, index)
    assert [(delta.index, delta.text) for delta in reader.deltas] == [(0, "cc"), (1, "aa")]
    assert not reader.deltas[0].logprobs, "nobody asked"
    assert [delta.cumulative_logprob for delta in reader.deltas] == [-1.0, -2.0], "what they were chosen by"
    assert reader.last is not None and reader.last.usage.completion_tokens == 6, "what was drawn for all three"


def test_of_best_of_what_ended_well_comes_first(tokenizer):
    reader = Reader(tokenizer, num_outputs=1, best_of=2)
    reader.take(b"ab", LENGTH, -9.0, index=1)
    reader.take(b"c", NONE, -0.1, index=0)
    reader.stream.end(FinishReason.ABORT, "")
    reader.read()
    assert [(delta.index, delta.text, delta.finish_reason) for delta in reader.deltas] == [(0, "ab", LENGTH)]


def beams(tokenizer: Tokenizer, hypotheses: list[BeamHypothesis], **params: Any) -> Reader:
    search = BeamSearch(width=3, num_returned=2, num_prompt_tokens=2, max_num_tokens=9)
    reader = Reader(tokenizer, num_outputs=2, best_of=3, beam_search=search, **params)
    reader.stream.take_beams(hypotheses)
    reader.read()
    return reader


HYPOTHESES = [
    BeamHypothesis([*b"one", IM_END], -0.5, -2.0, STOP, [-0.5] * 4, [1, 2, 1, 1]),
    BeamHypothesis([*b"two"], -1.0, -3.0, LENGTH, [-1.0] * 3, [1, 1, 3]),
    BeamHypothesis([*b"six"], -2.0, -6.0, LENGTH, [-2.0] * 3, [1, 1, 1]),
]


def test_beams_come_ranked_with_their_scores(tokenizer):
    reader = beams(tokenizer, HYPOTHESES)
    assert [(d.index, d.text, d.finish_reason, d.score) for d in reader.deltas] == [
        (0, "one", STOP, -0.5),
        (1, "two", LENGTH, -1.0),
    ]
    assert not reader.deltas[0].HasField("matched_stop") and not reader.deltas[0].logprobs
    assert [delta.cumulative_logprob for delta in reader.deltas] == [-2.0, -3.0]
    assert reader.last is not None and reader.last.usage.completion_tokens == 10, "of all hypotheses"


def test_beams_bring_logprobs_and_ranks_to_those_who_asked(tokenizer):
    reader = beams(tokenizer, HYPOTHESES, logprobs=0)
    assert [entry.token.rank for entry in reader.deltas[0].logprobs] == [1, 2, 1, 1]
    assert [delta.cumulative_logprob for delta in reader.deltas] == [-2.0, -3.0]


def test_a_stop_token_that_ended_a_beam_is_named(tokenizer):
    first, second = beams(tokenizer, HYPOTHESES, stop_token_ids=[IM_END]).deltas
    assert first.matched_stop.token_id == IM_END and not second.HasField("matched_stop")


def test_a_stop_string_cuts_a_beam_at_the_end(tokenizer):
    reader = beams(tokenizer, HYPOTHESES, stop=["w"])
    second = reader.deltas[1]
    assert (second.text, bytes(second.token_ids), second.finish_reason) == ("t", b"tw", STOP)
    assert second.matched_stop.text == "w" and second.score == -1.0, "the score is that of the whole hypothesis"


def test_beams_that_are_missing_end_with_an_error(tokenizer):
    assert [delta.finish_reason for delta in beams(tokenizer, HYPOTHESES[:1]).deltas] == [STOP, FinishReason.ERROR]


def test_cached_tokens_are_reported(tokenizer):
    reader = Reader(tokenizer)
    reader.group.num_cached_tokens = 2
    reader.take(b"x", LENGTH)
    assert reader.last is not None and reader.last.usage.cached_tokens == 2


def of_prompt(*token_ids: int) -> LogprobColumns:
    return LogprobColumns(
        worker_pb2.SequenceOutputs(
            token_ids_i32=np.array(token_ids, "<i4").tobytes(),
            logprobs_f32=np.full(len(token_ids), -0.5, "<f4").tobytes(),
            ranks_u32=np.ones(len(token_ids), "<u4").tobytes(),
        )
    )


@pytest.mark.parametrize("streams", [True, False])
def test_logprobs_of_the_prompt_come_once_with_the_first_token(tokenizer, streams):
    reader = Reader(tokenizer, streams, prompt_logprobs=0)
    reader.stream.take_prompt_logprobs(of_prompt(2))
    assert not reader.stream.make_prompt_logprobs()
    reader.read()
    assert not reader.messages, "no message of their own"
    reader.take(b"abc", LENGTH)
    told = [message for message in reader.messages if message.prompt_logprobs]
    assert told == reader.messages[:1] and reader.text == "abc"
    first, second = told[0].prompt_logprobs
    assert not first.HasField("token")
    assert (second.token.token_id, second.token.logprob, second.token.rank) == (2, -0.5, 1)


@pytest.mark.parametrize("ends", [True, False])
def test_there_is_nothing_to_read_before_the_logprobs_of_the_prompt_are_made(tokenizer, monkeypatch, ends):
    monkeypatch.setattr(prompt_logprobs, "LOGPROBS_A_PIECE", 2)
    reader = Reader(tokenizer, prompt_logprobs=0, prompt=[1, *range(2, 9)])
    for token_ids in ((2, 3, 4), (5, 6, 7, 8)):
        reader.stream.take_prompt_logprobs(of_prompt(*token_ids))
    reader.take(b"a", LENGTH if ends else NONE)
    num_pieces = 1
    while reader.stream.make_prompt_logprobs():
        num_pieces += 1
        reader.read()
        assert not reader.messages and not reader.stream.is_ready
    reader.read()
    assert num_pieces == 4 and reader.text == "a"
    assert [each.token.token_id for each in reader.messages[0].prompt_logprobs] == [0, *range(2, 9)]


def test_where_a_prompt_is_computed_anew_its_logprobs_are_those_of_the_last_time(tokenizer):
    reader = Reader(tokenizer, prompt_logprobs=0)
    reader.stream.take_prompt_logprobs(of_prompt(3))
    reader.stream.begins_anew_elsewhere()
    assert not reader.stream.make_prompt_logprobs()
    reader.stream.take_prompt_logprobs(of_prompt(2))
    reader.take(b"a", LENGTH)
    assert not reader.stream.make_prompt_logprobs()
    reader.read()
    assert [each.token.token_id for each in reader.messages[0].prompt_logprobs] == [0, 2]


def test_logprobs_of_a_prompt_that_was_not_computed_whole_are_not_told(tokenizer):
    reader = Reader(tokenizer, prompt_logprobs=0)
    reader.stream.end(FinishReason.ABORT, "")
    reader.read()
    assert reader.reason == FinishReason.ABORT and not reader.messages[0].prompt_logprobs


def test_a_token_before_the_logprobs_of_its_prompt_is_a_fault(tokenizer):
    reader = Reader(tokenizer, prompt_logprobs=0)
    with pytest.raises(ValueError, match="1 logprobs of the prompt"):
        reader.take(b"a")


def test_who_resumes_is_not_told_the_logprobs_of_the_prompt_again(tokenizer):
    reader = Reader(tokenizer, prompt_logprobs=0)
    reader.stream.resume([ResumedOutput([97], NONE, False)])
    for _ in reader.stream.catch_up():
        pass
    reader.take(b"b", LENGTH)
    assert reader.text == "b" and not reader.messages[0].prompt_logprobs


def test_minus_one_brings_every_logprob_there_is():
    columns = LogprobColumns(
        worker_pb2.SequenceOutputs(
            token_ids_i32=np.array([1, 0], "<i4").tobytes(),
            logprobs_f32=np.zeros(2, "<f4").tobytes(),
            ranks_u32=np.ones(2, "<u4").tobytes(),
            top_counts_u32=np.array([2, 3], "<u4").tobytes(),
            top_token_ids_i32=np.array([1, 0, 0, 2, 1], "<i4").tobytes(),
            top_logprobs_f32=np.zeros(5, "<f4").tobytes(),
        )
    )
    assert [top.token_id for top in columns.at(1, -1, str).top] == [0, 2, 1]
    assert [top.token_id for top in columns.at(1, 2, str).top] == [0, 2]
