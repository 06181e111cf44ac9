"""What a step costs, as measured at the start: memory at its peak, tokens a second, and how fast blocks are swapped.

On a GPU the step whose memory is measured is the largest there can be, in tokens and in rows that sample, each with
top-p, a penalty and one logprob; logprobs of prompts and of all tokens are not in it. Its peak counts as it is; speed
is that of as many tokens in few long prompts. On a CPU that would take seconds: a small prefill is scaled up by its
tokens, smaller where the processor is slow for the model, and what sampling takes is added by arithmetic.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from protos import worker_pb2
from worker_svc.cache.cache_sizing import Limits
from worker_svc.host.device_memory import DeviceMemory
from worker_svc.mirror.sequence_states import SequenceStates
from worker_svc.models.cache_scales.found_scales import warn_of_cuts
from worker_svc.models.logit_reader import MAX_ROWS_AT_ONCE
from worker_svc.steps.mixed_graphs import token_counts
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.step_timer import StepTimer

_HOST_TOKENS = (32, 128)  # of one prefill; the second where the first took no longer than
_HOST_SECONDS = 0.2
_WARM_UP_TOKENS = 8  # enough to compile and to touch the weights
_SWAPPED_BYTES = 16 << 20  # one way, to measure it
_SWAPS = 3  # the median is taken
# An entry of the vocabulary and row: logits, those of the rows that draw, an adjusted copy, counts, and where all
# tokens' logprobs are wanted their ids and logprobs.
_SAMPLING_BYTES = 4 + 4 + 4 + 4 + 8 + 4
_READING_BYTES = 4 + 8 + 4  # likewise, for logprobs of a prompt: logits, and ids and logprobs of all tokens


@dataclass(frozen=True, slots=True)
class Profile:
    """What one step was measured to take."""

    num_tokens: int
    peak_bytes: int  # besides weights and cache
    is_whole: bool  # whether it was as large as a step can be
    prefill_tokens_per_s: float


class Profiler:
    """Measures `runner`, in caches of its own: whatever the runner's cache held is gone."""

    def __init__(self, runner: ModelRunner, memory: DeviceMemory) -> None:
        self._runner, self._memory = runner, memory

    def measure(self, bounds: Limits, *, is_alone: bool = True) -> Profile:
        """A prefill, after a smaller one that compiles and warms up. `bounds` are the largest sizes of a step.

        Not alone: every rank computes its part of the same steps, so none of them looks at its own clock.
        """
        longest = max(bounds.max_model_len - 2, 1)  # a prompt, a token drawn after it, and one more
        num_tokens = min(bounds.max_num_batched_tokens, longest)
        self._measure(1, min(num_tokens, _WARM_UP_TOKENS))
        if self._memory.is_host:
            profile = self._on_host(num_tokens, _HOST_TOKENS if is_alone else _HOST_TOKENS[-1:])
        else:
            profile = self._on_device(bounds, longest)
        config = self._runner.config
        if config.cache_scales is not None:
            warn_of_cuts(config.cache_scales, self._runner.cache.store, config.first_layer)
        self._runner.release_cache()
        return profile

    def _on_host(self, most_tokens: int, counts: Sequence[int]) -> Profile:
        """Of one sequence: of the first count of tokens, and of a larger one where that does not take long."""
        for most in counts:
            num_tokens = min(most, most_tokens)
            num_bytes, seconds = self._measure(1, num_tokens)
            if num_tokens == most_tokens or seconds > _HOST_SECONDS:
                break
        return Profile(num_tokens, num_bytes, is_whole=False, prefill_tokens_per_s=num_tokens / seconds)

    def _on_device(self, bounds: Limits, longest: int) -> Profile:
        """Of as many sequences as there may be; `longest` is the most tokens of one."""
        num_seqs = bounds.max_num_seqs
        num_tokens = min(bounds.max_num_batched_tokens, num_seqs * longest)
        # More rows need other kernels, which are compiled and loaded at their first call.
        if not self._runner.uses_graphs:  # each capture compiles what so many rows need; here nothing else would
            for count in token_counts(num_tokens):
                self._measure(max(min(count, num_seqs), -(-count // longest)), count, is_plain=True)
        self._measure(num_seqs, num_tokens)
        num_bytes, _ = self._measure(num_seqs, num_tokens)
        # What a group costs that is computed again: few long sequences, which draw one token each.
        few = -(-num_tokens // longest)
        self._measure(few, num_tokens, is_plain=True)
        _, seconds = self._measure(few, num_tokens, is_plain=True)
        return Profile(num_tokens, num_bytes, is_whole=True, prefill_tokens_per_s=num_tokens / seconds)

    def step_bytes(self, profile: Profile, limits: Limits) -> int:
        """The most memory that a step of this size takes besides weights and cache."""
        config = self._runner.config
        if profile.is_whole:
            # Attention's scratch was there before the profile began.
            return profile.peak_bytes + self._runner.scratch_bytes(limits.max_num_seqs, limits.max_model_len)
        # What the head gives is converted to float32 where it is less.
        head_bytes = config.dtype.itemsize % 4
        row_bytes = max(
            limits.max_num_seqs * (_SAMPLING_BYTES + head_bytes), MAX_ROWS_AT_ONCE * (_READING_BYTES + head_bytes)
        )
        of_tokens = profile.peak_bytes / profile.num_tokens * limits.max_num_batched_tokens
        return int(of_tokens) + config.vocab_size * row_bytes

    def swap_bytes_per_s(self) -> float:
        """One way between the runner's device and host blocks, in the slower direction; 0 without host blocks.

        In host memory two small stores stand for these. A block has a place in every layer, so that a few of them would
        touch pages all over the runner's own.
        """
        cache = self._runner.cache
        most = min(cache.num_host_blocks, cache.num_device_blocks)
        num_blocks = min(-(-_SWAPPED_BYTES // self._runner.block_bytes), most)
        if num_blocks == 0:
            if not self._memory.is_host and cache.num_device_blocks > 1:
                cache.copy(torch.tensor([[0, 1]]))  # or its kernel would be compiled when the first sequence forks
            return 0.0
        if self._memory.is_host:
            cache = self._runner.new_cache(num_blocks, num_blocks)
        pairs = torch.arange(num_blocks)[:, None].expand(-1, 2).contiguous()  # as `ModelRunner.operate` has them
        both = (cache.swap_out, cache.swap_in)
        for swap in both:
            swap(pairs)  # touches the pages
        seconds = max(statistics.median(self._seconds(partial(swap, pairs)) for _ in range(_SWAPS)) for swap in both)
        return num_blocks * self._runner.block_bytes / seconds

    def _measure(self, num_seqs: int, num_tokens: int, *, is_plain: bool = False) -> tuple[int, float]:
        """Peak and seconds of a prefill of `num_tokens` by `num_seqs` sequences that all sample; then a decode step.

        On a GPU they sample with top-p, a penalty and a logprob, unless `is_plain`.
        """
        block_size = self._runner.block_size
        lengths = np.full(num_seqs, num_tokens // num_seqs) + (np.arange(num_seqs) < num_tokens % num_seqs)
        num_blocks = -(-(int(lengths.max()) + 1) // block_size)  # of each
        states = SequenceStates(num_seqs, int(lengths.max()) + 2, block_size, num_seqs * num_blocks)
        self._runner.allocate_cache(num_seqs * num_blocks, 0)
        self._runner.allocate_scratch(num_seqs, int(lengths.max()) + 2)
        slots = np.arange(num_seqs, dtype="<u2").tobytes()
        prefill = worker_pb2.Step(rows=worker_pb2.Rows(slots_u16=slots, query_lens_u32=lengths.astype("<u4").tobytes()))
        prefill.rows.num_samples_u16 = np.ones(num_seqs, "<u2").tobytes()
        group = prefill.groups.add(request_id="profile")
        group.sampling_params.seed = 0
        if not (self._memory.is_host or is_plain):
            group.sampling_params.top_p = 0.9
            group.sampling_params.repetition_penalty = 1.1
            group.sampling_params.logprobs = 1
        for slot, length in enumerate(lengths.tolist()):
            table = range(slot * num_blocks, (slot + 1) * num_blocks)
            token_ids = (index % self._runner.config.vocab_size for index in range(length))
            group.sequences.add(slot=slot, index=slot, token_ids=token_ids, block_table=table)
        seconds: list[float] = []
        timed = partial(self._seconds, partial(self._run, states, prefill))
        peak_bytes = self._memory.peak_bytes(lambda: seconds.append(timed()))
        self._run(states, worker_pb2.Step(rows=worker_pb2.Rows(slots_u16=slots, num_decode_rows=num_seqs)))
        return peak_bytes, seconds[0]

    def _run(self, states: SequenceStates, step: worker_pb2.Step) -> None:
        self._runner.run(states, states.apply(step).rows, StepTimer(time.perf_counter_ns()))

    def _seconds(self, work: Callable[[], object]) -> float:
        """How long work takes, until the device is done with it."""
        started_s = time.perf_counter()
        work()
        if not self._memory.is_host:
            torch.cuda.synchronize()
        return time.perf_counter() - started_s
