"""The token that each slot drew last, on the device: the next step starts from it before the host knows it.

Where the host sends a token that it does not know yet it writes `-1 - slot`, and the device fills in what the step
before has put there:

    host     7  -1 - 5  12            slot 5 drew last in the step that still runs
    device   7     31   12            of_slot[5] = 31
"""

from __future__ import annotations

import torch

MAX_SLOTS = 1 << 16  # of the protocol


class LastTokens:
    """One token a slot, on the device. A slot's entry means something only while the host has not heard of it."""

    def __init__(self, device: str | torch.device, max_num_seqs: int = MAX_SLOTS) -> None:
        self.device = torch.device(device)
        self.nobody = max_num_seqs  # what stands for a slot in a graph's pads
        self._of_slot = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)

    def put(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """`token_ids` i64[N] were drawn for `slots` i64[N]. Of a slot that is named twice, any."""
        self._of_slot[slots] = token_ids

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """What was drawn last for `slots` i64[N], i64[N]."""
        return self._of_slot[slots]

    def fill_in(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`token_ids` i64[T] with what was unknown to the host."""
        return torch.where(token_ids < 0, self._of_slot[(-1 - token_ids).clamp(min=0)], token_ids)
