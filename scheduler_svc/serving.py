"""The scheduler's parts put together: frontend, step loop, output thread and workers, for the service and for `LLM`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from protos import worker_pb2
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.engine_settings import EngineSettings
from scheduler_svc.engine.output_sink import OutputSink
from scheduler_svc.engine.turn_watch import TurnWatch
from scheduler_svc.errors import QueueFull
from scheduler_svc.flight.black_box import BlackBox, default_folder
from scheduler_svc.flight.record_file import header_of, packed
from scheduler_svc.flight.recorder import FlightRecorder, NoRecorder
from scheduler_svc.output.output_processor import Delivery, OutputProcessor
from scheduler_svc.requests.frontend import Frontend
from scheduler_svc.vital_parts import VitalParts
from scheduler_svc.workers.worker_channel import WorkerChannels
from scheduler_svc.workers.worker_pool import WorkerPool
from scheduler_svc.workers.worker_quota import WorkerQuota

SWITCH_INTERVAL_S = 0.0005  # a thread that waits for the interpreter beside a busy one waits this long, not 5 ms
RETRY_AFTER_S = 1.0  # of a flight record, while another one is read


class Outputs(OutputSink, Protocol):
    """An `OutputSink` that begins before the engine does, and ends after it."""

    def start(self) -> None:
        """Before the first `put`."""

    def stop(self) -> None:
        """After the last `put`; what has been put is delivered first."""


class Serving:
    """Everything between a checked request and its tokens.

    `outputs` takes what the step loop hands out; a function in its place gets messages, on a thread that makes them.
    `tracer` is None while tracing is off. Raises OptionError where its packages are missing.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        outputs: Outputs | Callable[[Delivery], None],
        vital: VitalParts | None = None,
    ) -> None:
        self.vital = vital or VitalParts()
        self.tracer = config.new_tracer()
        self.outputs: Outputs = OutputProcessor(outputs, self.vital) if callable(outputs) else outputs
        settings = EngineSettings(
            scheduling_policy=config.scheduling_policy,
            tenant_weights=config.weights(),
            tenants_are_known=config.tenants_are_known,
            # A shard, whose parent has the limits: all requests pass that. It may start while the file is broken.
            tenants=config.tenants(starts_without=config.shards > 1),
            has_tenant_limits=config.shards == 1,
            counts_refusals=config.shards == 1,
            preemption_mode=config.preemption_mode,
            enable_prefix_caching=config.enable_prefix_caching,
            enable_chunked_prefill=config.enable_chunked_prefill,
            step_time_goal=config.step_time_goal,
            scheduler_delay_factor=config.scheduler_delay_factor,
            steps_in_flight=config.steps_in_flight,
            max_waiting_requests=config.max_waiting_requests,
            max_waiting_tokens=config.max_waiting_tokens,
            worker_wait_timeout_s=config.worker_wait_timeout,
            max_worker_losses=config.max_worker_losses,
            adapters=config.adapters(),
        )
        self._is_read = False  # a flight record
        self.black_box = BlackBox(config.flight_recorder_dir or default_folder(), header_of(settings))
        self.engine = Engine(settings, self.outputs, self.vital, recorder=self._recorder(config))
        self.vital.on_failure(self.engine.close)
        self._watch = TurnWatch("step-loop", self.engine.turns, self.vital)
        self.pool = WorkerPool(
            self.engine,
            config.worker,
            self.vital,
            connect=WorkerChannels(
                config.worker_tls_ca_file,
                config.tls_cert_file,
                config.tls_key_file,
                config.worker_tls_name,
                config.worker_token_file,
            ),
            max_workers=config.max_workers,
            bounds=worker_pb2.InitializeRequest(
                max_num_seqs=config.max_num_seqs or 0,
                max_num_batched_tokens=config.max_num_batched_tokens or 0,
                max_model_len=config.max_model_len if isinstance(config.max_model_len, int) else 0,
            ),
            tokenizer_folder=config.tokenizer,
            names=config.model_names(),
            max_models=config.max_models,
            forget_after_s=config.worker_wait_timeout,
            quota=WorkerQuota(config.worker_quota, config.takeover_after),
        )
        self.frontend = Frontend(
            lambda: self.pool.models,
            self.engine.finish_sequence,
            config.text_settings(),
            enable_chunked_prefill=config.enable_chunked_prefill,
        )

    def _recorder(self, config: SchedulerConfig) -> NoRecorder:
        if not config.flight_recorder_steps:
            return NoRecorder()
        num_bytes = config.flight_recorder_memory << 20
        return FlightRecorder(config.flight_recorder_steps, num_bytes, self.black_box.take)

    async def flight_record(self) -> AsyncGenerator[bytes, None]:
        """The bytes of a record of what the recorder has now.

        Raises Unsupported where it is off, NotReady, and QueueFull while another one is read: each holds as much memory
        as the recorder may have.
        """
        if self._is_read:
            raise QueueFull("another flight record is being read", RETRY_AFTER_S)
        self._is_read = True
        try:
            recording = await asyncio.wrap_future(self.engine.recording())
            pieces = packed(recording, header_of(self.engine.settings))
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            self._is_read = False

    def start(self) -> None:
        """Starts the threads and connects to workers, in the order in which they need each other."""
        self.outputs.start()
        self.engine.start()
        self._watch.start()
        self.pool.start()

    def stop(self) -> None:
        """Aborts what is unfinished, lets its last messages out, and gives the workers back."""
        self.black_box.close()
        self.pool.close()
        self.engine.stop()
        self._watch.stop()
        self.outputs.stop()
        if self.tracer is not None:
            self.tracer.close()

    @property
    def is_ready(self) -> bool:
        """Whether a request could be served now: nothing has failed, and some worker takes new ones."""
        if self.vital.failure or not self.pool.models.known:
            return False
        return any(not worker.is_closing for worker in list(self.engine.workers))
