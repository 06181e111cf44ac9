"""Attention with linear biases: a score is lowered in proportion to the distance of the key."""

from __future__ import annotations

import math

import torch


def alibi_slopes(num_heads: int, device: str | torch.device) -> torch.Tensor:
    """f32[num_heads], what a token of distance takes off a score (Press et al. 2021, arXiv:2108.12409).

    A geometric series from 2^(-8 / n) for n heads; where their number is no power of 2, those beyond the largest power
    below it take every other slope of the series of twice that power.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    series = _series(power) + _series(2 * power)[::2]
    return torch.tensor(series[:num_heads], dtype=torch.float32, device=device)


def _series(count: int) -> list[float]:
    return [2.0 ** (-8 * (i + 1) / count) for i in range(count)]
