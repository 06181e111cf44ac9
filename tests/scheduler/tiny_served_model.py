"""A model as a scheduler knows it, with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.text.tokenizer import Tokenizer
from tests.tiny_models import END_OF_TEXT, IM_END, write_byte_tokenizer


def tiny_served_model(folder: Path) -> ServedModel:
    """Its tokenizer is written to `folder`."""
    write_byte_tokenizer(folder, 400)
    return ServedModel(
        name="tiny",
        fingerprint="0123456789abcdef0123456789abcdef",
        model_hash="",
        architecture="",
        dtype="float32",
        kv_cache_dtype="float32",
        quantization="",
        vocab_size=400,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=180,
        block_size=4,
        max_cached_tokens=48 * 4,
        max_logprobs=20,
        eos_token_ids=(IM_END, END_OF_TEXT),
        tokenizer=Tokenizer.from_folder(folder),
        tokenizer_sha256="",
    )
