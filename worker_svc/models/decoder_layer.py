"""One layer of a decoder: attention over the paged cache, then an MLP or experts, each with a norm before it.

    residual += update;  update = attention(norm(residual))
    residual += update;  update = mlp(norm(residual))

What a half adds to the residual is handed on as `update`, so that the next norm can add and norm in one pass. Some
families norm it once more before that.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.config import ModelConfig
from worker_svc.models.experts import Experts
from worker_svc.models.grouped_experts import GroupedExperts, take_grouped_experts
from worker_svc.models.linear import take_linear
from worker_svc.models.mlp import Mlp
from worker_svc.models.norm import Norm, take_norm
from worker_svc.models.weights import Weights


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What all layers of one forward pass share; rows may be more than tokens, the last ones are then padding."""

    num_tokens: int
    positions: torch.Tensor  # i64[rows]
    attention: AttentionMetadata
    residual: torch.Tensor  # [rows, hidden]
    normed: torch.Tensor  # [rows, hidden], overwritten by each half
    attended: torch.Tensor  # [rows, num_heads * head_size], overwritten by each layer


class DecoderLayer:
    """Takes its weights at construction; `index` counts from 0; `cos_sin` as `reference.rotary` takes it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        prefix: str,
        index: int,
        cos_sin: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        kernels: ModuleType,
    ) -> None:
        style, names, hidden = config.style, config.style.names, config.hidden_size
        self._config, self._kernels, self.cos_sin = config, kernels, cos_sin
        self._part_sizes = [heads * config.head_size for heads in (config.num_heads, *[config.num_kv_heads] * 2)]
        scale = config.head_size**-0.5 if style.attention_scale is None else style.attention_scale
        self.attention_options: dict[str, Any] = {
            "scale": scale / (index + 1) if style.is_scaled_by_layer else scale,
            "alibi_slopes": alibi_slopes,
            "sliding_window": style.window(index),
            "logit_soft_cap": style.attention_soft_cap,
        }

        def norm(name: str, size: int = hidden) -> Norm:
            return take_norm(config, weights, prefix + name, size, kernels)

        self.input_norm = norm(names.input_norm)
        self.qkv = take_linear(
            weights,
            [prefix + name for name in names.qkv],
            self._part_sizes,
            hidden,
            is_biased=style.qkv_bias,
            is_transposed=names.is_transposed,
            num_turns=config.num_heads if names.has_heads_in_turn else 1,
        )
        self._head_norms = [
            norm(name, config.head_size) for name in (names.query_norm, names.key_norm) if style.has_head_norms
        ]
        self.attention_out = take_linear(
            weights,
            [prefix + names.attention_out],
            [hidden],
            self._part_sizes[0],
            is_biased=style.attention_out_bias,
            is_transposed=names.is_transposed,
        )
        self._attention_post_norm = norm(names.attention_post_norm) if names.attention_post_norm else None
        self.mlp_norm = norm(names.mlp_norm)
        self.mlp = _take_mlp(config, weights, prefix, index, kernels)
        self._mlp_post_norm = norm(names.mlp_post_norm) if names.mlp_post_norm else None
        for name in names.ignored:
            weights.ignore(prefix + name)

    @property
    def weights_bytes(self) -> int:
        """Bytes that its weights occupy on the device."""
        norms = [self.input_norm, *self._head_norms, self._attention_post_norm, self.mlp_norm, self._mlp_post_norm]
        products = [self.qkv, self.attention_out, self.mlp]
        return sum(part.weight_bytes for part in [*norms, *products] if part is not None)

    def __call__(
        self, update: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, step: StepTensors
    ) -> torch.Tensor:
        """Adds `update` to the residual; the next update, [rows, hidden]. Writes the new keys and values."""
        self.input_norm(step.normed, update, step.residual)
        self._attend(key_cache, value_cache, step)
        update = self.attention_out(step.attended)
        if self._attention_post_norm:
            self._attention_post_norm(update, update)
        self.mlp_norm(step.normed, update, step.residual)
        update = self.mlp(step.normed)
        if self._mlp_post_norm:
            self._mlp_post_norm(update, update)
        return update

    def _attend(self, key_cache: torch.Tensor, value_cache: torch.Tensor, step: StepTensors) -> None:
        config, kernels, attention, num_tokens = self._config, self._kernels, step.attention, step.num_tokens
        query, key, value = (
            part.unflatten(1, (-1, config.head_size)) for part in self.qkv(step.normed).split(self._part_sizes, dim=1)
        )
        if self._head_norms:
            query, key = (_normed(norm, x) for norm, x in zip(self._head_norms, (query, key), strict=True))
        tokens, caches = slice(num_tokens), (key_cache, value_cache, attention.slot_mapping)
        if self.cos_sin is None:
            kernels.reshape_and_cache(key[tokens], value[tokens], *caches)
        else:
            angles = (step.positions[tokens], self.cos_sin)
            kernels.rotary_and_cache(query[tokens], key[tokens], value[tokens], *angles, *caches)
        kernels.paged_attention(
            step.attended.view(-1, config.num_heads, config.head_size),
            query,
            key_cache,
            value_cache,
            attention.block_tables,
            attention.seq_lens,
            attention.query_starts,
            max_query_len=attention.max_query_len,
            max_seq_len=attention.max_seq_len,
            **self.attention_options,
        )


def _take_mlp(
    config: ModelConfig, weights: Weights, prefix: str, index: int, kernels: ModuleType
) -> Mlp | Experts | GroupedExperts:
    style, names, hidden = config.style, config.style.names, config.hidden_size

    def mlp(prefix: str, inner: tuple[str, ...], outer: str, size: int) -> Mlp:
        sizes = [size] * (2 if style.is_gated else 1)
        options = {"is_biased": style.mlp_bias, "is_transposed": names.is_transposed}
        return Mlp(
            take_linear(weights, [prefix + name for name in inner], sizes, hidden, **options),
            take_linear(weights, [prefix + outer], [hidden], size, **options),
            style,
            kernels,
        )

    if style.experts is None or not style.experts.is_sparse[index]:
        return mlp(prefix, names.mlp_in, names.mlp_out, config.intermediate_size)
    router = take_linear(weights, [prefix + names.router], [style.experts.num_experts], hidden, is_exact=True)
    if "grouped_matmul" in kernels.__all__:
        return take_grouped_experts(config, weights, prefix, router, style.experts, kernels)
    experts = [
        mlp(prefix + names.expert.format(i), names.expert_in, names.expert_out, style.experts.intermediate_size)
        for i in range(style.experts.num_experts)
    ]
    return Experts(router, experts, style.experts)


def _normed(norm: Norm, x: torch.Tensor) -> torch.Tensor:
    """Each head of x [rows, heads, head_size] normed by itself."""
    heads = x.reshape(-1, x.shape[-1])  # a copy: part of a fused product
    norm(heads, heads)
    return heads.view(x.shape)
