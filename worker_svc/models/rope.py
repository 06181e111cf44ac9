"""Rotary position embedding: the table of cosines and sines that the kernels read.

Angles are `position * frequency[i]`, frequency[i] = theta^(-2 i / head_size) (Su et al. 2021, arXiv:2104.09864). To
reach beyond the length of training, `linear` divides all frequencies, `llama3` (Llama 3.1 report, arXiv:2407.21783)
those of long wavelengths only.
"""

from __future__ import annotations

import math

import torch

from worker_svc.models.config import ModelConfig, RopeScaling


def rotary_table(config: ModelConfig, device: str | torch.device) -> torch.Tensor:
    """f32[max_model_len, head_size]: the cosines of a position's head_size / 2 angles, then their sines."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    frequencies = _stretch(1.0 / config.rope_theta**exponents, config.rope_scaling)
    angles = torch.arange(config.max_model_len, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _stretch(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "default":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0 where a wavelength is too long to be kept, 1 where it is kept, a blend between.
    kept = ((scaling.original_max_position_embeddings / wavelengths - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
