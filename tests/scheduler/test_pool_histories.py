"""Random histories of a whole pool through the real `Engine`: nothing is lost, stuck, mixed up or left over.

A history is drawn from its seed alone: a failure names it, and `check_history(seed)` repeats it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

from scheduler_svc.core.sequences import sequence
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.routing import rebinding, router, worker_queue
from tests.scheduler.fake_language import VOCAB_SIZE, expected_tokens
from tests.scheduler.pool import Faults, Pool, PoolWorker, Size, heard_by

SHARED = [(7 * position) % VOCAB_SIZE for position in range(24)]  # what prompts begin with
MAX_MODEL_LEN = 64
NUM_SHORT, NUM_LONG = 60, 2_000
TURNS_A_CHECK = 3  # most of what goes wrong stays wrong
# Ends that are nobody's fault but the history's.
EXPECTED_ERRORS = (
    "the worker could not run it",
    "workers were lost while running it",
    "it holds",
    "finite",
    "serves its model",
)


def row_error(history: npt.NDArray[np.int32]) -> str | None:
    return "not finite" if int(history.sum()) % 23 == 0 else None


class History:
    """Draws one event after the other."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.random = random.Random(seed)
        self.stages = random.Random(f"stages of {seed}")  # apart: the rest of a history stays as it was
        draw = self.random
        self.is_chunked = draw.random() < 0.7
        self.pool = Pool(
            faults,
            row_error if draw.random() < 0.15 else None,
            scheduling_policy=draw.choice(["fcfs", "fcfs", "priority", "fair"]),
            preemption_mode=draw.choice(["auto", "swap", "recompute"]),
            enable_prefix_caching=draw.random() < 0.6,
            enable_chunked_prefill=self.is_chunked,
            steps_in_flight=draw.randint(1, 3),
        )
        self.pool.turns_a_check = TURNS_A_CHECK
        self.loss_rate = draw.choice([0.0, 0.02, 0.1])
        self.failure_rate = draw.choice([0.0, 0.05, 0.3])
        self.num_requests = draw.randint(2, 25)
        self.recent: list[list[int]] = []  # prompts, to be sent again
        self.models = ["a", "b"] if draw.random() < 0.2 else ["a"]
        for _ in range(draw.randint(1, 3)):
            self.join()

    def size(self) -> Size:
        draw = self.random
        num_slots = draw.randint(1, 6)
        return Size(
            num_slots=num_slots,
            num_blocks=draw.choice([8, 12, 16, 24, 40]),
            num_host_blocks=draw.choice([0, 8, 40]),
            max_num_batched_tokens=max(num_slots, draw.choice([4, 6, 10, 20, 40])),
            max_model_len=draw.choice([48, MAX_MODEL_LEN, MAX_MODEL_LEN]),
            num_stages=self.stages.choice([1, 1, 1, 2, 4]),
        )

    def run(self) -> None:
        draw, pool = self.random, self.pool
        events: list[tuple[int, Callable[[], Any]]] = [
            (4, self.submit),
            (12, self.run_some),
            (2, self.abort),
            (4, self.finish_above),
            (1, self.change_workers),
            (1, pool.flush),
            (1, self.withhold),
        ]
        weights, actions = [weight for weight, _ in events], [action for _, action in events]
        for _ in range(draw.randint(20, 120)):
            draw.choices(actions, weights)[0]()
            if draw.random() < 0.7:  # else several events are taken at once
                pool.turn()
        pool.run_to_end(self.size(), self.models[0])
        for prompt in self.recent[-6:]:  # who finds what is cached by now reads it
            pool.submit(prompt, min(len(prompt) + 4, MAX_MODEL_LEN), model=draw.choice(self.models))
        pool.run_to_end(self.size(), self.models[0])
        pool.check_outputs()
        pool.check_nothing_left()
        for group, told in pool.told.items():
            if told.end is not None and told.end[0] is FinishReason.ERROR:
                assert any(known in told.end[1] for known in EXPECTED_ERRORS), (group.request_id, told.end)

    def withhold(self) -> None:
        if self.pool.workers:
            worker = self.random.choice(self.pool.workers)
            self.pool.withhold(worker, self.random.choice([0, 3, worker.size.num_blocks]))

    # ---- requests ---------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        draw = self.random
        if len(self.pool.told) >= self.num_requests:
            return
        if self.recent and draw.random() < 0.4:
            prompt = draw.choice(self.recent)
        else:
            prompt = SHARED[: draw.randint(0, len(SHARED))] + draw.choices(range(VOCAB_SIZE), k=draw.randint(1, 10))
            self.recent.append(prompt)
        if not self.is_chunked:
            prompt = prompt[:4]
        max_num_tokens = min(len(prompt) + draw.randint(1, 40), MAX_MODEL_LEN)
        kind: dict[str, Any] = draw.choice(
            [{}, {}, {"n": 2}, {"n": 3}, {"n": 5}, {"n": 2, "best_of": 3}, {"beam_width": 2}, {"beam_width": 3, "n": 2}]
        )
        if not kind.get("beam_width") and "best_of" not in kind and draw.random() < 0.4:
            kind = {**kind, **self.resumed(prompt, max_num_tokens, kind.get("n", 1))}
        self.pool.submit(
            prompt,
            max_num_tokens,
            priority=draw.randint(0, 2),
            tenant=draw.choice("ab"),
            model=draw.choice(self.models),
            cache_salt=draw.choice(["", "", "", "salt"]),
            asks_prompt_logprobs=draw.random() < 0.15,
            **kind,
        )

    def resumed(self, prompt: list[int], max_num_tokens: int, n: int) -> dict[str, Any]:
        """Any part of what each output will be, none of it too; some say that they have ended."""
        resumed = []
        for index in range(n):
            whole = expected_tokens(prompt, index, max_num_tokens)[len(prompt) :]
            length = self.random.choice([0, 1, len(whole), self.random.randint(0, len(whole) - 1)])
            resumed.append(whole[:length][:-1])
        resumed = [tokens[: max_num_tokens - len(prompt) - 1] for tokens in resumed]
        finished = [index for index in range(n) if n > 1 and index and self.random.random() < 0.15]
        return {"resumed": resumed, "finished": finished}

    def chosen(self) -> SequenceGroup | None:
        groups = self.pool.unfinished()
        return self.random.choice(groups) if groups else None

    def abort(self) -> None:
        if (group := self.chosen()) is not None:
            self.pool.abort(group)

    def finish_above(self) -> None:
        """Anybody, or somebody who is half computed."""
        half_computed = [
            sequence
            for handle in self.pool.engine.workers
            for sequence in handle.scheduler.groups.prefilling
            if not sequence.group.uses_beam_search
        ]
        if half_computed and self.random.random() < 0.6:
            self.pool.finish_above(self.random.choice(half_computed))
            return
        group = self.chosen()
        if group is not None and not group.uses_beam_search:
            self.pool.finish_above(self.random.choice(group.unfinished()))

    # ---- workers ----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        self.pool.join(self.size(), self.random.choice(self.models))

    def run_some(self) -> None:
        for _ in range(self.random.choice([1, 1, 2, 4, 8])):
            for worker in self.pool.workers:
                self.run_one(worker)
            self.pool.turn()

    def run_one(self, worker: PoolWorker) -> None:
        draw = self.random
        if worker.received and draw.random() < 0.8:
            fails = draw.choice(["before", "after"]) if draw.random() < self.failure_rate else None
            worker.run(fails, is_out_of_memory=draw.random() < 0.5)
        if worker.results and draw.random() < 0.8:
            self.pool.answer(worker)
        if draw.random() < self.loss_rate:
            self.lose(worker)

    def lose(self, worker: PoolWorker) -> None:
        self.pool.lose(worker)
        if self.random.random() < 0.6:
            self.join()

    def change_workers(self) -> None:
        draw, workers = self.random, self.pool.workers
        if not workers or (len(workers) < 4 and draw.random() < 0.4):
            self.join()
        elif draw.random() < 0.5:
            self.lose(draw.choice(workers))
        else:
            self.pool.drain(draw.choice(workers), from_above=draw.random() < 0.5)


def check_history(seed: int) -> None:
    faults = Faults()
    # Half of them think a move cheap, so that there are many.
    eager = {"PAUSE_NS": 0, "CHEAPER": 0.2, "MUCH_CHEAPER": 0.5} if seed % 2 else {"PAUSE_NS": 0}
    with (
        heard_by(faults),
        mock.patch.object(worker_queue, "LOOK_AHEAD", 3),
        mock.patch.multiple(rebinding, **eager),
        mock.patch.object(router, "OVERRUN_NS", 0),
        # Or the order of a set, which decides between equals, would be that of addresses in memory.
        mock.patch.object(sequence, "_NUMBERS", itertools.count()),
        mock.patch.object(SequenceGroup, "__hash__", lambda group: hash(group.number)),
        mock.patch.object(Sequence, "__hash__", lambda sequence: hash((sequence.group.number, sequence.index))),
    ):
        try:
            History(seed, faults).run()
        except Exception as error:
            raise AssertionError(f"history {seed}") from error


@pytest.mark.parametrize("first", range(0, NUM_SHORT, 20))
def test_any_history_of_a_pool_ends_well(first):
    for seed in range(first, first + 20):
        check_history(seed)


def test_who_gives_way_alone_has_the_step_that_a_trial_has_to_wait_for():
    check_history(1630)


@pytest.mark.chaos
@pytest.mark.parametrize("first", range(NUM_SHORT, NUM_SHORT + NUM_LONG, 100))
def test_any_history_of_a_pool_ends_well_for_long(first):
    for seed in range(first, first + 100):
        check_history(seed)
