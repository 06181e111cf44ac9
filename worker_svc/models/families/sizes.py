"""What every decoder has, and the keys that most files tell it by."""

from __future__ import annotations

from dataclasses import dataclass

from worker_svc.models.raw_config import RawConfig


@dataclass(frozen=True, slots=True)
class Sizes:
    """What every decoder has."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int  # tokens in a sequence
    tie_word_embeddings: bool


def read_sizes(raw: RawConfig) -> Sizes:
    """Under the keys that Llama and most after it use."""
    hidden, num_heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    num_kv_heads = raw.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise raw.error(f"{num_heads} heads do not divide by {num_kv_heads} key/value heads")
    return Sizes(
        hidden_size=hidden,
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=raw.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=raw.integer("head_dim", hidden // num_heads),
        max_positions=raw.integer("max_position_embeddings"),
        tie_word_embeddings=raw.flag("tie_word_embeddings"),
    )


def head_size_of(raw: RawConfig, hidden: int, num_heads: int) -> int:
    """Where no key says it. Raises ModelError where heads are not of one size."""
    if hidden % num_heads:
        raise raw.error(f"a hidden size of {hidden} does not divide by {num_heads} heads")
    return hidden // num_heads
