"""Which experts a token goes to: the router's product, and the choice by its logits."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch

from worker_svc.models.checkpoint.weights import Weights
from worker_svc.models.products.dense import dense
from worker_svc.models.products.linear import Linear, take_linear
from worker_svc.models.style import DecoderStyle, ExpertStyle


class Router:
    """Chooses as the style says. Where it has a choice of its own (`GroupedChoice`), logits are float32: their
    differences decide."""

    def __init__(self, product: Linear, style: ExpertStyle, kernels: ModuleType, bias: torch.Tensor | None) -> None:
        """`product` gives [T, num_experts]; `bias` f32[num_experts]."""
        self._product, self._style, self._kernels, self._bias = product, style, kernels, bias
        self.weight_bytes = product.weight_bytes + (0 if bias is None else bias.nbytes)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[T, num_experts] of x [T, hidden]."""
        return self._product(x if self._style.choice is None else x.float())

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Shares f32[T, num_chosen] and whose they are, i64[T, num_chosen]."""
        num_chosen = self._style.num_chosen
        if self._style.choice is None:
            shares, chosen = self.logits(x).float().softmax(-1).topk(num_chosen, dim=-1)
            if self._style.is_normalized:
                shares /= shares.sum(-1, keepdim=True)
            return shares, chosen
        shares = x.new_empty(len(x), num_chosen, dtype=torch.float32)
        ordered = self._scores(shares, x).sort(dim=-1, descending=True, stable=True)
        return shares, ordered.indices[:, :num_chosen]

    def route(self, shares: torch.Tensor, *sorted_rows: torch.Tensor, x: torch.Tensor, first_expert: int) -> None:
        """Shares f32[T, num_chosen], and `places`, `rows` and `starts` of `reference.route_experts`."""
        route = partial(self._kernels.route_experts, first_expert=first_expert)
        if self._style.choice is None:
            route(shares, *sorted_rows, self.logits(x), is_normalized=self._style.is_normalized)
        else:
            scores = self._scores(shares, x)
            route(torch.empty_like(shares), *sorted_rows, scores, is_normalized=False)

    def _scores(self, shares: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `reference.score_experts`."""
        choice, logits = self._style.choice, self.logits(x)
        assert choice is not None
        scores = torch.empty_like(logits)
        self._kernels.score_experts(
            shares,
            scores,
            logits,
            self._bias,
            kind=choice.scores,
            num_groups=choice.num_groups,
            num_chosen_groups=choice.num_chosen_groups,
            is_normalized=self._style.is_normalized,
            scale=choice.scale,
        )
        return scores


def take_router(weights: Weights, prefix: str, style: DecoderStyle, hidden: int, kernels: ModuleType) -> Router:
    """That of the layer whose names begin with `prefix`."""
    experts, names = style.experts, style.names
    assert experts is not None
    if experts.choice is None:
        product: Linear = take_linear(
            weights,
            [prefix + names.router],
            [experts.num_experts],
            hidden,
            is_biased=experts.are_biased,
            is_exact=True,
        )
        return Router(product, experts, kernels, None)
    weight = weights.take_float32(f"{prefix}{names.router}.weight", experts.num_experts, hidden)
    bias = weights.take_float32(prefix + names.router_bias, experts.num_experts) if experts.choice.is_biased else None
    product = dense(weight, is_batch_invariant=weights.is_batch_invariant)
    return Router(product, experts, kernels, bias)
