"""Where the parts of a product lie that a checkpoint has in one tensor, or in one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch


def stored_rows(sizes: Sequence[int], outputs: Sequence[range], num_turns: int, *, is_fused: bool) -> list[range]:
    """Where the wanted outputs are stored, of all parts one after the other; with turns these have whole ones of all
    parts. `is_fused`: in one tensor, whose rows that follow each other are one range, to be read at once."""
    if num_turns > 1:
        turn_size, of_first = sum(sizes) // num_turns, sizes[0] // num_turns
        return [range(*(edge // of_first * turn_size for edge in (outputs[0].start, outputs[0].stop)))]
    rows: list[range] = []
    for start, part in zip(accumulate(sizes, initial=0), outputs, strict=False):
        stored = range(start + part.start, start + part.stop)
        if is_fused and rows and rows[-1].stop == stored.start:
            rows[-1] = range(rows[-1].start, stored.stop)
        else:
            rows.append(stored)
    return rows


def in_order(x: torch.Tensor, sizes: Sequence[int], num_turns: int) -> torch.Tensor:
    """Outputs [n, ...] as they are stored, in so many turns of parts of these sizes, part after part."""
    if num_turns == 1:
        return x
    turn_sizes = [size // num_turns for size in sizes]
    turns = x.unflatten(0, (-1, sum(turn_sizes))).split(turn_sizes, dim=1)
    return torch.cat([part.flatten(0, 1) for part in turns])
