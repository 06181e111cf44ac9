"""A plan of who computes what (`work`), made once a forward pass and read by all layers that are cut alike."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.gpu.attention.scratch import AttentionPass
from kernels.gpu.attention.work import NUM_FACTS, plan_kernel


class OfPlan(NamedTuple):
    """What a plan follows from besides the sequences and the card."""

    window: int
    num_kv_heads: int
    group: int  # heads of queries that have a key/value head together
    key_tile: int
    split_rows: int
    whole_rows: int


def plan_of(
    shared: AttentionPass,
    of_plan: OfPlan,
    query: torch.Tensor,
    head_size: int,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    max_seq_len: int,
    num_multiprocessors: int,
) -> torch.Tensor:
    """The pass's plan; where it is the first so cut, it is made, and the pass's scratch checked to suffice for queries
    [T, num_heads, ...] with values of `head_size`: raises ValueError."""
    plan = shared.plans.get(of_plan)
    if plan is None:
        num_sequences = len(seq_lens)
        shared.scratch.check(num_sequences, max_seq_len, query.shape[1], head_size, num_multiprocessors)
        plan = shared.plans[of_plan] = seq_lens.new_empty((NUM_FACTS, num_sequences))
        plan_kernel[(1,)](
            plan,
            seq_lens,
            query_starts,
            num_sequences,
            of_plan.num_kv_heads,
            shared.scratch.num_lines,
            num_multiprocessors,
            of_plan.window,
            GROUP=of_plan.group,
            KEY_TILE=of_plan.key_tile,
            SPLIT_ROWS=of_plan.split_rows,
            WHOLE_ROWS=of_plan.whole_rows,
            HAS_WINDOW=of_plan.window > 0,
        )
    return plan
