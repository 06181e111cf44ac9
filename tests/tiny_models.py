"""Tiny models in Hugging Face folders, made on the spot: real format, uneven sizes, random but varied weights.

Written through `transformers`, which is thereby the oracle for reading them. The tokenizer is that of
`octavo.bench.byte_tokenizer`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.bench.byte_tokenizer import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    IM_END,
    IM_START,
    NUM_PADDING_TOKENS,
    write_byte_tokenizer,
)

__all__ = ["CHAT_TEMPLATE", "END_OF_TEXT", "IM_END", "IM_START", "NUM_PADDING_TOKENS", "write_byte_tokenizer"]


def make_tiny_llama(
    folder: str | Path,
    *,
    seed: int = 0,
    vocab_size: int = 1031,
    hidden_size: int = 60,
    num_layers: int = 3,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    intermediate_size: int = 157,
    max_position_embeddings: int = 2048,
    tie_word_embeddings: bool = False,
    **config: Any,
) -> Path:
    """Write a model and its tokenizer to `folder` and return it; `config` goes to `LlamaConfig` as it is."""
    from transformers import LlamaConfig

    model_config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        **config,
    )
    return make_tiny_model(folder, model_config, seed)


def make_tiny_model(folder: str | Path, config: Any, seed: int = 0) -> Path:
    """Write a model of any `transformers` configuration and its tokenizer to `folder` and return it."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    folder = Path(folder)
    config.bos_token_id = config.pad_token_id = END_OF_TEXT
    config.eos_token_id = IM_END
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(_varied(name, weight.shape, generator))
    model.generation_config = GenerationConfig(bos_token_id=END_OF_TEXT, eos_token_id=IM_END, pad_token_id=END_OF_TEXT)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder, config.vocab_size)
    return folder


def _varied(name: str, shape: Any, generator: Any) -> Any:
    """Weights so large that attention and the layers outweigh a token's own embedding: greedy output then wanders."""
    import torch

    values = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return 0.2 * values
    if len(shape) == 1:  # of a norm
        return 1 + 0.2 * values
    if "embed" in name or ".wte." in name or ".wpe." in name:
        return 0.3 * values
    return values * (1.6 / shape[-1] ** 0.5)
