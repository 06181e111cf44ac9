"""One scheduler and one simulated worker with the wire format between them: no sockets, threads or time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from protos import inference_pb2, worker_pb2
from scheduler_svc.core.blocks.block_manager import BlockSpaceManager
from scheduler_svc.core.preemption_modes import Costs
from scheduler_svc.core.queues.policy import POLICIES
from scheduler_svc.core.queues.served_tokens import ServedTokens
from scheduler_svc.core.queues.waiting_queue import WaitingQueue
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_settings import SchedulerSettings
from scheduler_svc.core.sequences.beam_search import BeamHypothesis, BeamSearch
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import SequenceColumns
from scheduler_svc.core.step_plan import UNBOUNDED, NewTokens, ScheduledRows, SchedulerOutputs
from scheduler_svc.engine.messages.prompt_logprobs import take_prompt_logprobs
from scheduler_svc.engine.messages.step_encoder import decode, encode
from tests.scheduler.fake_language import EOS, VOCAB_SIZE, content_of, expected_tokens, logprobs_after, most_likely
from tests.scheduler.simulated_worker import RowErrorOf, SimulatedWorker

__all__ = ["EOS", "VOCAB_SIZE", "Simulation", "expected_beams", "expected_tokens"]

OK, FAILED = worker_pb2.STEP_STATUS_OK, worker_pb2.STEP_STATUS_FAILED
MOST_IDLE_ANSWERS = 1_000  # far more than any prompt here needs, also where every other step fails
MEASURED = Costs(prefill_tokens_per_s=1e3, swap_bytes_per_s=1e6, block_bytes=1)


def tenancies(slots: np.ndarray, generations: np.ndarray) -> set[tuple[int, int]]:
    """Who has these slots."""
    return set(zip(slots.tolist(), generations.tolist(), strict=True))


class Simulation:
    """Steps go through the encoder, through bytes, and into the worker at once; their answers wait in `in_flight`."""

    def __init__(
        self,
        *,
        num_slots: int = 4,
        max_model_len: int = 64,
        block_size: int = 4,
        num_blocks: int = 24,
        num_host_blocks: int = 0,
        max_num_batched_tokens: int = 16,
        most_prompt_tokens: int = UNBOUNDED,
        depth: int = 2,
        num_micro_batches: int = 1,
        policy: str = "fcfs",
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        delay_factor: float = 0.0,
        preemption_mode: str = "auto",
        costs: Costs = MEASURED,
        served: ServedTokens | None = None,
        row_error: RowErrorOf | None = None,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self.num_slots, self.max_model_len, self.block_size = num_slots, max_model_len, block_size
        self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks
        self.max_num_batched_tokens, self.depth = max_num_batched_tokens, depth
        self.most_prompt_tokens = most_prompt_tokens
        self.settings = SchedulerSettings(
            policy=POLICIES[policy],
            enable_chunked_prefill=enable_chunked_prefill,
            delay_factor=delay_factor,
            preemption_mode=preemption_mode,
            costs=costs,
            served=served,
            num_micro_batches=num_micro_batches,
        )
        self.enable_prefix_caching = enable_prefix_caching
        self.row_error = row_error
        self.vocab_size = vocab_size
        self.waiting = WaitingQueue(POLICIES[policy], served)
        self.groups: list[SequenceGroup] = []
        self._to_be_told: dict[SequenceGroup, list[int]] = {}  # tokens of the prompt whose logprobs are wanted
        self._told: dict[SequenceGroup, list[int]] = {}
        self.outputs: dict[SequenceGroup, dict[int, list[int]]] = {}  # tokens that came, by index
        self.hypotheses: dict[SequenceGroup, list[BeamHypothesis]] = {}
        self.errors: dict[SequenceGroup, str] = {}
        self.num_preempted = 0
        self.num_computed_tokens = 0  # of all steps sent
        self.sent: list[tuple[SchedulerOutputs, bytes]] = []
        self.steps: list[worker_pb2.Step] = []
        self.now_ns = 0
        self.start_worker()

    def start_worker(self) -> None:
        """An empty worker and an empty scheduler for it."""
        self.columns = SequenceColumns(self.num_slots, self.max_model_len, self.block_size)
        self.blocks = BlockSpaceManager(
            self.columns, self.num_blocks, self.num_host_blocks, enable_prefix_caching=self.enable_prefix_caching
        )
        self.scheduler = Scheduler(self.columns, self.blocks, self.max_num_batched_tokens, self.settings)
        self.worker = SimulatedWorker(
            self.num_slots,
            self.max_model_len,
            self.block_size,
            self.num_blocks,
            self.num_host_blocks,
            self.vocab_size,
            row_error=self.row_error,
        )
        self.in_flight: deque[tuple[ScheduledRows, worker_pb2.StepResult]] = deque()
        self.failed: int | None = None  # the step after which the next one goes on
        self.step_id = 0

    @property
    def mirror(self):
        return self.worker.states

    # ---- requests ---------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        eos_token_id: int | None = EOS,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
        n: int = 1,
        beam_width: int = 0,
        length_penalty: float = 1.0,
        early_stopping: int = 0,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        asks_prompt_logprobs: bool = False,
        resumed: Sequence[Sequence[int]] = (),
    ) -> SequenceGroup:
        max_num_tokens = min(len(prompt) + max_tokens, self.max_model_len)
        search = None
        params = inference_pb2.SamplingParams(seed=1, prompt_logprobs=0 if asks_prompt_logprobs else None)
        if beam_width:
            params.use_beam_search, params.best_of, params.n, params.temperature = True, beam_width, n, 0.0
            stops = stop_token_ids if eos_token_id is None else stop_token_ids | {eos_token_id}
            search = BeamSearch(
                beam_width,
                num_returned=n,
                num_prompt_tokens=len(prompt),
                max_num_tokens=max_num_tokens,
                stop_token_ids=stops,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
            )
        group = SequenceGroup(
            f"request-{len(self.groups)}",
            prompt,
            params,
            max_num_tokens=max_num_tokens,
            arrival_ns=self.now_ns,
            eos_token_id=eos_token_id,
            stop_token_ids=stop_token_ids,
            num_outputs=n,
            best_of=beam_width or n,
            beam_search=search,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            resumed_token_ids=resumed,
        )
        self.groups.append(group)
        self._to_be_told[group] = list(prompt[1:]) if asks_prompt_logprobs and not any(resumed) else []
        self._told[group] = []
        self.outputs[group] = {index: list(tokens) for index, tokens in enumerate(resumed)}
        self.waiting.push(group)
        return group

    def abort(self, group: SequenceGroup) -> None:
        self.waiting.remove(group)
        self.scheduler.abort(group)

    def lose_worker(self) -> None:
        """The worker dies and an empty one takes its place: groups keep what was answered, nothing else."""
        in_flight = {group for rows, _ in self.in_flight for group in self.groups_of(rows)}
        for group in self.scheduler.evacuate():
            group.num_moves += 1
            if group in in_flight:
                group.lost_worker(self.depth + 1)
            self.waiting.push(group)
        self.start_worker()

    # ---- steps ------------------------------------------------------------------------------------------------------

    def send(self, fails: str | None = None) -> bool:
        """Schedules and sends one step, which the worker runs at once; False when there is none to send."""
        if not self.may_send():
            return False
        scheduler = self.scheduler
        running, suspects = set(scheduler.groups.running), list(scheduler.groups.suspects)
        is_quiet, most = not self.in_flight, self.most_prompt_tokens
        outputs = scheduler.schedule(self.waiting, self.now_ns, is_quiet=is_quiet, most_prompt_tokens=most)
        self.take_outgrown()
        if outputs is None:
            # Of what blocks that are withheld leave, a group may wait for more: whoever withholds them sees to that.
            may_wait = self.in_flight or self.blocks.allocator.num_to_withhold
            assert may_wait or not scheduler.groups.has_work, "work is there, and no step can be made of it"
            return False
        came = scheduler.groups.running - running if scheduler.groups.running & running else set()
        gave_way = outputs.num_preempted and self.settings.policy is not POLICIES["priority"]
        assert not (came and gave_way), "took blocks from one group and gave them to another"
        rows = outputs.rows
        assert not suspects or self.groups_of(rows) in (set(), set(suspects[:1])), "a suspect runs by itself"
        tried = self.groups_of(rows) & scheduler.trials.on_trial
        assert not tried or suspects or tried == self.groups_of(rows), "a trial is disturbed"
        num_tokens, num_decodes = int(rows.query_lens.sum()), rows.num_decode_rows + rows.num_given_rows
        assert num_tokens <= self.max_num_batched_tokens and len(rows) <= self.num_slots
        assert num_tokens - num_decodes <= most, "a step takes too long for whoever decodes"
        if self.settings.num_micro_batches > 1:
            drawn = {
                pair
                for before, _ in self.in_flight
                for pair in tenancies(before.sample_slots, before.sample_generations)
            }
            assert not drawn & tenancies(rows.slots, rows.generations), (
                "its last token is on its way to the first stage"
            )
        self.step_id += 1
        self.num_preempted += outputs.num_preempted
        self.num_computed_tokens += int(rows.query_lens.sum())
        data = encode(outputs, self.step_id, self.failed).SerializeToString()
        self.failed = None
        self.sent.append((outputs, data))
        self.steps.append(worker_pb2.Step.FromString(data))
        introduced = [group.request_id for group in self.steps[-1].groups]
        assert len(set(introduced)) == len(introduced), "what a group's sequences have in common is sent once"
        self.in_flight.append((rows, self.worker.run(self.steps[-1], fails)))
        return True

    def may_send(self) -> bool:
        """Whether the loop around the scheduler would ask it for a step now."""
        if not self.in_flight:
            return True
        is_of_trials = self.scheduler.trials.on_trial or self.scheduler.trials.has_candidate(self.waiting)
        return self.failed is None and not is_of_trials

    def take_outgrown(self) -> None:
        """There is no larger worker here."""
        for group in self.scheduler.take_outgrown():
            self.errors[group] = "outgrown"
            self.scheduler.abort(group)

    @staticmethod
    def groups_of(rows: ScheduledRows) -> set[SequenceGroup]:
        return {sequence.group for sequence in rows.sequences}

    def answer(self) -> NewTokens | None:
        """Takes the answer of the oldest step in flight, and gives what it brought unless it failed."""
        rows, result = self.in_flight.popleft()
        if result.status == OK:
            tokens = self.scheduler.process_outputs(rows, decode(result.outputs, rows.num_answers))
            for group, logprobs in take_prompt_logprobs(rows, result.outputs):
                self._told[group] += np.frombuffer(logprobs.token_ids_i32, "<i4").tolist()
            self._check_prompts_told(tokens)
            for sequence, token_id in zip(tokens.sequences, tokens.token_ids.tolist(), strict=True):
                self.outputs[sequence.group].setdefault(sequence.index, []).append(token_id)
            self.hypotheses.update(tokens.beams)
            self.errors.update((failure.group, failure.message) for failure in tokens.errors)
            return tokens
        if result.status == FAILED:
            self.scheduler.roll_back(rows, [skipped for skipped, _ in self.in_flight])
            self.failed = result.step_id
        return None

    def _check_prompts_told(self, tokens: NewTokens) -> None:
        """Whoever has a token has been told all of the prompt before, each of its tokens once."""
        for group in {*(sequence.group for sequence in tokens.sequences), *(group for group, _ in tokens.beams)}:
            assert self._told[group] == self._to_be_told[group], group.request_id

    def run_to_end(self, fails: Callable[[], str | None] = lambda: None) -> None:
        """Runs until every group is finished. Fails when there is work, nothing in flight, and nothing to send, and
        when steps are made without end that bring nobody a token."""
        num_idle = 0  # answers since one brought a token, beams or an error
        while any(not group.is_finished for group in self.groups):
            sent = False
            while len(self.in_flight) < self.depth and self.send(fails()):
                sent = True
            if all(group.is_finished for group in self.groups):
                break
            assert sent or self.in_flight, "runnable work, nothing in flight, and nothing was scheduled"
            tokens = self.answer()
            brought = tokens is not None and (len(tokens.sequences) or tokens.beams or tokens.errors)
            num_idle = 0 if brought else num_idle + 1
            assert num_idle < MOST_IDLE_ANSWERS, "steps are made, and bring no token"
            self.check()
        while self.in_flight:
            self.answer()

    # ---- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant that can be seen from here; the mirror's equality whenever nothing is on the way."""
        self.scheduler.check_integrity()
        self.waiting.check_integrity()
        for group in self.groups:
            places = (group in self.waiting) + self.scheduler.groups.holds(group)
            assert places == (0 if group.is_finished else 1), f"{group.request_id} is in {places} places"
        if not self.in_flight and self.failed is None:
            self.worker.check_integrity()
            self._check_mirror()

    def _check_mirror(self) -> None:
        columns, mirror, groups = self.columns, self.mirror, self.scheduler.groups
        not_yet_released = set(np.flatnonzero(mirror.occupied)) - set(np.flatnonzero(columns.occupied))
        assert not_yet_released <= groups.released_slots, "the worker holds a slot that nobody will release"
        for slot in np.flatnonzero(columns.occupied):
            sequence = columns.owner[slot]
            if sequence in groups.unknown:
                continue
            num_given = sequence.group.uses_beam_search and sequence.group in groups.ready_beams
            length, num_blocks = columns.num_tokens[slot] - num_given, columns.num_blocks[slot]
            assert mirror.num_tokens[slot] == length
            assert mirror.num_computed_tokens[slot] == columns.num_computed_tokens[slot]
            assert (mirror.token_ids[slot, :length] == columns.token_ids[slot, :length]).all()
            assert mirror.num_blocks[slot] == num_blocks
            assert (mirror.block_tables[slot, :num_blocks] == columns.block_tables[slot, :num_blocks]).all()

    def check_outputs(self, besides: Iterable[SequenceGroup] = ()) -> None:
        """Each finished group has exactly the tokens that it would get alone; those in `besides` the first of them."""
        besides = {*besides, *self.errors}
        for group in self.groups:
            prompt: list[int] = (
                group.sequences[0].token_ids[: group.num_prompt_tokens].tolist() if group.sequences else []
            )
            if group.beam_search is not None:
                if group not in besides:
                    assert_same_beams(self.hypotheses[group], expected_beams(group, prompt, self.vocab_size))
                continue
            for index in range(group.best_of):
                expected = expected_tokens(
                    prompt, index, group.max_num_tokens, group.eos_token_id, vocab_size=self.vocab_size
                )
                expected, got = expected[len(prompt) :], self.outputs[group].get(index, [])
                assert got == (expected[: len(got)] if group in besides else expected), (group.request_id, index)

    def check_nothing_left(self) -> None:
        assert self.columns.num_free_slots == self.num_slots
        assert self.blocks.num_free_blocks == self.blocks.allocator.num_usable
        assert self.blocks.host_allocator.num_free == self.num_host_blocks
        assert not self.scheduler.groups.has_work and not self.scheduler.groups.prefilling
        assert len(self.waiting) == 0 and self.waiting.num_tokens == 0
        self.scheduler.check_integrity()


def expected_beams(group: SequenceGroup, prompt: list[int], vocab_size: int = VOCAB_SIZE) -> list[BeamHypothesis]:
    """What beam search finds for a group that runs alone, straight from the language."""
    used = group.beam_search
    assert used is not None
    search = BeamSearch(
        used.width,
        num_returned=group.num_outputs,
        num_prompt_tokens=len(prompt),
        max_num_tokens=group.max_num_tokens,
        stop_token_ids=group.stop_token_ids | ({group.eos_token_id} if group.eos_token_id is not None else set()),
        length_penalty=used._length_penalty,
        early_stopping=used._early_stopping,
    )
    while not search.is_done:
        candidates = []
        for beam in range(search.num_live):
            logprobs = logprobs_after(content_of([*prompt, *search.live_token_ids(beam)]), vocab_size)
            token_ids = most_likely(logprobs, search.num_candidates)
            candidates.append((token_ids, logprobs[token_ids]))
        search.advance(candidates)
    return search.hypotheses()


def assert_same_beams(found: list[BeamHypothesis], expected: list[BeamHypothesis]) -> None:
    assert [hypothesis.token_ids for hypothesis in found] == [hypothesis.token_ids for hypothesis in expected]
    assert [hypothesis.score for hypothesis in found] == [hypothesis.score for hypothesis in expected]
