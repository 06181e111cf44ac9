"""The engine: one thread, the step loop, that owns the waiting queues and every worker's scheduler.

Everything that happens (a request, an abort, an answer, a worker that joins or is lost) is a function in its `Inbox`,
and nothing else touches scheduler state: most are methods of `Events`. Steps are made in `step_sender`, answers taken
in `step_answers`. Tokens leave through an `OutputSink`. Knows nothing of text or of how messages travel.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import structlog

from protos import worker_pb2
from scheduler_svc.core.queues.policy import POLICIES
from scheduler_svc.core.queues.served_tokens import ServedTokens
from scheduler_svc.core.scheduler_settings import SchedulerSettings
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.engine.adapters import Adapters
from scheduler_svc.engine.engine_settings import EngineSettings
from scheduler_svc.engine.events import Events
from scheduler_svc.engine.failures import Failures
from scheduler_svc.engine.inbox import Inbox
from scheduler_svc.engine.joined_workers import JoinedWorkers
from scheduler_svc.engine.metrics.model_metrics import ModelMetrics
from scheduler_svc.engine.output_sink import OutputSink
from scheduler_svc.engine.placement import Placement
from scheduler_svc.engine.requests.admitted_before import AdmittedBefore
from scheduler_svc.engine.requests.live_requests import LiveRequests
from scheduler_svc.engine.requests.tenant_turns import TenantTurns
from scheduler_svc.engine.step_answers import StepAnswers, StepObserver
from scheduler_svc.engine.step_sender import StepSender
from scheduler_svc.engine.step_traces import StepTraces
from scheduler_svc.engine.time_limits import WATCH_INTERVAL_S, TimeLimits
from scheduler_svc.engine.turn_watch import Turns
from scheduler_svc.engine.turnover import Turnover
from scheduler_svc.errors import NotReady, RequestRefused, Unsupported
from scheduler_svc.flight.entries import Kind
from scheduler_svc.flight.recorder import FlightRecorder, NoRecorder, Recording
from scheduler_svc.leases.worker_handle import WorkerHandle, WorkerLink
from scheduler_svc.routing.rebinding import Rebinding
from scheduler_svc.routing.router import Router
from scheduler_svc.routing.stranded_groups import StrandedGroups
from scheduler_svc.vital_parts import VitalParts

log = structlog.get_logger()
T = TypeVar("T")


class Engine:
    """Start it, let workers join, submit groups. Any thread may call it, but for what is on the step loop's thread.

    Attributes:
        workers: those that have joined, in the order in which they came; others than the loop read a copy.
        router: where groups wait, and what their places are chosen by. For the step loop's thread.
        metrics: what is counted, by model.
        admitted_before: requests that may resume before all that wait.
        turns: of the step loop, at least four a second.
        recorder: of the last steps, and of what they came of.
        on_wanted: called with a worker whose lease another scheduler asks for.
    """

    def __init__(
        self,
        settings: EngineSettings,
        sink: OutputSink,
        vital: VitalParts | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        recorder: NoRecorder | None = None,
    ) -> None:
        """`clock`: nanoseconds, that of `arrival_ns` of groups and of `last_heard_ns` of links. `recorder`: of this
        engine alone; None: nothing is written down."""
        self.settings = settings
        recorder = self.recorder = recorder or NoRecorder()
        unrecorded = self._unrecorded = clock  # for what other threads ask as well; what comes of it is written down
        clock = self._clock = recorder.clock(clock)
        recorder.pictures(self.state)
        self.metrics = ModelMetrics(counts_prefixes=settings.enable_prefix_caching)
        self._joined = JoinedWorkers()
        self.workers = self._joined.workers
        self._served = served = ServedTokens(settings.tenant_weights)
        self._scheduler_settings = SchedulerSettings(
            policy=POLICIES[settings.scheduling_policy],
            enable_chunked_prefill=settings.enable_chunked_prefill,
            step_time_goal=settings.step_time_goal,
            delay_factor=settings.scheduler_delay_factor,
            preemption_mode=settings.preemption_mode,
            served=served,
        )
        policy, is_caching = self._scheduler_settings.policy, settings.enable_prefix_caching
        self.router = Router(policy, served, clock, enable_prefix_caching=is_caching)
        rebinding = self._rebinding = Rebinding(self.router, clock)
        self._waiting = self.router.queues
        stranded = StrandedGroups(self._waiting.unbound, self._joined.workers)
        self._inbox = Inbox(recorder)
        vital = vital or VitalParts()
        self._thread = vital.thread("step-loop", self._run, lambda: self._has_stopped)
        self.turns = Turns()
        self._has_stopped = False
        self.on_wanted: Callable[[WorkerHandle], None] = lambda worker: None
        joined, router, metrics = self._joined, self.router, self.metrics
        adapters = self._adapters = Adapters(
            self._inbox.put, joined.wake, self._on_adapter_loaded, settings.adapters, recorder
        )
        self.admitted_before = AdmittedBefore()
        bounds = settings.max_waiting_requests, settings.max_waiting_tokens
        turns = self._tenants = TenantTurns(
            settings.tenants,
            self._weigh,
            lambda group: self._inbox.put(partial(self._events.due, group)),
            unrecorded,
            has_limits=settings.has_tenant_limits,
            weights=settings.tenant_weights,
        )
        live = self._live = LiveRequests(self._waiting, self.admitted_before, *bounds, turns)
        traces = self._traces = StepTraces(unrecorded)
        placement = self._placement = Placement(
            joined, router, stranded, live, adapters, metrics, sink, traces, clock, recorder
        )
        failures = self._failures = Failures(
            settings, joined, placement, router, rebinding, stranded, adapters, metrics, traces, clock, recorder
        )
        self._sender = StepSender(
            settings.steps_in_flight, router, rebinding, placement, failures, traces, clock, recorder
        )
        turnover = Turnover(joined, placement, router, stranded, adapters, clock)
        self._answers = StepAnswers(
            joined, live, placement, failures, turnover, adapters, metrics, sink, self._on_wanted, clock, recorder
        )
        self._time_limits = TimeLimits(
            settings.worker_wait_timeout_s,
            joined,
            placement,
            failures,
            self._waiting,
            stranded,
            rebinding,
            clock,
            recorder,
        )
        self._stranded = stranded
        self._events = Events(joined, self._waiting, live, placement, failures, turnover, adapters, traces, recorder)

    # ---- from any thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread; what was put into the inbox before is done first."""
        self._time_limits.turns_itself = True
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop and closes every worker's stream; what is unfinished is aborted."""
        self._live.close()
        self._inbox.put(self._on_stop)
        if self._thread.is_alive():
            self._thread.join()
            return
        try:
            self.take_events()  # of a loop that somebody else turned, or that has ended before its time
        except Exception:
            log.exception("the step loop cannot be ended in order")

    def submit(self, group: SequenceGroup) -> None:
        """Queues a group. Raises what `Adapters.use` and `LiveRequests.add` raise."""
        group.share = self._served.share_of(group.tenant, is_known=self.settings.tenants_are_known)
        try:
            self._adapters.use(group)
            if group.has_resumed_tokens and not group.is_resumed:
                group.is_resumed = self.admitted_before.take(group.request_id, group.tenant)
            begins = self._live.add(group)
        except RequestRefused as refusal:
            if group.is_resumed:
                self.admitted_before.learn([group.request_id], group.tenant)
            self._inbox.put(partial(self._adapters.release, group))
            if self.settings.counts_refusals:
                self.metrics.rejected(refusal)
            raise
        self.metrics.of(group.model).admitted(group)
        if group.trace is not None:
            group.trace.queued(self._unrecorded())
        self._inbox.put(partial(self._events.submitted, group, begins))

    def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """Ends live requests of this id, of one tenant or of all, with ABORT; False when there is none."""
        groups = self._live.find(request_id, tenant)
        for group in groups:
            self.abort_group(group)
        return bool(groups)

    def abandon(self, group: SequenceGroup) -> None:
        """Its client is gone, and may come back with `resume`: a turn that it had is given back to it once."""
        if group.first_scheduled_ns is not None and not group.is_finished:
            self.admitted_before.learn([group.request_id], group.tenant)
        self.abort_group(group)

    def abort_group(self, group: SequenceGroup) -> None:
        """Ends the group with ABORT, and tells the sink."""
        self._inbox.put(partial(self._events.aborted, group))

    def finish_sequence(self, sequence: Sequence) -> None:
        """The layer above found the end of a sequence's text: it wants no more tokens of it."""
        self._live.end_above(sequence)  # the client may use the id again as soon as it has read the end
        self._inbox.put(partial(self._events.finished, sequence))

    def recording(self) -> Future[Recording]:
        """What the flight recorder has now. Raises Unsupported where it is off."""
        recorder = self.recorder
        if not isinstance(recorder, FlightRecorder):
            raise Unsupported("the flight recorder is off (--flight-recorder-steps)")
        return self.call(recorder.recording)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function on the step loop's thread, between steps, for a consistent look at its state."""
        return self._open_inbox().call(function)

    def observe_steps(self, observer: StepObserver) -> Callable[[], None]:
        """Has every answered step shown to `observer`, on the step loop's thread; returns what ends that."""
        return self._answers.observe(observer)

    def flush_prefix_cache(self, address: str = "") -> Future[int]:
        """Forgets cached prefixes, of one worker or of all; what runs keeps its blocks.

        How many could be found, or UnknownName.
        """
        return self.call(partial(self._events.flush, address))

    def withhold_blocks(self, address: str, count: int) -> Future[int]:
        """Withholds so many cache blocks of a worker from use, for its lease or until another call. See `Turnover`.

        How many are withheld at once; the others follow as they are given up. Or UnknownName, InvalidRequest.
        """
        return self.call(partial(self._events.withhold, address, count))

    def load_adapter(self, name: str, path: str) -> Future[int]:
        """Loads an adapter on every worker that takes them; its generation, or a RequestRefused. See `Adapters`."""
        return self._open_inbox().begin(partial(self._events.load, name, path))

    def unload_adapter(self, name: str) -> Future[int]:
        """Unloads an adapter once the requests that use it have ended; its generation, or a RequestRefused."""
        return self._open_inbox().begin(partial(self._events.unload, name))

    def _open_inbox(self) -> Inbox:
        if self._live.is_closed:
            raise NotReady("this server is shutting down")
        return self._inbox

    # ---- looks, from any thread -------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Requests that were taken and have not ended."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Of those the ones that have no place on a worker, and are not held by a limit of their tenant."""
        return self._live.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of those that wait."""
        return self._live.num_waiting_tokens

    @property
    def num_held(self) -> int:
        """Live requests that wait because a limit of their tenant holds them, not for want of workers."""
        return self._tenants.num_held

    @property
    def is_full(self) -> bool:
        """Whether not even the shortest request would be taken."""
        return self._live.is_full

    @property
    def is_closed(self) -> bool:
        """Whether no request is taken any more."""
        return self._live.is_closed

    @property
    def caches_prefixes(self) -> bool:
        """Whether groups find what others have computed."""
        return self.settings.enable_prefix_caching

    @property
    def num_step_observers(self) -> int:
        """Of `observe_steps`, those that have not ended."""
        return self._answers.num_observers

    def live_groups(self) -> list[SequenceGroup]:
        """All live requests, in order of admission. Grows with their number."""
        return self._live.all()

    def num_live_by_model(self) -> dict[str, int]:
        """How many there are, by the fingerprint of their model."""
        return self._live.num_by_model()

    def num_due_by_model(self) -> dict[str, int]:
        """How many of the live ones no limit of their tenant holds, by the fingerprint of their model."""
        counts = Counter(self._live.num_by_model())
        counts.subtract(group.model for group in self._tenants.held())
        return counts

    def find(self, request_id: str, tenant: str | None = None) -> list[SequenceGroup]:
        """Live requests of this id, of one tenant or of all."""
        return self._live.find(request_id, tenant)

    def page(self, after: int, limit: int) -> list[tuple[int, SequenceGroup]]:
        """Live requests in order of admission with their numbers: at most `limit`, of higher numbers than `after`."""
        return self._live.page(after, limit)

    def check_room(self, tenant: str, request_id: str, num_to_come: int = 0, num_bytes: int = 0) -> None:
        """Raises QueueFull where `submit` would, once `num_to_come` others have come. See `LiveRequests`."""
        self._live.check_room(tenant, request_id, num_to_come, num_bytes)

    def refused(self, refusal: RequestRefused) -> None:
        """Counts a request that was refused before it was submitted."""
        self.metrics.rejected(refusal)

    def close(self) -> None:
        """Takes no more requests; those that there are go on."""
        self._live.close()

    def number_requests_by(self, numbers: Iterator[int]) -> None:
        """Numbers of requests that are taken from now on; they have to rise."""
        self._live.number_by(numbers)

    def adapter_names(self) -> list[str]:
        """Adapters that a request may name."""
        return self._adapters.names()

    def adapter_generations(self) -> dict[str, int]:
        """Of those adapters."""
        return self._adapters.generations()

    def workers_at(self, address: str) -> list[WorkerHandle]:
        """The worker of an address; all of them for "". Raises UnknownName."""
        return self._joined.at(address)

    # ---- from worker clients ----------------------------------------------------------------------------------------

    def worker_joined(
        self,
        link: WorkerLink,
        info: worker_pb2.WorkerInfo,
        sizes: worker_pb2.InitializeResponse,
        lease: worker_pb2.LeaseGranted,
        model: str = "",
    ) -> None:
        """`model`: the fingerprint of what it serves. It gets the groups of that one alone."""
        settings, is_caching = self._scheduler_settings, self.settings.enable_prefix_caching
        is_lock_step = self.settings.steps_in_flight == 1
        worker = WorkerHandle(link, info, sizes, lease, settings, is_caching, model, is_lock_step=is_lock_step)
        self.admitted_before.learn(lease.request_ids)
        self._inbox.put(partial(self._events.joined, worker, lease))

    def worker_said(self, link: WorkerLink, data: bytes) -> None:
        """A `StepResponse`, still in bytes, so that the thread which reads the socket does nothing else."""
        self._inbox.put(partial(self._answers.take, link, data))

    def worker_lost(self, link: WorkerLink, reason: str) -> None:
        """Its groups go to other workers, or wait; a link that is not here any more is ignored."""
        self._inbox.put(partial(self._events.lost, link, reason))

    # ---- on the step loop's thread ----------------------------------------------------------------------------------

    def drain_worker(self, worker: WorkerHandle, *, may_finish: bool = False) -> int:
        """Gives a worker no more steps, and gives it back once it has answered those it has. Its requests move.

        `may_finish`: where no other worker has its model, it ends its requests first; new ones it gets no more.

        Returns how many they are. To be called on the step loop's thread, through `call`.
        """
        return self._events.drain(worker, may_finish=may_finish)

    def state(self) -> dict[str, Any]:
        """Whatever decisions are made from, by name: for an image of it, and for whoever goes on from one.

        To be called on the step loop's thread, between turns, or before it begins.
        """
        return {
            "router": self.router,
            "queues": self.router.queues,
            "unbound": self.router.queues.unbound,
            "rebinding": self._rebinding,
            "joined": self._joined,
            "workers": self._joined.workers,
            "stranded": self._stranded,
            "adapters": self._adapters,
            "served": self._served,
            "watched": self._time_limits.watched,
        }

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Tenants have these weights from now on. For the step loop's thread."""
        self._served.weigh(weights)

    def goes_on(self, groups: Iterable[SequenceGroup]) -> None:
        """All of its `state` was given to it from elsewhere, with these requests in it. Before it begins."""
        self._joined.find_links()
        self.router.watch_all()
        for group in groups:
            self._live.add(group)
            self._live.arrived(group)

    # ---- the step loop ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._has_stopped:
            self.turns.note()
            self.take_events()
            self.send_steps()

    def take_events(self, wait_s: float = WATCH_INTERVAL_S) -> None:
        """Waits so long for something to happen, then takes all that has: one schedule answers many events.

        With `send_steps` the whole of the loop, for a caller who runs it himself in place of `start`. Where the clock
        is not that of the machine, such a caller waits for nothing: 0.
        """
        self.take_waiting(wait_s)
        self.watch()

    def take_waiting(self, wait_s: float = 0.0) -> None:
        """Of `take_events` the events."""
        self._inbox.take(wait_s)

    def watch(self) -> None:
        """Of `take_events` the look at what is late."""
        self._tenants.watch()
        self.recorder.turn()
        self._time_limits.watch()

    def send_steps(self) -> None:
        """Fills every worker that something has happened to, and no other."""
        self._wake_one_idle()
        for worker in self._joined.take_due():
            if not self._joined.has(worker):
                continue  # it was lost meanwhile
            self._sender.fill(worker)
            if not self._joined.has(worker):
                continue
            self.router.touch(worker)
            if worker.in_flight:
                self._joined.idle.pop(worker, None)
            elif worker.is_leaving or self._has_finished(worker):
                worker.is_draining = True
                self._failures.lose(worker.link, "it is drained")
            else:
                self._joined.idle[worker] = None
        self.recorder.turned()

    def _has_finished(self, worker: WorkerHandle) -> bool:
        is_done = worker.is_finishing and not worker.has_something_to_do
        return is_done and self._joined.has_all_it_will_finish(worker)

    def _wake_one_idle(self) -> None:
        """Somebody waits, and not for want of workers: the next one that has nothing to do looks whom it can take."""
        if self._joined.idle and len(self.workers) > 1 and self.router.has_some_to_spare:
            self._joined.wake_next_idle()

    # ---- events -----------------------------------------------------------------------------------------------------

    def _weigh(self, weights: Mapping[str, float]) -> None:
        self.recorder.control(Kind.WEIGH, dict(weights))
        self.weigh(weights)

    def _on_wanted(self, worker: WorkerHandle) -> None:
        self.on_wanted(worker)

    def _on_adapter_loaded(self, worker: WorkerHandle) -> None:
        self._placement.place_unbound(worker)
        self._joined.wake(worker)

    def _on_stop(self) -> None:
        self._events.stop()
        self._placement.failed.write()
        self._has_stopped = True
