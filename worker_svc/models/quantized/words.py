"""Numbers of 4 or 8 bits in words of 32, the first in the lowest bits."""

from __future__ import annotations

import torch


def numbers_in(words: torch.Tensor, bits: int) -> torch.Tensor:
    """i32[..., n] as u8[..., n * 32 / bits]."""
    in_bytes = words.flatten().view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
    if bits == 8:
        return in_bytes
    return torch.stack([in_bytes & 15, in_bytes >> 4], dim=-1).flatten(-2)


def words_around(numbers: range, bits: int) -> tuple[range, slice]:
    """The words that these numbers are in, and where the numbers are among all that those words hold."""
    each = 32 // bits
    words = range(numbers.start // each, -(-numbers.stop // each))
    first = numbers.start - words.start * each
    return words, slice(first, first + len(numbers))
