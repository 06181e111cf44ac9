"""How groups may be preempted, and what a worker measured that tells the cheaper way.

Imports nothing heavy: the command line reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True)
class Costs:
    """What the worker measured; zeros where it did not, and then `auto` computes again."""

    prefill_tokens_per_s: float = 0.0
    swap_bytes_per_s: float = 0.0  # one way
    block_bytes: int = 0
