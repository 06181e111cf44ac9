"""What passes between the scheduler and those around it for one step: its rows, the decision, what came back.

Nobody changes it once it is made. What every step makes anew is not declared frozen all the same: that takes four times
as long (6 us a step).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.blocks.cache_news import NO_NEWS, CacheNews
from scheduler_svc.core.sequences.beam_search import BeamHypothesis
from scheduler_svc.core.sequences.block_hashes import BlockIds
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import Ints, TokenIds

BlockPairs = list[tuple[int, int]]
UNBOUNDED = 1 << 62


@dataclass(slots=True)
class ScheduledRows:
    """The ordered rows of one step, kept until the answer comes: decodes, chunks of known tokens, rows of beams.

    Attributes (shape [rows] unless noted):
        slots, query_lens, sequences: who computes how many tokens.
        num_answers: entries of the answer that belong to the row: samples, or a beam's candidates.
        generations: of the slots' tenancies: a row whose slot has another one by then no longer means what it meant.
        sample_slots, sample_generations, sample_sequences: [samples], whom the drawn tokens go to, row after row. Of
            rows that draw once each these are the rows' own.
        wants_logprobs: whether some of its draws are to come with their logprobs.
        num_beam_rows: the last rows of the step, whose answers are a beam group's candidates and no samples.
        num_given_rows: the last of those, which compute the token that was chosen for them.
        forks: (parent, children) of sequences that were forked in this step.
        moved: groups with blocks in this step's swaps and copies.
        published: blocks that can be found in the prefix cache because of this step.
    """

    slots: Ints
    num_decode_rows: int
    query_lens: Ints
    num_answers: Ints
    generations: Ints
    sequences: npt.NDArray[np.object_]
    sample_slots: Ints
    sample_generations: Ints
    sample_sequences: npt.NDArray[np.object_]
    wants_logprobs: bool
    num_beam_rows: int = 0
    num_given_rows: int = 0
    forks: list[tuple[Sequence, list[Sequence]]] = field(default_factory=list)
    moved: set[SequenceGroup] = field(default_factory=set)
    published: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.slots)


def groups_of(rows: ScheduledRows) -> set[SequenceGroup]:
    """Who has a row in the step."""
    return {sequence.group for sequence in rows.sequences}


@dataclass(slots=True)
class Introduction:
    """A sequence that the worker is told of in full, as it stood before the step.

    `same_as`: a sequence introduced before it in this step, whose tokens and blocks are its own as well.
    """

    sequence: Sequence
    num_computed_tokens: int
    same_as: Sequence | None = None


def introduced_groups(introductions: Iterable[Introduction]) -> list[SequenceGroup]:
    """Whose sequences are introduced, each once, in the order of their first ones: as a message has them."""
    return list(dict.fromkeys(each.sequence.group for each in introductions))


@dataclass(slots=True)
class SchedulerOutputs:
    """One step as decided: what the encoder turns into a message.

    Attributes:
        released_slots: slots that were given up since the last step.
        forks: (parent, child) of sequences whose slot is to begin as a copy of the other's.
        appended_slots, appended_counts, appended_blocks: for slots whose table the worker knows already, how many
            blocks joined it, and all their ids one slot after the other.
        replaced: sequences whose whole table the worker has to take anew: a block of it was copied for them, or they
            are forked from one that has grown.
    """

    rows: ScheduledRows
    released_slots: list[int]
    forks: list[tuple[Sequence, Sequence]]
    introductions: list[Introduction]
    swap_out: BlockPairs
    swap_in: BlockPairs
    copies: BlockPairs
    appended_slots: Ints
    appended_counts: Ints
    appended_blocks: BlockIds
    replaced: list[Sequence]
    num_preempted: int
    num_swapped_out_groups: int  # of those
    news: CacheNews = NO_NEWS


class WrongAnswer(ValueError):
    """What a worker said does not fit what it was asked: its fault, and nothing of it was taken."""


@dataclass(slots=True)
class Answer:
    """What a worker said of the rows of one step, entry by entry: samples and candidates, row after row.

    Attributes:
        num_tokens: [rows], entries of each row.
        logprobs: [entries], or empty where nobody asked.
        errors: rows that could not be answered, with the reason.
        computed_well: those of them where it was what the request asks for that left nothing to draw.
    """

    token_ids: TokenIds
    num_tokens: Ints
    logprobs: npt.NDArray[np.float32]
    errors: dict[int, str]
    computed_well: frozenset[int] = frozenset()


class RowFailure(NamedTuple):
    """Why a group ends without its next token; `is_invalid`: what it asks for leaves none, at the next attempt too."""

    group: SequenceGroup
    message: str
    is_invalid: bool


@dataclass(slots=True)
class NewTokens:
    """Tokens that one answer brought to sequences that still want them.

    Arrays of one length: the sequence, its token, the position of the token among the answer's columns, and a
    `FinishReason` where the token ended the sequence. `errors` are groups with a row that could not be sampled;
    `beams` are beam groups whose search is over, with what it found, best first.
    """

    sequences: npt.NDArray[np.object_]
    token_ids: TokenIds
    entries: Ints
    finish_reasons: npt.NDArray[np.uint8]
    errors: list[RowFailure] = field(default_factory=list)
    beams: list[tuple[SequenceGroup, list[BeamHypothesis]]] = field(default_factory=list)


@dataclass(slots=True)
class SchedulingBudget:
    """What one step may compute: tokens, so many of them of prompts, and sequences (rows). Policy asks, then takes."""

    tokens_left: int
    seqs_left: int
    prompt_tokens_left: int = UNBOUNDED

    def take(self, num_tokens: int, num_seqs: int) -> None:
        """Spends so many tokens and rows on decodes."""
        self.tokens_left -= num_tokens
        self.seqs_left -= num_seqs

    def take_chunk(self, num_tokens: int) -> None:
        """Spends a row of so many tokens on a prompt."""
        self.prompt_tokens_left -= num_tokens
        self.take(num_tokens, 1)

    @property
    def largest_chunk(self) -> int:
        """Tokens of a prompt that the step can take."""
        return min(self.tokens_left, self.prompt_tokens_left) if self.seqs_left > 0 else 0

    @property
    def is_spent(self) -> bool:
        """Whether the step can take nothing more of a prompt."""
        return self.largest_chunk <= 0


@dataclass(slots=True)
class Chunk:
    """Known tokens that a row computes; `num_samples` is 0 inside a prompt, else one for each sequence that draws."""

    sequence: Sequence
    query_len: int
    num_samples: int
    children: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan:
    """A step while it is being filled: what is left of the budget, and what has been spent on what."""

    budget: SchedulingBudget
    decode_slots: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    chunks: list[Chunk] = field(default_factory=list)
    beams: list[Sequence] = field(default_factory=list)  # rows that compute the token which was chosen for them
    copies: BlockPairs = field(default_factory=list)
    replaced: list[Sequence] = field(default_factory=list)  # their whole tables are sent
    appended: list[tuple[Ints, Ints, BlockIds]] = field(default_factory=list)  # (slots, counts, blocks)
    introductions: list[Introduction] = field(default_factory=list)
    introduced_bytes: int = 0  # at most; children of a prompt that is told with them take next to none
    num_preempted: int = 0  # for want of blocks
    num_overruled: int = 0  # preempted for a more urgent group
    num_swapped_out: int = 0  # of all preempted

    @property
    def has_rows(self) -> bool:
        """Whether there is anything for the worker to compute."""
        return bool(len(self.decode_slots) or self.chunks or self.beams)

    def introduce(self, introduction: Introduction) -> None:
        """The worker is told of a sequence that it does not know, in full, in this step."""
        self.introductions.append(introduction)
        self.introduced_bytes += 0 if introduction.same_as else introduction.sequence.introduction_bytes
