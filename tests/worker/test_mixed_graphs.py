"""Prompts, chunks and decodes beside them: which are replayed, over what inputs, and with which results."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import select
from protos import worker_pb2
from tests.kernels.device import DEVICE
from tests.worker.fake_model import FakeModel, decode, greedy, prefill, slots_u16, tokens_of, u32
from tests.worker.replayed_graphs import ReplayedGraphs, kept
from tests.worker.test_cache_engine import CONFIG
from tests.worker.test_decode_graphs import Watched
from worker_svc.host.graph_backend import CudaGraphBackend
from worker_svc.host.memory import GIB
from worker_svc.mirror.sequence_states import SequenceStates
from worker_svc.models.loader import Model, load_model
from worker_svc.models.rope import Rope
from worker_svc.models.style import DecoderStyle
from worker_svc.sampling.last_tokens import LastTokens
from worker_svc.steps.graph_buffers import GraphBuffers
from worker_svc.steps.input_batch import InputArrays, build_input_arrays
from worker_svc.steps.mixed_graphs import MixedGraphs, token_counts
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.step_timer import StepTimer

MAX_SEQS, MAX_LEN, BLOCK_SIZE, MAX_TOKENS = 4, 64, 4, 40


def prompt_beside(step_id: int, slot: int, prompt: list[int], decodes: list[int]) -> worker_pb2.Step:
    """A new prompt in `slot`, all of which is computed, beside one token of each of `decodes`."""
    step = worker_pb2.Step(step_id=step_id)
    group = step.groups.add(request_id=f"request-{slot}", sampling_params=greedy())
    blocks = MAX_LEN // BLOCK_SIZE
    group.sequences.add(slot=slot, token_ids=prompt, block_table=range(slot * blocks, (slot + 1) * blocks))
    step.rows.slots_u16, step.rows.num_decode_rows = slots_u16([*decodes, slot]), len(decodes)
    step.rows.query_lens_u32, step.rows.num_samples_u16 = u32([len(prompt)]), slots_u16([1])
    return step


class Run:
    """A runner over a model, and a mirror; with graphs of all steps, or without."""

    def __init__(self, model: Model, *, has_graphs: bool = True) -> None:
        made = list[ReplayedGraphs]()
        backend = kept(made) if model.device.type == "cpu" else CudaGraphBackend  # where the model is, not what is here
        self.runner = ModelRunner(
            model, model.config, BLOCK_SIZE, model.device, graph_backend=backend if has_graphs else None
        )
        num_blocks = MAX_SEQS * MAX_LEN // BLOCK_SIZE
        self.runner.allocate_cache(num_blocks, 0)
        for store in itertools.chain(*self.runner.cache.layers):
            store.fill_(torch.nan)
        self.runner.capture_graphs(MAX_SEQS, MAX_LEN, GIB)
        self.counts = self.runner.capture_mixed_graphs(MAX_TOKENS, MAX_LEN, GIB)
        self.states = SequenceStates(MAX_SEQS, MAX_LEN, BLOCK_SIZE, num_blocks)
        self.backend = made[0] if made else None

    def step(self, step: worker_pb2.Step) -> list[int]:
        outputs = self.runner.run(self.states, self.states.apply(step).rows, StepTimer(time.perf_counter_ns()))
        return tokens_of(worker_pb2.StepResult(outputs=outputs))

    @property
    def replays(self) -> dict[int, int]:
        """Of mixed steps, by tokens; the largest was captured first, after all other graphs."""
        assert self.backend is not None
        return dict(zip(self.counts[::-1], self.backend.replays[-len(self.counts) :], strict=True))


def test_numbers_of_tokens_rise_to_the_most_and_few_are_pads() -> None:
    assert token_counts(40) == [16, 24, 32, 40]
    assert token_counts(16) == [16] and token_counts(4) == [4]
    assert token_counts(8192)[-3:] == [1024, 1536, 2048]
    for most in (17, 100, 2048):
        counts = token_counts(most)
        assert counts == sorted(set(counts)) and counts[-1] == most
        assert all((larger - smaller - 1) / larger < 1 / 3 for smaller, larger in itertools.pairwise(counts))


def test_a_step_is_padded_with_tokens_of_nobody_and_sequences_of_nothing() -> None:
    model = Watched()
    run = Run(model)
    first = run.step(prefill(1, [[3, 4, 5], [7] * 15], block_size=BLOCK_SIZE, max_len=MAX_LEN))
    assert run.replays == {40: 0, 32: 0, 24: 1, 16: 0} and len(first) == 2
    seen = model.seen[-1]
    assert seen.query_starts.tolist() == [0, 3, 18, 18, 18] and seen.seq_lens.tolist() == [3, 15, 0, 0]
    assert seen.slot_mapping.tolist() == [0, 1, 2, *range(64, 79), *[-1] * 6]
    assert (seen.max_query_len, seen.max_seq_len) == (24, MAX_LEN)
    beside = run.step(prompt_beside(2, 2, [9] * 37, [0, 1]))
    assert run.replays == {40: 1, 32: 0, 24: 1, 16: 0}
    plain = Run(Watched(), has_graphs=False)
    assert first == plain.step(prefill(1, [[3, 4, 5], [7] * 15], block_size=BLOCK_SIZE, max_len=MAX_LEN))
    assert beside == plain.step(prompt_beside(2, 2, [9] * 37, [0, 1]))
    run.step(decode(3, [0, 1, 2]))
    assert sum(run.replays.values()) == 2, "decode steps have graphs of their own"
    seen = model.seen[-1]
    assert seen.max_query_len == 1
    run.runner.release_cache()
    assert run.runner._mixed_graphs is None, "they hold addresses of the cache that is gone"


def test_a_step_that_samples_nothing_is_replayed() -> None:
    run = Run(FakeModel())
    step = prefill(1, [[3, 4, 5]], block_size=BLOCK_SIZE, max_len=MAX_LEN)
    step.rows.query_lens_u32, step.rows.num_samples_u16 = u32([2]), slots_u16([0])
    assert run.step(step) == []
    assert run.replays[16] == 1


def mixed(backend: ReplayedGraphs, model: FakeModel) -> MixedGraphs:
    def forward(token_ids, positions, attention, rows, out):
        return model.forward(token_ids, positions, [], attention, rows, out=out)

    last_tokens = LastTokens("cpu")
    buffers = GraphBuffers.new(torch.device("cpu"), MAX_SEQS, MAX_LEN // BLOCK_SIZE, 31)
    return MixedGraphs(forward, backend, last_tokens, buffers, max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_LEN)


def arrays_of(num_tokens: int) -> InputArrays:
    states = SequenceStates(MAX_SEQS, MAX_LEN, BLOCK_SIZE, 64)
    return build_input_arrays(
        states, states.apply(prefill(1, [[3] * num_tokens], block_size=BLOCK_SIZE, max_len=MAX_LEN)).rows, 31
    )


def test_what_there_is_no_memory_for_is_computed_rather_than_padded_too_far() -> None:
    backend = ReplayedGraphs(torch.device("cpu"))
    backend.taken = [10, 101, 101, 101]  # all but the largest were too much
    found = mixed(backend, FakeModel())
    found.capture(100)
    assert found.sizes == [40]
    assert [found.suits(arrays_of(count)) for count in (19, 20, 40, 41)] == [False, True, True, False]
    found.keep([16])
    assert found.sizes == [] and not found.suits(arrays_of(40))


def test_a_capture_that_memory_does_not_suffice_for_is_passed_over() -> None:
    model = FakeModel()
    model.error = torch.OutOfMemoryError("CUDA out of memory")
    found = mixed(ReplayedGraphs(torch.device("cpu")), model)
    found.capture(100)
    assert found.sizes == [16, 24, 32], "the first failed"
    assert [found.suits(arrays_of(count)) for count in (1, 16, 32, 33)] == [True, True, True, False]


def test_a_replayed_step_gives_the_bits_of_the_step_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With products whose rows do not depend on their company, as those of a CPU and of `--batch-invariant` are; and
    pads are stored nowhere: outside of the sequences the cache stays NaN."""
    monkeypatch.setitem(select._MODULES, "cpu", "kernels.gpu.operations")
    monkeypatch.setattr("worker_svc.steps.mixed_graphs.token_counts", lambda most: [16])
    config = replace(CONFIG, style=DecoderStyle(ropes=(Rope(CONFIG.head_size),)), is_batch_invariant=True)
    model = load_model("", config, DEVICE, "dummy")
    runs = [Run(model, has_graphs=has_graphs) for has_graphs in (True, False)]
    logits: list[list[torch.Tensor]] = [[], []]
    for run, found in zip(runs, logits, strict=True):
        monkeypatch.setattr(run.runner, "_forward", watched(run.runner, found))
        run.step(prefill(1, [[3, 4, 5], [7, 8, 9, 10, 11, 6]], block_size=BLOCK_SIZE, max_len=MAX_LEN))
        run.step(prompt_beside(2, 2, [12, 13, 14, 15, 16], [1, 0]))
    assert all(torch.equal(ours, plain) for ours, plain in zip(*logits, strict=True)) and len(logits[0]) == 2
    for ours, plain in zip(*(itertools.chain(*run.runner.cache.layers) for run in runs), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)
        assert ours.isnan().any() and not ours.isnan().all()
    if runs[0].backend is not None:
        assert runs[0].replays == {16: 2}


def watched(runner: ModelRunner, found: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Its pass, which puts a copy of each step's logits into `found`."""
    forward: Callable[..., torch.Tensor] = runner._forward

    def forward_and_keep(*arguments: Any) -> torch.Tensor:
        found.append(forward(*arguments).clone())
        return found[-1]

    return forward_and_keep
