"""A worker without a scheduler and without gRPC: it is handed steps as a scheduler would send them, two at a time."""

from __future__ import annotations

import random
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from protos import worker_pb2
from worker_svc.config import WorkerConfig
from worker_svc.host.model_thread import ModelThread
from worker_svc.server import load
from worker_svc.steps.graph_captures import GraphSizes
from worker_svc.steps.worker import Worker

STEPS_IN_FLIGHT = 2
_EPOCH = 1
_TIMEOUT_S = 60.0


class BareWorker:
    """Sequences that decode, each with a context that was never computed: its cache blocks hold old memory."""

    def __init__(
        self, folder: Path, *, device: str, max_num_seqs: int, max_num_batched_tokens: int, **options: Any
    ) -> None:
        """Loads made-up weights; `options` are further ones of a worker. Raises what loading and a first step raise."""
        config = WorkerConfig(
            model=str(folder),
            load_format="dummy",
            device=device,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            log_level="warning",
            **options,
        )
        thread = ModelThread()
        runner, _ = thread.call(lambda: load(config)).result()
        self._worker = Worker(runner, config, thread)
        self.sizes = self._worker.initialize(self._worker.bounds).result()
        self._block_size = config.block_size
        self._worker.begin(_EPOCH).result()
        self._step_id = 0
        self._num_seqs = self._next_slot = 0
        self._free_blocks: list[int] = []  # which no sequence has
        self._failure = ""
        self._answered_ns: list[int] = []
        self._places = threading.Semaphore(STEPS_IN_FLIGHT)

    @property
    def graph_sizes(self) -> GraphSizes:
        """Of the steps that were captured."""
        return self._worker.graph_sizes

    def start(self, num_seqs: int, context: int, num_steps: int) -> None:
        """Sequences of `context` tokens that find cache blocks for `num_steps` more, scattered; greedy.

        Raises ValueError where the cache does not hold them.
        """
        blocks_of_one = -(-(context + num_steps + 1) // self._block_size)
        if num_seqs * blocks_of_one > self.sizes.num_device_blocks:
            raise ValueError(
                f"{num_seqs} sequences of {context} tokens do not fit in {self.sizes.num_device_blocks} blocks"
            )
        blocks = random.Random(0).sample(range(self.sizes.num_device_blocks), self.sizes.num_device_blocks)
        self._free_blocks = blocks[num_seqs * blocks_of_one :]
        step = worker_pb2.Step(rows=worker_pb2.Rows(slots_u16=_column(range(num_seqs), "<u2")))
        step.rows.query_lens_u32 = _column([1] * num_seqs, "<u4")
        step.rows.num_samples_u16 = _column([1] * num_seqs, "<u2")
        for slot in range(num_seqs):
            group = step.groups.add(request_id=str(slot), num_prompt_tokens=context)
            group.sampling_params.seed = slot
            group.sampling_params.temperature = 0.0
            group.sequences.add(
                slot=slot,
                token_ids=[3 + (slot + place) % 200 for place in range(context)],
                num_computed_tokens=context - 1,
                block_table=blocks[slot * blocks_of_one : (slot + 1) * blocks_of_one],
            )
        self._num_seqs = self._next_slot = num_seqs
        self._submit(step)

    def decode(self, num_steps: int, swapped_bytes: int = 0) -> list[float]:
        """Microseconds from one answer to the next, over `num_steps` steps of all sequences.

        Every second step also swaps blocks out that no sequence has, `swapped_bytes` at most, and the next in again.
        """
        most = min(len(self._free_blocks), self.sizes.num_host_blocks)
        swapped = list(enumerate(self._free_blocks[: min(most, swapped_bytes // self.sizes.block_bytes)]))
        for number in range(num_steps):
            rows = worker_pb2.Rows(slots_u16=_column(range(self._num_seqs), "<u2"), num_decode_rows=self._num_seqs)
            step = worker_pb2.Step(rows=rows)
            if swapped and number % 2:
                step.swap_in.pairs_u32 = _column([block for pair in swapped for block in pair], "<u4")
            elif swapped:
                step.swap_out.pairs_u32 = _column([block for pair in swapped for block in reversed(pair)], "<u4")
            self._submit(step)
        return self._times_us(num_steps)

    def mix(self, num_steps: int, chunk: int) -> list[float]:
        """As `decode`, and each step also computes `chunk` tokens of a prompt, which none of them reaches the end of.

        Raises ValueError where the cache does not hold it.
        """
        length = num_steps * chunk + 1
        num_blocks = -(-length // self._block_size)
        if num_blocks > len(self._free_blocks):
            raise ValueError(f"a prompt of {length} tokens does not fit in {len(self._free_blocks)} blocks")
        table, self._free_blocks = self._free_blocks[:num_blocks], self._free_blocks[num_blocks:]
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        for number in range(num_steps):
            step = worker_pb2.Step()
            if not number:
                group = step.groups.add(request_id=str(slot), num_prompt_tokens=length)
                group.sampling_params.seed, group.sampling_params.temperature = slot, 0.0
                group.sequences.add(slot=slot, token_ids=[3] * length, block_table=table)
            step.rows.slots_u16 = _column([*range(self._num_seqs), slot], "<u2")
            step.rows.num_decode_rows = self._num_seqs
            step.rows.query_lens_u32, step.rows.num_samples_u16 = _column([chunk], "<u4"), _column([0], "<u2")
            self._submit(step)
        return self._times_us(num_steps)

    def _times_us(self, num_steps: int) -> list[float]:
        """From one answer to the next, of the last `num_steps`, when all have come."""
        self._worker.answered().result()
        for _ in range(STEPS_IN_FLIGHT):  # answers that arrive after that thread ended are waited for, too
            self._take_place()
        self._places.release(STEPS_IN_FLIGHT)
        if self._failure:
            raise RuntimeError(f"a step failed: {self._failure}")
        times = self._answered_ns[-num_steps:]
        return [(later - earlier) / 1e3 for earlier, later in pairwise(times)]

    def close(self) -> None:
        """Ends the worker's thread; its memory is free then."""
        self._worker.end().result()
        self._worker.thread.stop(timeout_s=5.0)

    def _submit(self, step: worker_pb2.Step) -> None:
        self._take_place()
        self._step_id += 1
        step.step_id = self._step_id
        self._worker.submit(_EPOCH, step, time.perf_counter_ns(), self._deliver)

    def _take_place(self) -> None:
        if not self._places.acquire(timeout=_TIMEOUT_S):
            raise TimeoutError(f"no answer within {_TIMEOUT_S:.0f} s")

    def _deliver(self, result: worker_pb2.StepResult) -> None:
        if result.status != worker_pb2.STEP_STATUS_OK and not self._failure:
            self._failure = result.error.message
        self._answered_ns.append(time.perf_counter_ns())
        self._places.release()


def _column(values: object, dtype: str) -> bytes:
    return np.array(list(values), dtype).tobytes()  # type: ignore[call-overload]  # any dtype
