"""A worker without a model, as a process of its own: `python -m octavo.bench.simulated_worker --port PORT`.

It answers a step from the step's own columns, a letter for every token that it wants, and keeps nothing about any
sequence, so that what a scheduler is measured with costs next to nothing. It never ends a text and knows no logprobs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from octavo.bench.byte_tokenizer import IM_END, byte_tokenizer_files
from octavo.shared.rpc import WORKER_SERVER_OPTIONS
from protos import SCHEMA_REVISION, worker_pb2, worker_pb2_grpc

VOCAB_SIZE = 400
BLOCK_SIZE = 16
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8).astype("<i4")


class SimulatedWorker(worker_pb2_grpc.WorkerServicer):
    """`step_s`: how long a step takes at least, from one answer to the next."""

    def __init__(self, max_num_seqs: int, max_model_len: int, step_s: float = 0.0) -> None:
        self._step_s = step_s
        self._epoch = 0
        self._num_blocks = (max_num_seqs + 1) * -(-max_model_len // BLOCK_SIZE)
        self._info = worker_pb2.WorkerInfo(
            instance_id=f"simulated-{time.monotonic_ns()}",
            schema_revision=SCHEMA_REVISION,
            model="simulated",
            model_hash="simulated",
            architecture="Simulated",
            dtype="none",
            device="none",
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(4096, 4 * max_num_seqs),
            block_size=BLOCK_SIZE,
            eos_token_ids=[IM_END],
            tokenizer_sha256=byte_tokenizer_files(VOCAB_SIZE)[1],
            traces_steps=True,  # so that what a scheduler tells of them is measured; no span is made here
        )

    def GetInfo(self, request: worker_pb2.GetInfoRequest, context: grpc.ServicerContext) -> worker_pb2.WorkerInfo:
        """A model called "simulated" whose tokenizer knows bytes."""
        return self._info

    def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.TokenizerChunk]:
        """The files of a tokenizer of bytes, a chunk each."""
        files, sha256 = byte_tokenizer_files(VOCAB_SIZE)
        for name, data in files.items():
            yield worker_pb2.TokenizerChunk(file_name=name, data=data, sha256=sha256)

    def Initialize(
        self, request: worker_pb2.InitializeRequest, context: grpc.ServicerContext
    ) -> worker_pb2.InitializeResponse:
        """Accepts any bounds."""
        return worker_pb2.InitializeResponse(
            num_device_blocks=self._num_blocks,
            prefill_tokens_per_s=1e6,
            max_num_seqs=request.max_num_seqs or self._info.max_num_seqs,
            max_num_batched_tokens=request.max_num_batched_tokens or self._info.max_num_batched_tokens,
            max_model_len=request.max_model_len or self._info.max_model_len,
            settings_id="simulated",
        )

    def Execute(
        self, request_iterator: Iterator[worker_pb2.StepRequest], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.StepResponse]:
        """Grants the lease at once and answers each step after `step_s`, counted from the answer before."""
        self._epoch += 1
        epoch = self._epoch
        lease = worker_pb2.LeaseGranted(instance_id=self._info.instance_id, epoch=epoch)
        yield worker_pb2.StepResponse(epoch=epoch, notice=worker_pb2.Notice(lease=lease))
        answered_s = time.monotonic()
        for request in request_iterator:
            kind = request.WhichOneof("kind")
            if kind == "keepalive":  # comes every second that brings no step: often enough for a heartbeat, too
                yield worker_pb2.StepResponse(epoch=epoch, heartbeat=worker_pb2.Heartbeat())
            elif kind == "step":
                if self._step_s:
                    time.sleep(max(0.0, answered_s + self._step_s - time.monotonic()))
                    answered_s = time.monotonic()
                yield worker_pb2.StepResponse(epoch=epoch, result=answer(request.step))


def answer(step: worker_pb2.Step) -> worker_pb2.StepResult:
    """The answer to a step: the same letter for all tokens that its rows draw, another one each step."""
    num_tokens = step.rows.num_decode_rows + int(np.frombuffer(step.rows.num_samples_u16, "<u2").sum())
    tokens = np.full(num_tokens, LETTERS[step.step_id % len(LETTERS)], "<i4")
    return worker_pb2.StepResult(
        step_id=step.step_id,
        status=worker_pb2.STEP_STATUS_OK,
        outputs=worker_pb2.SequenceOutputs(token_ids_i32=tokens.tobytes()),
    )


def main() -> int:
    """Serves on loopback until it is killed."""
    parser = argparse.ArgumentParser(description="A worker without a model, for measuring what is around workers.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--step-ms", type=float, default=0.0, help="how long a step takes at least")
    arguments = parser.parse_args()
    worker = SimulatedWorker(arguments.max_num_seqs, arguments.max_model_len, arguments.step_ms / 1e3)
    server = grpc.server(ThreadPoolExecutor(4), options=WORKER_SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    server.add_insecure_port(f"127.0.0.1:{arguments.port}")
    server.start()
    server.wait_for_termination()
    return 0


if __name__ == "__main__":
    sys.exit(main())
