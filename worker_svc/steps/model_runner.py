"""Runs one step on the model: input batch, forward pass, draws, answer. Owns the model and its cache.

Decides nothing and keeps nothing of a step but what `SequenceStates` records. Used by the model thread alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.select import kernels_for
from protos import worker_pb2
from worker_svc.cache.cache_engine import CacheEngine
from worker_svc.host.device_marks import DeviceMarks
from worker_svc.host.graph_backend import GraphBackend
from worker_svc.host.output_copies import OutputCopies, output_copies
from worker_svc.host.uploads import upload
from worker_svc.mirror.sequence_states import UNKNOWN, AppliedRows, SequenceStates
from worker_svc.mirror.step_columns import BlockOperations, Ints
from worker_svc.models import ModelConfig
from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.logit_reader import LogitReader
from worker_svc.sampling.last_tokens import LastTokens
from worker_svc.sampling.logit_adjustments import LogitAdjustments
from worker_svc.sampling.prompt_logprobs import PromptLogprobs
from worker_svc.sampling.row_samples import RowSamples, check_candidates, draw_rows, largest_of_rows
from worker_svc.steps.awaited_step import AwaitedStep
from worker_svc.steps.decode_graphs import DecodeGraphs, Forward
from worker_svc.steps.graph_buffers import GraphBuffers
from worker_svc.steps.graph_captures import GraphSizes
from worker_svc.steps.input_batch import InputArrays, build_input_arrays
from worker_svc.steps.launched_step import Launched, LaunchedStep
from worker_svc.steps.mixed_graphs import MixedGraphs
from worker_svc.steps.sampling_graphs import SamplingGraphs
from worker_svc.steps.stage_answers import StageAnswers
from worker_svc.steps.step_timer import StepTimer

if TYPE_CHECKING:
    from kernels.gpu.attention.scratch import Scratch
    from worker_svc.adapters.adapter_set import AdapterSet
    from worker_svc.models.loader import Model


_SAMPLING_SHARE = 8  # of the memory for graphs an eighth at most: a pass that is launched by one call saves more


class ModelRunner:
    """A model, its cache, and the way from resolved rows to an answer."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        block_size: int,
        device: str | torch.device = "cpu",
        cache_dtype: torch.dtype | None = None,
        outputs: OutputCopies | None = None,
        graph_backend: Callable[[torch.device], GraphBackend] | None = None,
        adapters: AdapterSet | None = None,
        answers: StageAnswers | None = None,
    ) -> None:
        """
        Args:
            cache_dtype: of keys and values; None: that of the model.
            outputs: how they come to the host; None: as the device has it.
            graph_backend: makes what captures steps; None: nothing does.
            adapters: what rows may use beside the model; None: there are none.
            answers: between the stages of a pipeline, of which the model is one; None: it is the whole.
        """
        self.config = config
        self.block_size = block_size
        self.device = torch.device(device)
        self.cache_dtype = cache_dtype or config.dtype
        self._model, self.adapters, self._answers = model, adapters, answers
        self._draws = answers is None or answers.is_last  # else what is drawn comes from another stage
        self._cache: CacheEngine | None = None
        self._graph_backend = graph_backend
        self._backend: GraphBackend | None = None  # of the graphs over the cache
        self._buffers: GraphBuffers | None = None  # likewise
        self._graphs: DecodeGraphs | None = None  # over the cache
        self._mixed_graphs: MixedGraphs | None = None  # likewise, of all other steps
        self._sampling_graphs: SamplingGraphs | None = None  # over the logits of both
        self._scratch: Scratch | None = None  # of attention, where its kernels need one
        self._outputs = outputs or output_copies(self.device)
        self._last_tokens = LastTokens(self.device)
        self._adjustments = LogitAdjustments(config.vocab_size, self._last_tokens)

    @property
    def cache(self) -> CacheEngine:
        """What `allocate_cache` made."""
        assert self._cache is not None, "a step before Initialize"
        return self._cache

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block over all layers."""
        return CacheEngine.block_bytes(self.config, self.block_size, self.cache_dtype)

    def allocate_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Replaces the cache; the old contents are lost."""
        self.release_cache()
        self._cache = self.new_cache(num_device_blocks, num_host_blocks)

    def allocate_scratch(self, max_num_seqs: int, max_model_len: int) -> None:
        """Replaces what attention uses besides the cache, for steps of such sizes; the old one's graphs are gone."""
        self._scratch = None
        self._release_graphs()
        kernels = kernels_for(self.device)
        if "attention_scratch" in kernels.__all__:
            heads = (self.config.num_heads, self.config.gathered_size)
            self._scratch = kernels.attention_scratch(self.device, max_num_seqs, max_model_len, *heads)

    def scratch_bytes(self, max_num_seqs: int, max_model_len: int) -> int:
        """What `allocate_scratch` takes."""
        kernels = kernels_for(self.device)
        if "attention_scratch_bytes" not in kernels.__all__:
            return 0
        heads = (self.config.num_heads, self.config.gathered_size)
        num_bytes: int = kernels.attention_scratch_bytes(self.device, max_num_seqs, max_model_len, *heads)
        return num_bytes

    def new_cache(self, num_device_blocks: int, num_host_blocks: int) -> CacheEngine:
        """A second cache like the runner's own, which stays as it is."""
        return CacheEngine(
            self.config, self.block_size, num_device_blocks, num_host_blocks, self.cache_dtype, self.device
        )

    def release_cache(self) -> None:
        """Gives the cache's memory back, and that of graphs over it and of attention's scratch."""
        self._cache = self._scratch = None
        self._release_graphs()

    def _release_graphs(self) -> None:
        self._graphs = self._mixed_graphs = self._sampling_graphs = self._buffers = self._backend = None

    @property
    def uses_graphs(self) -> bool:
        """Whether `capture_graphs` captures any."""
        return self._graph_backend is not None

    @property
    def graph_sizes(self) -> GraphSizes:
        """Of the steps that have been captured."""
        return GraphSizes(*([] if graphs is None else graphs.sizes for graphs in (self._graphs, self._mixed_graphs)))

    def graph_buffer_bytes(self, max_num_seqs: int, max_model_len: int) -> int:
        """What `capture_graphs` takes besides the graphs."""
        if not self.uses_graphs:
            return 0
        return GraphBuffers.num_bytes(max_num_seqs, -(-max_model_len // self.block_size), self.config.vocab_size)

    def capture_graphs(
        self, max_num_seqs: int, max_model_len: int, most_bytes: int, *, is_alone: bool = True
    ) -> list[int]:
        """Captures decode steps over the cache and sampling, within `most_bytes`; returns the captured batch sizes of
        the steps, ascending. `is_alone`: see `capture_within`."""
        if self._graph_backend is None:
            return []
        num_blocks = -(-max_model_len // self.block_size)
        self._buffers = GraphBuffers.new(
            self.device, max_num_seqs, num_blocks, self.config.vocab_size, scratch=self._scratch
        )
        self._backend = self._graph_backend(self.device)  # counts what is taken from now on
        self._sampling_graphs = SamplingGraphs(self._backend, self._last_tokens, self._buffers)
        self._sampling_graphs.capture(most_bytes // _SAMPLING_SHARE)  # no rank waits for another in it
        self._graphs = DecodeGraphs(
            self._pass_over_cache(), self._backend, self._last_tokens, self._buffers, max_model_len=max_model_len
        )
        self._graphs.capture(most_bytes, is_alone=is_alone)
        return self._graphs.sizes

    def capture_mixed_graphs(
        self, max_num_batched_tokens: int, max_model_len: int, most_bytes: int, *, is_alone: bool = True
    ) -> list[int]:
        """After `capture_graphs`, captures other steps with what it has left of `most_bytes`; returns the captured
        numbers of tokens, ascending."""
        if self._backend is None or self._buffers is None:
            return []
        self._mixed_graphs = MixedGraphs(
            self._pass_over_cache(),
            self._backend,
            self._last_tokens,
            self._buffers,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        self._mixed_graphs.capture(most_bytes, is_alone=is_alone)
        return self._mixed_graphs.sizes

    def _pass_over_cache(self) -> Forward:
        layers = self.cache.layers

        def forward(
            token_ids: torch.Tensor,
            positions: torch.Tensor,
            attention: AttentionMetadata,
            logits_rows: torch.Tensor,
            out: torch.Tensor,
        ) -> None:
            self._model.forward(token_ids, positions, layers, attention, logits_rows, out=out)

        return forward

    def keep_graphs(self, batch_sizes: Collection[int], token_counts: Collection[int]) -> None:
        """Of the captured ones, decode steps of these batch sizes and others of these numbers of tokens."""
        if self._graphs is not None:
            self._graphs.keep(batch_sizes)
        if self._mixed_graphs is not None:
            self._mixed_graphs.keep(token_counts)

    def operate(self, operations: BlockOperations) -> None:
        """Swaps and copies of a step, in the protocol's order."""
        if operations.swap_out.size:
            self.cache.swap_out(torch.from_numpy(operations.swap_out))
        if operations.swap_in.size:
            self.cache.swap_in(torch.from_numpy(operations.swap_in))
        if operations.copies.size:
            self.cache.copy(torch.from_numpy(operations.copies))

    @property
    def is_late(self) -> bool:
        """Whether `launch` returns before the outputs are here, and may be called again meanwhile."""
        return self._outputs.is_late or not self._draws

    def waits_for_outputs(self, states: SequenceStates, rows: AppliedRows) -> bool:
        """Whether `launch` would read tokens that steps on their way have yet to bring to the mirror.

        The token that a row begins with is filled in on the device that drew it, where it counts for penalties as well.
        """
        others = ~rows.uses_last_sampled if self._draws else slice(None)
        last_inputs = rows.seq_lens[others] - 1
        if (states.token_ids[rows.slots[others], last_inputs] == UNKNOWN).any():
            return True
        return self._adjustments.waits_for_tokens(states, rows.slots[rows.num_samples > 0])

    @torch.inference_mode()
    def launch(self, states: SequenceStates, rows: AppliedRows, timer: StepTimer) -> Launched:
        """Has the rows computed and their samples drawn; gives each its place in `states`.

        What raises here has left `states` as `apply_rows` did. What is wrong with the step is found before anything is
        computed, so that all ranks find it.
        """
        if rows.slots.size == 0:
            return LaunchedStep.of_nothing(states, rows)
        check_candidates(rows, self.config.vocab_size)
        arrays = build_input_arrays(states, rows, self.config.vocab_size)
        adapters = self._adapters_of(states, rows)
        self._wait_for_swaps(states, rows)
        if not self._draws:
            return self._hand_on(states, rows, arrays, adapters, timer)
        of_prompts = PromptLogprobs(states, rows) if states.sampling.wants_prompt_logprobs[rows.slots].any() else None
        marks = DeviceMarks(self.device) if self.device.type == "cuda" else None
        timer.end_phase("prepare_ns")
        _mark(marks)
        reader = None if of_prompts is None else of_prompts.reader(self.device)
        logits = self._forward(arrays, reader, adapters)
        _mark(marks)
        timer.end_phase("forward_ns")
        drawn = self._draw(logits, states, rows) if rows.sample_rows.size else None
        _mark(marks)
        copy = self._outputs.start(() if drawn is None else drawn.tensors)
        tenancies = states.expect_samples(rows)
        timer.end_phase("sample_ns")
        tell = None if self._answers is None else self._answers.give
        return LaunchedStep(states, rows, drawn, tenancies, of_prompts, copy, marks, tell)

    def _wait_for_swaps(self, states: SequenceStates, rows: AppliedRows) -> None:
        """Of the step's blocks; swaps of others go on beside it."""
        if not self.cache.are_swaps_under_way:
            return
        ends = -(-rows.seq_lens // states.block_size)[:, None]
        tables = states.block_tables[rows.slots, : int(ends.max())]
        places = np.arange(tables.shape[1])
        is_read = places < ends
        is_written = is_read & (places >= rows.context_lens[:, None] // states.block_size)
        self.cache.hold_steps(tables[is_read], tables[is_written])

    def _hand_on(
        self, states: SequenceStates, rows: AppliedRows, arrays: InputArrays, adapters: Ints | None, timer: StepTimer
    ) -> AwaitedStep:
        """This stage's part of a step that the last one draws."""
        assert self._answers is not None
        timer.end_phase("prepare_ns")
        self._forward(arrays, None, adapters)
        timer.end_phase("forward_ns")
        return AwaitedStep(states, rows, states.expect_samples(rows), self._answers.expect())

    def run(self, states: SequenceStates, rows: AppliedRows, timer: StepTimer) -> worker_pb2.SequenceOutputs:
        """`launch`, and its outputs as soon as they are here."""
        return self.launch(states, rows, timer).outputs(timer)

    def _draw(self, logits: torch.Tensor, states: SequenceStates, rows: AppliedRows) -> RowSamples:
        """Adjusts `logits` f32[L, vocab] where a request wants that, and draws; L rows sample. What is drawn is where
        the next step finds it."""
        sampling, adjusted = states.sampling, logits
        take_largest = bool(sampling.takes_largest[rows.sample_slots].all())
        if not take_largest:
            slots = rows.slots[rows.num_samples > 0]
            keeps_logits = sampling.wants_raw_logits(slots)
            adjusted = self._adjustments.apply(logits, states, slots, keeps_logits=keeps_logits)
        graphs = self._sampling_graphs
        if graphs is not None and graphs.suits(adjusted, sampling, rows):
            return graphs.run(sampling, rows)
        drawn = largest_of_rows(logits, rows) if take_largest else draw_rows(adjusted, sampling, rows, logits)
        if self.is_late:
            (sample_slots,) = upload(self.device, rows.sample_slots)
            self._last_tokens.put(sample_slots, drawn.token_ids)
        return drawn

    def _adapters_of(self, states: SequenceStates, rows: AppliedRows) -> Ints | None:
        """[T], the number of each token's adapter, -1: none; None where no row has one."""
        if self.adapters is None:
            return None
        numbers = states.adapter_numbers[rows.slots]
        return numbers.repeat(rows.query_lens) if (numbers >= 0).any() else None

    def _forward(self, arrays: InputArrays, reader: LogitReader | None, adapters: Ints | None) -> torch.Tensor:
        """`adapters`: see `_adapters_of`. Graphs have none."""
        if reader is None and adapters is None:
            for graphs in (self._graphs, self._mixed_graphs):
                if graphs is not None and graphs.suits(arrays):
                    return graphs.run(arrays)
        batch = arrays.to_device(self.device, self._last_tokens, self._scratch)
        with self.adapters.step(adapters) if self.adapters and adapters is not None else nullcontext():
            return self._model.forward(
                batch.token_ids, batch.positions, self.cache.layers, batch.attention, batch.logits_rows, reader
            )


def _mark(marks: DeviceMarks | None) -> None:
    if marks is not None:
        marks.mark()
