"""What passes between the scheduler and those around it for one step: its rows, the decision, what came back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler_svc.block_allocator import BlockIds
from scheduler_svc.sequence import Sequence, SequenceGroup
from scheduler_svc.sequence_columns import Ints, TokenIds


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """The ordered rows of one step, first `num_decode_rows` decodes, kept until the answer comes.

    All arrays are over rows. `generations` are those of the slots' tenancies: a row whose slot has another generation
    by then no longer means what it meant.
    """

    slots: Ints
    num_decode_rows: int
    query_lens: Ints
    num_samples: Ints
    generations: Ints
    sequences: npt.NDArray[np.object_]

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Introduction:
    """A sequence that the worker is told of in full, as it stood before the step."""

    sequence: Sequence
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerOutputs:
    """One step as decided: what the encoder turns into a message.

    Attributes:
        released_slots: slots that were given up since the last step.
        appended_slots, appended_counts, appended_blocks: for slots whose table the worker knows already, how many
            blocks joined it, and all their ids one slot after the other.
    """

    rows: ScheduledRows
    released_slots: list[int]
    introductions: list[Introduction]
    appended_slots: Ints
    appended_counts: Ints
    appended_blocks: BlockIds
    num_preempted: int


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens that one answer brought to sequences that still want them.

    Arrays of one length: the sequence, its token, the position of the token among the answer's columns, and a
    `FinishReason` where the token ended the sequence. `errors` are groups with a row that could not be sampled, with
    the reason.
    """

    sequences: npt.NDArray[np.object_]
    token_ids: TokenIds
    entries: Ints
    finish_reasons: npt.NDArray[np.uint8]
    errors: list[tuple[SequenceGroup, str]]


@dataclass(slots=True)
class StepPlan:
    """A step while it is being filled: what is left of the token budget, and what has been spent on what."""

    tokens_left: int
    decode_slots: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    chunks: list[tuple[Sequence, int, int]] = field(default_factory=list)  # (sequence, query_len, num_samples)
    appended: list[tuple[Ints, Ints, BlockIds]] = field(default_factory=list)  # (slots, counts, blocks)
    introductions: list[Introduction] = field(default_factory=list)
    introduced_tokens: int = 0
    num_preempted: int = 0

    def introduce(self, introduction: Introduction) -> None:
        self.introductions.append(introduction)
        self.introduced_tokens += introduction.sequence.num_tokens
