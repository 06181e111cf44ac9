"""Runs one step on the model: input batch, forward pass, draws, answer. Owns the model and its cache.

Decides nothing and keeps nothing of a step but what `SequenceStates` records. Used by the model thread alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from protos import worker_pb2
from worker_svc.cache_engine import CacheEngine
from worker_svc.input_batch import build_input_batch
from worker_svc.logit_adjustments import LogitAdjustments
from worker_svc.memory import peak_bytes
from worker_svc.models import ModelConfig
from worker_svc.models.logit_reader import MAX_ROWS_AT_ONCE
from worker_svc.prompt_logprobs import PromptLogprobs
from worker_svc.row_samples import sample_rows
from worker_svc.sequence_outputs import pack_outputs
from worker_svc.sequence_states import AppliedRows, SequenceStates
from worker_svc.step_columns import BlockOperations, Ints
from worker_svc.step_timer import StepTimer

if TYPE_CHECKING:
    from worker_svc.models.loader import Model

_PROFILED_TOKENS = 128  # of one prefill; a whole budget of tokens would take seconds on a CPU
_WARM_UP_TOKENS = 8  # enough to compile and to touch the weights
_SWAPPED_BYTES = 16 << 20  # one way, to measure it
_SWAPS = 3  # of which the median counts
# An entry of the vocabulary and row: logits, a sorted and an adjusted copy, weights, running sums, counts.
_SAMPLING_BYTES = 4 + 8 + 8 + 8 + 8 + 5
_READING_BYTES = 4 + 4 + 1  # likewise, for logprobs of a prompt: logits, log-softmax, comparison


@dataclass(frozen=True, slots=True)
class Profile:
    """What a step costs, as measured at the start."""

    bytes_per_token: float  # of activations
    prefill_tokens_per_s: float


class ModelRunner:
    """A model, its cache, and the way from resolved rows to an answer."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        block_size: int,
        device: str = "cpu",
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """`cache_dtype` is that of keys and values; None: that of the model."""
        self.config = config
        self._cache_dtype = cache_dtype or config.dtype
        self._model = model
        self._block_size = block_size
        self._device = device
        self._cache: CacheEngine | None = None
        self._adjustments = LogitAdjustments(config.vocab_size, device)

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block over all layers."""
        return CacheEngine.block_bytes(self.config, self._block_size, self._cache_dtype)

    def allocate_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Replaces the cache; what the old one held is gone."""
        self.release_cache()
        self._cache = CacheEngine(
            self.config, self._block_size, num_device_blocks, num_host_blocks, self._cache_dtype, self._device
        )

    def release_cache(self) -> None:
        """Gives the cache's memory back."""
        self._cache = None

    def operate(self, operations: BlockOperations) -> None:
        """Swaps and copies of a step, in the protocol's order."""
        assert self._cache is not None, "a step before Initialize"
        if operations.swap_out.size:
            self._cache.swap_out(self._pairs(operations.swap_out))
        if operations.swap_in.size:
            self._cache.swap_in(self._pairs(operations.swap_in))
        if operations.copies.size:
            self._cache.copy(self._pairs(operations.copies))

    @torch.inference_mode()
    def run(self, states: SequenceStates, rows: AppliedRows, timer: StepTimer) -> worker_pb2.SequenceOutputs:
        """Computes the rows, draws their samples, records them in `states` and packs the answer."""
        if rows.slots.size == 0:
            return worker_pb2.SequenceOutputs()
        assert self._cache is not None, "a step before Initialize"
        batch = build_input_batch(states, rows, self.config.vocab_size, self._device)
        of_prompts = PromptLogprobs(states, rows)
        reader = of_prompts.reader(self._device)
        timer.end_phase("prepare_ns")
        logits = self._model.forward(
            batch.token_ids, batch.positions, self._cache.layers, batch.attention, batch.logits_rows, reader
        )
        timer.end_phase("forward_ns")
        if rows.sample_rows.size == 0:
            outputs = worker_pb2.SequenceOutputs()
            of_prompts.pack(outputs)
            return outputs
        adjusted = self._adjustments.apply(logits, states, rows.slots[rows.num_samples > 0])
        sampled = sample_rows(adjusted, states.sampling, rows, raw_logits=logits)
        states.record_samples(rows, sampled.token_ids)
        outputs = pack_outputs(rows, sampled)
        of_prompts.pack(outputs)
        timer.end_phase("sample_ns")
        return outputs

    def profile(self, max_num_batched_tokens: int) -> Profile:
        """Measures a prefill, in a small cache of its own, after a smaller one that compiles and warms up."""
        most = max(min(max_num_batched_tokens, self.config.max_model_len - 2), 1)
        self._run_once(min(_WARM_UP_TOKENS, most))
        num_tokens = min(_PROFILED_TOKENS, most)
        seconds = []
        num_bytes = peak_bytes(lambda: seconds.append(self._run_once(num_tokens)))
        return Profile(num_bytes / num_tokens, num_tokens / seconds[0])

    def step_bytes(self, profile: Profile, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """The most memory that a step of this size takes besides weights and cache."""
        # What the head gives is converted to float32 where it is less.
        head_bytes = self.config.dtype.itemsize % 4
        row_bytes = max(max_num_seqs * (_SAMPLING_BYTES + head_bytes), MAX_ROWS_AT_ONCE * (_READING_BYTES + head_bytes))
        return int(profile.bytes_per_token * max_num_batched_tokens) + self.config.vocab_size * row_bytes

    def measure_swap(self) -> float:
        """Bytes a second between device and host, one way, in the slower direction; 0 without host blocks."""
        cache = self._cache
        assert cache is not None, "measured after allocation"
        num_blocks = min(-(-_SWAPPED_BYTES // self.block_bytes), cache.num_host_blocks, cache.num_device_blocks)
        if num_blocks == 0:
            return 0.0
        pairs = torch.arange(num_blocks)[:, None].expand(-1, 2).contiguous()
        cache.swap_out(pairs)  # touches the pages
        cache.swap_in(pairs)
        seconds = max(
            statistics.median(_seconds(swap, pairs) for _ in range(_SWAPS)) for swap in (cache.swap_out, cache.swap_in)
        )
        return num_blocks * self.block_bytes / seconds

    def _run_once(self, num_tokens: int) -> float:
        """A prefill of one sequence that samples at random, and a decode step; the seconds of the prefill."""
        num_blocks = -(-(num_tokens + 1) // self._block_size)
        states = SequenceStates(1, num_tokens + 2, self._block_size, num_blocks)
        self.allocate_cache(num_blocks, 0)
        prefill = worker_pb2.Step(rows=worker_pb2.Rows(slots_u16=b"\0\0", num_samples_u16=b"\1\0"))
        prefill.rows.query_lens_u32 = num_tokens.to_bytes(4, "little")
        group = prefill.groups.add(request_id="profile")
        group.sampling_params.seed = 0
        token_ids = (index % self.config.vocab_size for index in range(num_tokens))
        group.sequences.add(token_ids=token_ids, block_table=range(num_blocks))
        decode = worker_pb2.Step(rows=worker_pb2.Rows(slots_u16=b"\0\0", num_decode_rows=1))
        started_s = time.perf_counter()
        self.run(states, states.apply(prefill).rows, StepTimer(time.perf_counter_ns()))
        seconds = time.perf_counter() - started_s
        self.run(states, states.apply(decode).rows, StepTimer(time.perf_counter_ns()))
        return seconds

    def _pairs(self, pairs: Ints) -> torch.Tensor:
        return torch.from_numpy(pairs).to(self._device)


def _seconds(swap: Callable[[torch.Tensor], None], pairs: torch.Tensor) -> float:
    """How long a swap takes, until it is done."""
    started_s = time.perf_counter()
    swap(pairs)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - started_s
