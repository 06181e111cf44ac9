"""Rotary position embedding: what a configuration says of it, and the table of cosines and sines that kernels read.

Angles are `position * frequency[i]`, frequency[i] = theta^(-2 i / size) (Su et al. 2021, arXiv:2104.09864). To reach
beyond the length of training, `linear` divides all frequencies; `llama3` (Llama 3.1 report, arXiv:2407.21783) those of
long wavelengths; `yarn` (Peng et al. 2023, arXiv:2309.00071) too, blended by rotations within the trained length, and
scales cosines and sines; `longrope` (Ding et al. 2024, arXiv:2402.13753) divides each by a factor of its own; `dynamic`
raises theta with the length ("NTK-aware", described in section 3.1 of YaRN).

`dynamic` and `longrope` change their frequencies with the length of a sequence, which keys that are in a cache already
do not follow. So both go by the longest sequence that is admitted: as trained, unless a longer `max_model_len` is set
for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from worker_svc.models.raw_config import RawConfig

_ROWS_AT_ONCE = 1 << 14  # of a table, while it is made

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn queries and keys."""

    size: int  # elements of a head that are turned, the first ones
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    # For llama3, yarn, longrope, dynamic: the length of training in tokens.
    original_max_position_embeddings: int = 0
    # For llama3: wavelengths beyond original / low_freq_factor are divided by `factor`, those within
    # original / high_freq_factor are kept, those between are blended.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # For yarn: frequencies that turn more than `beta_fast` times in the length of training are kept, those that turn
    # less than `beta_slow` times divided by `factor`; `truncate` rounds the borders outwards.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    # For longrope, size / 2 numbers each.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    magnitude: float = 1.0  # of cosines and sines; for yarn and longrope

    def table_bytes(self, max_model_len: int) -> int:
        """What `rotary_table` takes, also while it is made."""
        return max_model_len * self.size * 4

    def default_len(self, max_positions: int) -> int:
        """Tokens in a sequence, unless `max_model_len` is larger; `max_positions` is the model's own number."""
        if self.kind == "longrope":
            return min(self.original_max_position_embeddings, max_positions)
        return max_positions

    def longest(self, max_positions: int) -> int:
        """The largest `max_model_len` that is accepted."""
        if self.kind in ("yarn", "dynamic"):
            return max(max_positions, int(self.factor * self.original_max_position_embeddings))
        return max_positions


def read_rope(
    raw: RawConfig, head_size: int, theta: float = 10000.0, kind_aliases: dict[str, str] | None = None
) -> Rope:
    """The rotation of all layers alike; `theta` where the file names none. Raises ModelError."""
    return rope_from(raw, rope_parameters(raw), head_size, raw.number("rope_theta", theta), kind_aliases)


def rope_parameters(raw: RawConfig, layer_type: str = "") -> RawConfig:
    """What a file says of its rotation, or of that of one type of layers where types have their own.

    Since transformers 5 it stands in `rope_parameters`, before that in `rope_scaling`. Where a file has both, that
    library goes by `rope_scaling`, which users add to files of theirs to stretch a model, and with types of layers it
    adds its keys to those of the type.
    """
    new, old = raw.part("rope_parameters"), raw.part("rope_scaling")
    if layer_type:
        return old.merged(**dict(new.part(layer_type).items()))
    return old or new


def rope_from(
    raw: RawConfig, parameters: RawConfig, head_size: int, theta: float, kind_aliases: dict[str, str] | None = None
) -> Rope:
    """One kind of layers' parameters; `theta` where they name none."""
    theta = parameters.positive_number("rope_theta", theta, above=1.0)
    share = parameters.number("partial_rotary_factor", raw.number("partial_rotary_factor", 1.0))
    size = int(head_size * share)
    if size % 2 or not 0 < size <= head_size:
        raise raw.error(f"{size} of a head's {head_size} elements are turned; rotary embedding needs pairs")
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    kind = (kind_aliases or {}).get(kind, kind)
    if kind not in KINDS:
        raise raw.error(f"rope type {kind!r} is not supported; known: {', '.join(KINDS)}")
    if kind == "default":
        return Rope(size, theta, kind)
    if kind in ("linear", "llama3", "dynamic") and "factor" not in parameters:
        raise raw.error(f"rope type {kind} lacks 'factor'")
    if kind == "linear":
        return Rope(size, theta, kind, parameters.positive_number("factor"))
    longest = raw.integer("max_position_embeddings")
    if kind == "dynamic":
        return Rope(size, theta, kind, parameters.positive_number("factor"), longest)
    original = raw.integer(
        "original_max_position_embeddings", parameters.integer("original_max_position_embeddings", longest)
    )
    factor = parameters.positive_number("factor", longest / original)
    if kind == "llama3":
        low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
        return Rope(size, theta, kind, factor, original, low, high)
    if kind == "yarn":
        return Rope(
            size,
            theta,
            kind,
            factor,
            original,
            beta_fast=parameters.positive_number("beta_fast") if parameters.get("beta_fast") else 32.0,
            beta_slow=parameters.positive_number("beta_slow") if parameters.get("beta_slow") else 1.0,
            truncate=parameters.flag("truncate", True),
            magnitude=parameters.number("attention_factor", _yarn_magnitude(factor, parameters)),
        )
    if original == 1:
        raise raw.error("rope type longrope goes by a trained length, and original_max_position_embeddings is 1")
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(
        size,
        theta,
        kind,
        factor,
        original,
        short_factors=parameters.numbers("short_factor", size // 2),
        long_factors=parameters.numbers("long_factor", size // 2),
        magnitude=parameters.number("attention_factor", magnitude),
    )


def rotary_table(rope: Rope, max_model_len: int, device: str | torch.device) -> torch.Tensor:
    """f32[max_model_len, rope.size]: the cosines of a position's size / 2 angles, then their sines."""
    exponents = torch.arange(0, rope.size, 2, dtype=torch.float32) / rope.size
    frequencies = _stretched(1.0 / rope.theta**exponents, rope, max_model_len)
    table = torch.empty(max_model_len, rope.size)
    for first in range(0, max_model_len, _ROWS_AT_ONCE):  # in place, as a table of a million positions is large
        rows = table[first : first + _ROWS_AT_ONCE]
        angles = torch.arange(first, first + len(rows), dtype=torch.float32)[:, None] * frequencies
        torch.cat((angles.cos(), angles.sin()), dim=-1, out=rows)
    return table.mul_(rope.magnitude).to(device)


def _stretched(frequencies: torch.Tensor, rope: Rope, max_model_len: int) -> torch.Tensor:
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low, high = rope.low_freq_factor, rope.high_freq_factor
        # 0 where a wavelength is too long to be kept, 1 where it is kept, a blend between.
        kept = ((rope.original_max_position_embeddings / wavelengths - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / rope.factor)
    if rope.kind == "dynamic" and max_model_len > (trained := rope.original_max_position_embeddings):
        share = torch.arange(0, rope.size, 2, dtype=torch.float32) / rope.size
        # theta times this ^ (size / (size - 2)), with which the lowest frequency is divided by all of it.
        stretch = rope.factor * max_model_len / trained - (rope.factor - 1)
        return frequencies * stretch ** (-share * rope.size / (rope.size - 2))
    if rope.kind == "yarn":
        return _yarn(frequencies, rope)
    if rope.kind == "longrope":
        is_long = max_model_len > rope.original_max_position_embeddings
        return frequencies / torch.tensor(rope.long_factors if is_long else rope.short_factors)
    return frequencies


def _yarn(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    def place(turns: float) -> float:
        """Which frequency, as a fraction, turns so many times within the length of training."""
        length = rope.original_max_position_embeddings
        return rope.size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = place(rope.beta_fast), place(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    width = high - low or 0.001  # where both borders fall together, a step
    kept = 1 - ((torch.arange(rope.size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies * kept + frequencies / rope.factor * (1 - kept)


def _yarn_magnitude(factor: float, parameters: RawConfig) -> float:
    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    own, all_dims = parameters.number("mscale", 0.0), parameters.number("mscale_all_dim", 0.0)
    magnitude = grown(own) / grown(all_dims) if own and all_dims else grown(1.0)
    # Unlike `attention_factor`, which stands for all of it; transformers passes over this key, vLLM and SGLang do not.
    return magnitude * parameters.number("attn_factor", 1.0)
