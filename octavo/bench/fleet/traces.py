"""Public traces as requests: Mooncake's JSON lines, with prefixes, and Azure's CSV, without."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from octavo.bench.fleet.requests import OWN_TEXT, Content, Request

BLOCK_TOKENS = 512  # that one of Mooncake's hash ids stands for
MAX_TOKENS = 1 << 24  # of one prompt or answer: more is no length but a mistake
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class _Row(NamedTuple):
    line: int
    at_ms: float
    content: Content
    num_output_tokens: int


def read(path: Path, most: int | None = None, speedup: float = 1.0) -> list[Request]:
    """The first `most` requests of a trace in order of arrival, the first at time 0, `speedup` times as fast.

    Raises ValueError naming the file, and the line that is wrong; OSError where it cannot be read.
    """
    requests: list[Request] = []
    last_ms = start_ms = -math.inf
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            for row in _rows(lines):
                if row.at_ms < last_ms:
                    raise ValueError(f"line {row.line}: it came before the request of the line before")
                last_ms = row.at_ms
                start_ms = start_ms if requests else row.at_ms
                at_ns = round((row.at_ms - start_ms) / speedup * 1e6)
                requests.append(Request(at_ns, row.content, row.num_output_tokens))
                if len(requests) == most:
                    break
    except UnicodeDecodeError:
        raise ValueError(f"{path}: no text in UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from None
    if not requests:
        raise ValueError(f"{path}: no requests in it")
    return requests


def _rows(lines: Iterable[str]) -> Iterator[_Row]:
    """Rows of either format; the first character says which it is. Raises ValueError with the line that is wrong."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        return
    is_json = first[1].lstrip("\ufeff \t").startswith("{")
    if not is_json:
        _check_header(first[1])
    for number, line in [first, *numbered] if is_json else numbered:
        try:
            yield _of_mooncake(number, line) if is_json else _of_azure(number, line)
        except (ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from None


def _check_header(line: str) -> None:
    names = tuple(name.strip() for name in next(csv.reader([line.lstrip("\ufeff")])))
    if names != _AZURE:
        wanted = f"a JSON object with `timestamp` (Mooncake), or the names {','.join(_AZURE)} (Azure)"
        raise ValueError(f"line 1: it begins with {line.strip()[:40]!r}, neither {wanted}")


def _of_mooncake(number: int, line: str) -> _Row:
    """`{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}`; without ids nothing is shared."""
    try:
        entry = json.loads(line)
    except ValueError:
        raise ValueError("no JSON") from None
    if not isinstance(entry, dict):
        raise ValueError("no JSON object")
    at_ms = entry.get("timestamp")
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not math.isfinite(at_ms):
        raise ValueError(f"timestamp is {at_ms!r}, and no number of milliseconds")
    num_prompt_tokens = _length("input_length", entry.get("input_length"), least=1)
    ids = entry.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < OWN_TEXT for each in ids):
        raise ValueError("hash_ids is no list of numbers from 0 on")
    if len(ids) > (most := -(-num_prompt_tokens // BLOCK_TOKENS)):
        raise ValueError(f"{len(ids)} hash_ids for {most} blocks of {BLOCK_TOKENS} tokens")
    lengths = [min(BLOCK_TOKENS, num_prompt_tokens - BLOCK_TOKENS * place) for place in range(len(ids))]
    content = tuple(zip(ids, lengths, strict=True))
    if (rest := num_prompt_tokens - sum(lengths)) > 0:
        content = (*content, (OWN_TEXT + number, rest))
    return _Row(number, at_ms, content, max(1, _length("output_length", entry.get("output_length"))))


def _of_azure(number: int, line: str) -> _Row:
    """`2023-11-16 18:15:46.6805900,374,44`; nothing is shared."""
    fields = next(csv.reader([line]))
    if len(fields) != len(_AZURE):
        raise ValueError(f"{len(fields)} fields, not {len(_AZURE)}")
    at, *lengths = (field.strip() for field in fields)
    try:
        moment = datetime.fromisoformat(at)
    except ValueError:
        raise ValueError(f"TIMESTAMP is {at!r}, and no time") from None
    prompt, output = (int(text) if text.isdecimal() else text for text in lengths)
    content = ((OWN_TEXT + number, _length("ContextTokens", prompt, least=1)),)
    at_ms = (moment.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds() * 1e3
    return _Row(number, at_ms, content, max(1, _length("GeneratedTokens", output)))


def _length(name: str, value: Any, least: int = 0) -> int:
    """An answer of no tokens counts as one token, a server's shortest."""
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        raise ValueError(f"{name} is {value!r}, and no number of tokens from {least} to {MAX_TOKENS}")
    return value
