"""Where a scheduler's new groups come from."""

from __future__ import annotations

from typing import Protocol

from scheduler_svc.core.sequences.sequence import SequenceGroup


class GroupSource(Protocol):
    """A worker's queue, or what it is shown of that."""

    def peek(self) -> SequenceGroup | None:
        """The group that is next by the policy; None where there is none, or none that may begin here."""

    def peek_trial(self) -> SequenceGroup | None:
        """The first of those that are on trial, which `peek` does not show."""

    def remove(self, group: SequenceGroup) -> object:
        """Takes out a group that `peek` or `peek_trial` has shown."""

    def earliest_arrival_ns(self) -> int | None:
        """Of all groups here; None where there is none."""
