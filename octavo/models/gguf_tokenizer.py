"""Builds the tokenizer files of a Hugging Face folder from the metadata of a GGUF file.

A GGUF file has the vocabulary, merges or scores, token types, special token ids and the chat template, and names its
pre-tokenizer by one word. What such a word means is the table below, taken from the models' own tokenizer.json; a
word that is not there is refused, because splitting text in another way gives wrong ids in silence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from octavo.models.errors import GGUFError
from octavo.models.gguf_values import TOKENS, flag, integers, numbers, text, texts, token_id

_TYPES = "tokenizer.ggml.token_type"
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types
# What ends a turn, of Llama 3, Qwen, Phi and Gemma.
ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<end_of_turn>",
)


_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's special tokens


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How text is cut before bytes are merged."""

    split: str = ""  # a pattern of pieces; empty: GPT-2's
    has_digits_alone: bool = False
    ignores_merges: bool = False  # whether a piece that is a token stays whole
    is_composed: bool = False  # whether text is brought into Unicode's form NFC
    has_bos: bool = False  # whether a text begins with BOS where the file does not say


_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"  # said twice: a mark of a letter may be it or a part of the word
_CASED_WORDS = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|"

_GPT2, _DIGITS = _Splitting(), _Splitting(has_digits_alone=True)
_LLAMA3 = _Splitting(_CONTRACTED + _WORDS + r"\p{N}{1,3}|" + _SIGNS + _SPACES, ignores_merges=True, has_bos=True)
_QWEN2 = _Splitting(_CONTRACTED + _WORDS + r"\p{N}|" + _SIGNS + _SPACES, is_composed=True)
_TEKKEN = _Splitting(_CASED_WORDS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES, ignores_merges=True, has_bos=True)
_BLOOM = _Splitting(" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+")
_SPLITTINGS = {
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "gpt-2": _GPT2,
    "qwen2": _QWEN2,
    "tekken": _TEKKEN,
    "bloom": _BLOOM,
}


def tokenizer_files(metadata: dict[str, Any], model_max_length: int) -> dict[str, str]:
    """File name -> text of tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja.

    `metadata` is GGUF key -> value. Raises `GGUFError`.
    """
    try:
        tokens = texts(metadata, TOKENS)
        tokenizer = _build(metadata, tokens)
    except KeyError as error:
        raise GGUFError(f"the file lacks {error.args[0]!r}") from None
    except GGUFError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise GGUFError(f"its tokenizer cannot be built: {' '.join(str(error).split())}") from error
    _add_tokens(tokenizer, metadata)
    _add_bos(tokenizer, metadata, tokens)

    special = _special_tokens(metadata, tokens)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    files = {"tokenizer.json": tokenizer.to_str(pretty=False), "special_tokens_map.json": _json(special)}
    if template := text(metadata, "tokenizer.chat_template"):
        config["chat_template"] = template
        files["chat_template.jinja"] = template
    files["tokenizer_config.json"] = _json(config)
    return files


def _build(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    kind = metadata["tokenizer.ggml.model"]
    if kind == "gpt2":
        merges = [_pair(merge) for merge in texts(metadata, "tokenizer.ggml.merges")]
        return _byte_level(tokens, merges, text(metadata, "tokenizer.ggml.pre", "default"))
    if kind == "llama":
        unknown = tokens[token_id(metadata, "unknown") or 0]
        merges = merges_from_scores(tokens, numbers(metadata, "tokenizer.ggml.scores"))
        space_prefix = flag(metadata, "tokenizer.ggml.add_space_prefix", True)
        return _sentencepiece(tokens, merges, unknown, space_prefix)
    raise GGUFError(f"tokenizer model {kind!r} cannot be converted; 'gpt2' and 'llama' can")


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _byte_level(tokens: list[str], merges: list[tuple[str, str]], pre: str) -> Tokenizer:
    if pre not in _SPLITTINGS:
        raise GGUFError(f"pre-tokenizer {pre!r} is not known; known are {', '.join(_SPLITTINGS)}")
    splitting = _SPLITTINGS[pre]
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.has_digits_alone:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.split:
        steps.append(pre_tokenizers.Split(Regex(splitting.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splitting.split))
    vocab = {token: index for index, token in enumerate(tokens)}
    for left, right in merges:
        if left + right not in vocab:  # which ends `tokenizers` in a panic where it is longer than any token
            raise GGUFError(f"tokenizer.ggml.merges makes {left + right!r:.60}, which is no token of the file")
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=splitting.ignores_merges))
    if splitting.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _is_phi3(metadata: dict[str, Any]) -> bool:
    return bool(metadata.get("general.architecture") == "phi3" and metadata["tokenizer.ggml.model"] == "llama")


def _sentencepiece(tokens: list[str], merges: list[tuple[str, str]], unknown: str, space_prefix: bool) -> Tokenizer:
    """`space_prefix`: a space is put before every part between special tokens, as in llama.cpp.

    Not where [INST] is a token, as in the third version of Mistral's tokenizer: templates for it write that space
    themselves, and the published one puts a space before the first part alone."""
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    if space_prefix and "[INST]" not in tokens:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        scheme = "first" if space_prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """The merges of a sentencepiece BPE vocabulary, which stores none: every way to cut a token into two others, best
    score first; among equal scores the longer left part first, as `transformers` orders them."""
    ids = {token: index for index, token in enumerate(tokens)}
    found = [
        (score, token[:cut], token[cut:])
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def typed_tokens(metadata: dict[str, Any]) -> list[tuple[str, int]]:
    """The vocabulary in its order, text and type of each, where the file has types. What ends a turn is a control token
    by its text, as in llama.cpp: converters wrote other types for Phi-3's and Gemma's."""
    if TOKENS not in metadata or _TYPES not in metadata:
        return []
    typed = zip(texts(metadata, TOKENS), integers(metadata, _TYPES), strict=False)
    return [(token, _CONTROL if token in ENDS else kind) for token, kind in typed]


def _add_tokens(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    """Control tokens are special; user-defined ones are matched whole but stay text.

    Those of Phi-3's chats take in the white space behind them, as its template counts on; files do not say it."""
    typed = typed_tokens(metadata)
    stripped = [_is_phi3(metadata) and token not in _UNSTRIPPED for token, _ in typed]
    special, plain = (
        [
            AddedToken(token, normalized=False, special=wanted == _CONTROL, rstrip=strips)
            for (token, kind), strips in zip(typed, stripped, strict=True)
            if kind == wanted
        ]
        for wanted in (_CONTROL, _USER_DEFINED)
    )
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_bos(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    """Prompts begin with the BOS token where the file says so. Those of sentencepiece, Llama 3 and Tekken do unless it
    denies it, as in llama.cpp: files made of a tokenizer.json whose template adds BOS have no key for it."""
    index = token_id(metadata, "bos")
    if metadata["tokenizer.ggml.model"] == "llama":
        usual = True
    else:
        usual = _SPLITTINGS[text(metadata, "tokenizer.ggml.pre", "default")].has_bos
    wanted = flag(metadata, "tokenizer.ggml.add_bos_token", usual)
    if wanted and index is not None:
        bos = tokens[index]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, index)]
        )


def _special_tokens(metadata: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: token_id(metadata, key) for name, key in names.items()}
    return {name: tokens[index] for name, index in ids.items() if index is not None}


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
