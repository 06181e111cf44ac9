"""Stand-ins with the real protocol and none of the mathematics: a worker whose next token is a function."""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import numpy as np

from octavo.rpc import SERVER_OPTIONS
from protos import SCHEMA_REVISION, worker_pb2, worker_pb2_grpc
from tests.tiny_models import IM_END, write_byte_tokenizer
from worker_svc.sequence_states import SequenceStates

VOCAB_SIZE = 400

NextToken = Callable[[np.ndarray], int]


def hashed_token(history: np.ndarray) -> int:
    """A printable byte that depends on every token so far: one lost or doubled token changes all that follow."""
    state = 17
    for token in history.tolist():
        state = (state * 31 + token + 7) % 1_000_003
    return 33 + state % 90


def spell(text: str) -> NextToken:
    """Says `text` byte by byte over and over, counted from the token `|` (or the start of the prompt), then ends."""
    data = text.encode()

    def next_token(history: np.ndarray) -> int:
        start = np.flatnonzero(history == ord("|"))
        said = len(history) - (int(start[-1]) + 1 if len(start) else 0)
        return data[said] if said < len(data) else IM_END

    return next_token


def say_forever(text: str) -> NextToken:
    """Says `text` over and over, counted from the token `|`, and never ends by itself."""
    data = text.encode()
    return lambda history: data[(len(history) - 1 - int(np.flatnonzero(history == ord("|"))[-1])) % len(data)]


def _no_error(_history: np.ndarray) -> str | None:
    return None


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """A worker service on a free port of loopback, from `with` to the end of its block.

    It keeps the real mirror and answers the real messages. `received` and `answered` are the steps in order with their
    times; `fail_next(n)` lets the n-th next step fail. `row_error` says of which histories no token can be drawn,
    and why.
    """

    def __init__(
        self,
        next_token: NextToken = hashed_token,
        *,
        row_error: Callable[[np.ndarray], str | None] = _no_error,
        delay_s: float = 0.0,
        max_num_seqs: int = 8,
        max_model_len: int = 256,
        max_num_batched_tokens: int = 64,
        num_blocks: int = 64,
        block_size: int = 4,
        model_hash: str = "fake",
        port: int = 0,
    ) -> None:
        self.delay_s = delay_s
        self.received: list[tuple[int, float]] = []
        self.answered: list[tuple[int, float]] = []
        self.num_leases = 0
        self._next_token = next_token
        self._row_error = row_error
        self._num_blocks = num_blocks
        self._failures: set[int] = set()
        self._info = worker_pb2.WorkerInfo(
            instance_id=f"fake-{id(self)}",
            schema_revision=SCHEMA_REVISION,
            model="fake-model",
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
            tokenizer_sha256="byte-level",
        )
        self._server = grpc.server(futures.ThreadPoolExecutor(8), options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> FakeWorker:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Ends every stream at once, as a lost process does."""
        self._server.stop(grace=None).wait()

    def fail_next(self, count: int = 1) -> None:
        """The `count`-th step from now answers FAILED, those after it SKIPPED until the scheduler resumes."""
        self._failures.add(len(self.answered) + count)

    def GetInfo(self, request, context):
        return self._info

    def GetTokenizer(self, request, context):
        with tempfile.TemporaryDirectory() as folder:
            write_byte_tokenizer(folder, VOCAB_SIZE)
            for path in sorted(Path(folder).iterdir()):
                yield worker_pb2.TokenizerChunk(file_name=path.name, data=path.read_bytes(), sha256="byte-level")

    def Initialize(self, request, context):
        if request.max_num_seqs > request.max_num_batched_tokens:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a step must have room for a token of every sequence")
        self._mirror_sizes = (request.max_num_seqs, request.max_model_len, self._info.block_size, self._num_blocks)
        return worker_pb2.InitializeResponse(
            num_device_blocks=self._num_blocks,
            prefill_tokens_per_s=1e6,
            max_num_seqs=request.max_num_seqs,
            max_num_batched_tokens=request.max_num_batched_tokens,
            max_model_len=request.max_model_len,
            settings_id="fake",
        )

    def Execute(self, request_iterator, context):
        self.num_leases += 1
        epoch = self.num_leases
        steps: queue.SimpleQueue[worker_pb2.Step] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(request_iterator, steps), daemon=True).start()
        lease = worker_pb2.LeaseGranted(instance_id=self._info.instance_id, epoch=epoch)
        yield worker_pb2.StepResponse(epoch=epoch, notice=worker_pb2.Notice(lease=lease))
        for result in self._results(steps, SequenceStates(*self._mirror_sizes)):
            if result is None:
                yield worker_pb2.StepResponse(epoch=epoch, heartbeat=worker_pb2.Heartbeat())
            else:
                self.answered.append((result.step_id, time.monotonic()))
                yield worker_pb2.StepResponse(epoch=epoch, result=result)

    def _read(self, request_iterator, steps) -> None:
        try:
            for request in request_iterator:
                if request.WhichOneof("kind") == "step":
                    self.received.append((request.step.step_id, time.monotonic()))
                    steps.put(request.step)
        except grpc.RpcError:
            return  # the stream is over

    def _results(self, steps, mirror: SequenceStates) -> Iterator[worker_pb2.StepResult | None]:
        """Answers in order; None is a heartbeat while there is nothing to do."""
        failed = None
        while True:
            try:
                step = steps.get(timeout=0.2)
            except queue.Empty:
                yield None
                continue
            time.sleep(self.delay_s)
            if failed is not None and step.resume_after != failed:
                yield worker_pb2.StepResult(step_id=step.step_id, status=worker_pb2.STEP_STATUS_SKIPPED)
                continue
            failed = None
            mirror.apply_blocks(step)
            rows = mirror.apply_rows(step)
            if len(self.answered) + 1 in self._failures:
                mirror.roll_back(rows)
                failed = step.step_id
                error = worker_pb2.StepError(message="told to fail", block_operations_applied=True)
                yield worker_pb2.StepResult(step_id=failed, status=worker_pb2.STEP_STATUS_FAILED, error=error)
                continue
            histories = [mirror.token_ids[slot, : mirror.num_tokens[slot]] for slot in rows.sample_slots]
            tokens = np.array([self._next_token(history) for history in histories], "<i4")
            errors = [self._row_error(history) for history in histories]
            mirror.record_samples(rows, tokens)
            mirror.check_integrity()
            yield worker_pb2.StepResult(step_id=step.step_id, outputs=_outputs(step.rows, tokens, errors))


def _outputs(rows: worker_pb2.Rows, tokens: np.ndarray, errors: list[str | None]) -> worker_pb2.SequenceOutputs:
    """`tokens` and `errors` are those of the rows that draw; a row has at most one."""
    drawn = np.array([error is None for error in errors], bool)
    outputs = worker_pb2.SequenceOutputs(token_ids_i32=tokens[drawn].tobytes())
    if not drawn.all():
        chunks = np.frombuffer(rows.num_samples_u16, "<u2")
        num_tokens = np.concatenate([np.ones(rows.num_decode_rows, "<u2"), chunks])
        drawing = np.flatnonzero(num_tokens)
        num_tokens[drawing[~drawn]] = 0
        outputs.num_tokens_u16 = num_tokens.astype("<u2").tobytes()
        for row, error in zip(drawing.tolist(), errors, strict=True):
            if error is not None:
                outputs.row_errors.add(row=row, message=error)
    return outputs
