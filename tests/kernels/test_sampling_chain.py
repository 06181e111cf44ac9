"""The whole chain of a step through Triton's kernels: adjusted, drawn and ranked as the CPU's kernels do it.

Also what only a GPU can show of it: a captured graph, and rows beyond 2^31 logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels import cpu
from kernels.gpu import operations as gpu
from kernels.oracles import reference
from protos import inference_pb2, worker_pb2
from tests.kernels.device import DEVICE, IS_INTERPRETED
from worker_svc.mirror.sequence_states import SequenceStates
from worker_svc.sampling.last_tokens import LastTokens
from worker_svc.sampling.logit_adjustments import LogitAdjustments
from worker_svc.sampling.sampled import Sampled
from worker_svc.sampling.sampler import Draws, sample

VOCAB_SIZE = 203


def states_of(num_rows: int, seed: int) -> SequenceStates:
    """Every parameter of the chain in some row, each row with values of its own."""
    numbers = np.random.default_rng(seed)
    states = SequenceStates(num_rows, 40, 4, 4)
    step = worker_pb2.Step(step_id=1)
    for slot in range(num_rows):
        given: dict[str, Any] = {"temperature": float(numbers.choice([0.0, 0.6, 1.0, 1.5]))}
        chances = {
            "top_k": int(numbers.integers(1, 250)),
            "top_p": float(numbers.uniform(0.1, 1)),
            "min_p": float(numbers.uniform(0, 0.2)),
            "repetition_penalty": float(numbers.uniform(0.8, 1.5)),
            "frequency_penalty": float(numbers.uniform(-0.5, 1)),
            "presence_penalty": float(numbers.uniform(-0.5, 1)),
            "logit_bias": {int(token): float(numbers.normal()) for token in numbers.integers(0, VOCAB_SIZE, 3)},
            "allowed_token_ids": numbers.integers(0, VOCAB_SIZE, 60).tolist(),
            "logprobs": int(numbers.integers(0, 6)),
        }
        given |= {name: value for name, value in chances.items() if numbers.random() < 0.4}
        params = inference_pb2.SamplingParams(seed=int(numbers.integers(2**63)), **given)
        group = step.groups.add(request_id=str(slot), num_prompt_tokens=9, sampling_params=params)
        group.bad_words.extend([inference_pb2.TokenIds(ids=[int(numbers.integers(VOCAB_SIZE))])])
        group.sequences.add(slot=slot, token_ids=numbers.integers(0, VOCAB_SIZE, 20).tolist())
    states.apply_blocks(step)
    return states


def drawn(logits: torch.Tensor, states: SequenceStates, slots: np.ndarray) -> Sampled:
    """Two samples of every row."""
    adjusted = LogitAdjustments(VOCAB_SIZE, LastTokens(logits.device)).apply(logits, states, slots)
    rows = np.repeat(np.arange(slots.size), 2)
    draws = Draws(rows, np.tile([0, 1], slots.size), states.num_tokens[slots[rows]])
    return sample(adjusted, states.sampling.take(slots), draws, raw_logits=logits)


def test_the_chain_draws_what_the_cpu_draws_and_each_row_what_it_draws_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows = 24 if IS_INTERPRETED else 256
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    logits[5, 9], logits[6] = torch.nan, -torch.inf
    states, slots = states_of(num_rows, seed=2), np.arange(num_rows)
    expected = drawn(logits, states, slots)
    for user in ("logit_adjustments", "row_maxima", "sampler", "token_logprobs"):
        monkeypatch.setattr(f"worker_svc.sampling.{user}.kernels_for", lambda device: gpu)
    found = drawn(logits.to(DEVICE), states, slots)
    assert found.bad_rows.tolist() == expected.bad_rows.tolist() == [5, 6]
    assert found.token_ids.tolist() == expected.token_ids.tolist(), "a draw at a border, or a defect"
    assert len(set(found.token_ids.tolist())) > num_rows // 2
    assert found.logprobs is not None and expected.logprobs is not None
    for name in ("ranks", "top_counts", "top_token_ids"):
        assert getattr(found.logprobs, name).tolist() == getattr(expected.logprobs, name).tolist(), name
    for name in ("drawn", "top_logprobs"):
        np.testing.assert_allclose(getattr(found.logprobs, name), getattr(expected.logprobs, name), rtol=0, atol=2e-6)

    some = slots[7:11]
    alone = drawn(logits[7:11].to(DEVICE), states, some)
    assert alone.token_ids.tolist() == found.token_ids[14:22].tolist()
    if alone.logprobs is not None:
        assert alone.logprobs.drawn.tolist() == found.logprobs.drawn[14:22].tolist()


@pytest.mark.gpu
def test_a_captured_graph_draws_what_was_drawn_before_it() -> None:
    """Filters, draws and logprobs wait for nothing and size nothing by what the device knows."""
    if IS_INTERPRETED:
        pytest.skip("graphs are a GPU's")
    num_rows, vocab_size = 64, 128_256
    logits = torch.randn(num_rows, vocab_size, device=DEVICE) * 3
    maxima = torch.empty(num_rows, -(-vocab_size // reference.CHUNK_SIZE), device=DEVICE)
    temperature, min_p = torch.rand(num_rows, device=DEVICE) + 0.3, torch.rand(num_rows, device=DEVICE) * 0.1
    top_k = torch.randint(0, 300, (num_rows,), device=DEVICE)
    top_p = torch.rand(num_rows, device=DEVICE)
    rows, smallest = torch.arange(num_rows, device=DEVICE), torch.empty(num_rows, device=DEVICE)
    token_ids, ranks = torch.empty_like(rows), torch.empty_like(rows)
    logprobs, log_sums, values = (torch.empty(num_rows, device=DEVICE) for _ in range(3))
    top_token_ids, top_values = torch.empty_like(rows)[:, None], values[:, None]

    def chain() -> None:
        gpu.chunk_maxima(maxima, logits)
        largest = maxima.amax(dim=-1)
        gpu.kept_range(smallest, logits, maxima, largest, temperature, min_p, top_k, top_p)
        gpu.draw_tokens(token_ids, logits, maxima, largest, smallest, temperature, rows, rows, rows, rows)
        gpu.token_logprobs(logprobs, ranks, log_sums, logits, largest, rows, token_ids)
        gpu.top_logits(top_token_ids, top_values, logits, maxima, rows)

    outputs = (smallest, token_ids, logprobs, ranks, top_token_ids)
    chain()
    before = [tensor.clone() for tensor in outputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for tensor in outputs:
        tensor.fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(tensor, old) for tensor, old in zip(outputs, before, strict=True))


@pytest.mark.gpu
def test_rows_beyond_32_bit_offsets() -> None:
    if IS_INTERPRETED:
        pytest.skip("10 GiB of logits are for a GPU")
    vocab_size = 131_072
    logits = torch.full((17_000, vocab_size), -5.0, device=DEVICE)
    last = torch.randn(vocab_size, device=DEVICE) * 3
    logits[-1] = last
    assert logits.numel() > 2**31
    maxima = torch.empty(len(logits), vocab_size // reference.CHUNK_SIZE, device=DEVICE)
    gpu.chunk_maxima(maxima, logits)
    largest = maxima.amax(dim=-1)
    assert largest[-1] == last.max() and (largest[:-1] == -5).all()
    ones, zeros = torch.ones_like(largest), torch.zeros(len(logits), dtype=torch.int64, device=DEVICE)
    smallest = torch.empty_like(largest)
    gpu.kept_range(smallest, logits, maxima, largest, ones, 0 * ones, zeros + 7, ones)
    assert smallest[-1] == last.sort(descending=True).values[6]
    row = torch.tensor([len(logits) - 1], device=DEVICE)
    token_ids, ids, values = torch.empty_like(row), torch.empty_like(row)[:, None], ones[:1, None].clone()
    gpu.draw_tokens(token_ids, logits, maxima, largest, smallest, ones, row, row, row, row)
    expected = torch.empty(1, dtype=torch.int64)
    x, of_chunks, best, bound, one = (each[-1:].cpu() for each in (logits, maxima, largest, smallest, ones))
    counter = row.cpu()
    cpu.draw_tokens(expected, x, of_chunks, best, bound, one, torch.zeros_like(counter), counter, counter, counter)
    assert token_ids.item() == expected.item()
    gpu.top_logits(ids, values, logits, maxima, row)
    assert ids.item() == last.argmax()
    counts = torch.full((1, vocab_size), 2, dtype=torch.int32, device=DEVICE)
    gpu.penalize(logits, row, counts, zeros[:1], ones[:1], 0 * ones[:1], ones[:1])
    assert torch.equal(logits[-1], last - 1) and (logits[-2] == -5).all()


def test_what_does_not_fit_is_refused() -> None:
    logits, rows = torch.zeros(2, 100, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    maxima, column = torch.zeros(2, 2, device=DEVICE), torch.zeros(2, device=DEVICE)
    with pytest.raises(ValueError, match=r"chunk_maxima: out must be contiguous \(2, 2\)"):
        gpu.chunk_maxima(torch.zeros(2, 1, device=DEVICE), logits)
    with pytest.raises(ValueError, match="kept_range: logits must be rows of adjacent elements"):
        gpu.kept_range(column, logits.T, maxima, column, column, column, rows[:2], column)
    with pytest.raises(ValueError, match=r"kept_range: top_k must be contiguous \(2,\)"):
        gpu.kept_range(column, logits, maxima, column, column, column, rows, column)
    with pytest.raises(ValueError, match=r"draw_tokens: seeds must be contiguous \(3,\)"):
        gpu.draw_tokens(rows, logits, maxima, column, column, column, rows, rows[:2], rows, rows)
    with pytest.raises(ValueError, match=r"penalize: counts must be contiguous \(4, 100\)"):
        counts = torch.zeros(4, 99, dtype=torch.int32, device=DEVICE)
        gpu.penalize(logits, rows[:2], counts, rows[:2], column, column, column)
    with pytest.raises(ValueError, match="top_logits: 101 tokens asked for, of a vocabulary of 100"):
        values = torch.zeros(3, 101, device=DEVICE)
        gpu.top_logits(values.long(), values, logits, maxima, rows)
    with pytest.raises(ValueError, match="token_logprobs: logprobs must be contiguous"):
        gpu.token_logprobs(column, rows, rows.float(), logits, column, rows, rows)
