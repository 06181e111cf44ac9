"""How many tokens an answer took, in the words of each API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from protos import inference_pb2 as pb


def usage_of(counts: Iterable[pb.Usage], shows_output: bool = True) -> dict[str, Any]:
    """Of completions and chats: of all prompts together."""
    prompt, completion, cached = _sums(counts)
    completion = completion if shows_output else 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def usage_of_response(counts: Iterable[pb.Usage]) -> dict[str, Any]:
    """Of responses."""
    prompt, completion, cached = _sums(counts)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def _sums(counts: Iterable[pb.Usage]) -> tuple[int, int, int]:
    prompt = completion = cached = 0
    for each in counts:
        prompt, completion = prompt + each.prompt_tokens, completion + each.completion_tokens
        cached += each.cached_tokens
    return prompt, completion, cached
