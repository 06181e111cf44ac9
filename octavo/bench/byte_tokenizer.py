"""A byte-level tokenizer made on the spot, for workers that have no model: an id below 256 is the byte of that number.

Ids from 259 on decode to two bytes each (often half a character), the last four ids of a vocabulary to nothing, as the
padding rows of real checkpoints do.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from functools import cache
from pathlib import Path

from octavo.models.byte_letters import byte_letters

END_OF_TEXT, IM_START, IM_END = 256, 257, 258
NUM_PADDING_TOKENS = 4

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_byte_tokenizer(folder: str | Path, vocab_size: int, seed: int = 0) -> None:
    """Write tokenizer.json and tokenizer_config.json for ids below `vocab_size` - 4."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = byte_letters()
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


@cache
def byte_tokenizer_files(vocab_size: int, seed: int = 0) -> tuple[dict[str, bytes], str]:
    """The files of `write_byte_tokenizer` by name, and the hash that a worker tells of them."""
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(folder, vocab_size, seed)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    return files, hashlib.sha256(b"".join(files.values())).hexdigest()
