"""Which ranks of a group share the layers of one stage, and which have the same part of the next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """`num_stages` stages of `tensor_size` ranks each. Ranks of a stage follow each other, so that they share a machine
    where a machine has as many: they exchange far more than the stages do.

        rank     0 1 | 2 3 | 4 5         stages of two ranks
        hidden   0 ->  2 ->  4           states go from a rank to the one with the same place in the next stage
    """

    tensor_size: int
    num_stages: int

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.tensor_size * self.num_stages

    @property
    def first_of_last_stage(self) -> int:
        """The rank that tells what was drawn."""
        return self.size - self.tensor_size

    def stage_of(self, rank: int) -> int:
        """Of `rank`."""
        return rank // self.tensor_size

    def ranks_of(self, stage: int) -> list[int]:
        """Those that compute the stage together."""
        return list(range(stage * self.tensor_size, (stage + 1) * self.tensor_size))
