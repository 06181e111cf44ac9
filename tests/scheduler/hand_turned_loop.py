"""An engine whose step loop a test turns by hand, and workers that answer what the test says."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from protos import inference_pb2 as pb
from protos import worker_pb2
from scheduler_svc.core.sequences.beam_search import BeamHypothesis
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step_plan import NewTokens
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.engine_settings import EngineSettings
from scheduler_svc.leases.worker_handle import AdapterRequest


class FakeLink:
    """A worker that takes every step and answers what a test says."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.last_heard_ns = time.monotonic_ns()
        self.steps: list[worker_pb2.Step] = []
        self.is_closed = self.is_distrusted = False
        self.calls: list[tuple[AdapterRequest, Callable[[str], None]]] = []

    def call(self, request: AdapterRequest, done: Callable[[str], None]) -> None:
        self.calls.append((request, done))

    def send(self, data: bytes) -> None:
        self.steps.append(worker_pb2.StepRequest.FromString(data).step)

    def distrust(self) -> None:
        self.is_distrusted = True

    def close(self) -> None:
        self.is_closed = True


class Loop:
    """An engine without its thread, and the sink of its outputs."""

    num_stages = 1  # of workers that join

    def __init__(self, *, clock: Callable[[], int] = time.monotonic_ns, **settings: Any) -> None:
        self.engine = Engine(EngineSettings(**settings), self, clock=clock)
        self._clock = clock
        self.token_ids: dict[str, list[int]] = {}
        self.prompt_token_ids: dict[str, list[int]] = {}  # whose logprobs have come
        self.ends: dict[str, tuple[FinishReason, str]] = {}

    def put_prompt_logprobs(self, group: SequenceGroup, logprobs: worker_pb2.SequenceOutputs) -> None:
        self.prompt_token_ids.setdefault(group.request_id, []).extend(np.frombuffer(logprobs.token_ids_i32, "<i4"))

    def put_tokens(self, tokens: NewTokens, outputs: worker_pb2.SequenceOutputs) -> None:
        for sequence, token_id in zip(tokens.sequences, tokens.token_ids.tolist(), strict=True):
            self.token_ids.setdefault(sequence.group.request_id, []).append(token_id)

    def put_beams(self, group: SequenceGroup, hypotheses: list[BeamHypothesis]) -> None:
        raise AssertionError("nobody asks for beams here")

    def put_end(self, group: SequenceGroup, reason: FinishReason, message: str, is_invalid: bool) -> None:
        assert group.request_id not in self.ends
        self.ends[group.request_id] = reason, message

    def join(
        self, name: str = "worker", epoch: int = 1, max_num_seqs: int = 4, max_loras: int = 0, model: str = ""
    ) -> FakeLink:
        link = FakeLink(name)
        info = worker_pb2.WorkerInfo(vocab_size=1000, block_size=4, max_loras=max_loras)
        info.parallel.pipeline_parallel_size = self.num_stages
        sizes = worker_pb2.InitializeResponse(
            num_device_blocks=32,
            num_host_blocks=8,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            max_model_len=128,
        )
        self.engine.worker_joined(link, info, sizes, worker_pb2.LeaseGranted(epoch=epoch), model)
        return link

    def group(self, request_id: str, num_tokens: int = 3, **options: Any) -> SequenceGroup:
        params = pb.SamplingParams()
        return SequenceGroup(
            request_id, [1] * num_tokens, params, max_num_tokens=num_tokens + 9, arrival_ns=0, **options
        )

    def submit(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.engine.submit(self.group(request_id))

    def drain(self, address: str) -> Future[int]:
        def drain() -> int:
            (worker,) = self.engine.workers_at(address)
            return self.engine.drain_worker(worker)

        return self.engine.call(drain)

    def turn(self) -> None:
        self.engine.call(lambda: None)  # something to find, or it waits
        self.engine.take_events()
        self.engine.send_steps()

    def answer(self, link: FakeLink, **changes: Any) -> None:
        """Answers the oldest step in flight, every draw a 7; `changes` are fields of the StepResponse."""
        (worker,) = (worker for worker in self.engine.workers if worker.link is link)
        sent = worker.in_flight[0]
        token_ids = np.full(int(sent.rows.num_answers.sum()), 7, "<i4").tobytes()
        result = worker_pb2.StepResult(
            step_id=sent.step_id, outputs=worker_pb2.SequenceOutputs(token_ids_i32=token_ids)
        )
        fields = {"epoch": worker.epoch, "result": result, **changes}
        self.engine.worker_said(link, worker_pb2.StepResponse(**fields).SerializeToString())

    def run_to_end(self, link: FakeLink) -> None:
        while self.engine.live_groups():
            self.turn()
            link.last_heard_ns = self._clock()  # however long a slow machine takes for many steps
            self.answer(link)
            self.turn()
