"""The sampling parameters that the sampler reads, as numpy columns by slot.

Filled once, when a group's metadata arrives; a step only indexes them. Knows nothing of logits, torch or gRPC. What a
sequence's draw depends on (`seed`, its index, a position) is here or in the mirror, and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from protos import inference_pb2
from worker_svc.errors import ProtocolError
from worker_svc.mirror.bad_words import BadWords
from worker_svc.mirror.ragged_column import RaggedColumn

WEAKEST_REPETITION, STRONGEST_REPETITION = 0.01, 100.0  # what schedulers accept; no finite logit overflows by it
MOST_ADDED = 100.0  # to a logit by a penalty or a bias; likewise
WHOLE_VOCABULARY = np.int32(-1)
"""`num_logprobs` of a request that wants all of them (`SamplingParams.logprobs` = -1)."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of some rows, in their order."""

    temperature: npt.NDArray[np.float32]  # [N], 0: greedy
    top_k: npt.NDArray[np.int64]  # [N], 0: off
    top_p: npt.NDArray[np.float32]  # [N], 1: off
    min_p: npt.NDArray[np.float32]  # [N], 0: off
    seed: npt.NDArray[np.uint64]  # [N]
    wants_logprobs: npt.NDArray[np.bool_]  # [N]
    num_logprobs: npt.NDArray[np.int32]  # [N], top tokens, WHOLE_VOCABULARY for all; 0 where none are wanted

    def take(self, rows: npt.NDArray[np.intp]) -> SamplingRows:
        """Some of these rows."""
        return SamplingRows(*(getattr(self, field.name)[rows] for field in fields(self)))


class SamplingColumns:
    """One entry a slot for every parameter of `SamplingRows`, whether the slot draws at all, and what adjusts logits.

    `takes_largest` is set where the model's largest logit decides and nothing else is told. `adjusts_logits` is set
    where any of the columns after it does something, `is_penalised` where one of the penalties does, `compares_words`
    where bad words depend on the history. Whatever has a size of its own is freed when a slot is cleared.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.wants_logprobs = np.zeros(max_num_seqs, np.bool_)
        self.num_logprobs = np.zeros(max_num_seqs, np.int32)
        self.wants_prompt_logprobs = np.zeros(max_num_seqs, np.bool_)
        self.num_prompt_logprobs = np.zeros(max_num_seqs, np.int32)  # as num_logprobs
        self.use_beam_search = np.zeros(max_num_seqs, np.bool_)  # answers candidates and draws nothing
        self.takes_largest = np.zeros(max_num_seqs, np.bool_)
        self.adjusts_logits = np.zeros(max_num_seqs, np.bool_)
        self.is_penalised = np.zeros(max_num_seqs, np.bool_)
        self.presence_penalty = np.zeros(max_num_seqs, np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, np.float32)
        self.repetition_penalty = np.ones(max_num_seqs, np.float32)
        self.min_tokens = np.zeros(max_num_seqs, np.int64)
        self.stop_token_ids = RaggedColumn(max_num_seqs)  # not to be drawn before min_tokens
        self.allowed_token_ids = RaggedColumn(max_num_seqs)
        self.bias_token_ids = RaggedColumn(max_num_seqs)
        self.biases = RaggedColumn(max_num_seqs, np.float32)
        self.bad_words: list[BadWords | None] = [None] * max_num_seqs
        self.has_bad_words = np.zeros(max_num_seqs, np.bool_)
        self.compares_words = np.zeros(max_num_seqs, np.bool_)
        self._lists = (self.stop_token_ids, self.allowed_token_ids, self.bias_token_ids, self.biases)
        self._columns: tuple[npt.NDArray[Any], ...] = (
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed,
            self.wants_logprobs,
            self.num_logprobs,
        )

    def set(
        self,
        slot: int,
        params: inference_pb2.SamplingParams,
        stop_token_ids: npt.NDArray[np.integer] | tuple[int, ...] = (),
        bad_words: BadWords | None = None,
    ) -> None:
        """Fills a slot from what the client sent; unset fields get the defaults of the public surface."""
        self.temperature[slot] = params.temperature if params.HasField("temperature") else 1.0
        self.top_k[slot] = max(params.top_k, 0)
        self.top_p[slot] = params.top_p if params.HasField("top_p") else 1.0
        self.min_p[slot] = params.min_p
        self.seed[slot] = params.seed
        self.wants_logprobs[slot] = params.HasField("logprobs")
        self.num_logprobs[slot] = params.logprobs
        self.wants_prompt_logprobs[slot] = params.HasField("prompt_logprobs")
        self.num_prompt_logprobs[slot] = params.prompt_logprobs
        self.use_beam_search[slot] = params.use_beam_search
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        repetition = params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
        self.repetition_penalty[slot] = min(max(repetition, WEAKEST_REPETITION), STRONGEST_REPETITION)
        self.min_tokens[slot] = params.min_tokens
        self.stop_token_ids.set(slot, stop_token_ids)
        self.allowed_token_ids.set(slot, params.allowed_token_ids)
        self.bias_token_ids.set(slot, list(params.logit_bias.keys()))
        self.biases.set(slot, list(params.logit_bias.values()))
        self._set_bad_words(slot, bad_words)
        self.is_penalised[slot] = (
            self.presence_penalty[slot] != 0 or self.frequency_penalty[slot] != 0 or self.repetition_penalty[slot] != 1
        )
        self.adjusts_logits[slot] = (
            self.is_penalised[slot] or self.has_bad_words[slot] or any(column.counts[slot] for column in self._lists)
        )
        is_more = self.adjusts_logits[slot] or self.wants_logprobs[slot] or self.use_beam_search[slot]
        self.takes_largest[slot] = self.temperature[slot] == 0 and not is_more

    def copy(self, parent: int, child: int) -> None:
        """A forked slot samples as its parent does."""
        for values in self._columns:
            values[child] = values[parent]
        for flags in (self.wants_prompt_logprobs, self.use_beam_search, self.takes_largest):
            flags[child] = flags[parent]
        for flags in (self.adjusts_logits, self.is_penalised):
            flags[child] = flags[parent]
        self.num_prompt_logprobs[child] = self.num_prompt_logprobs[parent]
        for numbers in (self.presence_penalty, self.frequency_penalty, self.repetition_penalty, self.min_tokens):
            numbers[child] = numbers[parent]
        for column in self._lists:
            column.copy(parent, child)
        self._set_bad_words(child, self.bad_words[parent])

    def take(self, slots: npt.NDArray[np.intp]) -> SamplingRows:
        """The parameters of `slots`, in their order."""
        return SamplingRows(*(column[slots] for column in self._columns))

    def wants_raw_logits(self, slots: npt.NDArray[np.intp]) -> bool:
        """Whether one of `slots` wants logprobs of logits that are then adjusted."""
        return bool((self.wants_logprobs & self.adjusts_logits)[slots].any())

    def clear(self, slot: int) -> None:
        """Frees what a released slot holds, and its row of counts for another."""
        self.is_penalised[slot] = False
        for column in self._lists:
            column.set(slot, ())
        self._set_bad_words(slot, None)

    def _set_bad_words(self, slot: int, words: BadWords | None) -> None:
        self.bad_words[slot] = words = words or None
        self.has_bad_words[slot] = words is not None
        self.compares_words[slot] = words is not None and words.needs_history


def check_supported(params: inference_pb2.SamplingParams) -> None:
    """Raises ProtocolError for a parameter that changes a draw and that this sampler does not know."""
    asked_for = {
        "bad_words as text": len(params.bad_words) > 0,
        "guided": params.HasField("guided"),
        "logits that are adjusted before beams are ranked": params.use_beam_search and _adjusts(params),
    }
    unsupported = [name for name, is_asked_for in asked_for.items() if is_asked_for]
    if unsupported:
        raise ProtocolError(f"this worker cannot sample with {', '.join(unsupported)}")
    numbers = [value for field, value in params.ListFields() if field.type == field.TYPE_FLOAT]
    if not all(map(math.isfinite, (*numbers, *params.logit_bias.values()))):
        raise ProtocolError("sampling_params with a number that is not finite: what is drawn would mean nothing")
    added = max(map(abs, (params.presence_penalty, params.frequency_penalty, *params.logit_bias.values())))
    if added > MOST_ADDED:
        raise ProtocolError(f"sampling_params that would add {added:g} to a logit, more than {MOST_ADDED:g}")
    if not params.HasField("seed"):
        raise ProtocolError("sampling_params without a seed: a draw would not be reproducible")


def _adjusts(params: inference_pb2.SamplingParams) -> bool:
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty or 1.0
    return penalties != (0.0, 0.0, 1.0) or bool(params.logit_bias or params.allowed_token_ids or params.min_tokens)
