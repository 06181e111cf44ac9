"""What paged attention needs of a GPU's memory besides its arguments: allocated once, used by all layers and steps.

A line holds one token's sums over one piece of its sequence's keys (`work`). How many there are does not
follow from the cache: sequences may share blocks, and several tokens of a sequence each have sums of their own. It is
enough that every sequence's newest token has a line a span, however long all of them are; beyond that, FEW_LINES let
short contexts be cut into segments, and sequences with few new tokens be split. What does not fit is computed whole.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from kernels.gpu.attention import segment

SEGMENT: int = segment.SEGMENT.value
SPAN: int = segment.SPAN.value
# At least so many lines: 256 tokens after 131,072, in spans. Of 32 heads of 128, 136 MB.
FEW_LINES = 8192
_FEW_NUMBERS = 1 << 26  # but for no more than 268 MB: of 128 heads' latents of 512, 1,024 lines
KEPT_ROWS = 128  # of a multiprocessor: the tiles of rows that the prefill kernel has at once


@dataclass(frozen=True, slots=True)
class Scratch:
    """Tensors in float32. One step at a time uses them; a graph that was captured over them holds their addresses."""

    sums: torch.Tensor  # [num_lines, num_heads, head_size]
    maxima: torch.Tensor  # [num_lines, num_heads]
    totals: torch.Tensor  # [num_lines, num_heads]
    kept_sums: torch.Tensor  # [rows, head_size], of spans that a program has done, for the next one
    kept_maxima: torch.Tensor  # [rows]
    kept_totals: torch.Tensor  # [rows]

    @property
    def num_lines(self) -> int:
        """Pieces of a token that there is room for."""
        return len(self.maxima)

    def check(
        self, num_sequences: int, max_seq_len: int, num_heads: int, head_size: int, num_multiprocessors: int
    ) -> None:
        """Raises ValueError where it does not suffice for what `new_scratch` takes."""
        if self.sums.shape[1:] != (num_heads, head_size):
            raise ValueError(f"scratch of {tuple(self.sums.shape)} is not for {num_heads} heads of {head_size}")
        if self.num_lines < (needed := lines_needed(num_sequences, max_seq_len)):
            raise ValueError(f"scratch has {self.num_lines} lines; these sequences may need {needed}")
        if len(self.kept_sums) < num_multiprocessors * KEPT_ROWS:
            raise ValueError(f"scratch is not for {num_multiprocessors} multiprocessors")

    def new_pass(self) -> AttentionPass:
        """For the layers of one forward pass."""
        return AttentionPass(self)


@dataclass(frozen=True, slots=True)
class AttentionPass:
    """What the layers of one forward pass share: made anew for each, because plans are of its sequences."""

    scratch: Scratch
    plans: dict[Hashable, torch.Tensor] = field(default_factory=dict)  # by what they depend on beside these


def lines_needed(num_sequences: int, max_seq_len: int) -> int:
    """Lines without which decode steps of so many sequences, of any lengths up to `max_seq_len`, cannot be computed."""
    return num_sequences * max(-(-max_seq_len // (SEGMENT * SPAN)), 1)


def new_scratch(
    num_sequences: int,
    max_seq_len: int,
    num_heads: int,
    head_size: int,
    num_multiprocessors: int,
    device: torch.device,
    max_lines: int | None = None,
) -> Scratch:
    """For steps of up to `num_sequences` sequences; with no more lines than `max_lines`, but for those needed."""
    needed, few = lines_needed(num_sequences, max_seq_len), _few_lines(num_heads, head_size)
    num_lines = max(needed, few if max_lines is None else min(max_lines, few))

    def numbers(*shape: int) -> torch.Tensor:
        # Each begins at a multiple of 16 bytes: a part of a larger one might not, and be compiled for again.
        return torch.empty(shape, dtype=torch.float32, device=device)

    rows = KEPT_ROWS * num_multiprocessors
    of_lines = numbers(num_lines, num_heads, head_size), numbers(num_lines, num_heads), numbers(num_lines, num_heads)
    return Scratch(*of_lines, numbers(rows, head_size), numbers(rows), numbers(rows))


def new_pass_of(
    query: torch.Tensor, head_size: int, num_sequences: int, max_seq_len: int, num_multiprocessors: int
) -> AttentionPass:
    """Of a call alone, of queries [T, num_heads, ...] and values of `head_size`."""
    lines = len(query) * -(-max_seq_len // SEGMENT)
    sizes = (num_sequences, max_seq_len, query.shape[1], head_size, num_multiprocessors)
    return new_scratch(*sizes, query.device, lines).new_pass()


def scratch_bytes(
    num_sequences: int, max_seq_len: int, num_heads: int, head_size: int, num_multiprocessors: int
) -> int:
    """What `new_scratch` takes."""
    num_lines = max(lines_needed(num_sequences, max_seq_len), _few_lines(num_heads, head_size))
    return (num_lines * num_heads + KEPT_ROWS * num_multiprocessors) * (head_size + 2) * 4


def _few_lines(num_heads: int, head_size: int) -> int:
    return min(FEW_LINES, max(_FEW_NUMBERS // (num_heads * head_size), 1))
