"""One layer of a decoder: attention over the paged cache, then an MLP or experts, each with a norm before it.

    residual += update;  update = attention(norm(residual))
    residual += update;  update = mlp(norm(residual))

What a half adds to the residual is handed on as `update`, so that the next norm can add and norm in one pass. Some
families norm it once more before that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import torch

from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.checkpoint.weights import Weights
from worker_svc.models.errors import ModelError
from worker_svc.models.experts.experts import Experts
from worker_svc.models.experts.grouped_experts import GroupedExperts, take_grouped_experts
from worker_svc.models.experts.router import take_router
from worker_svc.models.experts.shared_experts import WithShared
from worker_svc.models.mlp import Mlp
from worker_svc.models.norm import Norm, RmsNorm, normed_rows, take_norm
from worker_svc.models.parts import ModelPart
from worker_svc.models.products.linear import Linear, take_linear
from worker_svc.models.products.rows import Rows, applied
from worker_svc.models.products.summed import Layer, summed

# Into and out of some neurons of an MLP: of names into it and out of it, of a size, which neurons.
Products = Callable[[tuple[str, ...], str, int, range], tuple[Linear, Linear]]


class HasWeight(Protocol):
    """A part of a layer."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that it occupies on the device."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What all layers of one forward pass share; rows may be more than tokens, the last ones are then padding."""

    num_tokens: int
    positions: torch.Tensor  # i64[rows]
    attention: AttentionMetadata
    attention_options: dict[str, Any]  # `AttentionMetadata.shared_options`
    residual: torch.Tensor  # [rows, hidden]
    normed: torch.Tensor  # [rows, hidden], overwritten by each half
    attended: torch.Tensor  # [rows, num_heads * config.gathered_size], overwritten by each layer


class DecoderLayer:
    """Takes its weights at construction; `index` counts from 0; `cos_sin` as `reference.rotary` takes it, and
    `cache_scales` as `CacheScales.of_layer` gives them, empty for a cache without."""

    def __init__(
        self,
        part: ModelPart,
        weights: Weights,
        prefix: str,
        index: int,
        cos_sin: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        kernels: ModuleType,
        cache_scales: dict[str, torch.Tensor],
    ) -> None:
        config, whole = part.own, part.whole
        style, names, hidden = config.style, config.style.names, config.hidden_size
        self._config, self._kernels, self.cos_sin = config, kernels, cos_sin
        scale = config.head_size**-0.5 if style.attention_scale is None else style.attention_scale
        self.attention_options: dict[str, Any] = {
            "scale": scale / (index + 1) if style.is_scaled_by_layer else scale,
            "alibi_slopes": alibi_slopes,
            "sliding_window": style.window(index),
            "logit_soft_cap": style.attention_soft_cap,
            "is_batch_invariant": weights.is_batch_invariant,
        }
        self._cache_scales = cache_scales
        if names.sinks:
            sinks = weights.take_parts([prefix + names.sinks], [whole.num_heads], rows=[part.heads])
            self.attention_options["sinks"] = sinks.float()

        def norm(name: str, size: int = hidden) -> Norm:
            return take_norm(config, weights, prefix + name, size, kernels)

        self.input_norm = norm(names.input_norm)
        self._take_heads(part, weights, prefix)
        attended_size = whole.attended_size // whole.num_heads
        attention_out = take_linear(
            weights,
            [prefix + names.attention_out],
            [hidden],
            whole.attended_size,
            inputs=range(part.heads.start * attended_size, part.heads.stop * attended_size),
            is_biased=style.attention_out_bias,
            is_transposed=names.is_transposed,
        )
        self.attention_out = summed(attention_out, part.ranks)
        self.attention_post_norm = norm(names.attention_post_norm) if names.attention_post_norm else None
        self.mlp_norm = norm(names.mlp_norm)
        self.mlp = _take_mlp(part, weights, prefix, index, kernels)
        self.mlp_post_norm = norm(names.mlp_post_norm) if names.mlp_post_norm else None
        for name in names.ignored:
            weights.ignore(prefix + name)

    def _take_heads(self, part: ModelPart, weights: Weights, prefix: str) -> None:
        """What makes queries, keys and values."""
        config, whole, outputs = part.own, part.whole, part.outputs_of_heads
        style, names = config.style, config.style.names
        self._part_sizes = [len(some) for some in outputs]
        self.qkv = take_linear(
            weights,
            [prefix + name for name in names.qkv],
            [heads * whole.head_size for heads in (whole.num_heads, *[whole.num_kv_heads] * 2)],
            config.hidden_size,
            outputs=outputs,
            is_biased=style.qkv_bias,
            is_transposed=names.is_transposed,
            num_turns=whole.num_heads if names.has_heads_in_turn else 1,
        )
        self.head_norms = [
            take_norm(config, weights, prefix + name, config.head_size, self._kernels)
            for name in (names.query_norm, names.key_norm)
            if style.has_head_norms
        ]
        self._head_norm_options = _options_of(self.head_norms, self.cos_sin)

    @property
    def _of_heads(self) -> Sequence[HasWeight]:
        """What `_take_heads` has taken."""
        return [self.qkv, *self.head_norms]

    @property
    def _into_heads(self) -> Sequence[Layer]:
        """The products that read what `input_norm` gives."""
        return [self.qkv]

    @property
    def weights_bytes(self) -> int:
        """Bytes that its weights occupy on the device."""
        norms = [self.input_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm]
        parts = [*norms, *self._of_heads, self.attention_out, self.mlp]
        sinks = self.attention_options.get("sinks")
        of_sinks = 0 if sinks is None else sinks.nbytes
        return of_sinks + sum(part.weight_bytes for part in parts if part is not None)

    def __call__(
        self, update: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, step: StepTensors
    ) -> torch.Tensor:
        """Adds `update` to the residual; the next update, [rows, hidden]. Writes the new keys and values."""
        rows = normed_rows(self.input_norm, self._into_heads, step.normed, update, step.residual)
        update = self.attention_out(self._attend(rows, key_cache, value_cache, step))
        if self.attention_post_norm:
            self.attention_post_norm(update, update)
        rows = normed_rows(self.mlp_norm, [self.mlp], step.normed, update, step.residual)
        update = applied(self.mlp, rows)
        if self.mlp_post_norm:
            self.mlp_post_norm(update, update)
        return update

    def _attend(
        self, rows: Rows, key_cache: torch.Tensor, value_cache: torch.Tensor, step: StepTensors
    ) -> torch.Tensor:
        """What heads attend to, side by side, [rows, config.attended_size]; `rows` for `_into_heads`."""
        config, kernels, attention, num_tokens = self._config, self._kernels, step.attention, step.num_tokens
        query, key, value = (
            part.unflatten(1, (-1, config.head_size)) for part in applied(self.qkv, rows).split(self._part_sizes, dim=1)
        )
        tokens, caches = slice(num_tokens), (key_cache, value_cache, attention.slot_mapping)
        if self.cos_sin is None:
            kernels.reshape_and_cache(key[tokens], value[tokens], *caches, **self._cache_scales)
        else:
            angles = (step.positions[tokens], self.cos_sin)
            new = query[tokens], key[tokens], value[tokens]
            kernels.rotary_and_cache(*new, *angles, *caches, **self._head_norm_options, **self._cache_scales)
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
            **self._cache_scales,
            **step.attention_options,
        )
        return step.attended


def _take_mlp(part: ModelPart, weights: Weights, prefix: str, index: int, kernels: ModuleType) -> Layer:
    config = part.whole
    style, names, hidden = config.style, config.style.names, config.hidden_size
    experts = style.experts
    is_sparse = experts is not None and experts.is_sparse[index]
    is_biased = experts.are_biased if experts is not None and is_sparse else style.mlp_bias
    take = partial(take_linear, weights, is_biased=is_biased, is_transposed=names.is_transposed)

    def products(into: tuple[str, ...], out_of: str, size: int, neurons: range) -> tuple[Linear, Linear]:
        """Into and out of these neurons of an MLP of `size`."""
        num_parts = 2 if style.is_gated else 1
        inner = take(
            [prefix + name for name in into],
            [size] * num_parts,
            hidden,
            outputs=[neurons] * num_parts,
            num_turns=size if is_sparse and names.has_gates_in_turn else 1,
        )
        return inner, take([prefix + out_of], [hidden], size, inputs=neurons)

    if experts is None or not is_sparse:
        size = config.intermediate_size
        inner, outer = products(names.mlp_in, names.mlp_out, size, part.neurons(size))
        return Mlp(inner, summed(outer, part.ranks), style, kernels)
    chosen = _take_experts(part, weights, prefix, products, kernels)
    if not experts.num_shared:
        return summed(chosen, part.ranks)
    size = experts.num_shared * experts.intermediate_size
    into = tuple(names.shared_experts + name for name in names.expert_in)
    inner, outer = products(into, names.shared_experts + names.expert_out, size, part.neurons(size))
    return summed(WithShared(chosen, Mlp(inner, outer, style, kernels)), part.ranks)


def _take_experts(
    part: ModelPart, weights: Weights, prefix: str, products: Products, kernels: ModuleType
) -> GroupedExperts | Experts:
    """Those of this rank that tokens choose."""
    style, names = part.whole.style, part.whole.style.names
    experts = style.experts
    assert experts is not None
    router = take_router(weights, prefix, style, part.whole.hidden_size, kernels)
    if "grouped_matmul" in kernels.__all__:
        return take_grouped_experts(part, weights, prefix, router, kernels)
    neurons, own = part.neurons(experts.intermediate_size, of_experts=True), []
    for number in range(experts.num_experts):
        expert = names.expert.format(number)
        into, out_of = tuple(expert + name for name in names.expert_in), expert + names.expert_out
        if number in part.experts:
            own.append(Mlp(*products(into, out_of, experts.intermediate_size, neurons), style, kernels))
        else:
            for name in (*into, out_of):
                weights.ignore(f"{prefix}{name}.weight")
                weights.ignore(f"{prefix}{name}.bias")
    return Experts(router, own, part.experts)


def _options_of(head_norms: list[Norm], cos_sin: torch.Tensor | None) -> dict[str, Any]:
    """What `rotary_and_cache` is told of the norms of queries' and keys' heads; nothing where there are none."""
    if not head_norms:
        return {}
    query_norm, key_norm = head_norms
    if not (isinstance(query_norm, RmsNorm) and isinstance(key_norm, RmsNorm)) or cos_sin is None:
        raise ModelError("norms of heads are supported where they are RMS norms and a rotation follows")
    return {
        "query_norm": query_norm.weight,
        "key_norm": key_norm.weight,
        "norm_eps": query_norm.eps,
        "norm_weight_offset": query_norm.weight_offset,
    }
