"""Which steps are replayed, over what inputs, and that a replayed step gives what the step itself gives."""

from __future__ import annotations

import copy
import itertools
import time

import numpy as np
import pytest
import torch

from protos import worker_pb2
from tests.worker.fake_model import FakeModel, decode, fake_config, greedy, prefill, slots_u16, tokens_of
from tests.worker.replayed_graphs import ReplayedGraphs, kept
from worker_svc.mirror.sequence_states import SequenceStates
from worker_svc.models.attention import AttentionMetadata
from worker_svc.sampling.last_tokens import LastTokens
from worker_svc.steps.decode_graphs import DecodeGraphs, batch_sizes, capture_order
from worker_svc.steps.graph_buffers import GraphBuffers
from worker_svc.steps.input_batch import build_input_arrays
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.step_timer import StepTimer

MAX_SEQS, MAX_LEN, BLOCK_SIZE = 6, 64, 4


class Watched(FakeModel):
    """Remembers what attention was told in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[AttentionMetadata] = []

    def forward(self, token_ids, positions, caches, attention: AttentionMetadata, logits_rows, reader=None, out=None):
        self.seen.append(copy.deepcopy(attention))
        return super().forward(token_ids, positions, caches, attention, logits_rows, reader, out)


class Run:
    """A runner with graphs over a fake model, and a mirror."""

    def __init__(self, num_prompts: int) -> None:
        self.model, made = Watched(), list[ReplayedGraphs]()
        self.runner = ModelRunner(self.model, fake_config(), BLOCK_SIZE, graph_backend=kept(made))
        self.runner.allocate_cache(MAX_SEQS * MAX_LEN // BLOCK_SIZE, 0)
        assert self.runner.capture_graphs(MAX_SEQS, MAX_LEN, 0) == [1, 2, 4, 6]
        self.backend = made[0]
        self.states = SequenceStates(MAX_SEQS, MAX_LEN, BLOCK_SIZE, MAX_SEQS * MAX_LEN // BLOCK_SIZE)
        self.step(prefill(1, [[3 + i, 4, 5 + i] for i in range(num_prompts)]))

    def step(self, step: worker_pb2.Step) -> list[int]:
        outputs = self.runner.run(self.states, self.states.apply(step).rows, StepTimer(time.perf_counter_ns()))
        return tokens_of(worker_pb2.StepResult(outputs=outputs))

    @property
    def replays(self) -> dict[int, int]:
        """By batch size; captured in this order, after the graphs of sampling."""
        return dict(zip((1, 2, 4, 6), self.backend.replays[-4:], strict=True))


def test_sizes_rise_to_the_most_and_padding_stays_small() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(3) == [1, 2, 3]
    assert batch_sizes(256) == [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16)]
    for most in (5, 8, 100, 256, 300, 1100, 5000):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        for smaller, larger in itertools.pairwise(sizes):
            share = (larger - 1 - smaller) / larger
            assert share < (0.5 if smaller < 64 else 0.2), (smaller, larger)


def test_the_smallest_graph_that_holds_the_rows_is_replayed_and_the_rest_of_it_are_pads() -> None:
    run = Run(5)
    assert run.replays == {1: 0, 2: 0, 4: 0, 6: 0}, "a prefill is computed"
    tokens = run.step(decode(2, [4, 0, 2]))
    assert run.replays == {1: 0, 2: 0, 4: 1, 6: 0}
    plain = Run(5)
    plain.runner._graphs = None
    assert tokens == plain.step(decode(2, [4, 0, 2]))
    seen, expected = run.model.seen[-1], plain.model.seen[-1]
    assert seen.slot_mapping.tolist() == [*expected.slot_mapping.tolist(), -1]
    assert seen.seq_lens.tolist() == [4, 4, 4, 0] and seen.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(seen.block_tables[:3, :1], expected.block_tables)
    assert (seen.max_query_len, seen.max_seq_len) == (1, MAX_LEN)
    run.step(decode(3, [1]))
    run.step(decode(4, range(5)))
    assert run.replays == {1: 1, 2: 0, 4: 1, 6: 1}


def test_what_a_larger_step_left_behind_is_not_seen_by_a_smaller_one() -> None:
    run = Run(6)
    run.step(decode(2, range(6)))
    run.step(decode(3, [5, 1, 0]))
    seen = run.model.seen[-1]
    assert seen.seq_lens.tolist() == [5, 5, 5, 0] and seen.slot_mapping[3] == -1
    num_blocks = MAX_LEN // BLOCK_SIZE
    assert seen.block_tables[:3, :2].tolist() == [[slot * num_blocks + block for block in (0, 1)] for slot in (5, 1, 0)]


def test_steps_that_are_no_decode_are_computed() -> None:
    run = Run(2)
    chunk = worker_pb2.Step(step_id=2)
    group = chunk.groups.add(request_id="new", sampling_params=greedy(), num_prompt_tokens=4)
    group.sequences.add(slot=2, token_ids=[1, 2, 3, 4], block_table=[80, 81])
    chunk.rows.slots_u16, chunk.rows.num_decode_rows = slots_u16([0, 2]), 1
    chunk.rows.query_lens_u32, chunk.rows.num_samples_u16 = np.array([1], "<u4").tobytes(), slots_u16([0])
    assert len(run.step(chunk)) == 1, "a chunk of one token, which samples nothing"
    assert sum(run.replays.values()) == 0
    run.step(decode(3, [0, 1]))
    assert sum(run.replays.values()) == 1
    run.runner.release_cache()
    assert run.runner._graphs is None, "they hold addresses of the cache that is gone"


def graphs(backend: ReplayedGraphs, model: FakeModel) -> DecodeGraphs:
    return DecodeGraphs(
        lambda token_ids, positions, attention, rows, out: model.forward(
            token_ids, positions, [], attention, rows, out=out
        ),
        backend,
        LastTokens("cpu"),
        GraphBuffers.new(torch.device("cpu"), MAX_SEQS, MAX_LEN // BLOCK_SIZE, 31),
        max_model_len=MAX_LEN,
    )


def test_only_as_many_are_captured_as_there_is_memory_for() -> None:
    backend = ReplayedGraphs(torch.device("cpu"))
    backend.taken = [10, 101, 90, 100]  # after each capture: the second one was too much
    found = graphs(backend, FakeModel())
    found.capture(100)
    assert found.sizes == [1, 4, 6]


def test_small_ones_are_captured_before_large_ones_use_up_the_memory() -> None:
    assert capture_order(batch_sizes(40)) == ([1, 2, 4, 8], [40, 32, 24, 16])


def test_a_capture_that_memory_does_not_suffice_for_is_passed_over() -> None:
    model = FakeModel()
    model.error = torch.OutOfMemoryError("CUDA out of memory")
    found = graphs(ReplayedGraphs(torch.device("cpu")), model)
    found.capture(100)
    assert found.sizes == [2, 4, 6], "the first failed"


@pytest.mark.parametrize(("num_rows", "suits"), [(4, True), (5, False)])
def test_more_rows_than_the_largest_graph_are_computed(num_rows: int, suits: bool) -> None:
    backend = ReplayedGraphs(torch.device("cpu"))
    backend.taken = [10, 20, 30, 101]  # the last, which is the largest, was too much
    found = graphs(backend, FakeModel())
    found.capture(100)
    states = SequenceStates(MAX_SEQS, MAX_LEN, BLOCK_SIZE, 96)
    states.record_samples(states.apply(prefill(1, [[3]] * num_rows)).rows, np.zeros(num_rows, np.int64))
    rows = states.apply(decode(2, range(num_rows))).rows
    assert found.suits(build_input_arrays(states, rows, 31)) is suits
