"""Which samplings are replayed, and that they draw what kernels launched one by one draw."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from kernels import select
from protos import inference_pb2, worker_pb2
from tests.kernels.device import DEVICE, IS_INTERPRETED
from tests.worker.fake_model import FakeModel, decode, fake_config, greedy, slots_u16, tokens_of, u32
from tests.worker.late_outputs import LateOutputs
from tests.worker.replayed_graphs import ReplayedGraphs, kept
from worker_svc.host.graph_backend import CudaGraphBackend
from worker_svc.host.memory import GIB
from worker_svc.mirror.sequence_states import SequenceStates
from worker_svc.sampling.last_tokens import LastTokens
from worker_svc.sampling.row_samples import sample_rows
from worker_svc.steps.graph_buffers import GraphBuffers
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.sampling_graphs import SamplingGraphs, row_counts
from worker_svc.steps.step_timer import StepTimer

MAX_SEQS, MAX_LEN, BLOCK_SIZE, MAX_TOKENS = 6, 64, 4, 32
MIXED_PARAMS = [
    inference_pb2.SamplingParams(seed=1, temperature=1.0),
    inference_pb2.SamplingParams(seed=2, temperature=1.7, top_p=0.8),
    inference_pb2.SamplingParams(seed=3, temperature=0.0),
    inference_pb2.SamplingParams(seed=4, temperature=1.3, top_k=9, min_p=0.01),
    inference_pb2.SamplingParams(seed=5, temperature=2.0, repetition_penalty=1.5, frequency_penalty=0.7),
]


class Run:
    """A runner over a fake model, with graphs or without, and a mirror; tokens stay on the device as on a GPU."""

    def __init__(self, *, has_graphs: bool = True) -> None:
        made = list[ReplayedGraphs]()
        self.model = FakeModel()
        self.runner = ModelRunner(
            self.model,
            fake_config(),
            BLOCK_SIZE,
            outputs=LateOutputs(),
            graph_backend=kept(made) if has_graphs else None,
        )
        num_blocks = MAX_SEQS * MAX_LEN // BLOCK_SIZE
        self.runner.allocate_cache(num_blocks, 0)
        self.runner.capture_graphs(MAX_SEQS, MAX_LEN, GIB)
        self.runner.capture_mixed_graphs(MAX_TOKENS, MAX_LEN, GIB)
        self.states = SequenceStates(MAX_SEQS, MAX_LEN, BLOCK_SIZE, num_blocks)
        self._backend = made[0] if made else None
        self._step_id = 0

    def prompts(self, all_params: list[inference_pb2.SamplingParams]) -> worker_pb2.Step:
        """One of three tokens for each, in slots of their own."""
        self._step_id += 1
        step, num_blocks = worker_pb2.Step(step_id=self._step_id), MAX_LEN // BLOCK_SIZE
        for slot, params in enumerate(all_params):
            group = step.groups.add(request_id=f"request-{slot}", sampling_params=params)
            table = range(slot * num_blocks, (slot + 1) * num_blocks)
            group.sequences.add(slot=slot, token_ids=[3 + slot, 4, 5 + slot], block_table=table)
        step.rows.slots_u16, step.rows.query_lens_u32 = slots_u16(range(len(all_params))), u32([3] * len(all_params))
        step.rows.num_samples_u16 = slots_u16([1] * len(all_params))
        return step

    def step(self, step: worker_pb2.Step) -> worker_pb2.SequenceOutputs:
        launched = self.runner.launch(self.states, self.states.apply(step).rows, StepTimer(time.perf_counter_ns()))
        return launched.outputs(StepTimer(time.perf_counter_ns()))

    def decode(self, slots: list[int]) -> worker_pb2.SequenceOutputs:
        self._step_id += 1
        return self.step(decode(self._step_id, slots))

    @property
    def replays(self) -> tuple[list[int], list[int]]:
        """Of graphs that take the largest and of those that draw: of 1, 2, 4 and 6 rows, captured falling."""
        assert self._backend is not None
        return self._backend.replays[3::-1], self._backend.replays[7:3:-1]


def tokens(outputs: worker_pb2.SequenceOutputs) -> list[int]:
    return tokens_of(worker_pb2.StepResult(outputs=outputs))


def test_numbers_of_rows_rise_to_the_most() -> None:
    assert [row_counts(most) for most in (1, 2, 6, 8, 256)][:4] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert row_counts(300) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]


def test_draws_of_replayed_steps_are_those_of_kernels_launched_one_by_one() -> None:
    run, plain = Run(), Run(has_graphs=False)
    for one in (run, plain):
        one.model.poison = 6  # slot 3 may come to it, and others
    expected = [plain.step(plain.prompts(MIXED_PARAMS))]
    found = [run.step(run.prompts(MIXED_PARAMS))]
    for slots in ([0, 1, 2, 3, 4], [4, 1, 0], [2, 3, 1, 4], [1], *[[0, 1, 2, 3, 4]] * 20):
        found.append(run.decode(slots))
        expected.append(plain.decode(slots))
    assert found == expected
    assert run.replays == ([0, 0, 0, 0], [1, 0, 2, 22])
    drawn = np.concatenate([tokens(outputs) for outputs in found])
    assert len(set(drawn.tolist())) > 15, "temperatures are high: the model's choice alone would be a few tokens"
    assert any(outputs.row_errors for outputs in found), "or the poison has reached nobody"


def test_where_all_take_the_largest_logit_nothing_is_drawn() -> None:
    run, plain = Run(), Run(has_graphs=False)
    for one in (run, plain):
        one.step(one.prompts([greedy()] * 3))
    assert run.replays == ([0, 0, 1, 0], [0, 0, 0, 0])
    assert [tokens(run.decode([2, 0])) for _ in range(5)] == [tokens(plain.decode([2, 0])) for _ in range(5)]
    assert run.replays == ([0, 5, 1, 0], [0, 0, 0, 0])


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 1.0, "logprobs": 2},
        {"temperature": 0.0, "logprobs": 0, "repetition_penalty": 1.2},
        {"temperature": 0.0, "use_beam_search": True, "best_of": 2, "n": 2},
    ],
    ids=["logprobs", "raw logprobs", "beams"],
)
def test_what_tells_more_than_a_token_is_launched_one_by_one(more: dict[str, Any]) -> None:
    run, plain = Run(), Run(has_graphs=False)
    params = [greedy(), inference_pb2.SamplingParams(seed=7, **more)]
    assert run.step(run.prompts(params)) == plain.step(plain.prompts(params))
    assert run.replays == ([0] * 4, [0] * 4)
    assert tokens(run.decode([0])) == tokens(plain.decode([0]))
    assert run.replays == ([1, 0, 0, 0], [0] * 4), "its neighbour alone"


def test_several_samples_of_one_row_are_launched_one_by_one() -> None:
    run, plain = Run(), Run(has_graphs=False)
    found = []
    for one in (run, plain):
        step = one.prompts([inference_pb2.SamplingParams(seed=7, temperature=1.5, n=2)])
        step.groups[0].sequences.add(slot=1, index=1, same_as_slot=0)
        step.rows.num_samples_u16, step.rows.child_slots_u16 = slots_u16([2]), slots_u16([0, 1])
        found.append(one.step(step))
    assert found[0] == found[1] and len(tokens(found[0])) == 2
    assert run.replays == ([0] * 4, [0] * 4)


def test_the_next_step_begins_with_what_a_replay_has_drawn_before_the_host_knows_it() -> None:
    run, plain = Run(), Run(has_graphs=False)
    found = []
    for one in (run, plain):
        launched, timer = [], StepTimer(time.perf_counter_ns())
        one.step(one.prompts(MIXED_PARAMS))
        for step_id, slots in enumerate(([0, 1, 3, 4], [4, 0], [0, 1, 2, 3, 4]), 2):
            rows = one.states.apply(decode(step_id, slots)).rows
            launched.append(one.runner.launch(one.states, rows, timer))
        found.append([one.outputs(timer) for one in launched])
    assert found[0] == found[1]
    assert run.replays == ([0] * 4, [0, 1, 1, 2])


def test_logits_that_are_no_numbers_are_told_of_the_rows_that_have_them() -> None:
    for params in ([greedy()] * 3, MIXED_PARAMS[:3]):
        run, plain = Run(), Run(has_graphs=False)
        found = []
        for one in (run, plain):
            one.model.poison = 6  # the last token of the second prompt
            found.append(one.step(one.prompts(params)))
        assert found[0] == found[1]
        assert [error.row for error in found[0].row_errors] == [1]


def test_pads_and_what_a_larger_step_left_change_nothing() -> None:
    """The buffers hold NaN beyond the rows of a step, and slots that no row has keep their tokens."""
    run, plain = Run(), Run(has_graphs=False)
    for one in (run, plain):
        one.step(one.prompts(MIXED_PARAMS))
    assert run.runner._buffers is not None
    run.runner._buffers.logits.fill_(torch.nan)
    before = run.runner._last_tokens.of(torch.arange(MAX_SEQS))
    assert run.decode([4, 1, 0]) == plain.decode([4, 1, 0])
    after = run.runner._last_tokens.of(torch.arange(MAX_SEQS))
    assert after[[2, 3, 5]].tolist() == before[[2, 3, 5]].tolist()
    assert after[[4, 1, 0]].tolist() == plain.runner._last_tokens.of(torch.tensor([4, 1, 0])).tolist()


def test_more_rows_than_there_is_memory_for_are_launched_one_by_one() -> None:
    backend = ReplayedGraphs(torch.device("cpu"))
    backend.taken = [101, 10, 20, 30, 101, 40, 50, 60]  # the largest of both were too much
    buffers = GraphBuffers.new(torch.device("cpu"), MAX_SEQS, MAX_LEN // BLOCK_SIZE, 31)
    graphs = SamplingGraphs(backend, LastTokens("cpu"), buffers)
    graphs.capture(100)
    states = SequenceStates(MAX_SEQS, MAX_LEN, BLOCK_SIZE, 96)
    for count, suits in ((4, True), (5, False)):
        step = Run(has_graphs=False).prompts([greedy()] * count)
        rows = states.apply(step).rows
        assert graphs.suits(buffers.logits[:count], states.sampling, rows) is suits
        assert not graphs.suits(torch.zeros(count, 31), states.sampling, rows), "these are not where graphs write"
        states = SequenceStates(MAX_SEQS, MAX_LEN, BLOCK_SIZE, 96)


def test_on_the_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy samplings and draws by turns, of two sizes, over the same buffers with NaN in the pads; none is read
    before all have been launched."""
    monkeypatch.setitem(select._MODULES, "cpu", "kernels.gpu.operations")
    monkeypatch.setattr("worker_svc.steps.sampling_graphs.row_counts", lambda most: [2, most])
    device, vocab_size = torch.device(DEVICE), 5001  # no multiple of a chunk
    buffers = GraphBuffers.new(device, MAX_SEQS, MAX_LEN // BLOCK_SIZE, vocab_size)
    last_tokens = LastTokens(device)
    graphs = SamplingGraphs((ReplayedGraphs if IS_INTERPRETED else CudaGraphBackend)(device), last_tokens, buffers)
    graphs.capture(GIB)
    torch.manual_seed(0)
    expected, launched, put = [], [], []
    for count, all_params in (
        (5, MIXED_PARAMS),
        (3, [greedy()] * 3),
        (2, MIXED_PARAMS[3:]),
        (1, [greedy()]),
        (4, MIXED_PARAMS[1:]),
    ):
        states = SequenceStates(MAX_SEQS, MAX_LEN, BLOCK_SIZE, MAX_SEQS * MAX_LEN // BLOCK_SIZE)
        rows = states.apply(Run(has_graphs=False).prompts(all_params)).rows
        buffers.logits.normal_().mul_(3)
        buffers.logits[count:, ::7] = torch.nan
        logits = buffers.logits[:count]
        assert graphs.suits(logits, states.sampling, rows)
        expected.append(sample_rows(logits.clone(), states.sampling, rows))
        launched.append(graphs.run(states.sampling, rows))
        put.append(last_tokens.of(torch.arange(count, device=device)).tolist())
    for before, sampled, drawn in zip(expected, put, launched, strict=True):
        found = drawn.on_host(tuple(tensor.cpu().numpy() for tensor in drawn.tensors))
        assert found.token_ids.tolist() == before.token_ids.tolist() == sampled and not found.bad_rows.size
