"""The Llama family: decoder layers of grouped-query attention and SwiGLU, with RMSNorm before each (arXiv:2302.13971).

Rows of a step belong to any number of sequences, in any mix of prefill, chunk and decode: only attention and the cache
tell them apart, by `AttentionMetadata`. Queries, keys and values come out of one fused product, gate and up of another.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.select import kernels_for
from worker_svc.attention import AttentionMetadata
from worker_svc.models.config import ModelConfig
from worker_svc.models.linear import Linear
from worker_svc.models.rope import rotary_table
from worker_svc.models.weights import Weights


class LlamaLayer:
    """Weights of one decoder layer, taken under the names that Hugging Face gives them."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        hidden, query_size = config.hidden_size, config.num_heads * config.head_size
        kv_size, inner = config.num_kv_heads * config.head_size, config.intermediate_size

        def linear(parts: dict[str, int], in_features: int, biased: bool) -> Linear:
            """One product out of several that share their input."""
            weight = [weights.take(f"{prefix}.{name}.weight", size, in_features) for name, size in parts.items()]
            bias = [weights.take(f"{prefix}.{name}.bias", size) for name, size in parts.items()] if biased else None
            return Linear(torch.cat(weight) if len(weight) > 1 else weight[0], torch.cat(bias) if bias else None)

        qkv = {"self_attn.q_proj": query_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        self.input_norm = weights.take(f"{prefix}.input_layernorm.weight", hidden)
        self.qkv = linear(qkv, hidden, config.attention_bias)
        self.attention_out = linear({"self_attn.o_proj": hidden}, query_size, config.attention_bias)
        self.mlp_norm = weights.take(f"{prefix}.post_attention_layernorm.weight", hidden)
        self.gate_up = linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias)
        self.down = linear({"mlp.down_proj": hidden}, inner, config.mlp_bias)
        weights.ignore(f"{prefix}.self_attn.rotary_emb.inv_freq")  # old checkpoints; computed from the configuration

    @property
    def weights_bytes(self) -> int:
        products = (self.qkv, self.attention_out, self.gate_up, self.down)
        return sum(product.weight_bytes for product in products) + self.input_norm.nbytes + self.mlp_norm.nbytes


class LlamaModel:
    """The whole decoder; see `worker_svc.models.loader.Model` for its contract."""

    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device) -> None:
        self.config, self.device = config, device
        self._kernels = kernels_for(device)
        self._embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [LlamaLayer(config, weights, f"model.layers.{i}") for i in range(config.num_layers)]
        self._norm = weights.take("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            weights.ignore("lm_head.weight")
            head = self._embedding
        else:
            head = weights.take("lm_head.weight", config.vocab_size, config.hidden_size)
        self._head = Linear(head)
        self._cos_sin = rotary_table(config, device)
        self._scale = config.head_size**-0.5

    @property
    def weights_bytes(self) -> int:
        """Bytes that the weights occupy; a tied embedding counts twice where the head is a packed copy of it."""
        tensors = (self._embedding, self._norm, self._cos_sin)
        return (
            sum(tensor.nbytes for tensor in tensors)
            + self._head.weight_bytes
            + sum(layer.weights_bytes for layer in self._layers)
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        attention: AttentionMetadata,
        logits_rows: torch.Tensor,
    ) -> torch.Tensor:
        """See `Model.forward`."""
        config, kernels = self.config, self._kernels
        num_tokens = token_ids.shape[0]
        if num_tokens == 1:  # a product of one row may round differently from the same row among others: see Linear
            token_ids, positions = token_ids.repeat(2), positions.repeat(2)
        query_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        residual = functional.embedding(token_ids, self._embedding)  # [rows, hidden], rows >= num_tokens
        normed = torch.empty_like(residual)
        attended = residual.new_zeros(residual.shape[0], query_size)
        activated = residual.new_empty(residual.shape[0], config.intermediate_size)
        update = torch.zeros_like(residual)  # what the layer before adds to the residual
        for layer, (key_cache, value_cache) in zip(self._layers, caches, strict=True):
            kernels.rms_norm(normed, update, layer.input_norm, eps=config.rms_norm_eps, residual=residual)
            query, key, value = (
                part.unflatten(1, (-1, config.head_size))
                for part in layer.qkv(normed).split((query_size, kv_size, kv_size), dim=1)
            )
            kernels.rotary(query, key, positions, self._cos_sin)
            kernels.reshape_and_cache(
                key[:num_tokens], value[:num_tokens], key_cache, value_cache, attention.slot_mapping
            )
            kernels.paged_attention(
                attended.view(-1, config.num_heads, config.head_size),
                query,
                key_cache,
                value_cache,
                attention.block_tables,
                attention.seq_lens,
                attention.query_starts,
                scale=self._scale,
                max_query_len=attention.max_query_len,
                max_seq_len=attention.max_seq_len,
            )
            update = layer.attention_out(attended)
            kernels.rms_norm(normed, update, layer.mlp_norm, eps=config.rms_norm_eps, residual=residual)
            kernels.silu_and_mul(activated, layer.gate_up(normed))
            update = layer.down(activated)
        return self._logits(residual, update, logits_rows)

    def _logits(self, residual: torch.Tensor, update: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """f32[R, vocab_size] of the named rows; only those are normed and multiplied by the head."""
        num_rows = rows.shape[0]
        if num_rows == 1:
            rows = rows.repeat(2)
        hidden = residual[rows]
        self._kernels.rms_norm(hidden, update[rows], self._norm, eps=self.config.rms_norm_eps, residual=residual[rows])
        return self._head(hidden)[:num_rows].float()
