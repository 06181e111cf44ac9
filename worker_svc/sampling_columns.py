"""The sampling parameters that the sampler reads, as numpy columns by slot.

Filled once, when a group's metadata arrives; a step only indexes them. Knows nothing of logits, torch or gRPC. What a
sequence's draw depends on (`seed`, its index, a position) is here or in the mirror, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from protos import inference_pb2
from worker_svc.errors import ProtocolError

WHOLE_VOCABULARY = np.int32(-1)
"""`num_logprobs` of a request that asked for all of them (`SamplingParams.logprobs` = -1)."""


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
    """One entry a slot for every parameter of `SamplingRows`, and whether the slot draws at all."""

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.wants_logprobs = np.zeros(max_num_seqs, np.bool_)
        self.num_logprobs = np.zeros(max_num_seqs, np.int32)
        self.use_beam_search = np.zeros(max_num_seqs, np.bool_)  # answers candidates and draws nothing
        self._columns: tuple[npt.NDArray[Any], ...] = (
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed,
            self.wants_logprobs,
            self.num_logprobs,
        )

    def set(self, slot: int, params: inference_pb2.SamplingParams) -> None:
        """Fills a slot from what the client sent; unset fields get the defaults of the public surface."""
        self.temperature[slot] = params.temperature if params.HasField("temperature") else 1.0
        self.top_k[slot] = max(params.top_k, 0)
        self.top_p[slot] = params.top_p if params.HasField("top_p") else 1.0
        self.min_p[slot] = params.min_p
        self.seed[slot] = params.seed
        self.wants_logprobs[slot] = params.HasField("logprobs")
        self.num_logprobs[slot] = params.logprobs
        self.use_beam_search[slot] = params.use_beam_search

    def copy(self, parent: int, child: int) -> None:
        """A forked slot samples as its parent does."""
        for column in self._columns:
            column[child] = column[parent]
        self.use_beam_search[child] = self.use_beam_search[parent]

    def take(self, slots: npt.NDArray[np.intp]) -> SamplingRows:
        """The parameters of `slots`, in their order."""
        return SamplingRows(*(column[slots] for column in self._columns))


def check_supported(params: inference_pb2.SamplingParams) -> None:
    """Raises ProtocolError for a parameter that changes a draw and that this sampler does not know."""
    asked_for = {
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "repetition_penalty": params.HasField("repetition_penalty") and params.repetition_penalty != 1,
        "min_tokens": params.min_tokens > 0,
        "prompt_logprobs": params.HasField("prompt_logprobs"),
        "logit_bias": len(params.logit_bias) > 0,
        "allowed_token_ids": len(params.allowed_token_ids) > 0,
        "bad_words": len(params.bad_words) > 0,
        "guided": params.HasField("guided"),
    }
    unsupported = [name for name, is_asked_for in asked_for.items() if is_asked_for]
    if unsupported:
        raise ProtocolError(f"this worker cannot sample with {', '.join(unsupported)}")
    if not params.HasField("seed"):
        raise ProtocolError("sampling_params without a seed: a draw would not be reproducible")
