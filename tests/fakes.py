"""Stand-ins that speak the real protocol and compute nothing: a worker whose next token is a function."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np

from octavo.bench.byte_tokenizer import byte_tokenizer_files
from octavo.shared.ports import free_port
from octavo.shared.rpc import WORKER_SERVER_OPTIONS
from protos import SCHEMA_REVISION, worker_pb2, worker_pb2_grpc
from tests.scheduler.fake_language import content_of, logprobs_after
from tests.scheduler.simulated_worker import SimulatedWorker
from tests.tiny_models import IM_END
from worker_svc.errors import ProtocolError

VOCAB_SIZE = 400
BLOCK_BYTES = 1 << 16  # as if a block were that large

NextToken = Callable[[np.ndarray, int], int]  # (history, index of the sequence in its group)


def hashed_token(history: np.ndarray, index: int = 0) -> int:
    """A printable byte that depends on every token so far: one lost or doubled token changes all that follow."""
    state = 17 + index
    for token in history.tolist():
        state = (state * 31 + token + 7) % 1_000_003
    return 33 + state % 90


def spell(text: str) -> NextToken:
    """Says `text` byte by byte over and over, counted from the token `|` (or the start of the prompt), then ends."""
    data = text.encode()

    def next_token(history: np.ndarray, index: int = 0) -> int:
        start = np.flatnonzero(history == ord("|"))
        said = len(history) - (int(start[-1]) + 1 if len(start) else 0)
        return data[said] if said < len(data) else IM_END

    return next_token


def say_forever(text: str) -> NextToken:
    """Says `text` over and over, counted from the token `|`, and never ends by itself."""
    data = text.encode()
    return lambda history, index: data[(len(history) - 1 - int(np.flatnonzero(history == ord("|"))[-1])) % len(data)]


CANDIDATES = np.array([*range(33, 127), IM_END])
"""The tokens that `beam_logprobs` holds possible: printable bytes and the end."""


def beam_logprobs(history: np.ndarray) -> np.ndarray:
    """Log probabilities of all tokens after a history, f32[VOCAB_SIZE], for searches with beams."""
    logprobs = np.full(VOCAB_SIZE, -1e4, np.float32)
    logprobs[CANDIDATES] = logprobs_after(content_of(history.tolist()), len(CANDIDATES))
    return logprobs


class _Spoken:
    """A model given by its next token alone."""

    def __init__(self, next_token: NextToken) -> None:
        self._next_token = next_token

    def next_token(self, history: np.ndarray, content: int, index: int) -> int:
        return self._next_token(history, index)

    def logprobs(self, history: np.ndarray, content: int) -> np.ndarray:
        return beam_logprobs(history)


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """A worker service on a free port of loopback, from `with` to the end of its block; the system hands that port
    to nobody.

    It answers the real messages. Behind them is a `SimulatedWorker`: a cache that does not hold what the scheduler
    takes it to hold ends the stream, and raises at the end of the `with` block. `received` and `answered` are the steps
    in order with their times; `fail_next(n)` lets the n-th next step fail. `row_error` says of which histories no token
    can be drawn, and why; a step of more tokens than `out_of_memory_above` runs out of memory. `adapters` are those
    loaded since the stream was opened, with their generations; there is nothing to load at the paths in `broken_paths`.
    """

    def __init__(
        self,
        next_token: NextToken = hashed_token,
        *,
        row_error: Callable[[np.ndarray], str | None] | None = None,
        delay_s: float = 0.0,
        out_of_memory_above: int | None = None,
        max_num_seqs: int = 8,
        max_model_len: int = 256,
        max_num_batched_tokens: int = 64,
        num_blocks: int = 64,
        num_host_blocks: int = 0,
        prefill_tokens_per_s: float = 1e6,
        swap_bytes_per_s: float = 1e9,
        max_loras: int = 0,
        block_size: int = 4,
        model: str = "fake-model",
        model_hash: str = "fake",
        tokenizer_seed: int = 0,
        port: int = 0,
    ) -> None:
        self.delay_s = delay_s
        self.received: list[tuple[int, float]] = []
        self.answered: list[tuple[int, float]] = []
        self.num_leases = 0
        self._tokenizer_seed = tokenizer_seed
        self.adapters: dict[str, int] = {}
        self.broken_paths: set[str] = set()
        self._language = _Spoken(next_token)
        self._row_error = row_error
        self._num_blocks, self._num_host_blocks = num_blocks, num_host_blocks
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._swap_bytes_per_s = swap_bytes_per_s if num_host_blocks else 0.0
        self._out_of_memory_above = out_of_memory_above
        self._failures: set[int] = set()
        self._inbox: queue.SimpleQueue[worker_pb2.Step | worker_pb2.Notice] = queue.SimpleQueue()
        self._worker: SimulatedWorker | None = None  # of the lease that is held
        self._broken: AssertionError | None = None
        self._info = worker_pb2.WorkerInfo(
            instance_id=f"fake-{id(self)}",
            schema_revision=SCHEMA_REVISION,
            model=model,
            model_hash=model_hash,
            architecture="Fake",
            dtype="float32",
            device="none",
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            eos_token_ids=[IM_END],
            max_logprobs=20,
            max_loras=max_loras,
            tokenizer_sha256=byte_tokenizer_files(VOCAB_SIZE, tokenizer_seed)[1],
        )
        self._server = grpc.server(futures.ThreadPoolExecutor(8), options=WORKER_SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port or free_port()}")
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> FakeWorker:
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.kill()
        if self._broken is not None and kind is None:
            raise self._broken

    def kill(self) -> None:
        """Ends every stream at once, as a lost process does."""
        self._server.stop(grace=None).wait()

    @property
    def num_tokens_computed(self) -> int:
        """Of prompts and of draws, since the stream was opened."""
        return self._worker.num_tokens_computed if self._worker is not None else 0

    def fail_next(self, count: int = 1) -> None:
        """The `count`-th step from now answers FAILED, those after it SKIPPED until the scheduler resumes."""
        self._failures.add(len(self.answered) + count)

    def GetInfo(self, request, context):
        return self._info

    def GetTokenizer(self, request, context):
        files, sha256 = byte_tokenizer_files(VOCAB_SIZE, self._tokenizer_seed)
        for name, data in files.items():
            yield worker_pb2.TokenizerChunk(file_name=name, data=data, sha256=sha256)

    def Initialize(self, request, context):
        if request.max_num_seqs > request.max_num_batched_tokens:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a step must have room for a token of every sequence")
        self._sizes = (request.max_num_seqs, request.max_model_len, self._info.block_size, self._num_blocks)
        return worker_pb2.InitializeResponse(
            num_device_blocks=self._num_blocks,
            num_host_blocks=self._num_host_blocks,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            swap_bytes_per_s=self._swap_bytes_per_s,
            max_num_seqs=request.max_num_seqs,
            max_num_batched_tokens=request.max_num_batched_tokens,
            max_model_len=request.max_model_len,
            block_bytes=BLOCK_BYTES,
            settings_id="fake",
        )

    def LoadAdapter(self, request, context):
        worker = self._leased(request.epoch, context)
        if request.path in self.broken_paths:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no adapter at {request.path}")
        worker.load_adapter(request.name, request.generation)
        self.adapters[request.name] = request.generation
        loaded = worker_pb2.AdapterState(name=request.name, generation=request.generation)
        self._inbox.put(worker_pb2.Notice(adapter_loaded=loaded))
        return worker_pb2.LoadAdapterResponse()

    def UnloadAdapter(self, request, context):
        worker = self._leased(request.epoch, context)
        if request.name not in self.adapters:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no adapter {request.name!r} among {sorted(self.adapters)}")
        del self.adapters[request.name]
        worker.unload_adapter(request.name)
        return worker_pb2.UnloadAdapterResponse()

    def _leased(self, epoch, context) -> SimulatedWorker:
        if self._worker is None or epoch != self.num_leases:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"epoch {epoch} does not hold the lease")
        assert self._worker is not None, "abort has raised"
        return self._worker

    def Execute(self, request_iterator, context):
        self.num_leases += 1
        epoch = self.num_leases
        self._inbox = queue.SimpleQueue()
        self.adapters = {}
        self._worker = SimulatedWorker(
            *self._sizes,
            self._num_host_blocks,
            language=self._language,
            max_loras=self._info.max_loras,
            row_error=self._row_error,
        )
        threading.Thread(target=self._read, args=(request_iterator, self._inbox), daemon=True).start()
        lease = worker_pb2.LeaseGranted(instance_id=self._info.instance_id, epoch=epoch)
        yield worker_pb2.StepResponse(epoch=epoch, notice=worker_pb2.Notice(lease=lease))
        for kind in self._answers(self._inbox, self._worker):
            yield worker_pb2.StepResponse(epoch=epoch, **kind)

    def _read(self, request_iterator, inbox) -> None:
        try:
            for request in request_iterator:
                if request.WhichOneof("kind") == "step":
                    self.received.append((request.step.step_id, time.monotonic()))
                    inbox.put(request.step)
        except grpc.RpcError:
            return  # the stream is over

    def _answers(self, inbox, worker: SimulatedWorker) -> Iterator[dict[str, Any]]:
        """Results in order, notices as they come, heartbeats while there is nothing to do."""
        while True:
            try:
                message = inbox.get(timeout=0.2)
            except queue.Empty:
                yield {"heartbeat": worker_pb2.Heartbeat()}
                continue
            if isinstance(message, worker_pb2.Notice):
                yield {"notice": message}
                continue
            time.sleep(self.delay_s)
            is_too_large = self._out_of_memory_above is not None and _num_tokens(message) > self._out_of_memory_above
            fails = "after" if is_too_large or len(self.answered) + 1 in self._failures else None
            try:
                result = worker.run(message, fails)
                worker.check_integrity()
            except (AssertionError, ProtocolError) as error:
                self._broken = self._broken or AssertionError(f"step {message.step_id}: {error}")
                raise
            if is_too_large and result.status == worker_pb2.STEP_STATUS_FAILED:
                result.error.code = worker_pb2.STEP_ERROR_CODE_OUT_OF_MEMORY
            self.answered.append((result.step_id, time.monotonic()))
            yield {"result": result}


def _num_tokens(step: worker_pb2.Step) -> int:
    return step.rows.num_decode_rows + int(np.frombuffer(step.rows.query_lens_u32, "<u4").sum())
