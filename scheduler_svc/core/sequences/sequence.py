"""A request as the scheduler sees it: a `SequenceGroup` of `Sequence`s that share a prompt and sampling parameters.

While a sequence has a slot its state is in the worker's `SequenceColumns`; without one it holds its own tokens, and, if
it was swapped out, the host blocks in which they are computed. Knows nothing of text, streams or time.
"""

from __future__ import annotations

import enum
import itertools
import secrets
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as AbstractSequence
from functools import cached_property
from typing import Any

import numpy as np

from protos import inference_pb2
from scheduler_svc.core.sequences.beam_search import BeamSearch
from scheduler_svc.core.sequences.block_hashes import BlockIds, extend_hashes, next_hash, root_hash
from scheduler_svc.core.sequences.sequence_columns import SequenceColumns, TokenIds
from scheduler_svc.tracing.group_trace import GroupTrace

NO_BLOCKS: BlockIds = np.zeros(0, np.int32)


class SequenceStatus(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"  # never ran, or was moved off a worker
    RUNNING = "running"  # has a slot
    PREEMPTED = "preempted"  # gave its slot up, belongs to a worker, is computed again
    SWAPPED = "swapped"  # gave its slot up, is computed in host blocks of its worker
    FINISHED = "finished"


_NUMBERS = itertools.count(1)  # of groups, in this process
# Adapters are numbered by each scheduler for itself: what one has computed with them is none of another's.
PROCESS = secrets.token_hex(8)
_ID_BYTES = 5  # the longest varint of 32 bits
_GROUP_BYTES = 96  # tags, lengths and single numbers of a group's and a sequence's messages


def adapter_version(generation: int, process: str = PROCESS) -> str:
    """Of an adapter, wherever it is compared with those of other schedulers and shards."""
    return f"{process}.{generation}"


class Sequence:
    """One line of tokens of a group.

    `index` is fixed for life and part of every draw. `num_pending_tokens` counts draws of steps in flight that will
    still arrive after the slot was given up; the sequence does not get a slot before they have. `last_token_ns` is the
    column's value from one slot to the next. `host_table` and `num_swapped_tokens` say what of it lies in host blocks.
    `trial_ends_at`: the tokens at which it has got past where it was when its group lost a worker.
    """

    __slots__ = (
        "__weakref__",  # what was found of its prefix is kept as long as it is there
        "_columns",
        "_own_hashes",
        "_own_token_ids",
        "group",
        "host_table",
        "index",
        "last_generation",
        "last_token_ns",
        "num_pending_tokens",
        "num_swapped_tokens",
        "slot",
        "status",
        "trial_ends_at",
    )

    def __init__(self, group: SequenceGroup, index: int, token_ids: TokenIds) -> None:
        self.group = group
        self.index = index
        self.status = SequenceStatus.WAITING
        self.slot = -1
        self.last_generation = -1  # of the slot's tenancy that this sequence gave up last
        self.num_pending_tokens = 0
        self.last_token_ns = 0
        self.trial_ends_at = 0
        self.host_table = NO_BLOCKS
        self.num_swapped_tokens = 0
        self._own_hashes: list[bytes] = []  # of the blocks after the prompt's full ones, as far as somebody asked
        self._own_token_ids = token_ids
        self._columns: SequenceColumns | None = None

    @property
    def token_ids(self) -> TokenIds:
        """Prompt and generated tokens, a view where the sequence has a slot."""
        if self._columns is None:
            return self._own_token_ids
        return self._columns.token_ids[self.slot, : self._columns.num_tokens[self.slot]]

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens whose value is known here."""
        columns = self._columns
        return len(self._own_token_ids) if columns is None else int(columns.num_tokens[self.slot])

    @property
    def introduction_bytes(self) -> int:
        """The most that a message takes which tells a worker all about it: a token is an id and, at most, a block."""
        return 2 * _ID_BYTES * self.num_tokens + self.group.parameter_bytes

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K and V are in the cache, or in host blocks, once all steps sent have run."""
        return self.num_swapped_tokens if self._columns is None else int(self._columns.num_computed_tokens[self.slot])

    @property
    def block_table(self) -> TokenIds:
        """int32[blocks], its device blocks in the order of positions: a view of the columns, empty without a slot."""
        if self._columns is None:
            return NO_BLOCKS
        return self._columns.block_tables[self.slot, : self._columns.num_blocks[self.slot]]

    def hashes(self, first: int, last: int, block_size: int) -> list[bytes]:
        """Chained hashes of its blocks [first, last), all of whose tokens are known."""
        of_prompt = self.group.prompt_hashes(block_size)
        num_shared = len(of_prompt)
        if last <= num_shared:
            return of_prompt[first:last]
        held = num_shared + len(self._own_hashes)
        if held < last:
            self._extend_hashes(of_prompt, self.token_ids[held * block_size : last * block_size].tobytes(), block_size)
        own = self._own_hashes[max(0, first - num_shared) : last - num_shared]
        return of_prompt[first:] + own if first < num_shared else own

    def hash_of_next(self, index: int, token_bytes: bytes, block_size: int) -> bytes:
        """The hash of its block of that index, whose tokens are `token_bytes`: most often the first without one."""
        of_prompt, own = self.group.prompt_hashes(block_size), self._own_hashes
        if index != len(of_prompt) + len(own):
            return self.hashes(index, index + 1, block_size)[0]
        digest = next_hash(own[-1] if own else of_prompt[-1] if of_prompt else self.group.hash_root, token_bytes)
        own.append(digest)
        return digest

    def _extend_hashes(self, of_prompt: list[bytes], token_bytes: bytes, block_size: int) -> None:
        behind = of_prompt[-1] if of_prompt else self.group.hash_root
        extend_hashes(self._own_hashes, behind, token_bytes, 4 * block_size)

    @property
    def own_hashes(self) -> list[bytes]:
        """Of the blocks behind the prompt's full ones, as far as somebody asked. Not to be changed."""
        return self._own_hashes

    def forget_hashes(self) -> None:
        """Once its tokens or what their K and V depend on has changed."""
        self._own_hashes = []

    def attach(self, columns: SequenceColumns) -> None:
        """Takes a slot; nothing of the sequence is computed there yet."""
        assert self._columns is None and self.num_pending_tokens == 0
        group = self.group
        self.slot = columns.take_slot(
            self,
            self._own_token_ids,
            max_num_tokens=group.max_num_tokens,
            eos_token_id=group.eos_token_id,
            has_stop_token_ids=bool(group.stop_token_ids),
            wants_logprobs=group.wants_logprobs,
            last_token_ns=self.last_token_ns,
            is_traced=group.trace is not None,
        )
        self._columns = columns
        self.status = SequenceStatus.RUNNING

    def attach_as_child(self, parent: Sequence) -> None:
        """Takes a slot and stands where `parent` stands."""
        assert self._columns is None and parent._columns is not None
        self.slot = parent._columns.fork_slot(parent.slot, self)
        self._columns, self.status = parent._columns, SequenceStatus.RUNNING
        self._own_hashes = list(parent._own_hashes)

    def child(self, index: int) -> Sequence:
        """Another sequence of its group with the same tokens, without a slot."""
        child = Sequence(self.group, index, self.token_ids.copy())
        child.status, child._own_hashes = self.status, list(self._own_hashes)
        child.trial_ends_at = self.trial_ends_at
        return child

    def detach(self, status: SequenceStatus) -> None:
        """Gives the slot up and takes its tokens along; draws in flight stay pending unless it is finished."""
        assert self._columns is not None
        columns, slot = self._columns, self.slot
        self._own_token_ids = self.token_ids.copy()
        self.num_pending_tokens = 0 if status is SequenceStatus.FINISHED else int(columns.num_placeholders[slot])
        self.last_generation = int(columns.generation[slot])
        self.last_token_ns = int(columns.last_token_ns[slot])
        if status is SequenceStatus.SWAPPED:
            self.num_swapped_tokens = int(columns.num_computed_tokens[slot])
        columns.release_slot(slot)
        self._columns, self.slot, self.status = None, -1, status

    def append(self, token_id: int) -> None:
        """Takes a token that was not drawn in its slot: one that arrives late, or one that was chosen for it."""
        if self._columns is None:
            self._own_token_ids = np.append(self._own_token_ids, np.int32(token_id))
        else:
            columns, slot = self._columns, self.slot
            columns.token_ids[slot, columns.num_tokens[slot]] = token_id
            columns.num_tokens[slot] += 1

    def extend(self, token_ids: AbstractSequence[int]) -> None:
        """Takes what another process drew for it; for a sequence without a slot."""
        assert self._columns is None
        self._own_token_ids = np.append(self._own_token_ids, np.asarray(token_ids, np.int32))

    def truncate(self, num_tokens: int) -> None:
        """Takes back tokens that nobody has been told of; for a sequence without a slot."""
        assert self._columns is None and num_tokens >= self.group.num_prompt_tokens
        if num_tokens < len(self._own_token_ids):
            self._own_token_ids = self._own_token_ids[:num_tokens]
            self.forget_hashes()

    def drop_pending(self) -> None:
        """Draws in flight will not arrive: their worker is lost."""
        self.num_pending_tokens = 0


class SequenceGroup:
    """All sequences of one request.

    Args:
        max_num_tokens: prompt and generated tokens at which a sequence ends with LENGTH.
        eos_token_id: ends a sequence with STOP when drawn; None with `ignore_eos` or where the model has none.
        stop_token_ids: further token ids that do.
        num_outputs: sequences that the client gets (`n`).
        best_of: sequences that are drawn, of which it gets the best; the default is `num_outputs`.
        beam_search: ranks the group's beams, if it is of beams.
        model: fingerprint of the one whose tokens these are, where several may come and go.
        cache_salt: shares cached prefixes only with groups of the same salt.
        bad_words: the token ids of each word that must not be drawn.
        resumed_token_ids: tokens that output i has from an earlier life, for all outputs or none; they count as drawn.
        output: whatever the layer above wants back with this group's tokens; never looked into here.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: AbstractSequence[int] | TokenIds,
        sampling_params: inference_pb2.SamplingParams,
        *,
        max_num_tokens: int,
        arrival_ns: int,
        eos_token_id: int | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        num_outputs: int = 1,
        best_of: int | None = None,
        beam_search: BeamSearch | None = None,
        priority: int = 0,
        tenant: str = "",
        adapter: str = "",
        cache_salt: str = "",
        model: str = "",
        bad_words: AbstractSequence[AbstractSequence[int]] = (),
        resumed_token_ids: AbstractSequence[AbstractSequence[int]] = (),
        output: Any = None,
    ) -> None:
        prompt = np.asarray(prompt_token_ids, np.int32)
        self.number = next(_NUMBERS)
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.num_prompt_tokens = len(prompt)
        self.max_num_tokens = max_num_tokens
        self.eos_token_id = eos_token_id
        self.stop_token_ids = stop_token_ids
        self.num_outputs = num_outputs
        self.best_of = best_of or num_outputs
        self.beam_search = beam_search
        self.priority = priority
        self.tenant = tenant
        self.share = tenant  # under which fair turns count it; several tenants may have one together
        self.adapter = adapter
        self.cache_salt = cache_salt
        self.model = model
        self.bad_words = tuple(array("I", word) for word in bad_words)  # 4 bytes a token: there may be many
        self.hash_root = root_hash(adapter, "", cache_salt)
        self._prompt_hashes: list[bytes] | None = None  # of the prompt's full blocks, once somebody asked
        self._num_blocks: tuple[object, int] = (None, 0)  # what `num_distinct_blocks` said last, and of what
        self.output = output
        self.num_bytes = 0  # of the request as it came, set by who read it
        self.hides_cached_tokens = False  # other tenants share its cached prefixes: how many there are would tell
        self.trace: GroupTrace | None = None  # of a request that is traced
        self.arrival_ns = arrival_ns
        self.order = 0  # set by the waiting queue: earlier arrivals have lower numbers
        self.num_resumed_tokens = sum(map(len, resumed_token_ids))  # that it brings along, of all outputs
        self.has_resumed_tokens = self.num_resumed_tokens > 0
        self.is_resumed = False  # it had its turn before, under another lease or connection: see `AdmittedBefore`
        self.first_scheduled_ns: int | None = None
        self.first_token_ns: int | None = None
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache when it was scheduled first
        self.num_preemptions = 0
        self.num_moves = 0
        self.goes_on_elsewhere = False  # another shard has it: what becomes of it here is not its end
        # Of workers that it was in flight for, and of what was known of them, by a fault; and those not charged with.
        self.num_worker_losses = self.num_losses_in_all = 0
        # Of the prompt, tokens whose logprobs have arrived or are not wanted: the first has none, and who resumes has
        # got them with the first token.
        has_them = not sampling_params.HasField("prompt_logprobs") or any(resumed_token_ids)
        self.num_prompt_logprobs = len(prompt) if has_them else 1
        if resumed_token_ids:
            histories = [np.append(prompt, np.asarray(ids, np.int32)) for ids in resumed_token_ids]
        else:
            histories = [prompt] * (1 if beam_search else self.best_of)
        self.sequences = [Sequence(self, index, history) for index, history in enumerate(histories)]

    def use_adapter_generation(self, generation: int) -> None:
        """Which version of its adapter it runs with, said before anybody looks for what of its prompt is cached."""
        assert self.adapter and self._prompt_hashes is None
        self.use_hash_root(root_hash(self.adapter, adapter_version(generation), self.cache_salt))

    def use_hash_root(self, root: bytes) -> None:
        """Its blocks are found by others, and finds those of others, under this root from now on."""
        self.hash_root, self._prompt_hashes, self._num_blocks = root, None, (None, 0)
        for sequence in self.sequences:
            sequence.forget_hashes()

    def prompt_hashes(self, block_size: int) -> list[bytes]:
        """Chained hashes of the prompt's full blocks, made once for all its sequences. Not to be changed."""
        if self._prompt_hashes is None:
            self._prompt_hashes = []
            full = self.num_prompt_tokens // block_size * block_size
            token_bytes = self.sequences[0].token_ids[:full].tobytes()
            extend_hashes(self._prompt_hashes, self.hash_root, token_bytes, 4 * block_size)
        return self._prompt_hashes

    def known_hashes(self) -> tuple[list[bytes], list[tuple[int, list[bytes]]]]:
        """Hashes that somebody asked for: of the prompt's full blocks, and by index of those behind. Not to be changed.

        Looks only, and so may be called from any thread.
        """
        return self._prompt_hashes or [], [(sequence.index, sequence.own_hashes) for sequence in list(self.sequences)]

    def num_distinct_blocks(self, block_size: int) -> int:
        """Blocks that hold all its known tokens when nothing of them is cached; what sequences share counts once.

        Looked for again only when tokens or sequences have come or gone. The prompt's full blocks are not looked at.
        """
        sequences = self.unfinished()
        if len(sequences) == 1:
            return -(-sequences[0].num_tokens // block_size)
        lengths = [sequence.num_tokens for sequence in sequences]
        state = (self.sequences, len(lengths), sum(lengths), block_size)
        if self._num_blocks[0] != state:
            if self.begins_as_one:
                whole, rest = divmod(self.num_prompt_tokens, block_size)
                self._num_blocks = state, whole + len(lengths) * (rest > 0)
            else:
                self._num_blocks = state, self._num_blocks_one_by_one(sequences, block_size)
        return self._num_blocks[1]

    def _num_blocks_one_by_one(self, sequences: list[Sequence], block_size: int) -> int:
        """What each takes that those before it have not computed. The block of its last token it computes itself, also
        where another has one that is equal."""
        num_full = self.num_prompt_tokens // block_size
        num_blocks = num_of_prompt = 0
        known = set[bytes]()  # behind the prompt's full blocks
        for sequence in sequences:
            last, rest = divmod(sequence.num_tokens - 1, block_size)
            ends_with_block = rest == block_size - 1  # and others find it
            num_blocks += max(0, min(last, num_full) - num_of_prompt) + 1
            num_of_prompt = max(num_of_prompt, min(last + ends_with_block, num_full))
            if last + ends_with_block > num_full:
                own = sequence.hashes(num_full, last + ends_with_block, block_size)
                num_blocks += len(set(own[: last - num_full]) - known)
                known.update(own)
        return num_blocks

    @property
    def uses_beam_search(self) -> bool:
        """Whether its sequences are hypotheses, of which some are dropped on the way."""
        return self.beam_search is not None

    def is_stop_token(self, token_id: int) -> bool:
        """Whether drawing it ends a sequence of this group."""
        return token_id == self.eos_token_id or token_id in self.stop_token_ids

    @cached_property
    def parameter_bytes(self) -> int:
        """The most that everything but tokens and blocks takes in a message, of any field and any number."""
        num_ids = len(self.stop_token_ids) + sum(len(word) + 2 for word in self.bad_words)
        names = len(self.request_id.encode()) + len(self.adapter.encode())
        return _GROUP_BYTES + names + self.sampling_params.ByteSize() + _ID_BYTES * num_ids

    def all_stop_token_ids(self) -> list[int]:
        """Every token id that ends a sequence with STOP, in order."""
        return sorted({*self.stop_token_ids, *([] if self.eos_token_id is None else [self.eos_token_id])})

    @property
    def wants_logprobs(self) -> bool:
        """Whether draws come with their logprobs: asked for, or what the best of them are chosen by."""
        is_ranked = self.best_of > self.num_outputs and not self.uses_beam_search
        return is_ranked or self.sampling_params.HasField("logprobs")

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether its prompt has to be computed, not found, because logprobs of it are still to come."""
        return self.num_prompt_logprobs < self.num_prompt_tokens

    @property
    def num_slots(self) -> int:
        """Slots that the group must get at once to come in: beams advance together, other sequences one by one."""
        if self.beam_search:
            return self.best_of
        if len(self.sequences) == 1:
            return 1
        return max(1, sum(sequence.status is SequenceStatus.SWAPPED for sequence in self.sequences))

    @property
    def is_on_trial(self) -> bool:
        """Whether it may have been this group that cost its last worker: one that runs is not past where it was then.

        Sequences without a slot do not count, or who runs beside the trial would wait for them, and they for a slot.
        """
        if not self.num_worker_losses:
            return False
        sequences = self.unfinished()
        seated = [sequence for sequence in sequences if sequence.slot >= 0]
        return any(sequence.num_tokens < sequence.trial_ends_at for sequence in seated or sequences)

    def lost_worker(self, num_trial_tokens: int) -> None:
        """Its worker, or what was known of it here, was lost, maybe over it; it is on trial for so many tokens.

        Who has passed the trial after an earlier loss, and lost this one in the company of all, is suspected anew and
        charged with no more: it is one of many, and has shown that it need not have been the reason.
        """
        self.num_losses_in_all += 1
        self.num_worker_losses += not self.num_worker_losses or self.is_on_trial
        for sequence in self.unfinished():
            sequence.trial_ends_at = sequence.num_tokens + num_trial_tokens

    def free_indices(self, held: Iterable[Sequence]) -> Iterator[int]:
        """Indices below its width that none of `held` has, lowest first.

        A beam's may be one that another had before: beams are ranked, so no draw depends on it.
        """
        taken = {sequence.index for sequence in held}
        return (index for index in range(self.best_of) if index not in taken)

    def unfinished(self) -> list[Sequence]:
        """In the order of their indexes."""
        return [sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED]

    @property
    def is_finished(self) -> bool:
        """Whether nothing of it will be computed any more."""
        return all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)

    @property
    def num_pending_tokens(self) -> int:
        """Draws of steps in flight that will still arrive for slots that were given up."""
        return sum(sequence.num_pending_tokens for sequence in self.sequences)

    @property
    def num_tokens_to_compute(self) -> int:
        """Of a group without a slot, when nothing of it is cached. A prompt that it begins with as one counts once."""
        if self.begins_as_one:
            return self.num_prompt_tokens
        return sum(sequence.num_tokens for sequence in self.unfinished())

    @property
    def begins_as_one(self) -> bool:
        """Whether its sequences have nothing but the prompt, which is then computed once and forked.

        Asked of a group that has no slot; `WorkerGroups.unforked` remembers the answer while it runs.
        """
        if len(self.sequences) == 1:
            return False
        sequences = self.unfinished()
        return len(sequences) > 1 and all(s.num_tokens == self.num_prompt_tokens for s in sequences)
