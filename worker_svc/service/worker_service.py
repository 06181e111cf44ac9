"""The servicer of `octavo.v1.Worker`: it checks, hands over to `Worker` or `StepSession`, and encodes.

Runs on the event loop; never touches the model.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial

import grpc
import structlog

from octavo.shared.tracing.tracer import Tracer
from protos import SCHEMA_REVISION, worker_pb2, worker_pb2_grpc
from worker_svc.adapters.errors import AdapterError
from worker_svc.cache.cache_sizing import Limits
from worker_svc.config import AUTO
from worker_svc.errors import StartupError
from worker_svc.host.compute_threads import bfloat16_instructions
from worker_svc.models import ModelConfig
from worker_svc.service.adapter_reads import AdapterReads
from worker_svc.service.call_limit import CallLimit, refuse
from worker_svc.service.lease import Lease, LeaseDesk, LeaseHeld
from worker_svc.service.step_session import LeaseExpired, StepSession
from worker_svc.steps.worker import Worker
from worker_svc.tokenizers.tokenizer_files import TokenizerFiles

log = structlog.get_logger()

OPEN_TIMEOUT_S = 5.0  # until the first message of a stream
MAX_STREAMS = 16  # of `Execute`; one of them can hold the lease
MAX_INITIALIZING = 16  # schedulers that wait for the model thread
MAX_TOKENIZER_CALLS = 8
MIN_LOADING = 64  # adapters, of which a few are read at a time
_NO_ADAPTERS = "this worker takes no adapters: start it with --enable-lora"
UNUSED_S = 2.0  # after which an ending worker assumes that no scheduler has requests to finish here
TOKENIZER_TIMEOUT_S = 60.0  # as long as a scheduler waits for the files


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """The servicer. `model_config` and `files` describe what `worker` serves. `tracer`: None while tracing is off."""

    def __init__(
        self, worker: Worker, model_config: ModelConfig, files: TokenizerFiles, tracer: Tracer | None = None
    ) -> None:
        self.instance_id = uuid.uuid4().hex
        self._worker = worker
        self._model_config = model_config
        self._files = files
        self._tracer = tracer
        self._leases = LeaseDesk()
        self._session: StepSession | None = None
        self._is_draining = False
        self._settling: set[asyncio.Task[None]] = set()
        self._streams = CallLimit("open streams", MAX_STREAMS)
        self._initializing = CallLimit("calls of Initialize that wait", MAX_INITIALIZING)
        # A worker that joins is asked at once for all that are loaded, and nobody would ask again for one refused here.
        most_loading = max(MIN_LOADING, 2 * worker.config.max_cpu_loras)
        self._loading, self._reads = CallLimit("adapters that are read", most_loading), AdapterReads(most_loading)
        self._tokenizer_calls = CallLimit("calls of GetTokenizer", MAX_TOKENIZER_CALLS)

    # ---- Handshake --------------------------------------------------------------------------------------------------

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerInfo:
        """What this worker serves and its upper bounds; answers with or without a lease."""
        config, bounds = self._model_config, self._worker.bounds
        return worker_pb2.WorkerInfo(
            instance_id=self.instance_id,
            schema_revision=SCHEMA_REVISION,
            model=config.model_name,
            model_hash=config.model_hash,
            architecture=config.architecture,
            dtype=str(config.dtype).removeprefix("torch."),
            device=str(self._worker.device),
            vocab_size=config.vocab_size,
            max_model_len=bounds.max_model_len,
            max_num_seqs=bounds.max_num_seqs,
            max_num_batched_tokens=bounds.max_num_batched_tokens,
            block_size=self._worker.config.block_size,
            parallel=worker_pb2.ParallelLayout(
                tensor_parallel_size=self._worker.config.tensor_parallel_size,
                pipeline_parallel_size=self._worker.config.pipeline_parallel_size,
            ),
            lifecycle=self._lifecycle(),
            tokenizer_sha256=self._files.sha256,
            eos_token_ids=config.eos_token_ids,
            max_logprobs=config.vocab_size,
            max_loras=0 if self._worker.adapters is None else self._worker.adapters.max_loras,
            adapters=self._adapters(),
            kv_cache_dtype=self._cache_dtype(),
            quantization=config.quantization or (config.weights_format.name if config.weights_format else ""),
            traces_steps=self._tracer is not None,
            instructions=bfloat16_instructions(self._worker.device, config.dtype),
        )

    def _adapters(self) -> list[worker_pb2.AdapterState]:
        generations = {} if self._worker.adapters is None else self._worker.adapters.generations
        return [worker_pb2.AdapterState(name=name, generation=number) for name, number in generations.items()]

    def _cache_dtype(self) -> str:
        asked, scales = self._worker.config.kv_cache_dtype, self._model_config.cache_scales
        if scales is not None and scales.digest:
            return f"{asked}:{scales.digest}"  # other scales give other tokens
        return str(self._worker.cache_dtype).removeprefix("torch.") if asked == AUTO else asked

    def _lifecycle(self) -> worker_pb2.WorkerLifecycle:
        if self._is_draining:
            return worker_pb2.WORKER_LIFECYCLE_DRAINING
        if self._leases.is_held:
            return worker_pb2.WORKER_LIFECYCLE_LEASED
        if self._worker.sizes is None:
            return worker_pb2.WORKER_LIFECYCLE_LOADED
        return worker_pb2.WORKER_LIFECYCLE_INITIALIZED

    async def GetTokenizer(self, request: worker_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext) -> None:
        """The tokenizer's files in chunks; DEADLINE_EXCEEDED where the disk takes too long."""
        async with self._tokenizer_calls.admit(context):
            try:
                async with asyncio.timeout(TOKENIZER_TIMEOUT_S):
                    for chunk in self._files.chunks():
                        await context.write(chunk)
            except TimeoutError:
                why = f"the files were not read within {TOKENIZER_TIMEOUT_S:g} s"
                await refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, why)

    async def Initialize(
        self, request: worker_pb2.InitializeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.InitializeResponse:
        """Makes cache and buffers of these bounds, once; FAILED_PRECONDITION for others under a lease."""
        try:
            limits = limits_of(request, self._worker.bounds)
        except ValueError as error:
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if self._leases.is_held and not self._worker.is_initialized_for(limits):
            await refuse(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                "other settings are refused while a scheduler holds the lease",
            )
        async with self._initializing.admit(context):
            try:
                return await asyncio.wrap_future(self._worker.initialize(limits))
            except StartupError as error:
                await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.LoadAdapterResponse:
        """Reads an adapter, on all ranks, while steps run on, and returns when groups may use it. FAILED_PRECONDITION
        where it cannot be loaded, with a line that says why; UNIMPLEMENTED without --enable-lora."""
        adapters = self._worker.adapters
        if adapters is None:
            await refuse(context, grpc.StatusCode.UNIMPLEMENTED, _NO_ADAPTERS)
        is_given_up = threading.Event()
        async with self._loading.admit(context):
            try:
                self._worker.check_epoch(request.epoch)
                adapter = await self._reads.read(partial(adapters.read, request.path))
                await asyncio.wrap_future(self._worker.load_adapter(request, adapter, is_given_up.is_set))
            except asyncio.CancelledError:
                is_given_up.set()
                raise
            except AdapterError as error:
                await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        log.info("adapter loaded", adapter=request.name, path=request.path, generation=request.generation)
        if self._session is not None:
            self._session.tell_adapter(request.epoch, request.name, request.generation)
        return worker_pb2.LoadAdapterResponse()

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.UnloadAdapterResponse:
        """FAILED_PRECONDITION for one that is in use, or not here."""
        if self._worker.adapters is None:
            await refuse(context, grpc.StatusCode.UNIMPLEMENTED, _NO_ADAPTERS)
        try:
            await asyncio.wrap_future(self._worker.unload_adapter(request))
        except AdapterError as error:
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        log.info("adapter unloaded", adapter=request.name)
        return worker_pb2.UnloadAdapterResponse()

    # ---- Steps ------------------------------------------------------------------------------------------------------

    def scheduler_peers(self) -> list[str]:
        """The scheduler that holds the lease, if there is one."""
        return [self._session.peer] if self._session is not None else []

    async def Execute(self, requests: AsyncIterator[worker_pb2.StepRequest], context: grpc.aio.ServicerContext) -> None:
        """One scheduler's lease: steps in, answers out, until either side ends it."""
        async with self._streams.admit(context):
            await self._execute(context)

    async def _execute(self, context: grpc.aio.ServicerContext) -> None:
        lease = await self._open(await self._first_message(context), context)
        session = StepSession(context, self._worker, lease, self.instance_id, self._tracer)
        self._session = session
        log.info("lease taken", epoch=lease.epoch, scheduler=context.peer())
        try:
            await session.run()
        except LeaseExpired as error:
            log.warning("lease expired", epoch=lease.epoch)
            await refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        except StartupError as error:
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        finally:
            self._session = None
            self._leases.end(lease)
            task = asyncio.create_task(self._settle(lease))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def _first_message(self, context: grpc.aio.ServicerContext) -> worker_pb2.StepRequest | None:
        """None for a stream that ends without one."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                first = await context.read()
        except TimeoutError:
            why = f"no `open` came within {OPEN_TIMEOUT_S:g} s"
            await refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, why)
        return None if first is grpc.aio.EOF else first

    async def _open(self, request: worker_pb2.StepRequest | None, context: grpc.aio.ServicerContext) -> Lease:
        refused = grpc.StatusCode.FAILED_PRECONDITION
        sizes = self._worker.sizes
        if request is None or not request.HasField("open"):
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "the first message of a stream has to be `open`")
        if self._is_draining:
            await refuse(context, grpc.StatusCode.UNAVAILABLE, "this worker is draining")
        if sizes is None:
            await refuse(context, refused, "Initialize has to come before Execute")
        if request.open.settings_id != sizes.settings_id:
            await refuse(
                context,
                refused,
                f"settings_id {request.open.settings_id!r} is not {sizes.settings_id!r}: Initialize again",
            )
        try:
            return self._leases.take(time.monotonic())
        except LeaseHeld as error:
            if request.open.is_wanted and self._session is not None:
                self._session.tell_wanted()
            await refuse(context, refused, str(error))

    async def _settle(self, lease: Lease) -> None:
        """The next lease has to wait for the step that still runs."""
        await asyncio.wrap_future(self._worker.end())
        self._leases.settled(lease)
        log.info("lease ended", epoch=lease.epoch)

    async def finish(self, seconds: float) -> None:
        """Refuses new leases, and takes steps of the one there is until its scheduler has given it back, or sends none
        any more, or for so long."""
        self._is_draining = True
        until_s = time.monotonic() + seconds
        if self._session is not None:
            self._session.finish(seconds)
        while (session := self._session) is not None and time.monotonic() < until_s and session.unused_s < UNUSED_S:
            await asyncio.sleep(0.02)

    async def drain(self) -> None:
        """Refuses new leases, answers what was received, and returns when nothing runs any more."""
        self._is_draining = True
        if self._session is not None:
            self._session.drain()
        await asyncio.wrap_future(self._worker.answered())
        while self._leases.is_held:
            await asyncio.sleep(0.01)


def limits_of(request: worker_pb2.InitializeRequest, bounds: Limits) -> Limits:
    """The limits that a scheduler wants, within the worker's bounds; 0 means the bound. Raises ValueError."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        if getattr(request, name) > getattr(bounds, name):
            raise ValueError(f"{name} is {getattr(request, name)}, at most {getattr(bounds, name)} is accepted")
    limits = Limits(
        request.max_num_seqs or bounds.max_num_seqs,
        request.max_num_batched_tokens or bounds.max_num_batched_tokens,
        request.max_model_len or bounds.max_model_len,
    )
    if limits.max_num_seqs > limits.max_num_batched_tokens:
        raise ValueError(
            f"max_num_seqs is {limits.max_num_seqs}, more than max_num_batched_tokens, {limits.max_num_batched_tokens}"
        )
    return limits
