"""What the servicer calls: sizes the cache, and runs steps in order on the model thread.

A failed step is answered FAILED with nothing of its rows left in the mirror; every later one is SKIPPED until a step
says `resume_after` with the failed step's id (`StepPipeline`). Never decides what runs. Methods may be called from any
thread; what they start runs on the model thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch

from octavo.shared.terminal_row import TerminalRow
from protos import ranks_pb2, worker_pb2
from worker_svc.adapters.adapter_folder import Adapter
from worker_svc.adapters.adapter_set import AdapterSet
from worker_svc.adapters.errors import AdapterError
from worker_svc.adapters.reading_on_ranks import ReadingOnRanks
from worker_svc.cache.cache_engine import CacheEngine
from worker_svc.cache.cache_sizing import CacheSizes, Limits, size_cache
from worker_svc.cache.cached_blocks import CachedBlocks
from worker_svc.config import WorkerConfig
from worker_svc.errors import GroupError, ProtocolError, StartupError
from worker_svc.host.device_memory import memory_of
from worker_svc.host.memory import GIB, available_bytes
from worker_svc.host.model_thread import ModelThread
from worker_svc.host.touch_ahead import TouchAhead
from worker_svc.mirror.sequence_states import SequenceStates
from worker_svc.parallel.group import ParallelGroup
from worker_svc.steps.failures import is_device_lost
from worker_svc.steps.giving_way import GivingWay, may_give_way
from worker_svc.steps.graph_captures import GraphSizes
from worker_svc.steps.launched_step import Launched
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.profile import Profile, Profiler
from worker_svc.steps.recent_requests import RecentRequests
from worker_svc.steps.step_pipeline import Deliver, StepPipeline
from worker_svc.steps.step_timer import StepTimer

log = structlog.get_logger()


class Worker:
    """A model runner, its mirror, and the thread on which both live."""

    def __init__(
        self,
        runner: ModelRunner,
        config: WorkerConfig,
        thread: ModelThread | None = None,
        end_process: Callable[[], None] | None = None,
        group: ParallelGroup | None = None,
    ) -> None:
        """
        Args:
            thread: the one that loaded the model, where it was loaded on one (`server.load` says why).
            end_process: called when the device is lost; None: the process ends at once.
            group: the ranks that have the other parts of the model. Rank 0 is told what to do by `initialize`, `begin`
                and `submit`, the others by `follow`.
        """
        self.config = config
        self.thread = thread or ModelThread()
        self._runner = runner
        self._memory = memory_of(runner.device, config.gpu_memory_utilization)
        self._profiler = Profiler(runner, self._memory)
        self._profile: Profile | None = None
        self._limits: Limits | None = None  # that `_sizes` were made for
        self._sizes: worker_pb2.InitializeResponse | None = None
        self._epoch = 0  # of the lease whose steps count; 0: none
        self._was_leased = False
        self._pipeline: StepPipeline | None = None  # of the last lease
        self._cached_blocks = CachedBlocks(0)  # of the cache, whatever lease they were computed under
        self._requests = RecentRequests(max(1024, 4 * config.max_num_seqs))
        self._waiter: ModelThread | None = None  # for outputs that come later
        self._end_process = end_process or _end_process
        self._group = group
        self._num_submitted = 0  # steps
        self._touching: TouchAhead | None = None  # the cache
        self._giving_way: GivingWay | None = None  # to neighbours
        self._reader: ModelThread | None = None  # of adapters, on each rank of a group
        self._reading: ReadingOnRanks | None = None  # likewise
        self._read: Future[Adapter] | None = None  # what rank 0 has had this one read, and loads next

    # ---- Sizes ------------------------------------------------------------------------------------------------------

    @property
    def bounds(self) -> Limits:
        """The most that this worker takes, before Initialize."""
        asked = self.config.max_model_len
        max_model_len = asked if isinstance(asked, int) else self._runner.config.max_model_len
        return Limits(self.config.max_num_seqs, self.config.max_num_batched_tokens, max_model_len)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._runner.device

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self._runner.cache_dtype

    @property
    def graph_sizes(self) -> GraphSizes:
        """Of the steps that are replayed."""
        return self._runner.graph_sizes

    @property
    def sizes(self) -> worker_pb2.InitializeResponse | None:
        """What Initialize answered last; None before."""
        return self._sizes

    def is_initialized_for(self, limits: Limits) -> bool:
        """Whether Initialize would only repeat its answer."""
        return self._limits == limits

    def initialize(self, limits: Limits) -> Future[worker_pb2.InitializeResponse]:
        """Measures a step (the first time), sizes and allocates the cache. The future may hold a StartupError, also of
        other limits than those of a lease that has begun meanwhile."""
        return self.thread.call(lambda: self._initialize(limits))

    def _initialize(self, limits: Limits) -> worker_pb2.InitializeResponse:
        """The process ends where a rank of a group fails in that alone: the others wait for it, now or next time."""
        if self._epoch and not self.is_initialized_for(limits):
            raise StartupError("other settings are refused while a scheduler holds the lease")
        row = TerminalRow()
        try:
            return self._initialize_for(limits, row)
        except GroupError:  # of all ranks
            raise
        except Exception as error:
            if self._group is not None:
                log.exception("this rank cannot be initialized")
                self._group.tell_failure(error)
                self._end_process()
            raise
        finally:
            row.clear()

    def _initialize_for(self, limits: Limits, row: TerminalRow) -> worker_pb2.InitializeResponse:
        """`row` says what takes time."""
        if self._sizes is not None and self._limits == limits:
            return self._sizes
        self._tell(
            initialize=worker_pb2.InitializeRequest(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
            )
        )
        runner = self._runner
        self._limits, self._sizes = None, None
        if self._profile is None:
            row.draw("warming up: the first steps")
            self._profile = self._profiler.measure(self.bounds, is_alone=self._group is None)
            if self._group is None and may_give_way(runner.config, runner.device):
                self._giving_way = GivingWay()
        if self._touching is not None:
            self._touching.stop()
            self._touching = None
        runner.release_cache()
        graph_bytes = int(self.config.cuda_graph_memory * GIB) if runner.uses_graphs else 0
        buffer_bytes = runner.graph_buffer_bytes(limits.max_num_seqs, limits.max_model_len)
        adapters = runner.adapters
        adapter_bytes = 0 if adapters is None else adapters.most_bytes(limits.max_num_batched_tokens)
        staging_bytes = 0 if self._memory.is_host else CacheEngine.staging_bytes(runner.block_bytes)
        sizes = self._least(
            partial(
                size_cache,
                self.config,
                limits,
                runner.block_bytes,
                self._memory.available_bytes(),
                self._profiler.step_bytes(self._profile, limits)
                + (graph_bytes + buffer_bytes + staging_bytes + adapter_bytes),
                None if self._memory.is_host else available_bytes(),
                1 if self._group is None else self._group.member.local_size,
            )
        )
        runner.allocate_cache(sizes.num_device_blocks, sizes.num_host_blocks)
        runner.allocate_scratch(sizes.limits.max_num_seqs, sizes.limits.max_model_len)
        self._cached_blocks, self._pipeline = CachedBlocks(sizes.num_device_blocks), None
        swap_gib = round(sizes.num_host_blocks * runner.block_bytes / GIB, 3)
        log.info(
            "cache allocated",
            blocks=sizes.num_device_blocks,
            host_blocks=sizes.num_host_blocks,
            swap_space_gib=swap_gib if self.config.swap_space is not None else f"{swap_gib} by default",
        )
        if runner.uses_graphs:
            row.draw("warming up: graphs of steps")
            started_s, limits_of_step = time.monotonic(), sizes.limits
            self._capture(limits_of_step, graph_bytes)
            if self._group is not None:
                self._keep_what_all_captured()
            seconds = round(time.monotonic() - started_s, 2)
            log.info("graphs captured", **self.graph_sizes._asdict(), seconds=seconds)
        row.draw("warming up: copies of cache blocks")
        self._sizes = worker_pb2.InitializeResponse(
            num_device_blocks=sizes.num_device_blocks,
            num_host_blocks=sizes.num_host_blocks,
            prefill_tokens_per_s=self._profile.prefill_tokens_per_s,
            swap_bytes_per_s=self._profiler.swap_bytes_per_s(),
            max_num_seqs=sizes.limits.max_num_seqs,
            max_num_batched_tokens=sizes.limits.max_num_batched_tokens,
            max_model_len=sizes.limits.max_model_len,
            block_bytes=runner.block_bytes,
            settings_id=uuid.uuid4().hex,
        )
        self._limits = limits
        if self._memory.is_host:
            self._touching = TouchAhead(runner.cache.store, self._num_steps)
        return self._sizes

    def _least(self, size: Callable[[], CacheSizes]) -> CacheSizes:
        """The cache that every rank has room for. Raises GroupError on all where one has none."""
        if self._group is None:
            return size()
        own, mine = None, ranks_pb2.RankSizes()
        try:
            own = size()
            mine.num_device_blocks, mine.num_host_blocks = own.num_device_blocks, own.num_host_blocks
            mine.max_model_len = own.limits.max_model_len
        except StartupError as error:
            mine.error = str(error)
        everyones = self._group.exchange(mine)
        for rank, sizes in enumerate(everyones):
            if sizes.error:
                raise GroupError(f"rank {rank}: {sizes.error}")
        assert own is not None, "an error of its own is among all"
        return CacheSizes(
            min(sizes.num_device_blocks for sizes in everyones),
            min(sizes.num_host_blocks for sizes in everyones),
            replace(own.limits, max_model_len=min(sizes.max_model_len for sizes in everyones)),
        )

    def _capture(self, limits: Limits, most_bytes: int) -> None:
        """Decode steps, then others."""
        is_alone, runner = self._group is None, self._runner
        of_all = limits.max_model_len, most_bytes
        runner.capture_graphs(limits.max_num_seqs, *of_all, is_alone=is_alone)
        runner.capture_mixed_graphs(limits.max_num_batched_tokens, *of_all, is_alone=is_alone)

    def _keep_what_all_captured(self) -> None:
        """Keeps the graphs that every rank has: a collective within one waits for the others' replay."""
        assert self._group is not None
        batch_sizes, token_counts = self.graph_sizes
        everyones = self._group.exchange(ranks_pb2.RankGraphs(batch_sizes=batch_sizes, token_counts=token_counts))
        self._runner.keep_graphs(
            set.intersection(*(set(graphs.batch_sizes) for graphs in everyones)),
            set.intersection(*(set(graphs.token_counts) for graphs in everyones)),
        )

    # ---- Leases -----------------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> Future[worker_pb2.LeaseGranted]:
        """Accepts steps of `epoch` from now on, on an empty mirror. Returns what is known of the steps before them. The
        future may hold a StartupError: the sizes that stand now have been replaced before it was begun."""
        self._epoch, sizes = epoch, self._sizes
        return self.thread.call(lambda: self._begin(sizes))

    def end(self) -> Future[None]:
        """Drops steps that have not started; the future is done when those that have started are over."""
        self._epoch = 0
        return self.thread.call(self._settle)

    def answered(self) -> Future[None]:
        """Done when every step submitted so far has been answered."""
        return self.thread.call(self._settle)

    def _settle(self) -> None:
        """The process ends where steps cannot be answered: no scheduler would get a lease again."""
        if self._pipeline is None:
            return
        try:
            self._pipeline.settle()
        except Exception:
            log.exception("steps cannot be answered")
            self._end_process()
            raise

    def _begin(self, sizes: worker_pb2.InitializeResponse | None) -> worker_pb2.LeaseGranted:
        if self._sizes is not sizes:
            raise StartupError("settings have changed meanwhile: Initialize again")
        return self._reset()

    def _reset(self) -> worker_pb2.LeaseGranted:
        assert self._sizes is not None, "a lease before Initialize"
        self._tell(begin_lease=ranks_pb2.BeginLease())
        self._was_leased = True
        self._settle()
        if self._runner.adapters is not None:
            self._runner.adapters.clear()
        self._read = None
        cached_blocks = self._cached_blocks.told(None if self._pipeline is None else self._pipeline.states)
        states = SequenceStates(
            self._sizes.max_num_seqs,
            self._sizes.max_model_len,
            self.config.block_size,
            self._sizes.num_device_blocks,
            self._sizes.num_host_blocks,
            self._runner.config.vocab_size,
        )
        self._pipeline = StepPipeline(
            self._runner,
            states,
            self._sizes.max_num_batched_tokens,
            self._when_here,
            self._memory.give_back,
            self._end_process,
            self._cached_blocks,
            is_device_lost if self._group is None else _is_fatal_to_a_group,
        )
        return worker_pb2.LeaseGranted(cached_blocks=cached_blocks, request_ids=self._requests.all())

    # ---- Adapters ---------------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> AdapterSet | None:
        """What requests may use beside the model; None: this worker takes none."""
        return self._runner.adapters

    def load_adapter(
        self,
        request: worker_pb2.LoadAdapterRequest,
        adapter: Adapter,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> Future[None]:
        """Groups of later steps may use it; steps run on while other ranks read it. The future may hold an
        AdapterError. `is_given_up`: whether nobody waits for it any more, who could unload it."""

        def load() -> None:
            if is_given_up():
                raise AdapterError("whoever asked for it has given up")
            self._load_adapter(request, adapter)

        if self._group is None:
            return self.thread.call(load)
        return self._reader_thread().call(lambda: self._load_on_all_ranks(request, adapter, load))

    def _load_on_all_ranks(
        self, request: worker_pb2.LoadAdapterRequest, adapter: Adapter, load: Callable[[], None]
    ) -> None:
        """On rank 0, one adapter after another: no rank has two that are read and not loaded yet."""
        self.thread.call(lambda: self._begin_reading(request)).result()
        self._read_on_all_ranks(request.path, adapter)
        self.thread.call(load).result()

    def _read_on_all_ranks(self, path: str, adapter: Adapter | None = None) -> Adapter:
        if self._reading is None:
            assert self._runner.adapters is not None and self._group is not None
            self._reading = ReadingOnRanks(self._group, self._runner.adapters, self._new_thread)
        return self._reading.read(path, adapter)

    def _begin_reading(self, request: worker_pb2.LoadAdapterRequest) -> None:
        self.check_epoch(request.epoch)
        self._tell(read_adapter=request)

    def _load_adapter(self, request: worker_pb2.LoadAdapterRequest, adapter: Adapter) -> None:
        assert self._runner.adapters is not None
        self.check_epoch(request.epoch)
        assert self._pipeline is not None, "a lease without a pipeline"
        self._tell(load_adapter=request)
        self._runner.adapters.load(request.name, request.generation, adapter)
        self._pipeline.states.loaded_adapters = self._runner.adapters.names

    def _reader_thread(self) -> ModelThread:
        if self._reader is None:
            self._reader = self._new_thread("adapters")
        return self._reader

    def unload_adapter(self, request: worker_pb2.UnloadAdapterRequest) -> Future[None]:
        """Nobody uses it any more. The future may hold an AdapterError."""
        return self.thread.call(lambda: self._unload_adapter(request))

    def _unload_adapter(self, request: worker_pb2.UnloadAdapterRequest) -> None:
        assert self._runner.adapters is not None
        self.check_epoch(request.epoch)
        assert self._pipeline is not None, "a lease without a pipeline"
        self._tell(unload_adapter=request)
        states = self._pipeline.states
        number = self._runner.adapters.names.get(request.name, -1)
        if number >= 0 and (using := np.flatnonzero(states.adapter_numbers == number)).size:
            raise AdapterError(f"adapter {request.name!r} is used by {using.size} sequences")
        self._pipeline.settle()  # a step on its way may read it
        self._runner.adapters.unload(request.name)
        states.loaded_adapters = self._runner.adapters.names

    def check_epoch(self, epoch: int) -> None:
        """Raises AdapterError for what is not of the lease; on any thread."""
        if self._group is not None and not self._group.is_first:
            return  # rank 0 has looked
        if not self._epoch or epoch != self._epoch:
            raise AdapterError(f"epoch {epoch} is not that of the lease, {self._epoch or 'there is none'}")

    # ---- Steps ------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> tuple[int, int]:
        """Id of the step that runs and its age in ns; (0, 0) when none does."""
        pipeline = self._pipeline
        return (0, 0) if pipeline is None else pipeline.running

    def _num_steps(self) -> int | None:
        """See `TouchAhead`; until the first lease the processor is left to the processes that still start."""
        return None if not self._was_leased or self.running[0] else self._num_submitted

    def submit(self, epoch: int, step: worker_pb2.Step, arrived_ns: int, deliver: Deliver) -> None:
        """Runs a step after those before it; `deliver` gets the answer, on the model thread."""
        self._num_submitted += 1
        self.thread.submit(lambda: self._take(epoch, step, arrived_ns, deliver))

    def _take(self, epoch: int, step: worker_pb2.Step, arrived_ns: int, deliver: Deliver) -> None:
        if epoch != self._epoch:  # of a lease that has ended
            with contextlib.suppress(ProtocolError):
                self._cached_blocks.forget(step)  # whether the step is run or not
            return
        assert self._pipeline is not None, "a step before a lease"
        self._tell(step=step)
        if self._giving_way is not None:
            self._giving_way.adapt()
        self._requests.take(step)
        self._pipeline.take(step, StepTimer(arrived_ns), deliver)

    def _tell(self, **kind: Any) -> None:
        """Has the other ranks begin what this one begins."""
        if self._group is not None and self._group.is_first:
            self._group.tell(ranks_pb2.RankCommand(**kind))

    def follow(self, command: ranks_pb2.RankCommand) -> None:
        """Begins what rank 0 has begun; on the model thread. Nothing is answered: all ranks compute the same answer."""
        match command.WhichOneof("kind"):
            case "initialize":
                asked = command.initialize
                with contextlib.suppress(GroupError):  # of all ranks, and rank 0 answers it
                    limits = Limits(asked.max_num_seqs, asked.max_num_batched_tokens, asked.max_model_len)
                    self._initialize(limits)
            case "begin_lease":
                self._reset()
            case "step":
                assert self._pipeline is not None, "a step before a lease"
                self._num_submitted += 1
                self._pipeline.take(command.step, StepTimer(time.perf_counter_ns()), lambda result: None)
            case "read_adapter":
                self._read = self._reader_thread().call(partial(self._read_on_all_ranks, command.read_adapter.path))
            case "load_adapter":
                read, self._read = self._read, None
                assert read is not None, "an adapter is loaded that was not read"
                with contextlib.suppress(AdapterError):  # likewise
                    self._load_adapter(command.load_adapter, read.result())
            case "unload_adapter":
                with contextlib.suppress(AdapterError):
                    self._unload_adapter(command.unload_adapter)
            case kind:
                raise ProtocolError(f"rank 0 tells of {kind}, which this rank does not know")

    def _when_here(self, launched: Launched, then: Callable[[], None]) -> None:
        """Waits on a thread of its own, so that the model thread can launch what comes next."""
        if self._waiter is None:
            self._waiter = self._new_thread("outputs")

        def wait() -> None:
            with contextlib.suppress(Exception):  # it is raised again where the outputs are read
                launched.wait()
            self.thread.submit(then)

        self._waiter.submit(wait)

    def _new_thread(self, name: str) -> ModelThread:
        thread = ModelThread(name)
        if self.device.type == "cuda":  # it begins on the first GPU, and would take memory of it
            thread.submit(lambda: torch.cuda.set_device(self.device))
        return thread


def _is_fatal_to_a_group(error: Exception) -> bool:
    """What is wrong with a message all ranks find; after anything else they may stand at different places."""
    return not isinstance(error, ProtocolError)


def _end_process() -> None:
    """Nothing can be computed any more: the parent of this process starts another."""
    log.critical("the device is lost, or a rank of the group has failed")
    sys.stderr.flush()
    os._exit(1)
