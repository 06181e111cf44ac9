"""A decoder of any family in `families`; `DecoderStyle` says how they differ.

Rows of a step belong to any number of sequences, in any mix of prefill, chunk and decode: only attention and the cache
tell them apart, by `AttentionMetadata`.
"""

from __future__ import annotations

import torch

from kernels.select import kernels_for
from worker_svc.models.alibi import alibi_slopes
from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.checkpoint.weights import Weights
from worker_svc.models.decoder_layer import DecoderLayer, StepTensors
from worker_svc.models.embedding import Embedding
from worker_svc.models.fused_layers import FusedLayers
from worker_svc.models.head import Head
from worker_svc.models.latent.latent_layer import LatentLayer
from worker_svc.models.logit_reader import MAX_ROWS_AT_ONCE, LogitReader
from worker_svc.models.parts import ModelPart
from worker_svc.models.post_norm import PostNormLayer
from worker_svc.models.rope import rotary_table
from worker_svc.models.step_adapters import StepAdapters


class Decoder:
    """The model, or a rank's part of it; see `worker_svc.models.loader.Model` for its contract.

    A stage that is not the last gives the next one the residual with the last update in it, as the next norm would add
    them; its own logits have no rows.
    """

    def __init__(self, part: ModelPart, weights: Weights, device: torch.device) -> None:
        config = part.whole
        self.config, self.device, self._part = part.own, device, part
        style, names = config.style, config.style.names
        kernels = kernels_for(device)
        base = names.base(weights.has)
        self._embedding = Embedding(part, weights, base, kernels, device) if part.is_first else None
        slopes = None
        if style.positions == "alibi":
            slopes = alibi_slopes(config.num_heads, device)[part.heads.start : part.heads.stop].contiguous()
        self._rotary_tables = [rotary_table(rope, config.max_model_len, device) for rope in style.ropes]
        self.step_adapters = StepAdapters(device)
        self.layers: list[DecoderLayer] = []
        layer_class = PostNormLayer if style.are_norms_behind else DecoderLayer
        if style.latent is not None:
            layer_class = LatentLayer
        for i in part.layers:
            rope = style.rope_of_layer[i] if style.rope_of_layer else 0
            cos_sin = self._rotary_tables[rope] if self._rotary_tables else None
            prefix = base + names.layer.format(i)
            scales = {} if config.cache_scales is None else config.cache_scales.of_layer(i, part.kv_heads, device)
            self.layers.append(layer_class(part, weights, prefix, i, cos_sin, slopes, kernels, scales))
        is_fused = part.ranks.size == 1 and FusedLayers.is_for(config, self.layers, kernels)
        self._fused = FusedLayers(config, self.layers) if is_fused else None
        embedding = None if self._embedding is None else self._embedding.weight
        self._head = Head(part, weights, base, embedding, kernels) if part.is_last else None
        weights.ignore(f"{base}rotary_emb.inv_freq")  # of files that have it once, not by layer as `names.ignored`
        for prefix in part.prefixes_without_place(base):
            weights.ignore_all(prefix)
        # A GPU's library takes other code for one row than for two, which then round differently.
        self._least_rows = 1 if device.type == "cpu" or config.is_batch_invariant else 2

    @property
    def weights_bytes(self) -> int:
        """Bytes that the weights occupy; a tied embedding counts twice where the head is a packed copy of it."""
        ends = [end for end in (self._embedding, self._head) if end is not None]
        return (
            sum(table.nbytes for table in self._rotary_tables)
            + sum(end.weight_bytes for end in ends)
            + sum(layer.weights_bytes for layer in self.layers)
        )

    @property
    def head(self) -> Head | None:
        """None where another stage has it."""
        return self._head

    @property
    def is_fused(self) -> bool:
        """Whether all layers are computed in one call of compiled code."""
        return self._fused is not None

    @property
    def is_capturable(self) -> bool:
        """Unless it is the host that tells which experts have rows, or another stage computes as well."""
        can_be = self.device.type == "cuda" or self.config.style.experts is None
        return can_be and self._part.stages.count == 1

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        attention: AttentionMetadata,
        logits_rows: torch.Tensor,
        reader: LogitReader | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Model.forward`."""
        num_tokens = token_ids.shape[0]
        if num_tokens < self._least_rows:
            token_ids, positions = token_ids.repeat(2), positions.repeat(2)
        residual = self._first_residual(token_ids, positions, num_tokens)
        if self._head is None:
            wanted = torch.arange(num_tokens, device=self.device)
        else:
            wanted = logits_rows if reader is None else torch.cat((reader.rows, logits_rows))
        step = positions, attention, caches
        if self._fused is not None and not self.step_adapters.is_used:
            takes_all = reader is None and wanted.shape[0] == num_tokens  # in order, as rows ascend
            residual, update = self._fused(residual, *step, None if takes_all else wanted)
        else:
            residual, update = self._run_layers(residual, *step, wanted, num_tokens)
        if self._head is None:
            self._part.stages.hand_on(residual.add_(update))
            return torch.empty(0, self.config.vocab_size, device=self.device)
        if reader is not None:
            num_read = reader.rows.shape[0]
            read = residual[:num_read].split(MAX_ROWS_AT_ONCE), update[:num_read].split(MAX_ROWS_AT_ONCE)
            for some_residual, some_update in zip(*read, strict=True):
                reader.take(self._head(some_residual, some_update, self._least_rows))
            residual, update = residual[num_read:], update[num_read:]
        return self._head(residual, update, self._least_rows, out)

    def _first_residual(self, token_ids: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[rows, hidden], of which `num_tokens` count."""
        if self._embedding is not None:
            return self._embedding(token_ids, positions)
        shape = token_ids.shape[0], self.config.hidden_size
        received = torch.zeros(shape, dtype=self.config.dtype, device=self.device)
        self._part.stages.receive(received[:num_tokens])
        return received

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
        attended = residual.new_zeros(residual.shape[0], self.config.num_heads * self.config.gathered_size)
        shared = attention.shared_options()
        step = StepTensors(num_tokens, positions, attention, shared, residual, torch.empty_like(residual), attended)
        update = torch.zeros_like(residual)
        for layer, (key_cache, value_cache) in zip(self.layers, caches, strict=True):
            update = layer(update, key_cache, value_cache, step)
        return residual[wanted], update[wanted]
