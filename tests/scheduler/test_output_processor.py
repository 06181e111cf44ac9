"""The output thread's work by itself: what it does with tokens, logprob columns and outputs that raise."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from protos import inference_pb2 as pb
from protos import worker_pb2
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import NewTokens
from scheduler_svc.engine.messages.logprob_columns import LogprobColumns
from scheduler_svc.output.output_processor import Delivery, OutputProcessor
from scheduler_svc.output.output_stream import OutputStream
from scheduler_svc.output.request_stream import RequestStream
from scheduler_svc.text.stop_automaton import StopAutomaton
from scheduler_svc.text.tokenizer import Tokenizer
from tests.tiny_models import write_byte_tokenizer
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, 400)
    return Tokenizer.from_folder(folder)


class Outputs:
    """A processor whose deliveries are kept, and the requests that it serves."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.processor = OutputProcessor(self._deliver)
        self.finished: list[Sequence] = []
        self.messages: dict[str, list[pb.OutputDelta]] = {}
        self.delivery_fails = False
        self._tokenizer = tokenizer

    def _deliver(self, delivery: Delivery) -> None:
        if self.delivery_fails:
            self.delivery_fails = False
            raise RuntimeError("nobody takes it")
        for stream, response in delivery:
            self.messages.setdefault(stream.group.request_id, []).extend(response.outputs)

    def add(self, request_id: str, streams: bool = True, **params: Any) -> SequenceGroup:
        group = SequenceGroup(request_id, [1], pb.SamplingParams(**params), max_num_tokens=50, arrival_ns=0)
        group.output = RequestStream(
            group, self._tokenizer, "model", streams=streams, returns_prompt=False, finish_sequence=self.finished.append
        )
        return group

    def put(self, *groups: SequenceGroup, reason: FinishReason = FinishReason.NONE) -> None:
        """An answer with the token `x` for each group, which may be its last."""
        token_ids = np.full(len(groups), ord("x"), np.int32)
        sequences = np.array([group.sequences[0] for group in groups], object)
        reasons = np.full(len(groups), reason, np.uint8)
        tokens = NewTokens(sequences, token_ids, np.arange(len(groups)), reasons, [])
        outputs = worker_pb2.SequenceOutputs(token_ids_i32=token_ids.tobytes())
        self.processor.put_tokens(tokens, outputs)


def break_text(monkeypatch, group: SequenceGroup) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the text is broken")

    detokenizer = group.output._outputs[0]._detokenizer
    monkeypatch.setattr(detokenizer, "update", fail)
    monkeypatch.setattr(detokenizer, "finish", fail)


def test_an_output_that_raises_ends_with_an_error_and_no_other_does(monkeypatch, tokenizer):
    outputs = Outputs(tokenizer)
    bad, good = outputs.add("bad"), outputs.add("good")
    break_text(monkeypatch, bad)
    outputs.processor.start()
    outputs.put(bad, good)
    outputs.put(bad, good)
    outputs.processor.stop()
    (end,) = outputs.messages["bad"]
    assert end.finish_reason == FinishReason.ERROR and end.error.code == "INTERNAL"
    assert outputs.finished == [bad.sequences[0]]
    assert [delta.text for delta in outputs.messages["good"]] == ["x", "x"]


def test_an_end_that_raises_is_an_error(monkeypatch, tokenizer):
    outputs = Outputs(tokenizer)
    bad = outputs.add("bad")
    break_text(monkeypatch, bad)
    outputs.processor.put_end(bad, FinishReason.ABORT, "", is_invalid=False)
    outputs.processor.run_pending()
    assert [delta.finish_reason for delta in outputs.messages["bad"]] == [FinishReason.ERROR]


def test_a_delivery_that_raises_does_not_end_the_thread(tokenizer):
    outputs = Outputs(tokenizer)
    group = outputs.add("one")
    outputs.delivery_fails = True
    outputs.processor.start()
    outputs.put(group)
    outputs.put(group)
    outputs.processor.stop()
    assert len(outputs.messages["one"]) == 1


def test_tokens_wait_for_one_another_until_there_are_enough_or_one_ends(tokenizer):
    outputs = Outputs(tokenizer)
    outputs.processor.patience = 5
    first, second = outputs.add("first", streams=False), outputs.add("second", streams=False)
    times_ns = first.output.token_times_ns
    outputs.processor.start()
    outputs.put(first, second)
    outputs.put(first, second)
    time.sleep(0.05)
    assert not times_ns, "four tokens wait"
    outputs.put(first, second)
    wait_until(lambda: len(times_ns) == 3)
    outputs.put(second)
    outputs.put(first, reason=FinishReason.LENGTH)
    wait_until(lambda: "first" in outputs.messages)
    (delta,) = outputs.messages["first"]
    assert (delta.text, delta.finish_reason) == ("xxxx", FinishReason.LENGTH)
    assert len(times_ns) == 4 and times_ns == sorted(set(times_ns)), "each by when its answer came"
    outputs.put(second)
    outputs.processor.put_end(second, FinishReason.ABORT, "", is_invalid=False)
    wait_until(lambda: "second" in outputs.messages)
    assert outputs.messages["second"][0].text == "xxxxx"
    outputs.processor.stop()


def test_what_waits_is_made_when_the_thread_stops(tokenizer):
    outputs = Outputs(tokenizer)
    outputs.processor.patience = 5
    group = outputs.add("one")
    outputs.processor.start()
    outputs.put(group)
    outputs.processor.stop()
    assert outputs.messages["one"][0].text == "x"


@pytest.mark.parametrize(
    ("reason", "expected"), [(FinishReason.LENGTH, True), (FinishReason.STOP, True), (FinishReason.ABORT, False)]
)
def test_a_stop_string_in_what_was_held_back_is_told_however_the_output_ends(tokenizer, reason, expected):
    """Half a character before the end is U+FFFD: with EOS too, the text ends before it."""
    stream = OutputStream(pb.SamplingParams(stop=["\ufffd"]), tokenizer, StopAutomaton(["\ufffd"]))
    for token_id, ends in ((ord("x"), FinishReason.NONE), ("é".encode()[0], FinishReason.NONE)):
        stream.take(token_id, ends)
    if reason is FinishReason.STOP:
        stream.take(tokenizer.eos_token_id, reason)
    else:
        stream.end(reason)
    delta = pb.OutputDelta()
    stream.write(delta, 9)
    assert delta.text == "x" and delta.matched_stop.text == ("\ufffd" if expected else "")
    assert delta.finish_reason == (FinishReason.STOP if expected else reason)


def test_logprobs_go_to_those_who_asked():
    """Ragged columns: two candidates for the first token, none for the second, one for the third."""
    columns = LogprobColumns(
        worker_pb2.SequenceOutputs(
            token_ids_i32=np.array([7, 8, 9], "<i4").tobytes(),
            logprobs_f32=np.array([-1, -2, -3], "<f4").tobytes(),
            ranks_u32=np.array([1, 5, 2], "<u4").tobytes(),
            top_counts_u32=np.array([2, 0, 1], "<u4").tobytes(),
            top_token_ids_i32=np.array([7, 70, 90], "<i4").tobytes(),
            top_logprobs_f32=np.array([-1, -1.5, -0.5], "<f4").tobytes(),
        )
    )
    first, second, third = (columns.at(entry, 20, str) for entry in range(3))
    assert (first.token.token_id, first.token.logprob, first.token.rank, first.token.text) == (7, -1.0, 1, "7")
    assert [(top.token_id, top.logprob, top.rank) for top in first.top] == [(7, -1.0, 1), (70, -1.5, 2)]
    assert second.token.rank == 5 and not second.top
    assert [top.token_id for top in third.top] == [90]
    assert [top.token_id for top in columns.at(0, 1, str).top] == [7]


def test_logprobs_that_wait_for_their_reader_take_few_bytes(tokenizer):
    """As a message a token with 20 alternatives takes some 3 KB."""
    entries, top = 1000, 20
    columns = LogprobColumns(
        worker_pb2.SequenceOutputs(
            token_ids_i32=np.arange(entries, dtype="<i4").tobytes(),
            logprobs_f32=np.zeros(entries, "<f4").tobytes(),
            ranks_u32=np.ones(entries, "<u4").tobytes(),
            top_counts_u32=np.full(entries, top, "<u4").tobytes(),
            top_token_ids_i32=np.arange(entries * top, dtype="<i4").tobytes(),
            top_logprobs_f32=np.zeros(entries * top, "<f4").tobytes(),
        )
    )
    stream = OutputStream(pb.SamplingParams(logprobs=top), tokenizer)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for entry in range(entries):
            stream.take_logprobs(columns, entry)
            stream.take(3, 0)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 600 * entries
    delta = pb.OutputDelta()
    stream.write(delta, entries)
    assert [each.token.token_id for each in delta.logprobs] == list(range(entries))
    assert [each.token_id for each in delta.logprobs[5].top] == list(range(100, 120))


def test_missing_logprob_columns_end_the_one_who_asked(tokenizer):
    outputs = Outputs(tokenizer)
    asked, plain = outputs.add("asked", logprobs=1), outputs.add("plain")
    outputs.put(asked, plain)
    outputs.processor.run_pending()
    assert outputs.messages["asked"][0].finish_reason == FinishReason.ERROR
    assert outputs.messages["plain"][0].text == "x"
