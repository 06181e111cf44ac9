"""The real `Engine`, turned by hand, over simulated workers of different sizes that join, fail, drain and vanish.

Steps and answers go through bytes and wait in queues until somebody lets them on. Whatever the engine would only have
logged (an event that failed, a worker that was given up for a fault of the scheduler) is a failure here.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from protos import inference_pb2, worker_pb2
from scheduler_svc.core.sequences.beam_search import BeamHypothesis, BeamSearch
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import Sequence as SchedulerSequence
from scheduler_svc.core.sequences.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.step_plan import NewTokens
from scheduler_svc.engine import engine, failures, inbox, placement, time_limits
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.engine_settings import EngineSettings
from scheduler_svc.errors import RequestRefused
from scheduler_svc.leases.worker_claims import check_cached
from scheduler_svc.leases.worker_handle import AdapterRequest, WorkerHandle
from tests.scheduler.fake_language import EOS, expected_tokens
from tests.scheduler.simulated_worker import RowErrorOf, SimulatedWorker
from tests.scheduler.simulation import assert_same_beams, expected_beams

BLOCK_SIZE = 4
MAX_ROUNDS = 3_000  # in which everything that is left has to end


class Faults:
    """Stands in for the engine's log."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def exception(self, what: str, **_: Any) -> None:
        self.found.append(f"{what}: {''.join(traceback.format_exception(*sys.exc_info()))}")

    error = exception

    def warning(self, *_: Any, **__: Any) -> None: ...

    info = warning


@contextlib.contextmanager
def heard_by(faults: Faults) -> Iterator[None]:
    """What the engine would have logged comes to `faults`."""
    with contextlib.ExitStack() as patches:
        for module in (engine, failures, inbox, placement, time_limits):
            patches.enter_context(mock.patch.object(module, "log", faults))
        yield


class Ticks:
    """A clock on which every look takes a twentieth of a millisecond: what happens depends on nothing outside."""

    def __init__(self) -> None:
        self._now_ns = 1_000_000_000

    def __call__(self) -> int:
        self._now_ns += 50_000
        return self._now_ns


@dataclass(frozen=True, slots=True)
class Size:
    num_slots: int
    num_blocks: int
    num_host_blocks: int
    max_num_batched_tokens: int
    max_model_len: int
    num_stages: int = 1


class PoolWorker:
    """A worker and the link to it."""

    def __init__(
        self,
        address: str,
        size: Size,
        epoch: int,
        row_error: RowErrorOf | None,
        worker: SimulatedWorker | None = None,
        model: str = "",
        *,
        now_ns: int,
    ) -> None:
        """`worker`: one that was leased before."""
        self.address, self.size, self.epoch, self.model = address, size, epoch, model
        self.worker = worker or SimulatedWorker(
            size.num_slots,
            size.max_model_len,
            BLOCK_SIZE,
            size.num_blocks,
            size.num_host_blocks,
            row_error=row_error,
        )
        self.received: deque[worker_pb2.Step] = deque()
        self.results: deque[worker_pb2.StepResult] = deque()
        self.last_heard_ns = now_ns
        self.is_closed = False
        self.may_close = False  # it was lost, or told to drain
        self.is_ending = False  # it has said that it drains, and goes once it has answered

    def call(self, request: AdapterRequest, done: Callable[[str], None]) -> None:
        raise AssertionError("nobody asks for adapters here")

    def send(self, data: bytes) -> None:
        self.received.append(worker_pb2.StepRequest.FromString(data).step)

    def distrust(self) -> None:
        """What is wrong here is found by whoever reads its answers."""

    def close(self) -> None:
        self.is_closed = True

    def run(self, fails: str | None = None, is_out_of_memory: bool = False) -> None:
        result = self.worker.run(self.received.popleft(), fails)
        if result.HasField("error") and is_out_of_memory:
            result.error.code = worker_pb2.STEP_ERROR_CODE_OUT_OF_MEMORY
        self.results.append(result)


@dataclass(slots=True)
class Told:
    """What the engine has said of a group."""

    tokens: dict[int, list[int]]
    hypotheses: list[BeamHypothesis] | None = None
    prompt: list[int] = field(default_factory=list)  # tokens whose logprobs came
    end: tuple[FinishReason, str] | None = None


class Pool:
    """An engine, its workers and its requests. `check` holds after every `turn`."""

    def __init__(self, faults: Faults, row_error: RowErrorOf | None = None, **settings: Any) -> None:
        self._clock = Ticks()
        self._new_engine = partial(Engine, EngineSettings(**settings), self, clock=self._clock)
        self.engine = self._new_engine()
        self._numbers = itertools.count()
        self.num_told = 0  # blocks that a worker brought along to another lease
        self.workers: list[PoolWorker] = []
        self.told: dict[SequenceGroup, Told] = {}
        self.cut_short: set[SequenceGroup] = set()  # aborted, or with a sequence that was ended from above
        self._prompt_logprobs_of: set[SequenceGroup] = set()
        self._faults, self._row_error = faults, row_error
        self._num_joined = 0
        self.turns_a_check = 1  # who takes thousands of turns has them looked at less often
        self._num_turns = 0

    # ---- the sink ---------------------------------------------------------------------------------------------------

    def put_prompt_logprobs(self, group: SequenceGroup, logprobs: worker_pb2.SequenceOutputs) -> None:
        self.told[group].prompt += np.frombuffer(logprobs.token_ids_i32, "<i4").tolist()

    def put_tokens(self, tokens: NewTokens, outputs: worker_pb2.SequenceOutputs) -> None:
        for sequence, token_id in zip(tokens.sequences, tokens.token_ids.tolist(), strict=True):
            told = self.told[sequence.group]
            assert told.end is None, "a token after the end"
            told.tokens.setdefault(sequence.index, []).append(token_id)
            if sequence.group in self._prompt_logprobs_of:
                assert told.prompt == _prompt(sequence.group)[1:], "the prompt's logprobs came not once, or too late"

    def put_beams(self, group: SequenceGroup, hypotheses: list[BeamHypothesis]) -> None:
        self.told[group].hypotheses = hypotheses

    def put_end(self, group: SequenceGroup, reason: FinishReason, message: str, is_invalid: bool) -> None:
        assert self.told[group].end is None, "two ends"
        self.told[group].end = reason, message

    # ---- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        max_num_tokens: int,
        *,
        n: int = 1,
        best_of: int | None = None,
        beam_width: int = 0,
        resumed: Sequence[Sequence[int]] = (),
        finished: Sequence[int] = (),
        ended: Sequence[int] = (),
        asks_prompt_logprobs: bool = False,
        request_id: str = "",
        **options: Any,
    ) -> SequenceGroup:
        """`resumed`: tokens by output; `finished`: the outputs of those that had ended, `ended`: by themselves."""
        params = inference_pb2.SamplingParams(seed=1, prompt_logprobs=0 if asks_prompt_logprobs else None)
        search = None
        if beam_width:
            params.use_beam_search, params.best_of, params.n, params.temperature = True, beam_width, n, 0.0
            search = BeamSearch(
                beam_width,
                num_returned=n,
                num_prompt_tokens=len(prompt),
                max_num_tokens=max_num_tokens,
                stop_token_ids=frozenset([EOS]),
            )
        group = SequenceGroup(
            request_id or f"request-{next(self._numbers)}",
            prompt,
            params,
            max_num_tokens=max_num_tokens,
            arrival_ns=len(self.told),
            eos_token_id=EOS,
            num_outputs=n,
            best_of=beam_width or best_of or n,
            beam_search=search,
            resumed_token_ids=resumed,
            **options,
        )
        for index in [*finished, *ended]:
            group.sequences[index].status = SequenceStatus.FINISHED
        if finished:
            self.cut_short.add(group)
        if asks_prompt_logprobs and not any(resumed):
            self._prompt_logprobs_of.add(group)
        self.told[group] = Told({index: list(tokens) for index, tokens in enumerate(resumed)})
        try:
            self.engine.submit(group)
        except RequestRefused:
            del self.told[group]
            raise
        return group

    def unfinished(self) -> list[SequenceGroup]:
        return [group for group in self.told if not group.is_finished]

    def abort(self, group: SequenceGroup) -> None:
        self.cut_short.add(group)
        self.engine.abort_group(group)

    def finish_above(self, sequence: SchedulerSequence) -> None:
        """As a stop string does."""
        self.cut_short.add(sequence.group)
        self.engine.finish_sequence(sequence)

    # ---- workers ----------------------------------------------------------------------------------------------------

    def replace_engine(self) -> None:
        """The scheduler is killed. Its workers go to another one, and so do clients, with what they were told."""
        self.engine = self._new_engine()
        workers, self.workers = self.workers, []
        for worker in {worker.worker: worker for worker in workers}.values():  # of one that has come back, the last
            if not worker.is_ending:
                self.join(worker.size, worker.model, worker.worker)
        for group in self.unfinished():
            told = self.told.pop(group)
            if group in self.cut_short:
                continue  # its client has left, or knows an end of it that nobody else does
            comes_whole = group.uses_beam_search or group.best_of > group.num_outputs
            tokens = [told.tokens.get(index, []) for index in range(group.best_of)]
            resumed = [] if comes_whole or not any(tokens) else tokens
            ended = [index for index, one in enumerate(resumed) if is_at_end(group, one)]
            if len(ended) == len(resumed) > 0:
                continue  # it is all there; a frontend would say so
            self.submit(
                _prompt(group),
                group.max_num_tokens,
                n=group.num_outputs,
                best_of=group.best_of,
                beam_width=group.best_of if group.uses_beam_search else 0,
                resumed=resumed,
                ended=ended,
                asks_prompt_logprobs=group in self._prompt_logprobs_of,
                priority=group.priority,
                tenant=group.tenant,
                cache_salt=group.cache_salt,
                model=group.model,
            )

    def rejoin(self, worker: PoolWorker) -> PoolWorker:
        """The way to a worker was lost, and is found again by the same scheduler."""
        self.lose(worker)
        worker.received.clear()
        return self.join(worker.size, worker.model, worker.worker)

    def join(self, size: Size, model: str = "", worker_before: SimulatedWorker | None = None) -> PoolWorker:
        self._num_joined += 1
        epoch = self._num_joined
        worker = PoolWorker(f"worker-{epoch}", size, epoch, self._row_error, worker_before, model, now_ns=self._clock())
        sizes = worker_pb2.InitializeResponse(
            num_device_blocks=size.num_blocks,
            num_host_blocks=size.num_host_blocks,
            max_num_seqs=size.num_slots,
            max_num_batched_tokens=size.max_num_batched_tokens,
            max_model_len=size.max_model_len,
            prefill_tokens_per_s=1e3,
            swap_bytes_per_s=1e6,
            block_bytes=1,
        )
        info, lease = worker_pb2.WorkerInfo(block_size=BLOCK_SIZE), worker_pb2.LeaseGranted(epoch=worker.epoch)
        info.parallel.pipeline_parallel_size = size.num_stages
        if worker_before is not None:
            lease.cached_blocks.CopyFrom(worker_before.begin_lease())
            check_cached(sizes, lease)
            self.num_told += len(lease.cached_blocks.block_ids_u32) // 4
        self.workers.append(worker)
        self.engine.worker_joined(worker, info, sizes, lease, model)
        return worker

    def lose(self, worker: PoolWorker) -> None:
        worker.may_close = True
        self.engine.worker_lost(worker, "it vanished")

    def drain(self, worker: PoolWorker, from_above: bool) -> None:
        worker.may_close = True
        if from_above:
            self.engine.call(partial(self._drain, worker.address))
        elif not worker.is_ending:
            worker.is_ending = True
            self._say(worker, notice=worker_pb2.Notice(draining=worker_pb2.Draining()))

    def _drain(self, address: str) -> None:
        for worker in self.engine.workers_at(address):
            self.engine.drain_worker(worker)

    def answer(self, worker: PoolWorker) -> None:
        self._say(worker, result=worker.results.popleft())

    def withhold(self, worker: PoolWorker, count: int) -> None:
        """As an operator does, or of fewer blocks where the longest sequence would not fit any more."""
        for handle in self.engine.workers:
            if handle.link is worker:
                self.engine.withhold_blocks(worker.address, min(count, handle.most_withheld))

    def flush(self) -> None:
        self.engine.flush_prefix_cache()

    def _say(self, worker: PoolWorker, **fields: Any) -> None:
        self.engine.worker_said(worker, worker_pb2.StepResponse(epoch=worker.epoch, **fields).SerializeToString())

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Takes what has happened, sends steps, and looks at everything."""
        for worker in self.workers:
            worker.last_heard_ns = self._clock()
        self.engine.call(lambda: None)  # something to find, or it waits
        self.engine.take_events()
        self.engine.send_steps()
        for worker in self.workers:
            assert worker.may_close or not worker.is_closed, f"{worker.address} was given up: {self._faults.found}"
        self.workers = [worker for worker in self.workers if not worker.is_closed]
        self._num_turns += 1
        if self._num_turns % self.turns_a_check == 0:
            self.check()

    def run_to_end(self, rescue: Size, model: str = "") -> None:
        """Lets everything on until all have ended. `rescue`: of the worker that joins if there is none."""
        for _ in range(MAX_ROUNDS):
            self.turn()
            if not self.unfinished():
                self.check()
                return
            if not self.workers:
                self.join(rescue, model)
                continue
            is_moving = False
            for worker in self.workers:
                is_moving |= bool(worker.received or worker.results or worker.may_close)
                while worker.received:
                    worker.run()
                while worker.results:
                    self.answer(worker)
                if worker.is_ending:
                    self.lose(worker)
            if not is_moving:
                self.turn()  # a worker that has just gone may have left something to those before it
                if self.unfinished() and self.workers and not any(worker.received for worker in self.workers):
                    self._end_stranded()
        raise AssertionError(f"not over after {MAX_ROUNDS} rounds: {self._places()}")

    def _end_stranded(self) -> None:
        """Nothing moves: everything that is left has to be too large for every worker, and waits for another one."""
        for group in self.unfinished():
            can_run = any(handle.can_ever_run(group) for handle in self.engine.workers)
            assert not can_run and group in self.engine._waiting, f"stuck: {self._places()}"
        self.engine._time_limits.worker_wait_timeout_s = 0.0

    def _places(self) -> dict[str, str]:
        places = {}
        for group in self.unfinished():
            holder = next((handle for handle in self.engine.workers if handle.scheduler.groups.holds(group)), None)
            where = "waiting" if holder is None else holder.link.address
            states = [(sequence.status.value, sequence.slot, sequence.num_tokens) for sequence in group.sequences]
            places[group.request_id] = f"{where} {states}"
        return places

    # ---- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        assert not self._faults.found, "\n".join(self._faults.found)
        waiting = self.engine._waiting
        self.engine.router.check_integrity()
        for handle in self.engine.workers:
            scheduler = handle.scheduler
            scheduler.check_integrity()
            for group in scheduler.groups.all():
                assert handle.model in ("", group.model), f"{group.request_id} runs on another model"
            if not handle.in_flight and handle.failed_step is None:
                self._link(handle).worker.check_integrity()
        for group in self.told:
            num_places = (group in waiting) + sum(
                handle.scheduler.groups.holds(group) for handle in self.engine.workers
            )
            assert num_places == (not group.is_finished), f"{group.request_id} is in {num_places} places"
            assert not (group in waiting and group.num_pending_tokens), "who waits has draws in flight"

    def _link(self, handle: WorkerHandle) -> PoolWorker:
        link = handle.link
        assert isinstance(link, PoolWorker)
        return link

    def check_outputs(self) -> None:
        """Each group has exactly the tokens that it would get alone, or the first of them where it was cut short."""
        for group, told in self.told.items():
            prompt = _prompt(group)
            is_cut = group in self.cut_short or (told.end is not None and told.end[0] is FinishReason.ERROR)
            if group.beam_search is not None:
                if not is_cut:
                    assert told.hypotheses is not None
                    assert_same_beams(told.hypotheses, expected_beams(group, prompt))
                continue
            for index in range(group.best_of):
                expected = expected_tokens(prompt, index, group.max_num_tokens)[len(prompt) :]
                got = told.tokens.get(index, [])
                assert got == (expected[: len(got)] if is_cut else expected), (group.request_id, index)

    def check_nothing_left(self) -> None:
        assert not self.engine.live_groups() and not len(self.engine._waiting)
        assert self.engine._waiting.num_tokens == 0
        for handle in self.engine.workers:
            scheduler = handle.scheduler
            assert not scheduler.groups.has_work and not scheduler.groups.prefilling
            assert scheduler.columns.num_free_slots == scheduler.columns.max_num_seqs, "slots are left"
            assert scheduler.blocks.num_free_blocks == scheduler.blocks.allocator.num_usable, "blocks are left"
            assert scheduler.blocks.host_allocator.num_free == handle.sizes.num_host_blocks, "host blocks are left"


def is_at_end(group: SequenceGroup, generated: Sequence[int]) -> bool:
    """Whether an output of the group ends with the last of these tokens."""
    is_longest = group.num_prompt_tokens + len(generated) >= group.max_num_tokens
    return bool(generated) and (is_longest or generated[-1] == EOS)


def _prompt(group: SequenceGroup) -> list[int]:
    return group.sequences[0].token_ids[: group.num_prompt_tokens].tolist() if group.sequences else []
