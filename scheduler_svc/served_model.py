"""The one model that a scheduler serves: what its workers said of it, with its tokenizer. Another takes its place only
once no worker of it is left, see `WorkerPool`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from protos import worker_pb2
from scheduler_svc.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Lengths are in tokens, and those of the largest worker. `max_cached_tokens` is what one whole cache holds."""

    name: str
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
        return cls(
            name=name or info.model,
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
            eos_token_ids=tuple(info.eos_token_ids),
            tokenizer=tokenizer,
            tokenizer_sha256=info.tokenizer_sha256,
        )

    def difference(self, info: worker_pb2.WorkerInfo) -> str | None:
        """Why a worker cannot serve this model, if it cannot."""
        if info.model_hash != self.model_hash:
            return f"it serves {info.model} ({info.model_hash[:12]}), this pool {self.name} ({self.model_hash[:12]})"
        for name in ("dtype", "kv_cache_dtype", "quantization"):
            # A request that moves to another worker goes on with the same tokens only where it is computed alike.
            if (theirs := getattr(info, name)) != (ours := getattr(self, name)):
                return f"its {name} is {theirs or 'none'}, the pool's {ours or 'none'}"
        if info.tokenizer_sha256 != self.tokenizer_sha256:
            return f"its tokenizer ({info.tokenizer_sha256[:12]}) is not the pool's ({self.tokenizer_sha256[:12]})"
        if info.block_size != self.block_size:
            return f"its cache blocks hold {info.block_size} tokens, the pool's {self.block_size}"
        return None

    @property
    def fingerprint(self) -> str:
        """The same where a request goes on with the same tokens: weights, arithmetic and text. 32 hex digits.

        The text is that of the tokenizer in use, which may be another than the workers' (`--tokenizer`).
        """
        parts = (self.model_hash, self.dtype, self.kv_cache_dtype, self.quantization, self.tokenizer.sha256)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def with_worker(self, info: worker_pb2.WorkerInfo, sizes: worker_pb2.InitializeResponse) -> ServedModel:
        """What the pool takes with one more worker in it."""
        return replace(
            self,
            max_model_len=max(self.max_model_len, sizes.max_model_len),
            max_num_seqs=max(self.max_num_seqs, sizes.max_num_seqs),
            max_num_batched_tokens=max(self.max_num_batched_tokens, sizes.max_num_batched_tokens),
            max_cached_tokens=max(self.max_cached_tokens, sizes.num_device_blocks * info.block_size),
        )
