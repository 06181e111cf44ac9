"""How large keys and values become: what scales of a cache of eight bits are made from."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from protos import worker_pb2
from worker_svc.mirror.sequence_states import SequenceStates
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.step_timer import StepTimer


def largest_keys_and_values(runner: ModelRunner, pieces: Sequence[Sequence[int]]) -> torch.Tensor:
    """f32[layers, 2 (key, value), key/value heads]: the largest magnitudes over pieces of text, as the cache gets them,
    keys rotated. The pieces, of token ids, are sequences of their own. The runner's cache is replaced, of its type."""
    block_size, longest = runner.block_size, max(map(len, pieces))
    num_blocks = -(-longest // block_size)
    runner.allocate_cache(num_blocks, 0)
    found: list[torch.Tensor] = []
    for piece in pieces:
        states = SequenceStates(1, longest + 1, block_size, num_blocks)
        step = worker_pb2.Step(rows=worker_pb2.Rows(slots_u16=bytes(2), num_samples_u16=bytes(2)))
        step.rows.query_lens_u32 = np.array([len(piece)], "<u4").tobytes()
        group = step.groups.add(request_id="calibration")
        group.sampling_params.seed = 0  # of no draw
        group.sequences.add(slot=0, token_ids=piece, block_table=range(-(-len(piece) // block_size)))
        runner.run(states, states.apply(step).rows, StepTimer(time.perf_counter_ns()))
        found.append(runner.cache.store.abs().amax(dim=(2, 4, 5)).float())
    runner.release_cache()
    return torch.stack(found).amax(dim=0).cpu()
