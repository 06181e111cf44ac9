"""Small tokenizers, one a family of decoders, as the files a model's folder would have."""

from __future__ import annotations

import base64
import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer

TEXTS = [
    "the quick brown fox jumps over the lazy dog", "  two  spaces\t\ttabs\n\n\nnewlines \r\n",
    "日本語のテキスト、中文 한국어 Привет, мир! ไทย العربية हिन्दी", "👩‍👩‍👧‍👦🏳️‍🌈 emoji 🤷🏽‍♀️ naïve café",
    "x = [i**2 for i in range(100) if i%3==0]  # 3.14159e-10", "12345 67 8.90", "don't I'll WE'VE they're",
    "a" * 50, "", " ", "\x00\x01\x7f", "<s>hi</s>there<extra>", "é\ufffdé",
]  # fmt: skip


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, SmolLM: bytes, some merges, special tokens, and added tokens outside the byte alphabet."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(
        [
            AddedToken("two words", normalized=False),
            AddedToken("日本", normalized=False),
            AddedToken("ÿ", normalized=False),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<extra>", special=True)])
    return tokenizer


def sentencepiece(strip: bool = True) -> Tokenizer:
    """As Llama 2 (with `strip`) and Gemma (without): byte fallback, "▁" for a space, BOS in front."""
    words = ["▁", *"theouick ,.!=0123456789dgazy", "▁t", "he", "▁the", "▁▁", "日", "本", "▁é", "a▁b"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(words)]
    tokens = list(dict.fromkeys(tokens))
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    scheme: Any = "first" if strip else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<extra>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace(prepend: bool = True) -> Tokenizer:
    """As T5: the decoder is Metaspace, which drops the marks of the first token."""
    tokens = ["<unk>", "<s>", "▁", "▁▁", "▁the", "▁a▁b", "t", "h", "e", "日", "<0xE6>", "▁."]
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    scheme: Any = "always" if prepend else "never"
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme=scheme)
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    return tokenizer


def word_piece() -> Tokenizer:
    """A decoder that Octavo has no table for."""
    tokens = ["[UNK]", "[SEP]", "the", "##se", "fox", "jump", "##ing", "!", ",", "don", "'", "t"]
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens([AddedToken("[SEP]", normalized=False)])
    return tokenizer


def no_decoder() -> Tokenizer:
    """Tokens joined by spaces."""
    return Tokenizer(WordLevel({token: index for index, token in enumerate(["<unk>", "a", "b", "cd"])}, "<unk>"))


def files_of(tokenizer: Tokenizer, **config: Any) -> dict[str, bytes]:
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def panicking_files() -> dict[str, bytes]:
    """Of a tokenizer over which the library's Rust code panics when it is read: a trie without a node."""
    added = {"id": 1, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    whole = {
        "version": "1.0",
        "added_tokens": [added | {"special": False}],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4)).decode()},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "<s>": 1}, "unk_token": "a"},
    }
    return {"tokenizer.json": json.dumps(whole).encode()}
