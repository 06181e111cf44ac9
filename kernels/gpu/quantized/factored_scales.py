"""Scales that are small integers times one number for many groups, as those of GGUF's K types are, taken apart again.

    scale[n, g] = factor[n, chunk of g] * number[n, g],   -127 <= number <= 127

A byte a group instead of four: of Q4_K's 6 bits a weight (scales and offsets in float32) 5 remain.
"""

from __future__ import annotations

import torch

_MOST = 127
_BETWEEN_CHECKS = 16  # trials, after which it is asked whether all are found


def factored(scale: torch.Tensor, groups_of_chunk: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Numbers i8[N, G] and factors f32[N, ceil(G / groups_of_chunk)] of scales f32[N, G]; None where any product would
    not be that scale to the last bit."""
    num_groups = scale.shape[1]
    padded = torch.nn.functional.pad(scale, (0, -num_groups % groups_of_chunk)).unflatten(1, (-1, groups_of_chunk))
    largest = padded.abs().amax(2)
    factor = torch.zeros_like(largest)
    is_found = largest == 0
    # On the device, because a GPU divides by a number of the host as it multiplies by its reciprocal: rounded twice.
    numbers_of_largest = torch.arange(1, _MOST + 1, dtype=scale.dtype, device=scale.device)
    for number in range(1, _MOST + 1):  # what the largest may be
        trial = largest / numbers_of_largest[number - 1]
        products = (padded / trial[..., None]).round_() * trial[..., None]
        is_new = (products == padded).all(2) & ~is_found
        factor = torch.where(is_new, trial, factor)
        is_found |= is_new
        if number % _BETWEEN_CHECKS == 0 and bool(is_found.all()):
            break
    if not bool(is_found.all()):
        return None
    numbers = (padded / torch.where(factor == 0, 1, factor)[..., None]).round_()
    return numbers.flatten(1)[:, :num_groups].to(torch.int8), factor
