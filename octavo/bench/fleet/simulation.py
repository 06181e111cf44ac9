"""Plays requests against the real engine and simulated workers: the clock is a number, and jumps to what happens next.

Real are the step loop, the waiting queue, the choice of workers, the schedulers, their caches and every message of a
step. Not there are text, sockets and processes. The scheduler's own work takes no virtual time; it is measured apart.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.bench.fleet.front import Front
from octavo.bench.fleet.outcomes import Loss, Outcome, Run
from octavo.bench.fleet.requests import OWN_TEXT, Request
from octavo.bench.fleet.worker import BLOCK_SIZE, RunStep, VirtualWorker, WorkerKind
from protos import inference_pb2, worker_pb2

if TYPE_CHECKING:
    from scheduler_svc.core.sequences.beam_search import BeamHypothesis
    from scheduler_svc.core.sequences.finish_reason import FinishReason
    from scheduler_svc.core.sequences.sequence import Sequence as RunSequence
    from scheduler_svc.core.sequences.sequence import SequenceGroup
    from scheduler_svc.core.step_plan import NewTokens
    from scheduler_svc.engine.engine import Engine
    from scheduler_svc.flight.recorder import NoRecorder

TICK_NS = 250_000_000  # the step loop looks at its clock at least so often
MAX_SILENCE_NS = 600_000_000_000  # without any event while requests are unfinished: they never will be
UNBOUNDED = 1 << 60


class NeverEnds(Exception):
    """Requests are unfinished, and no event is left that could advance them."""


class Simulation:
    """One pool and its requests. `run` once.

    Args:
        pool: a worker each; they are dealt out to `num_shards` engines.
        losses: of those, by their number.
        settings: of the `EngineSettings`.
        new_recorder: makes the flight recorder of an engine.
        tick_ns: how often a step loop looks at its clock at least.
        seed: of whatever the engine draws.

    Raises ValueError for a request that no worker's cache can hold.

    Attributes:
        engines: one a shard, to be changed before the run if at all.
    """

    def __init__(
        self,
        pool: Sequence[WorkerKind],
        requests: Sequence[Request],
        losses: Sequence[Loss] = (),
        seed: int = 0,
        num_shards: int = 1,
        new_recorder: Callable[[], NoRecorder] | None = None,
        tick_ns: int = TICK_NS,
        **settings: Any,
    ) -> None:
        from scheduler_svc.engine.engine import Engine
        from scheduler_svc.engine.engine_settings import EngineSettings

        self._pool = list(pool)
        self._tick_ns = tick_ns
        self._now_ns = 0
        self._events: list[tuple[int, int, Callable[[], None], bool]] = []
        self._numbers = itertools.count()
        self._texts = itertools.count(OWN_TEXT << 1)
        self._random = random.Random(f"fleet engine/{seed}")
        longest, largest = (
            max(request.num_tokens_at_end for request in requests),
            max(kind.cache_tokens for kind in pool),
        )
        if longest > largest // BLOCK_SIZE * BLOCK_SIZE:
            raise ValueError(f"a request reaches {longest} tokens, and no worker's cache holds more than {largest}")
        self._max_model_len = -(-longest // BLOCK_SIZE) * BLOCK_SIZE
        self._told: list[tuple[int, NewTokens]] = []  # not yet looked at
        self._links: list[VirtualWorker] = []  # the present lease of each worker
        self._links_to_read: list[VirtualWorker] = []  # that were sent something
        self._has_answer = False  # among the events that the step loop has not taken
        self.run_seen = Run()
        bounds = {"max_waiting_requests": UNBOUNDED, "max_waiting_tokens": UNBOUNDED, "worker_wait_timeout_s": 1e9}
        engine_settings = EngineSettings(**{**bounds, **settings})
        num_shards = min(num_shards, len(pool))
        recorders = [None if new_recorder is None else new_recorder() for _ in range(num_shards)]
        self.engines = [Engine(engine_settings, self, clock=self._clock, recorder=each) for each in recorders]
        self._front = Front(self.engines, BLOCK_SIZE) if num_shards > 1 else None
        self.run_seen.num_shards = num_shards
        self._awake = list(self.engines)  # that have something to take
        self._turned_ns = 0  # when all of them looked at the clock last
        for number in range(len(pool)):
            self._links.append(self._join(number, epoch=1))
        self._num_planned = len(requests)
        for request in requests:
            self._at(request.at_ns, partial(self._submit, request), is_arrival=True)
        for loss in losses:
            self._at(round(loss.at_s * 1e9), partial(self._lose, loss.worker))
            if loss.return_s is not None:
                self._at(round(loss.return_s * 1e9), partial(self._come_back, loss.worker))

    def run(self) -> Run:
        """Until every request has ended. Raises NeverEnds."""
        with _frozen_memory(), _seeded(self._random):
            self._turn()
            if self._front is not None:
                self._front.report(self._now_ns)
            while self._events:
                self._pass_time_until(self._events[0][0])
                self._take_next()
                self._turn()
                if not self._events:
                    self._wait_for_more()
        self._close()
        return self.run_seen

    # ---- for those who change the pool during the run ----------------------------------------------------------------

    @property
    def now_ns(self) -> int:
        """The virtual time."""
        return self._now_ns

    @property
    def num_to_come(self) -> int:
        """Requests that have not ended, and those planned that have not arrived."""
        return self._num_planned + self._num_live

    def at(self, at_s: float, event: Callable[[], None]) -> None:
        """Calls `event` at that second, between turns of the step loops."""
        self._at(round(at_s * 1e9), event)

    def add_worker(self, kind: WorkerKind) -> VirtualWorker:
        """A worker more, which joins now."""
        self._pool.append(kind)
        self._links.append(self._join(len(self._pool) - 1, epoch=1))
        return self._links[-1]

    def drain(self, link: VirtualWorker, finishes_within_s: float) -> None:
        """The worker says what it says at SIGTERM; its link is closed once the scheduler has given it back."""
        draining = worker_pb2.Draining(finishes_within_ms=round(finishes_within_s * 1e3))
        said = worker_pb2.StepResponse(epoch=link.epoch, notice=worker_pb2.Notice(draining=draining))
        self._engine_of(link.number).worker_said(link, said.SerializeToString())

    # ---- time -------------------------------------------------------------------------------------------------------

    def _clock(self) -> int:
        return self._now_ns

    def _at(self, at_ns: int, event: Callable[[], None], is_arrival: bool = False) -> None:
        heapq.heappush(self._events, (at_ns, next(self._numbers), event, is_arrival))

    def _pass_time_until(self, at_ns: int) -> None:
        """Step loops wake a few times a second, whatever happens; where nothing is unfinished that can be left."""
        while self._now_ns < at_ns:
            wakes_ns = min(
                at_ns, self._turned_ns + self._tick_ns, self._front.due_ns if self._front is not None else at_ns
            )
            if not self._num_live:
                wakes_ns = max(wakes_ns, at_ns - self._tick_ns)
            self._now_ns = max(self._now_ns, wakes_ns)
            if self._now_ns >= self._turned_ns + self._tick_ns:
                self._wake_all()
            if self._front is not None and self._now_ns >= self._front.due_ns:
                self._front.report(self._now_ns)

    @property
    def _num_live(self) -> int:
        return sum(engine.num_live for engine in self.engines)

    def _wake_all(self) -> None:
        self._awake[:], self._turned_ns = self.engines, self._now_ns
        self._turn()

    def _take_next(self) -> None:
        """The next event, and the requests that arrive at the very same time. Of answers each wakes the step loop."""
        _, _, event, is_arrival = heapq.heappop(self._events)
        event()
        while is_arrival and self._events and self._events[0][0] <= self._now_ns and self._events[0][3]:
            heapq.heappop(self._events)[2]()

    def _wait_for_more(self) -> None:
        """Nothing is on its way. Whatever is unfinished gets on by the step loop's own looks at the clock, or never."""
        until_ns = self._now_ns + MAX_SILENCE_NS
        while self._num_live and not self._events:
            if self._now_ns >= until_ns:
                raise NeverEnds(f"{self._num_live} requests wait for ever: nothing is computed, nobody comes")
            self._now_ns += self._tick_ns
            self._wake_all()

    def _turn(self) -> None:
        """Step loops with news wake: what they hear of, what they send, and then what that brings."""
        run, decision_ns = self.run_seen, 0
        while self._awake:
            engine, began_ns = self._awake.pop(), time.thread_time_ns()
            engine.take_events(wait_s=0)
            heard_ns = time.thread_time_ns()
            engine.send_steps()
            sent_ns = time.thread_time_ns()
            run.engine_cpu_ns += sent_ns - began_ns
            decision_ns += sent_ns - (heard_ns if self._has_answer else began_ns)
        steps = [step for link in self._links_to_read for step in link.take_steps()]
        self._links_to_read.clear()
        for step in steps:
            self._at(step.ends_ns, partial(self._answer, step))
        num_begun = sum(step.num_begun for step in steps)
        if self._has_answer and not num_begun:
            run.plain_cpu_ns += decision_ns
            run.num_plain_steps += len(steps)
        run.decision_cpu_ns += decision_ns
        run.num_steps += len(steps)
        run.num_begun += num_begun
        self._has_answer = False
        told, self._told = self._told, []
        for now_ns, tokens in told:
            self._note(now_ns, tokens)

    def _wake(self, engine: Engine) -> Engine:
        """Wakes an engine that has events to take."""
        if engine not in self._awake:
            self._awake.append(engine)
        return engine

    def _engine_of(self, number: int) -> Engine:
        """The engine that has the worker of this number."""
        return self._wake(self.engines[number % len(self.engines)])

    # ---- events -----------------------------------------------------------------------------------------------------

    def _join(self, number: int, epoch: int) -> VirtualWorker:
        kind = self._pool[number]
        link = VirtualWorker(f"worker-{number}", number, kind, epoch, self._clock, self._links_to_read.append)
        self.run_seen.workers.append(link)
        lease = worker_pb2.LeaseGranted(instance_id=link.address, epoch=epoch)
        info, sizes = kind.info(link.address, self._max_model_len), kind.sizes(self._max_model_len)
        self._engine_of(number).worker_joined(link, info, sizes, lease)
        return link

    def _lose(self, number: int) -> None:
        link = self._links[number]
        self._engine_of(number).worker_lost(link, "it is lost, as the plan has it")
        link.is_closed = True

    def _come_back(self, number: int) -> None:
        self._links[number] = self._join(number, self._links[number].epoch + 1)

    def _answer(self, step: RunStep) -> None:
        if not step.worker.is_closed:
            self._has_answer = True
            self._engine_of(step.worker.number).worker_said(step.worker, step.answer)

    def _submit(self, request: Request) -> None:
        from scheduler_svc.core.sequences.sequence import SequenceGroup

        self._num_planned -= 1
        outcome = Outcome(request)
        self.run_seen.outcomes.append(outcome)
        group = SequenceGroup(
            str(len(self.run_seen.outcomes)),
            request.prompt(),
            _SAMPLING,
            max_num_tokens=request.num_prompt_tokens + request.num_output_tokens,
            arrival_ns=self._now_ns,
            output=outcome,
        )
        shard = self._front.choose(group) if self._front is not None else 0
        self._wake(self.engines[shard]).submit(group)

    # ---- the sink ---------------------------------------------------------------------------------------------------

    def put_tokens(self, tokens: NewTokens, outputs: worker_pb2.SequenceOutputs) -> None:
        """Keeps an answer's tokens with the time of their arrival; they are counted after the turn."""
        self._told.append((self._now_ns, tokens))

    def put_end(self, group: SequenceGroup, reason: FinishReason, message: str, is_invalid: bool) -> None:
        """Notes when a request ended, and why where that is not its length."""
        group.output.error, group.output.ended_ns = message or reason.name, self._now_ns
        self.run_seen.ended_ns = self._now_ns

    def put_prompt_logprobs(self, group: SequenceGroup, logprobs: worker_pb2.SequenceOutputs) -> None:
        """Never called: no request of a load asks for them."""
        raise AssertionError("nobody asks for logprobs")

    def put_beams(self, group: SequenceGroup, hypotheses: list[BeamHypothesis]) -> None:
        """Never called: no request of a load searches."""
        raise AssertionError("nobody asks for beams")

    def _note(self, now_ns: int, tokens: NewTokens) -> None:
        gaps_ns = self.run_seen.gaps_ns
        for sequence in tokens.sequences:
            outcome = sequence.group.output
            outcome.num_output_tokens += 1
            if outcome.last_token_ns:
                gap_ns = now_ns - outcome.last_token_ns
                gaps_ns.append(gap_ns)
                if gap_ns > outcome.longest_gap_ns:
                    outcome.longest_gap_ns = gap_ns
            else:
                outcome.first_token_ns = now_ns
            outcome.last_token_ns = now_ns
        for entry in tokens.finish_reasons.nonzero()[0]:
            self._end(now_ns, tokens.sequences[entry])

    def _end(self, now_ns: int, sequence: RunSequence) -> None:
        outcome, run = sequence.group.output, self.run_seen
        outcome.ended_ns = run.ended_ns = now_ns
        outcome.num_cached_tokens, outcome.num_moves = sequence.group.num_cached_tokens, sequence.group.num_moves
        follower = outcome.request.next_turn(sequence.token_ids, now_ns, next(self._texts))
        if follower is not None:
            self._num_planned += 1
            self._at(follower.at_ns, partial(self._submit, follower), is_arrival=True)

    def _close(self) -> None:
        run = self.run_seen
        for engine in self.engines:
            metrics = engine.metrics.total()
            run.num_preemptions += sum(metrics.num_preemptions.values())
            run.num_cached_tokens += metrics.num_prefix_hits
            run.num_prompt_tokens += metrics.num_prefix_queries
            engine.stop()
        if self._front is not None:
            run.front_cpu_ns = self._front.cpu_ns


_SAMPLING = inference_pb2.SamplingParams(seed=1, ignore_eos=True, temperature=0)


@contextmanager
def _frozen_memory() -> Iterator[None]:
    """Objects from before are kept from the garbage collector, so that no measurement pays for them; unless others,
    whose decision that is, have frozen theirs."""
    is_mine = not gc.get_freeze_count()
    gc.collect()
    if is_mine:
        gc.freeze()
    try:
        yield
    finally:
        if is_mine:
            gc.unfreeze()


@contextmanager
def _seeded(source: random.Random) -> Iterator[None]:
    """Whatever the engine draws of Python's own random numbers is the same each time."""
    before = random.getstate()
    random.seed(source.random())
    try:
        yield
    finally:
        random.setstate(before)
