"""Models: configuration from a folder, weights from safetensors, and the forward pass over the paged cache.

One decoder for all families; nothing of steps, slots or sampling.
"""

from __future__ import annotations

from worker_svc.models.config import ModelConfig, ModelError

__all__ = ["ModelConfig", "ModelError"]
