"""A model that a scheduler serves: what its workers said of it, with its tokenizer. Of several, see `ServedModels`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from protos import worker_pb2
from scheduler_svc.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Lengths are in tokens, and those of the largest worker. `max_cached_tokens` is what one whole cache holds."""

    name: str
    fingerprint: str  # see `fingerprint_of`
    model_hash: str
    architecture: str
    dtype: str
    kv_cache_dtype: str
    quantization: str  # of the weights; empty: none
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_cached_tokens: int
    block_size: int
    max_logprobs: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    tokenizer_sha256: str  # of the workers' own

    @classmethod
    def from_worker(
        cls, info: worker_pb2.WorkerInfo, sizes: worker_pb2.InitializeResponse, tokenizer: Tokenizer, name: str
    ) -> ServedModel:
        """What a worker says of its model and sizes; `name` empty: the worker's own."""
        return cls(
            name=name or info.model,
            fingerprint=fingerprint_of(info, tokenizer.sha256),
            model_hash=info.model_hash,
            architecture=info.architecture,
            dtype=info.dtype,
            kv_cache_dtype=info.kv_cache_dtype,
            quantization=info.quantization,
            vocab_size=info.vocab_size,
            max_model_len=sizes.max_model_len,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_cached_tokens=sizes.num_device_blocks * info.block_size,
            block_size=info.block_size,
            max_logprobs=info.max_logprobs,
            eos_token_ids=_ends(info, tokenizer),
            tokenizer=tokenizer,
            tokenizer_sha256=info.tokenizer_sha256,
        )

    def with_worker(self, info: worker_pb2.WorkerInfo, sizes: worker_pb2.InitializeResponse) -> ServedModel:
        """What is taken with one more worker of this model."""
        return replace(
            self,
            max_model_len=max(self.max_model_len, sizes.max_model_len),
            max_num_seqs=max(self.max_num_seqs, sizes.max_num_seqs),
            max_num_batched_tokens=max(self.max_num_batched_tokens, sizes.max_num_batched_tokens),
            block_size=info.block_size,  # that of all workers there are
            max_cached_tokens=max(self.max_cached_tokens, sizes.num_device_blocks * info.block_size),
        )


def _ends(info: worker_pb2.WorkerInfo, tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the model's configs name, and the tokenizer's EOS, as with vLLM: a fine-tune may have its own end in the
    tokenizer alone, and its base's in the configs."""
    own = tokenizer.eos_token_id
    has_more = own is not None and own < info.vocab_size and own not in info.eos_token_ids
    return (*info.eos_token_ids, own) if own is not None and has_more else tuple(info.eos_token_ids)


def fingerprint_of(info: worker_pb2.WorkerInfo, tokenizer_sha256: str) -> str:
    """The same where a request goes on with the same tokens: weights, arithmetic and text. 32 hex digits.

    The text is that of the tokenizer in use, which may be another than the worker's (`--tokenizer`).
    """
    parts = [info.model_hash, info.dtype, info.kv_cache_dtype, info.quantization, tokenizer_sha256]
    parts += [info.instructions] if info.instructions else []
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
