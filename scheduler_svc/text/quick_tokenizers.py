"""Whether a tokenizer takes a short text quickly whatever is in it, as far as its parts say.

Regular expressions alone can make a tokenizer slow beyond all bounds, and a model may bring any: those are known here
that models of this field have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tokenizers

# Of regular expressions that split text into words, each alternative. None looks at a letter more than a few times,
# but those that look for the end of some spaces, which is the square of their number at worst.
_QUICK = frozenset(
    {
        *(r"\s+", r"\s+(?!\S)", r"\s*[\r\n]+", r"\s*[\r\n]", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+"),
        *(r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r" ?\p{N}+", r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\d", r"[0-9]"),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" {2,}", " "),
        *(
            r"'s",
            r"'t",
            r"'re",
            r"'ve",
            r"'m",
            r"'ll",
            r"'d",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            r"'(?i:[sdmt]|ll|ve|re)",
        ),
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    }
)


def is_quick(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether all its regular expressions are known. Whatever else a tokenizer may be made of is quick."""
    parts = (part.__getstate__() for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) if part is not None)
    return all(
        alternative in _QUICK
        for part in parts
        for pattern in _patterns(json.loads(part))
        for alternative in alternatives(pattern)
    )


def _patterns(part: Any) -> Iterator[str]:
    values = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    if isinstance(part, dict) and isinstance(part.get("Regex"), str):
        yield part["Regex"]
    for value in values:
        yield from _patterns(value)


def alternatives(pattern: str) -> list[str]:
    """Of a regular expression, as they are written."""
    found, depth, in_class, start, position = list[str](), 0, 0, 0, 0
    while position < len(pattern):
        letter = pattern[position]
        if letter == "\\":
            position += 1
        elif letter == "[" or in_class:
            in_class += (letter == "[") - (letter == "]")
        elif letter == "|" and not depth:
            found.append(pattern[start:position])
            start = position + 1
        else:
            depth += (letter == "(") - (letter == ")")
        position += 1
    return [*found, pattern[start:]]
