"""One layer of a decoder whose norms follow the sums, as in the first Transformer (Vaswani et al. 2017,
arXiv:1706.03762); of the models here, OPT-350m's.

    residual = norm(residual + attention(residual))
    residual = norm(residual + mlp(residual))
"""

from __future__ import annotations

import torch

from worker_svc.models.decoder_layer import DecoderLayer, StepTensors


class PostNormLayer(DecoderLayer):
    """Hands on an update of nothing: a sum cannot wait for the next norm where that norm is its own layer's."""

    def __call__(
        self, update: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, step: StepTensors
    ) -> torch.Tensor:
        """As `DecoderLayer`; returns `update` as it came."""
        step.normed.copy_(step.residual)
        attended = self._attend(step.normed, key_cache, value_cache, step)
        self.input_norm(step.normed, self.attention_out(attended), step.residual)
        step.residual.copy_(step.normed)
        self.mlp_norm(step.normed, self.mlp(step.normed), step.residual)
        step.residual.copy_(step.normed)
        return update
