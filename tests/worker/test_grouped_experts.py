"""A mixture of experts in one launch a product gives what it gives expert by expert."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import cpu
from kernels.gpu import operations as gpu
from kernels.gpu.quantized.packed_codes import PackedCodes
from tests.kernels.device import DEVICE, IS_INTERPRETED
from tests.worker.ranks_in_threads import on_all_ranks
from tests.worker.test_cache_engine import CONFIG
from worker_svc.models.checkpoint.weights import DummyWeights
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder_layer import _take_mlp
from worker_svc.models.experts.experts import Experts
from worker_svc.models.experts.grouped_experts import GroupedExperts
from worker_svc.models.names import GPT_OSS, MIXTRAL
from worker_svc.models.parts import ModelPart
from worker_svc.models.products.summed import Summed
from worker_svc.models.quantized.fp8_store import Fp8Store
from worker_svc.models.style import DecoderStyle, ExpertStyle
from worker_svc.parallel.ranks import OnlyRank, Ranks

# The interpreter's numpy says so where a GPU's sigmoid of a large negative number is 0 without a word.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


class NamedWeights(DummyWeights):
    """The same numbers for every device."""

    def __init__(self, device: str) -> None:
        super().__init__(torch.float32, torch.device("cpu"), 0)
        self.is_batch_invariant = True  # the router, too
        self._device = torch.device(device)


def config_of(num_experts: int, num_chosen: int, is_normalized: bool) -> ModelConfig:
    experts = ExpertStyle(num_experts, num_chosen, 18, is_normalized, is_sparse=(True,) * 3)
    return replace(CONFIG, style=DecoderStyle(names=MIXTRAL, experts=experts))


def gpt_oss_of(num_experts: int, num_chosen: int) -> ModelConfig:
    """With biases, gates and ups in turn, and a gate that is cut off."""
    experts = ExpertStyle(num_experts, num_chosen, 18, True, is_sparse=(True,) * 3, are_biased=True)
    return replace(CONFIG, style=DecoderStyle(names=GPT_OSS, activation="clamped_swiglu", experts=experts))


def mixtures(num_chosen: int, is_normalized: bool) -> tuple[Experts, GroupedExperts]:
    """Of the same weights."""
    return both_ways(config_of(5, num_chosen, is_normalized))


def both_ways(config: ModelConfig) -> tuple[Experts, GroupedExperts]:
    part = ModelPart.of(config, OnlyRank())
    one_by_one = _take_mlp(part, NamedWeights("cpu"), "layer.", 0, cpu)
    grouped = _take_mlp(part, NamedWeights(DEVICE), "layer.", 0, gpu)
    assert isinstance(one_by_one, Experts) and isinstance(grouped, GroupedExperts)
    return one_by_one, grouped


@pytest.mark.parametrize("num_tokens", [2, 37])
@pytest.mark.parametrize(("num_chosen", "is_normalized"), [(1, False), (2, True), (5, False)])
def test_both_ways_agree(num_tokens: int, num_chosen: int, is_normalized: bool) -> None:
    one_by_one, grouped = mixtures(num_chosen, is_normalized)
    x = 100 * torch.randn(num_tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    expected, out = one_by_one(x), grouped(x.to(DEVICE)).cpu()
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))
    assert grouped.weight_bytes == grouped._router.weight_bytes + 5 * (2 * 18 * 30 + 30 * 18) * 4


@pytest.mark.parametrize("num_tokens", [2, 37])
def test_both_ways_agree_with_biases_and_a_clamped_gate(num_tokens: int) -> None:
    one_by_one, grouped = both_ways(gpt_oss_of(5, 2))
    x = 100 * torch.randn(num_tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    expected, out = one_by_one(x), grouped(x.to(DEVICE)).cpu()
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))
    assert grouped.weight_bytes == grouped._router.weight_bytes + 5 * (2 * 18 * 30 + 30 * 18 + 2 * 18 + 30) * 4


def test_gates_in_turn_are_put_in_order_before_they_are_quantised() -> None:
    """To E4M3, when they are loaded: its rounding of the weights is all that is lost."""
    part, weights = ModelPart.of(gpt_oss_of(5, 2), OnlyRank()), NamedWeights(DEVICE)
    weights.store = Fp8Store(gpu)
    grouped, one_by_one = _take_mlp(part, weights, "layer.", 0, gpu), both_ways(gpt_oss_of(5, 2))[0]
    assert isinstance(grouped, GroupedExperts) and isinstance(grouped._inner, PackedCodes)
    x = 10 * torch.randn(9, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    expected, out = one_by_one(x), grouped(x.to(DEVICE)).cpu()
    assert 1e-3 < (out - expected).abs().mean() / expected.std() < 0.1


# What leads to experts elsewhere is never written, but activated with the rest.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("is_expert_parallel", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 37])  # of one token, the two experts leave ranks without a row
@pytest.mark.parametrize("is_biased", [False, True])
def test_ranks_add_up_to_the_whole(num_tokens: int, is_expert_parallel: bool, is_biased: bool) -> None:
    config = replace(gpt_oss_of(6, 2) if is_biased else config_of(6, 2, True), num_heads=6, num_kv_heads=3)
    x = 100 * torch.randn(num_tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    whole = _take_mlp(ModelPart.of(config, OnlyRank()), NamedWeights("cpu"), "layer.", 0, cpu)
    expected = whole(x)

    def work(ranks: Ranks) -> tuple[torch.Tensor, int]:
        part = ModelPart.of(config, ranks, is_expert_parallel=is_expert_parallel)
        summed = _take_mlp(part, NamedWeights(DEVICE), "layer.", 0, gpu)
        assert isinstance(summed, Summed) and isinstance(summed.layer, GroupedExperts)
        return summed(x.to(DEVICE)).cpu(), summed.weight_bytes - summed.layer._router.weight_bytes

    of_weights = 2 * (2 * 18 * 30 + 30 * 18) * 4  # of two of the six, or as much of all
    for rank, (out, experts_bytes) in enumerate(on_all_ranks(3, work)):
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))
        outer = 2 * 30 if is_expert_parallel else 6 * 30 * (rank == 0)  # added to the sum once
        assert experts_bytes == of_weights + is_biased * 4 * (2 * 2 * 18 + outer)


def test_a_row_is_the_same_in_any_company() -> None:
    """Where the interpreter's products are: it multiplies in numpy, whose sums depend on a row's place in the tile."""
    _, grouped = mixtures(2, True)
    x = torch.randn(40, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    whole = grouped(x)
    for row in (0, 17, 39):
        few = grouped(x[[row, 0]])[0]
        if IS_INTERPRETED:
            torch.testing.assert_close(few, whole[row], rtol=1e-5, atol=1e-5 * float(whole.abs().max()))
        else:
            assert torch.equal(few, whole[row])
