"""What the stages of a pipeline give each other while a model computes: each has some of the layers."""

from __future__ import annotations

from typing import Protocol

import torch


class Stages(Protocol):
    """The pipeline as one of its stages sees it. Steps go through all stages in the order in which they are begun."""

    stage: int  # from 0, which has the embedding; the last one has the head
    count: int
    bytes_sent: int  # to the next stage, ever

    def receive(self, out: torch.Tensor) -> None:
        """Fills `out` with what the stage before has handed on of the same step; waits for it."""

    def hand_on(self, x: torch.Tensor) -> None:
        """Gives `x` to the next stage, and does not wait for it unless that one is many steps behind; nobody may change
        `x` any more."""


class OnlyStage:
    """All layers are here."""

    stage, count, bytes_sent = 0, 1, 0

    def receive(self, out: torch.Tensor) -> None:
        """There is no stage before."""
        raise AssertionError("the first stage receives nothing")

    def hand_on(self, x: torch.Tensor) -> None:
        """There is no stage behind."""
        raise AssertionError("the last stage hands nothing on")
