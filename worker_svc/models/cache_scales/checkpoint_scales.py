"""Scales of a cache of eight bits that a checkpoint carries, under the names that its makers give them.

    LAYER.self_attn.k_scale, .v_scale                        also below k_proj, v_proj, qkv_proj or attn
    LAYER.self_attn.k_proj.output_scale, v_proj likewise     of older files
    LAYER.self_attn.kv_scale                                 one for both

LAYER ends with its number. A scale is one number, or one for each key/value head. Towers that read pictures or sounds
beside the model have layers of the same names; their scales are of no cache here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from worker_svc.models.cache_scales.cache_scales import CacheScales, Table
from worker_svc.models.checkpoint.checkpoint_files import checkpoint_paths, detect_format, open_checkpoint
from worker_svc.models.checkpoint.stored_tensor import StoredTensor
from worker_svc.models.errors import ModelError
from worker_svc.models.raw_config import RawConfig

# In the order in which they are preferred; the number of the layer, and whose they are.
_LAYER = r"(?!.*(?:vision|visual|image|audio))(?:.*\.)?(\d+)\."
_NAMES = [
    re.compile(_LAYER + r"(?:\w+\.)*([kv])_scale"),
    re.compile(_LAYER + r"(?:\w+\.)*([kv])_proj\.output_scale"),
    re.compile(_LAYER + r"(?:\w+\.)*(kv)_scale"),
]
_OF_QUERIES = re.compile(_LAYER + r"(?:\w+\.)*(?:q_scale|prob_scale|q_proj\.output_scale)")


def is_cache_scale(name: str) -> bool:
    """Whether a tensor of this name is of the cache's scales, or of those that go with them for queries."""
    return any(pattern.fullmatch(name) for pattern in (*_NAMES, _OF_QUERIES))


def scales_of_checkpoint(
    folder: Path, load_format: str, num_layers: int, num_kv_heads: int
) -> tuple[CacheScales, list[int]] | None:
    """The scales, and layers that lack one, which is 1 then; None where no layer has any.

    Raises ModelError for a scale that is none, and for scales of another kind of cache.
    """
    if load_format == "auto":
        load_format = detect_format(folder)
    if load_format in ("gguf", "dummy"):
        return None
    tensors = open_checkpoint(checkpoint_paths(folder, load_format), load_format)
    found: dict[tuple[int, str], tuple[float, ...]] = {}
    for pattern in _NAMES:
        for name, tensor in tensors.items():
            if (match := pattern.fullmatch(name)) and int(match[1]) < num_layers:
                for part in match[2]:
                    if (int(match[1]), part) not in found:
                        found[int(match[1]), part] = _read(folder, name, tensor, num_kv_heads)
    if not found:
        return None
    _check_scheme(folder)
    layers, ones = range(num_layers), (1.0,) * num_kv_heads

    def table(part: str) -> Table:
        return tuple([found.get((layer, part), ones) for layer in layers])

    lacking = [layer for layer in layers if not {(layer, "k"), (layer, "v")} <= found.keys()]
    return CacheScales(table("k"), table("v")), lacking


def numbers_of(layers: Iterable[int]) -> str:
    """Of layers in ascending order, with runs as their ends: 0, 3-5."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _read(folder: Path, name: str, tensor: StoredTensor, num_kv_heads: int) -> tuple[float, ...]:
    shape = tensor.shape or (1,)
    values = torch.empty(shape, dtype=torch.float32)
    if values.numel() not in (1, num_kv_heads):
        what = f"{list(tensor.shape)}, neither one number nor one for each of {num_kv_heads} key/value heads"
        raise ModelError(f"{folder}: scale {name} is {what}")
    tensor.read_into(values, [range(shape[0])], [range(shape[-1])])
    if not bool((values.isfinite() & (values > 0)).all()):
        raise ModelError(f"{folder}: scale {name} is {values.flatten().tolist()}: no numbers above 0")
    return tuple(values.flatten().expand(num_kv_heads).tolist())


def _check_scheme(folder: Path) -> None:
    """Of compressed-tensors, which has caches of integers, too; AutoFP8, which has none, writes a word here."""
    raw = RawConfig.read(folder / "config.json")
    scheme = (raw.part("quantization_config") or raw.part("compression_config")).get("kv_cache_scheme")
    if isinstance(scheme, dict) and scheme and (scheme.get("num_bits"), scheme.get("type")) != (8, "float"):
        kind = f"{scheme.get('type')} of {scheme.get('num_bits')} bits"
        raise raw.error(f"kv_cache_scheme: its scales are for a cache of {kind}, not for kv_cache_dtype fp8")
