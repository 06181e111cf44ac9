"""A decoder of any family in `families.py`; `DecoderStyle` says how they differ.

Rows of a step belong to any number of sequences, in any mix of prefill, chunk and decode: only attention and the cache
tell them apart, by `AttentionMetadata`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.select import kernels_for
from worker_svc.models.alibi import alibi_slopes
from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.decoder_layer import DecoderLayer, StepTensors
from worker_svc.models.float_linear import FloatLinear
from worker_svc.models.fused_layers import FusedLayers
from worker_svc.models.linear import take_linear, tied_linear
from worker_svc.models.logit_reader import MAX_ROWS_AT_ONCE, LogitReader
from worker_svc.models.norm import NoNorm, Norm, take_norm
from worker_svc.models.parts import ModelPart, vocabulary_part
from worker_svc.models.post_norm import PostNormLayer
from worker_svc.models.rope import rotary_table
from worker_svc.models.step_adapters import StepAdapters
from worker_svc.models.weights import Weights


class Decoder:
    """The model, or a rank's part of it; see `worker_svc.models.loader.Model` for its contract."""

    def __init__(self, part: ModelPart, weights: Weights, device: torch.device) -> None:
        config = part.whole
        self.config, self.device, self._ranks = part.own, device, part.ranks
        style, names, hidden = config.style, config.style.names, config.hidden_size
        kernels = kernels_for(device)
        # Older files lack the first base: the one under which the embedding is found is that of all.
        base = next((base for base in names.bases if weights.has(f"{base}{names.embedding}.weight")), names.bases[0])
        width = style.embedding_size or hidden
        self._token_ids, self._most_token_ids = vocabulary_part(part.ranks, config.vocab_size)
        self._embedding = weights.take_parts(
            [f"{base}{names.embedding}.weight"], [config.vocab_size], width, rows=[self._token_ids]
        )
        self._project_in, self._project_out = None, None
        if style.embedding_size:
            self._project_in = take_linear(weights, [base + names.project_in], [hidden], width)
            self._project_out = take_linear(weights, [base + names.project_out], [width], hidden)
        self._positions = None
        if style.positions == "learned":
            num_rows = config.style.learned_offset + config.max_positions
            self._positions = weights.take(f"{base}{names.positions}.weight", num_rows, hidden)
        self._embedding_norm = None
        if names.embedding_norm:
            self._embedding_norm = take_norm(config, weights, base + names.embedding_norm, hidden, kernels)
        slopes = None
        if style.positions == "alibi":
            slopes = alibi_slopes(config.num_heads, device)[part.heads.start : part.heads.stop].contiguous()
        self._rotary_tables = [rotary_table(rope, config.max_model_len, device) for rope in style.ropes]
        self.step_adapters = StepAdapters(device)
        self.layers: list[DecoderLayer] = []
        layer_class = PostNormLayer if style.are_norms_behind else DecoderLayer
        for i in range(config.num_layers):
            rope = style.rope_of_layer[i] if style.rope_of_layer else 0
            cos_sin = self._rotary_tables[rope] if self._rotary_tables else None
            prefix = base + names.layer.format(i)
            self.layers.append(layer_class(part, weights, prefix, i, cos_sin, slopes, kernels))
        is_fused = part.ranks.size == 1 and FusedLayers.is_for(config, self.layers, kernels)
        self._fused = FusedLayers(config, self.layers) if is_fused else None
        self._norm: Norm = NoNorm()
        if names.final_norm:
            self._norm = take_norm(config, weights, base + names.final_norm, hidden, kernels)
        if config.tie_word_embeddings:
            weights.ignore(f"{names.head}.weight")
            self._head = tied_linear(weights, names.head, self._embedding)
        else:
            vocab_size = config.vocab_size
            self._head = take_linear(weights, [names.head], [vocab_size], width, outputs=[self._token_ids])
        # A GPU's library takes other code for one row than for two, which then round differently.
        self._least_rows = 2 if isinstance(self._head, FloatLinear) else 1

    @property
    def weights_bytes(self) -> int:
        """Bytes that the weights occupy; a tied embedding counts twice where the head is a packed copy of it."""
        tensors = [self._embedding, *self._rotary_tables, *([] if self._positions is None else [self._positions])]
        parts = [self._norm, self._embedding_norm, self._project_in, self._project_out]
        return (
            sum(tensor.nbytes for tensor in tensors)
            + sum(part.weight_bytes for part in parts if part is not None)
            + self._head.weight_bytes
            + sum(layer.weights_bytes for layer in self.layers)
        )

    @property
    def is_fused(self) -> bool:
        """Whether all layers are computed in one call of compiled code."""
        return self._fused is not None

    @property
    def is_capturable(self) -> bool:
        """Unless it is the host that tells which experts have rows."""
        return self.device.type == "cuda" or self.config.style.experts is None

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        attention: AttentionMetadata,
        logits_rows: torch.Tensor,
        reader: LogitReader | None = None,
    ) -> torch.Tensor:
        """See `Model.forward`."""
        num_tokens = token_ids.shape[0]
        if num_tokens < self._least_rows:
            token_ids, positions = token_ids.repeat(2), positions.repeat(2)
        residual = self._embed(token_ids, positions)
        wanted = logits_rows if reader is None else torch.cat((reader.rows, logits_rows))
        step = positions, attention, caches
        if self._fused is not None and not self.step_adapters.is_used:
            residual, update = self._fused(residual, *step, wanted)
        else:
            residual, update = self._run_layers(residual, *step, wanted, num_tokens)
        if reader is not None:
            num_read = reader.rows.shape[0]
            read = residual[:num_read].split(MAX_ROWS_AT_ONCE), update[:num_read].split(MAX_ROWS_AT_ONCE)
            for some_residual, some_update in zip(*read, strict=True):
                reader.take(self._logits(some_residual, some_update))
            residual, update = residual[num_read:], update[num_read:]
        return self._logits(residual, update)

    def _run_layers(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionMetadata,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        wanted: torch.Tensor,
        num_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FusedLayers`."""
        attended = residual.new_zeros(residual.shape[0], self.config.num_heads * self.config.head_size)
        step = StepTensors(num_tokens, positions, attention, residual, torch.empty_like(residual), attended)
        update = torch.zeros_like(residual)
        for layer, (key_cache, value_cache) in zip(self.layers, caches, strict=True):
            update = layer(update, key_cache, value_cache, step)
        return residual[wanted], update[wanted]

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[rows, hidden], the first residual."""
        style = self.config.style
        embedded = self._embedding_of(token_ids)
        if style.embedding_scale != 1.0:  # rounded to the model's type first, as it was in training
            embedded *= torch.tensor(style.embedding_scale, dtype=embedded.dtype)
        if self._project_in is not None:
            embedded = self._project_in(embedded)
        if self._positions is not None:
            embedded += functional.embedding(positions + style.learned_offset, self._positions)
        if self._embedding_norm:
            self._embedding_norm(embedded, embedded)
        return embedded

    def _embedding_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[rows, embedding size]."""
        if self._ranks.size == 1:
            return functional.embedding(token_ids, self._embedding)
        own = token_ids - self._token_ids.start
        is_foreign = (own < 0) | (own >= len(self._token_ids))
        if not self._token_ids:
            embedded = self._embedding.new_zeros(*token_ids.shape, self._embedding.shape[1])
            return self._ranks.add_up(embedded)
        embedded = functional.embedding(own.masked_fill(is_foreign, 0), self._embedding)
        return self._ranks.add_up(embedded.masked_fill(is_foreign[:, None], 0))

    def _of_all_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, vocab_size] of every rank's [R, its tokens]."""
        if self._ranks.size == 1:
            return logits
        padded = functional.pad(logits, (0, self._most_token_ids - logits.shape[1]))
        return self._ranks.side_by_side(padded)[:, : self.config.vocab_size]

    def _logits(self, residual: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """f32[R, vocab_size] of R rows, whose residual is overwritten."""
        num_rows = residual.shape[0]
        if 0 < num_rows < self._least_rows:
            residual, update = residual.repeat(2, 1), update.repeat(2, 1)
        hidden = torch.empty_like(residual)
        self._norm(hidden, update, residual=residual)
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        logits = self._of_all_tokens(self._head(hidden)[:num_rows]).float()
        if cap := self.config.style.logit_soft_cap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits
