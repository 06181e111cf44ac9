"""The worker service as a process: load, initialise, serve, drain.

The event loop runs in the main thread, the model on a thread of its own. Nothing here imports `transformers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import grpc
import structlog

from octavo.models.fetch import available
from octavo.models.hub_cache import TOKENIZER, served_name
from octavo.shared import log as logging
from octavo.shared.access.exposure import check_exposure
from octavo.shared.access.tls import ServerTls, server_tls
from octavo.shared.connection_shares import ConnectionShares, watch
from octavo.shared.rpc import MAX_WORKER_CONNECTIONS, WORKER_SERVER_OPTIONS, add_introspection, bind
from octavo.shared.signals import on_signal, terminating
from octavo.shared.tracing.options import check_tracing_packages
from octavo.shared.tracing.tracer import new_tracer
from protos import worker_pb2_grpc
from worker_svc.adapters.adapter_set import AdapterSet
from worker_svc.config import WorkerConfig
from worker_svc.errors import GroupError, StartupError
from worker_svc.follower import follow
from worker_svc.host.compute_threads import log_arithmetic, set_threads
from worker_svc.host.graph_backend import CudaGraphBackend
from worker_svc.host.memory import GIB, available_bytes
from worker_svc.host.model_thread import ModelThread
from worker_svc.models import ModelConfig
from worker_svc.models.cache_scales.found_scales import find_scales
from worker_svc.models.checkpoint.gguf_folder import model_folder
from worker_svc.models.decoder import Decoder
from worker_svc.models.latent.latent_config import check_cache_type
from worker_svc.models.loader import load_model, log_source
from worker_svc.models.parts import ModelPart
from worker_svc.parallel.group import ParallelGroup, end_group, meet
from worker_svc.parallel.membership import membership_of
from worker_svc.parallel.started_ranks import StartedRanks, inherited_channel
from worker_svc.service.devices import cache_dtype, choose_device
from worker_svc.service.door import Door
from worker_svc.service.message_guard import MessageGuard
from worker_svc.service.worker_service import WorkerService
from worker_svc.steps.failures import is_out_of_memory
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.stage_answers import StageAnswers
from worker_svc.steps.worker import Worker
from worker_svc.tokenizers.tokenizer_files import TokenizerFiles

log = structlog.get_logger()

SERVICE_NAME = "octavo.v1.Worker"
DRAIN_LIMIT_S = 4.0  # for answers to what was received; then the process ends all the same
ENDING_S = 2.0  # for other ranks, once they were told to end
SWITCH_INTERVAL_S = 0.001  # the model thread yields to the event loop this often where it runs Python code


class Entrance(NamedTuple):
    """Who may call, and what the port shows them; `tls` None: nothing."""

    door: Door
    tls: ServerTls | None

    @classmethod
    def of(cls, config: WorkerConfig) -> Entrance:
        """Raises OptionError and StartupError."""
        # A certificate of its own tells a stranger that this is the worker that it means to take.
        is_locked = config.token_file is not None or config.tls_client_ca_file is not None
        locks = "--token-file and --tls-client-ca-file"
        check_exposure(config.host, is_locked=is_locked, insecure=config.insecure, locks=locks)
        door = Door.of(config.token_file, config.tls_client_name)
        return cls(door, server_tls(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file))


class WorkerServer:
    """A gRPC server around a `WorkerService`."""

    def __init__(
        self, worker: Worker, model_config: ModelConfig, files: TokenizerFiles, entrance: Entrance | None = None
    ) -> None:
        """Create it on the event loop that will serve. Listens to nothing before `start`. Raises BindError, OptionError
        and StartupError.

        `entrance`: what was already made of the worker's options.
        """
        entrance = entrance or Entrance.of(worker.config)
        self._worker = worker
        config = worker.config
        self._tracer = new_tracer("octavo-worker", config.otlp_traces_endpoint)
        self.service = WorkerService(worker, model_config, files, self._tracer)
        self._server = grpc.aio.server(options=WORKER_SERVER_OPTIONS, interceptors=(MessageGuard(entrance.door),))
        watch(self._server, ConnectionShares(MAX_WORKER_CONNECTIONS, self.service.scheduler_peers))
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, self._server)
        self._health = add_introspection(self._server, [SERVICE_NAME])
        self.port = bind(self._server, config.host, config.port, entrance.tls and entrance.tls.credentials())

    async def start(self) -> None:
        """Initialises with the worker's own bounds, and says meanwhile what it serves. Raises StartupError."""
        initialized = self._worker.initialize(self._worker.bounds)  # before those that a scheduler may ask for
        await self._server.start()
        try:
            await asyncio.wrap_future(initialized)
        except StartupError:
            await self._server.stop(grace=None)
            raise
        await self._health.set_ready(True)

    async def stop(
        self, grace_s: float = DRAIN_LIMIT_S, finish_s: float = 0.0, urgent: asyncio.Event | None = None
    ) -> None:
        """Not ready, drained, closed, in this order; a step that takes longer than `grace_s` is abandoned.

        `finish_s`: before that, for requests that no other worker can go on with, until `urgent` is set.
        """
        await self._health.set_ready(False)
        if finish_s:
            await self._finish(finish_s, urgent or asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.service.drain()
        await self._health.shut_down()
        await self._server.stop(grace=0.2)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def _finish(self, seconds: float, urgent: asyncio.Event) -> None:
        tasks = [asyncio.create_task(self.service.finish(seconds)), asyncio.create_task(urgent.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


def main(config: WorkerConfig) -> int:
    """Runs a worker until SIGINT or SIGTERM; the exit code.

    Raises ModelNotFound, ModelError, StartupError, BindError.
    """
    is_rank = config.num_ranks > 1 and "RANK" in os.environ
    logging.configure(config.log_level, **({"rank": os.environ["RANK"]} if is_rank else {}))
    # Before weights are loaded, for minutes; ranks that do not serve listen to nobody.
    entrance = None if is_rank and os.environ["RANK"] != "0" else Entrance.of(config)
    if config.otlp_traces_endpoint:
        check_tracing_packages()
    if config.num_ranks == 1 and os.environ.get("WORLD_SIZE", "1") != "1":
        alone = "this worker computes alone: --tensor-parallel-size or --pipeline-parallel-size says otherwise"
        log.warning(alone, world_size=os.environ["WORLD_SIZE"])
    started_s = time.monotonic()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with _parallel_group(config) as group:
            if group is not None:  # ranks of one machine have its memory together
                config = dataclasses.replace(config, memory_share=config.memory_share / group.member.local_size)
            thread = ModelThread()
            # Loaded before the event loop takes over signals: until then they end the process at once.
            runner, files = thread.run(lambda: load(config, group))
            if group is not None and not group.is_first:
                return follow(Worker(runner, config, thread, group=group), group)
            return asyncio.run(_serve(config, runner, files, thread, started_s, group, entrance))
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise StartupError("too little memory to load the model") from error
        from kernels.cpu.native.build import NoCompilerError  # with what a worker on a GPU does without

        if isinstance(error, NoCompilerError):
            raise StartupError(str(error)) from None
        raise
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


@contextlib.contextmanager
def _parallel_group(config: WorkerConfig) -> Iterator[ParallelGroup | None]:
    """The group of this process, and the other ranks where nobody else starts them; None for a model in one piece. For
    a thread that lives as long as they are to. Raises StartupError."""
    if config.num_ranks == 1:
        yield None
        return
    started, member, ending_s = None, membership_of(config.num_ranks, os.environ), 0.0
    if member is None:
        started = StartedRanks(config, config.num_ranks, end_group)
        member = started.membership
    try:
        channel = started.channel if started else inherited_channel(member.rank)
        device = choose_device(config.device, member.local_rank)
        num_stages = config.pipeline_parallel_size
        # On a thread of its own: Ctrl-C ends a wait for the thread, but none within torch, which may be of minutes.
        meeting = partial(meet, member, device, channel, num_stages=num_stages, is_ordered=config.batch_invariant)
        group = ModelThread("meeting").run(meeting)
        try:
            yield group
            group.tell_end()
            ending_s = ENDING_S
        except Exception as error:
            if not isinstance(error, GroupError):
                group.tell_failure(error)
            raise
        finally:
            group.leave()
    finally:
        if started is not None:
            started.end(ending_s)


def load(config: WorkerConfig, group: ParallelGroup | None = None) -> tuple[ModelRunner, TokenizerFiles]:
    """The model of `config`, its weights loaded, or the part of it that this rank of `group` has. Raises ModelNotFound,
    FetchError, ModelError, StartupError.

    To be called on the thread that will run the model. Every thread that computes with torch gets an OpenMP
    pool of its own, and with two pools libgomp counts more threads than cores and no longer spins at barriers.
    """
    local_rank, local_size = (group.member.local_rank, group.member.local_size) if group else (0, 1)
    device = choose_device(config.device, local_rank)
    set_threads(config, local_size)
    quantization = "" if config.quantization == "none" else config.quantization
    of_cache = cache_dtype(config.kv_cache_dtype, device, quantization)
    asked, started_s = config.max_model_len, time.monotonic()
    path = available(config.model, load_format=config.load_format, download_dir=config.download_dir or None)
    with model_folder(path) as folder:
        model_config = ModelConfig.from_folder(
            folder,
            config.dtype,
            asked if isinstance(asked, int) else None,
            str(device),
            impl=config.model_impl,
            trust_remote_code=config.trust_remote_code,
            quantization=quantization,
            is_batch_invariant=config.batch_invariant,
        )
        model_config = dataclasses.replace(model_config, model_name=served_name(config.model, path))
        check_cache_type(model_config.style, model_config.dtype, of_cache, device)
        if of_cache is not None and of_cache.itemsize == 1:
            scales = find_scales(folder, model_config, config.load_format, config.kv_cache_scales)
            model_config = dataclasses.replace(model_config, cache_scales=scales)
        # Before `check_alike`, where ranks wait for each other: none loads yet, so each sees what all of this machine
        # have together. Those that share layers take equal parts; stages differ, and none knows what another needs.
        free_bytes = available_bytes() // max(local_size // config.pipeline_parallel_size, 1)
        if group is not None:
            group.check_alike(model_config.model_hash, _shared_settings(config, model_config))
        part = _part(model_config, config, group)
        # Both before weights are read, which takes minutes for a large model on a slow disk.
        log_arithmetic(device, model_config.dtype)
        log_source(folder, part, config.load_format)
        source = config.load_format, config.seed, config.trust_remote_code
        model = load_model(folder, part, device, *source, free_bytes)
        files = _tokenizer_files(config, folder)
    seconds, gib = time.monotonic() - started_s, model.weights_bytes / GIB
    log.info("weights loaded", gib=round(gib, 3), seconds=round(seconds, 2), gib_per_s=round(gib / seconds, 2))
    has_graphs = device.type == "cuda" and model.is_capturable and not config.enforce_eager
    backend = CudaGraphBackend if has_graphs and config.cuda_graph_memory > 0 else None
    adapters = None
    if config.enable_lora:
        if not isinstance(model, Decoder):
            raise StartupError(
                f"enable_lora: {model_config.architecture} is computed by transformers, without adapters"
            )
        if model_config.style.latent is not None:
            raise StartupError(f"enable_lora: {model_config.architecture} has latent attention, without adapters")
        bounds = config.max_loras, config.max_lora_rank, config.max_cpu_loras
        adapters = AdapterSet(model, part, *bounds, config.download_dir)
    of_runner = model, part.own, config.block_size, device, of_cache
    answers = StageAnswers(group.answers, is_last=part.is_last) if group and part.stages.count > 1 else None
    return ModelRunner(*of_runner, graph_backend=backend, adapters=adapters, answers=answers), files


def _part(model: ModelConfig, config: WorkerConfig, group: ParallelGroup | None) -> ModelPart:
    """What this process has of the model. Raises ModelError."""
    ranks, stages = (group.ranks, group.stages) if group else (None, None)
    return ModelPart.of(model, ranks, stages, is_expert_parallel=config.enable_expert_parallel)


def _shared_settings(config: WorkerConfig, model: ModelConfig) -> dict[str, str]:
    """Whatever a step of all ranks depends on, by name."""
    of_worker = """
        max_num_seqs max_num_batched_tokens block_size kv_cache_dtype enforce_eager cuda_graph_memory
        tensor_parallel_size pipeline_parallel_size enable_expert_parallel
        enable_lora max_loras max_lora_rank max_cpu_loras
    """
    of_model = {f"model's {field.name}": getattr(model, field.name) for field in dataclasses.fields(model)}
    of_options = {name: getattr(config, name) for name in of_worker.split()}
    return {name: str(value) for name, value in {**of_options, **of_model}.items()}


def _tokenizer_files(config: WorkerConfig, folder: Path) -> TokenizerFiles:
    mode, trusted = config.tokenizer_mode, config.trust_remote_code
    if not config.tokenizer:
        return TokenizerFiles.from_folder(folder, mode, trusted)
    path = available(config.tokenizer, load_format=TOKENIZER, download_dir=config.download_dir or None)
    with model_folder(path) as other:
        return TokenizerFiles.from_folder(folder, mode, trusted, other)


async def _serve(
    config: WorkerConfig,
    runner: ModelRunner,
    files: TokenizerFiles,
    thread: ModelThread,
    started_s: float,
    group: ParallelGroup | None,
    entrance: Entrance | None,
) -> int:
    stopped, urgent = asyncio.Event(), asyncio.Event()

    def stop(number: int) -> None:
        if number == signal.SIGINT or (stopped.is_set() and number != signal.SIGHUP):
            urgent.set()  # somebody waits at a terminal, or insists; the end of a terminal may be told twice
        stopped.set()

    for number in (signal.SIGINT, *terminating()):
        on_signal(number, stop, number)
    worker = Worker(runner, config, thread, group=group)
    server = WorkerServer(worker, runner.config, files, entrance)
    if not await _unless(stopped, server.start()):
        log.info("worker stopped before it was ready")
        _leave()
    if group is not None:
        group.ready()
    gc.freeze()  # the model is for life: no collection has to look at it again
    gc.enable()
    seconds = round(time.monotonic() - started_s, 2)
    log.info("worker ready", address=f"{config.host}:{server.port}", model=runner.config.model_name, seconds=seconds)
    await stopped.wait()
    log.info("worker draining")
    await server.stop(finish_s=0.0 if urgent.is_set() else config.finish_timeout, urgent=urgent)
    if not worker.thread.stop(timeout_s=0.5):
        log.warning("worker leaves a step behind that did not end in time")
        _leave()
    log.info("worker stopped")
    return 0


async def _unless(stopped: asyncio.Event, starting: Coroutine[Any, Any, None]) -> bool:
    """Whether `starting` came to its end, or raised, before `stopped`: kernels may be compiled in it, for minutes."""
    start, stop = asyncio.create_task(starting), asyncio.create_task(stopped.wait())
    await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not start.done():
        return False
    await start
    return True


def _leave() -> NoReturn:
    """Ends the process under a thread inside the model, which cannot be ended otherwise."""
    sys.stderr.flush()
    os._exit(0)
