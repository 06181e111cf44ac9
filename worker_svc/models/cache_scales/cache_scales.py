"""What keys and values are divided by before a cache of eight bits stores them: a number for each layer and head.

    stored = clamp(x / scale, -448, 448)        read = stored * scale

float8_e4m3 has 3 bits of mantissa whatever the exponent, from 2^-6 to 448: a scale moves that range to where a head's
numbers are, and what it does within the range is nothing. Scales are fixed before a model is served. What they are
changes its tokens, so they belong to what a worker says that it serves (`digest`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.shared.cache import cache_dir
from octavo.shared.whole_files import replacing
from worker_svc.models.errors import ModelError

LARGEST = 448.0  # that float8_e4m3fn can tell
_LEAST_EXPONENT = -126  # of a float32 with all its bits, as kernels take scales
_MOST = float(np.finfo(np.float32).max)
_MARGIN = 2.0  # between what was measured and what can be told: a bit of exponent, of 4

Table = tuple[tuple[float, ...], ...]  # [layers][key/value heads]


@dataclass(frozen=True, slots=True)
class CacheScales:
    """Those of a whole model, all above 0."""

    key: Table
    value: Table

    @classmethod
    def ones(cls, num_layers: int, num_kv_heads: int) -> CacheScales:
        """Of a cache that holds keys and values as they are."""
        table = ((1.0,) * num_kv_heads,) * num_layers
        return cls(table, table)

    @classmethod
    def of_largest(cls, largest: torch.Tensor) -> CacheScales:
        """For keys and values of at most `largest` [layers, 2 (key, value), heads]: powers of two, so that dividing by
        them rounds nothing and two machines that differ in a last bit of `largest` have the same. 1 for heads of zeros.
        Raises ModelError for what is not finite.
        """
        if not bool(largest.isfinite().all()):
            raise ModelError("keys or values are not finite: no scale fits them")
        exponents = (largest.double() * (_MARGIN / LARGEST)).log2().ceil().clamp(min=_LEAST_EXPONENT)
        scales = torch.where(largest > 0, exponents.exp2(), 1.0)
        key, value = (tuple(map(tuple, part.tolist())) for part in scales.unbind(1))
        return cls(key, value)

    @classmethod
    def of_file(cls, path: Path, num_layers: int, num_kv_heads: int, model_hash: str) -> CacheScales:
        """What `write` wrote. Raises ModelError where it cannot be read or was made for another model."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        except ValueError:
            raise ModelError(f"{path} is no file of `octavo model calibrate`") from None
        if not isinstance(content, dict) or not all(_is_table(content.get(part)) for part in ("key", "value")):
            raise ModelError(f"{path} is no file of `octavo model calibrate`: it has no key and value scales above 0")
        if content.get("model_hash") != model_hash:
            raise ModelError(f"{path} was made for another model, {content.get('model')!r:.80}")
        key, value = (tuple(map(tuple, content[part])) for part in ("key", "value"))
        for table in (key, value):
            if len(table) != num_layers or {len(heads) for heads in table} != {num_kv_heads}:
                raise ModelError(f"{path} has no scales for {num_layers} layers of {num_kv_heads} key/value heads")
        return cls(key, value)

    def write(self, path: Path, model: str, model_hash: str, **facts: Any) -> None:
        """Raises OSError. `facts` say how they were found."""
        content = {"model": model, "model_hash": model_hash, **facts, "key": self.key, "value": self.value}
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode=0o666) as file:
            file.write(json.dumps(content) + "\n")

    @property
    def is_plain(self) -> bool:
        """Whether all are 1."""
        return all(scale == 1.0 for table in (self.key, self.value) for heads in table for scale in heads)

    @property
    def digest(self) -> str:
        """The same for the same numbers, in 8 hex digits; empty where all are 1."""
        if self.is_plain:
            return ""
        numbers = np.array([self.key, self.value], "<f4")
        return hashlib.sha256(numbers.tobytes()).hexdigest()[:8]

    def __str__(self) -> str:
        return self.digest or "1"

    def of_layer(self, layer: int, heads: range, device: torch.device) -> dict[str, torch.Tensor]:
        """key_scale and value_scale f32[heads] as kernels take them."""
        parts = {"key_scale": self.key, "value_scale": self.value}
        return {
            name: torch.tensor(table[layer][heads.start : heads.stop], dtype=torch.float32, device=device)
            for name, table in parts.items()
        }


def calibrated_path(model_hash: str) -> Path:
    """Where the scales of a model are kept that were measured on this machine."""
    return cache_dir() / "cache-scales" / f"{model_hash[:32]}.json"


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(heads, list)
        and all(isinstance(scale, int | float) and 2.0**_LEAST_EXPONENT <= scale <= _MOST for scale in heads)
        for heads in value
    )
