"""Models with the sizes of real ones, and weights that are made up: at a worker's start, or in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.bench.byte_tokenizer import END_OF_TEXT, IM_END, write_byte_tokenizer

_TOKENIZER_SIZE = 1024  # the ids above decode to nothing, as the padding rows of a vocabulary do

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
LLAMA_3_2_1B: dict[str, Any] = {
    **LLAMA_3_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SMALL = ["--kv-cache-memory=0.05", "--swap-space=0"]  # flags of a worker for a tiny model on a CPU
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1031,
}


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int = 0) -> None:
    """Writes config, tokenizer and bfloat16 weights, normal with a deviation of 0.02, which need all their bits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model(folder, config, "bfloat16")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    write_model(folder, config, "bfloat16")  # as it was: the library writes what it makes of it


def write_model(folder: Path, config: dict[str, Any], dtype: str, is_tiny: bool = False) -> dict[str, Any]:
    """Writes a folder for `--load-format dummy` and returns its configuration; `is_tiny`: the same, but small."""
    config = {**config, **(TINY if is_tiny else {}), "dtype": dtype, "torch_dtype": dtype}
    config |= {"bos_token_id": END_OF_TEXT, "eos_token_id": IM_END, "pad_token_id": END_OF_TEXT}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    write_byte_tokenizer(folder, _TOKENIZER_SIZE)
    return config
