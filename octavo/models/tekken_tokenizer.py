"""Builds tokenizer.json from tekken.json, in which Mistral's models since NeMo have their tokenizer.

The file says everything itself: the pattern by which text is cut, tokens as bytes in the order in which they are made
(of all neighbours, those that form the earliest token are joined first), and special tokens, which have the first ids.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from octavo.models.byte_letters import byte_letters
from octavo.models.errors import TekkenError

_BOS, _EOS = "<s>", "</s>"


def tokenizer_json(data: bytes, config: Mapping[str, Any]) -> str:
    """The text of tokenizer.json. Raises `TekkenError`.

    data: the file. config: tokenizer_config.json, of which `add_bos_token` (default: true) and `add_eos_token` (false)
    count.
    """
    try:
        content = json.loads(data)
        settings = content["config"]
        special = _special_tokens(content, settings)
        size = settings.get("default_vocab_size") or len(special) + len(content["vocab"])
        tokens = [base64.b64decode(token["token_bytes"]) for token in content["vocab"][: size - len(special)]]
        return _build(settings["pattern"], special, tokens, config).to_str()
    except TekkenError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise TekkenError(f"this is no tekken file: {type(error).__name__} {' '.join(str(error).split())}") from None
    except Exception as error:  # the tokenizers library raises plain Exception
        raise TekkenError(f"it cannot be converted: {' '.join(str(error).split())}") from error


def _special_tokens(content: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """By id; those that the file reserves and does not name have names of their own."""
    if "special_tokens" not in content:
        raise TekkenError("it does not name its special tokens, as files of the first version; these are not supported")
    named = {token["rank"]: token["token_str"] for token in content["special_tokens"]}
    count = settings.get("default_num_special_tokens") or len(named)
    if not all(0 <= rank < count for rank in named):
        raise TekkenError(f"a special token has id {max(named)}, though there are {count}")
    return [named.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]


def _build(pattern: str, special: list[str], tokens: list[bytes], config: Mapping[str, Any]) -> Tokenizer:
    ids = {token: index for index, token in enumerate(tokens)}
    letters = byte_letters()

    def shown(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocab = {text: index for index, text in enumerate(special)}
    vocab |= {shown(token): len(special) + index for index, token in enumerate(tokens)}
    merges = [(shown(left), shown(right)) for token in tokens for left, right in _cuts(token, ids)]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    begin = [_BOS] if _BOS in vocab and config.get("add_bos_token", True) else []
    end = [_EOS] if _EOS in vocab and config.get("add_eos_token", False) else []
    if begin or end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end], special_tokens=[(text, vocab[text]) for text in (*begin, *end)]
        )
    return tokenizer


def _cuts(token: bytes, ids: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every way to make a token of two others: whichever two of them lie side by side, they are joined in its turn."""
    for cut in range(1, len(token)):
        if token[:cut] in ids and token[cut:] in ids:
            yield token[:cut], token[cut:]
