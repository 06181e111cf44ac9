"""Runs one step on the model: input batch, forward pass, draws, answer. Owns the model and its cache.

Decides nothing and keeps nothing of a step but what `SequenceStates` records. Used by the model thread alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from protos import worker_pb2
from worker_svc.cache_engine import CacheEngine
from worker_svc.input_batch import build_input_batch
from worker_svc.logit_adjustments import LogitAdjustments
from worker_svc.models import ModelConfig
from worker_svc.prompt_logprobs import PromptLogprobs
from worker_svc.row_samples import sample_rows
from worker_svc.sequence_outputs import pack_outputs
from worker_svc.sequence_states import AppliedRows, SequenceStates
from worker_svc.step_columns import BlockOperations
from worker_svc.step_timer import StepTimer

if TYPE_CHECKING:
    from worker_svc.models.loader import Model


class ModelRunner:
    """A model, its cache, and the way from resolved rows to an answer."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        block_size: int,
        device: str | torch.device = "cpu",
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """`cache_dtype` is that of keys and values; None: that of the model."""
        self.config = config
        self.block_size = block_size
        self.device = torch.device(device)
        self._cache_dtype = cache_dtype or config.dtype
        self._model = model
        self._cache: CacheEngine | None = None
        self._adjustments = LogitAdjustments(config.vocab_size, self.device)

    @property
    def cache(self) -> CacheEngine:
        """What `allocate_cache` made."""
        assert self._cache is not None, "a step before Initialize"
        return self._cache

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block over all layers."""
        return CacheEngine.block_bytes(self.config, self.block_size, self._cache_dtype)

    def allocate_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Replaces the cache; what the old one held is gone."""
        self.release_cache()
        self._cache = CacheEngine(
            self.config, self.block_size, num_device_blocks, num_host_blocks, self._cache_dtype, self.device
        )

    def release_cache(self) -> None:
        """Gives the cache's memory back."""
        self._cache = None

    def operate(self, operations: BlockOperations) -> None:
        """Swaps and copies of a step, in the protocol's order."""
        if operations.swap_out.size:
            self.cache.swap_out(torch.from_numpy(operations.swap_out))
        if operations.swap_in.size:
            self.cache.swap_in(torch.from_numpy(operations.swap_in))
        if operations.copies.size:
            self.cache.copy(torch.from_numpy(operations.copies))

    @torch.inference_mode()
    def run(self, states: SequenceStates, rows: AppliedRows, timer: StepTimer) -> worker_pb2.SequenceOutputs:
        """Computes the rows, draws their samples, records them in `states` and packs the answer."""
        if rows.slots.size == 0:
            return worker_pb2.SequenceOutputs()
        batch = build_input_batch(states, rows, self.config.vocab_size, self.device)
        of_prompts = PromptLogprobs(states, rows)
        reader = of_prompts.reader(self.device)
        timer.end_phase("prepare_ns")
        logits = self._model.forward(
            batch.token_ids, batch.positions, self.cache.layers, batch.attention, batch.logits_rows, reader
        )
        timer.end_phase("forward_ns")
        if rows.sample_rows.size == 0:
            outputs = worker_pb2.SequenceOutputs()
            of_prompts.pack(outputs)
            return outputs
        slots = rows.slots[rows.num_samples > 0]
        keeps_logits = bool(states.sampling.wants_logprobs[slots].any())
        adjusted = self._adjustments.apply(logits, states, slots, keeps_logits=keeps_logits)
        sampled = sample_rows(adjusted, states.sampling, rows, raw_logits=logits)
        states.record_samples(rows, sampled.token_ids)
        outputs = pack_outputs(rows, sampled)
        of_prompts.pack(outputs)
        timer.end_phase("sample_ns")
        return outputs
