"""Tiny Llama models in Hugging Face folders, made on the spot: real format, uneven sizes, random but varied weights.

Written through `transformers`, which is thereby the oracle for reading them. The tokenizer is byte-level: it encodes
a byte as one token; ids from 259 on decode to two bytes each (often half a character), the last four ids to nothing, as
the padding rows of real checkpoints do.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

END_OF_TEXT, IM_START, IM_END = 256, 257, 258
NUM_PADDING_TOKENS = 4

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


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
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    folder = Path(folder)
    model_config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=END_OF_TEXT,
        eos_token_id=IM_END,
        pad_token_id=END_OF_TEXT,
        **config,
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(model_config)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(_varied(name, weight.shape, generator))
    model.generation_config = GenerationConfig(bos_token_id=END_OF_TEXT, eos_token_id=IM_END, pad_token_id=END_OF_TEXT)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder, vocab_size)
    return folder


def write_byte_tokenizer(folder: str | Path, vocab_size: int, seed: int = 0) -> None:
    """Write tokenizer.json and tokenizer_config.json for ids below `vocab_size` - 4."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = _byte_characters()
    vocab = {character: byte for byte, character in enumerate(alphabet)}
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab |= {token: END_OF_TEXT + i for i, token in enumerate(specials)}
    numbers = random.Random(seed)
    while len(vocab) < vocab_size - NUM_PADDING_TOKENS:
        vocab.setdefault(numbers.choice(alphabet) + numbers.choice(alphabet), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _varied(name: str, shape: Any, generator: Any) -> Any:
    """Weights so large that attention and the layers outweigh a token's own embedding: greedy output then wanders."""
    import torch

    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * values
    if name.endswith("bias"):
        return 0.2 * values
    if "embed_tokens" in name:
        return 0.3 * values
    return values * (1.6 / shape[-1] ** 0.5)


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each of the 256 bytes (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]
