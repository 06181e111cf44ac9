"""Blocks move in every layer at once, between device and host, and nothing else moves."""

from __future__ import annotations

import pytest
import torch

from kernels.oracles import reference
from worker_svc.cache.cache_engine import CacheEngine
from worker_svc.cache.cpu_moves import CpuMoves
from worker_svc.models.config import ModelConfig
from worker_svc.models.style import DecoderStyle

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=31,
    hidden_size=30,
    intermediate_size=17,
    num_layers=3,
    num_heads=3,
    num_kv_heads=1,
    head_size=10,
    max_positions=64,
    max_model_len=64,
    tie_word_embeddings=False,
    style=DecoderStyle(),
    dtype=torch.float32,
    eos_token_ids=(2,),
    model_name="tiny",
    model_hash="0",
)


@pytest.fixture
def engine() -> CacheEngine:
    engine = CacheEngine(CONFIG, 4, 7, 5, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    for key, value in engine.layers:
        key.copy_(torch.randn(key.shape, generator=generator))
        value.copy_(torch.randn(value.shape, generator=generator))
    return engine


def snapshot(engine: CacheEngine) -> torch.Tensor:
    return torch.stack([torch.stack(layer) for layer in engine.layers])  # [layers, 2, blocks, ...]


def test_layers_are_contiguous_views_of_the_documented_shape(engine: CacheEngine) -> None:
    assert len(engine.layers) == 3
    for key, value in engine.layers:
        assert key.shape == value.shape == (7, 1, 4, 10)
        assert key.is_contiguous() and value.is_contiguous()


def test_block_bytes_is_what_a_block_takes(engine: CacheEngine) -> None:
    total = sum(tensor.nbytes for layer in engine.layers for tensor in layer)
    assert CacheEngine.block_bytes(CONFIG, 4, torch.float32) * 7 == total
    assert CacheEngine.block_bytes(CONFIG, 4, torch.bfloat16) * 14 == total


def test_copy_moves_only_the_named_blocks(engine: CacheEngine) -> None:
    expected = snapshot(engine)
    expected[:, :, [5, 6, 0]] = expected[:, :, [1, 1, 3]]
    engine.copy(torch.tensor([[1, 5], [1, 6], [3, 0]]))
    assert torch.equal(snapshot(engine), expected)


def test_swapping_out_and_in_brings_blocks_back_elsewhere(engine: CacheEngine) -> None:
    before = snapshot(engine)
    engine.swap_out(torch.tensor([[0, 4], [6, 2]]))
    for key, value in engine.layers:
        key[[0, 6]] = 0
        value[[0, 6]] = 0
    engine.swap_in(torch.tensor([[2, 3], [4, 6]]))
    after = snapshot(engine)
    assert torch.equal(after[:, :, 3], before[:, :, 6])
    assert torch.equal(after[:, :, 6], before[:, :, 0])
    assert torch.equal(after[:, :, [1, 2, 4, 5]], before[:, :, [1, 2, 4, 5]])


def test_every_way_moves_what_the_oracle_moves() -> None:
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(3, 2, 7, 1, 4, 10, generator=generator)
    moves, device, host = CpuMoves(cache, 5), cache.clone(), torch.zeros(3, 2, 5, 1, 4, 10)
    for _ in range(20):
        order = torch.randperm(7, generator=generator)
        out = torch.stack([order[:4], torch.randperm(5, generator=generator)[:4]], dim=1)
        back = torch.stack([torch.randperm(5, generator=generator)[:3], order[4:]], dim=1)
        copied = torch.stack([order[:3], order[4:]], dim=1)
        moves.swap_out(out)
        reference.copy_blocks(device, host, out)
        moves.swap_in(back)
        reference.copy_blocks(host, device, back)
        moves.copy(copied)
        reference.copy_blocks(device, device, copied)
        assert torch.equal(cache, device) and torch.equal(moves._host, host)


def test_no_pairs_and_no_host_blocks_are_nothing_to_do(engine: CacheEngine) -> None:
    before = snapshot(engine)
    engine.copy(torch.empty(0, 2, dtype=torch.int64))
    assert torch.equal(snapshot(engine), before)
    assert CacheEngine(CONFIG, 4, 7, 0, torch.float32, "cpu").num_host_blocks == 0
