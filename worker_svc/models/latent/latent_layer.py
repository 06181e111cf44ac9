"""One layer of a decoder with multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434).

The cache holds of each token a latent c and a part r of its keys that is turned. A head's key is (K c, r), its value
V c, with matrices K and V of its own. Neither is ever made: with the query (q, p)

    (q, p) . (K c, r) = (K^T q, p) . (c, r)        sum_j w_j V c_j = V (sum_j w_j c_j)

so all heads' queries, once multiplied by K^T, meet the same keys (c, r), whose first part are the values, and V is
applied to what they add up. docs/latent-attention.md says what that costs, in decoding and in prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from worker_svc.models.checkpoint.weights import Weights
from worker_svc.models.decoder_layer import DecoderLayer, HasWeight, StepTensors
from worker_svc.models.latent.head_products import head_products
from worker_svc.models.norm import normed_rows, take_norm
from worker_svc.models.parts import ModelPart
from worker_svc.models.products.linear import take_linear
from worker_svc.models.products.rows import Rows, applied
from worker_svc.models.products.summed import Layer
from worker_svc.models.quantized.quantized_layer import drop_zero_biases


class LatentLayer(DecoderLayer):
    """As `DecoderLayer`; of the caches it writes and reads keys alone, as values are a part of them."""

    def _take_heads(self, part: ModelPart, weights: Weights, prefix: str) -> None:
        config, style, names = part.whole, part.whole.style, part.whole.style.names
        assert style.latent is not None
        hidden, latent = config.hidden_size, style.latent
        self._latent = latent

        def rows_of_heads(size: int) -> range:
            return range(part.heads.start * size, part.heads.stop * size)

        self._query_down = self._query_norm = None
        query, inputs = names.query, hidden
        if latent.query_latent_size:
            query, inputs = names.query_up, latent.query_latent_size
            down = [prefix + names.query_down]
            self._query_down = take_linear(weights, down, [inputs], hidden, is_biased=style.qkv_bias)
            norm, eps = prefix + names.query_down_norm, latent.norm_eps
            self._query_norm = take_norm(config, weights, norm, inputs, self._kernels, eps)
        sizes, outputs = [config.num_heads * latent.query_size], [rows_of_heads(latent.query_size)]
        self._query = take_linear(weights, [prefix + query], sizes, inputs, outputs=outputs)
        down = [prefix + names.key_down]
        self._key_down = take_linear(weights, down, [latent.cached_size], hidden, is_biased=style.qkv_bias)
        self._key_norm = weights.take(f"{prefix}{names.key_down_norm}.weight", latent.latent_size)

        up, size = f"{prefix}{names.key_up}.weight", latent.plain_size + latent.value_size
        if kind := weights.format_of(up):
            weights.quantized.note_expanded(kind, "latent attention multiplies by its transpose")
            drop_zero_biases(weights, [prefix + names.key_up], [config.num_heads * size])
        rows = [rows_of_heads(size)]
        both = weights.take_parts([up], [config.num_heads * size], latent.latent_size, rows=rows)
        keys, values = both.view(-1, size, latent.latent_size).split([latent.plain_size, latent.value_size], dim=1)
        self._is_batch_invariant = weights.is_batch_invariant
        form = partial(head_products, is_batch_invariant=self._is_batch_invariant)
        self._into_latent, self._out_of_latent = form(keys.transpose(1, 2).contiguous()), form(values.contiguous())

    @property
    def _of_heads(self) -> Sequence[HasWeight]:
        parts = [
            self._query_down,
            self._query_norm,
            self._query,
            self._key_down,
            self._into_latent,
            self._out_of_latent,
        ]
        return [each for each in parts if each is not None]

    @property
    def _into_heads(self) -> Sequence[Layer]:
        return [self._query if self._query_down is None else self._query_down, self._key_down]

    def _attend(
        self, rows: Rows, key_cache: torch.Tensor, value_cache: torch.Tensor, step: StepTensors
    ) -> torch.Tensor:
        latent, kernels, attention, num_tokens = self._latent, self._kernels, step.attention, step.num_tokens
        of_query = rows
        if self._query_down is not None and self._query_norm is not None:
            narrow = applied(self._query_down, rows)
            of_query = normed_rows(self._query_norm, [self._query], narrow, narrow)
        plain, turning = (
            applied(self._query, of_query)
            .unflatten(1, (-1, latent.query_size))
            .split([latent.plain_size, latent.rotary_size], dim=2)
        )
        tokens, heads = slice(num_tokens), plain.shape[1]
        query = plain.new_empty(len(plain), heads, latent.cached_size)  # [rows, heads, latent and turned part]
        self._into_latent(query[..., : latent.latent_size], plain)
        kernels.latent_and_cache(
            query[tokens, :, latent.latent_size :],
            turning[tokens],
            applied(self._key_down, rows)[tokens],
            self._key_norm,
            step.positions[tokens],
            self.cos_sin,
            key_cache,
            attention.slot_mapping,
            norm_eps=latent.norm_eps,
            are_pairs=latent.are_pairs,
        )
        gathered = step.attended.view(-1, heads, latent.latent_size)
        kernels.latent_attention(
            gathered,
            query,
            key_cache,
            attention.block_tables,
            attention.seq_lens,
            attention.query_starts,
            scale=self.attention_options["scale"],
            max_query_len=attention.max_query_len,
            max_seq_len=attention.max_seq_len,
            is_batch_invariant=self._is_batch_invariant,
            **step.attention_options,
        )
        values = step.normed.new_empty(len(plain), heads * latent.value_size)
        self._out_of_latent(values.view(-1, heads, latent.value_size), gathered)
        return values
