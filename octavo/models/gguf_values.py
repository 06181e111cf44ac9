"""Values of a GGUF file's keys, each of the type that it is to have: a file may give a key any type.

`values` is key -> value, as `GgufFile` reads it. All raise GGUFError, which names the key, for a value of another type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.errors import GGUFError

Values = Mapping[str, Any]
TOKENS = "tokenizer.ggml.tokens"
_NO_TOKEN = (-1, 2**32 - 1)  # as llama.cpp has it, and what its u32 makes of that


def lacking(key: str) -> GGUFError:
    """Of a file without a key that has to be there."""
    return GGUFError(f"the file lacks {key!r}")


def unlike(key: str, value: Any, wanted: str) -> GGUFError:
    """Of a value that is not what is `wanted`."""
    return GGUFError(f"{key} is {value!r:.60}, not {wanted}")


def text(values: Values, key: str, default: str = "") -> str:
    """`default` where the file has no such key."""
    value = values.get(key, default)
    if not isinstance(value, str):
        raise unlike(key, value, "a text")
    return value


def flag(values: Values, key: str, default: bool) -> bool:
    """Also of numbers that are 0 or 1."""
    value = values.get(key, default)
    if not isinstance(value, int) or value not in (0, 1):
        raise unlike(key, value, "true or false")
    return bool(value)


def integer(values: Values, key: str, default: int) -> int:
    """At least 0."""
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise unlike(key, value, "a whole number")
    return value


def texts(values: Values, key: str) -> list[str]:
    """Raises GGUFError for a missing key, too."""
    return _list(values, key, str, "a list of texts")


def numbers(values: Values, key: str) -> list[float]:
    """Likewise."""
    return _list(values, key, (int, float), "a list of numbers")


def integers(values: Values, key: str) -> list[int]:
    """Likewise."""
    return _list(values, key, int, "a list of whole numbers")


def token_id(values: Values, name: str) -> int | None:
    """The id in `tokenizer.ggml.NAME_token_id`; None where the file names no such token. Raises GGUFError for one that
    is not among its tokens."""
    value = values.get(key := f"tokenizer.ggml.{name}_token_id")
    if value is None or value in _NO_TOKEN:
        return None
    if TOKENS not in values:
        raise lacking(TOKENS)
    count = len(values[TOKENS]) if isinstance(values[TOKENS], list) else 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise unlike(key, value, f"the id of one of {count} tokens")
    return value


def _list(values: Values, key: str, kind: type | tuple[type, ...], wanted: str) -> list[Any]:
    if key not in values:
        raise lacking(key)
    found = values[key]
    if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
        raise unlike(key, found, wanted)
    return found
