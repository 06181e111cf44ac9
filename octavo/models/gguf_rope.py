"""Rotary embedding in the keys and small tensors of a GGUF file, as a `config.json` says it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.models.errors import GGUFError
from octavo.models.gguf_metadata import Metadata

Values = Callable[[str], "np.ndarray[Any, Any] | None"]  # of a small tensor by its name, None where there is none


def trained_length(metadata: Metadata) -> int:
    """In tokens, before a rope was stretched."""
    return metadata.integer("rope.scaling.original_context_length", metadata.integer("context_length"))


def read_rope(metadata: Metadata, head_size: int, values: Values) -> dict[str, Any]:
    """`rope_parameters`, and `partial_rotary_factor` where a part of each head is turned."""
    turned = metadata.integer("rope.dimension_count", head_size)
    parameters = {"rope_theta": metadata.number("rope.freq_base", 10000.0), **_scaling(metadata, turned, values)}
    if metadata.name == "gemma3":
        local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10000.0)}
        return {"rope_parameters": {"full_attention": parameters, "sliding_attention": local}}
    if turned == head_size:
        return {"rope_parameters": parameters}
    if metadata.name != "phi3":
        raise GGUFError("rotary embedding over a part of each head cannot be converted")
    share = turned / head_size
    return {"partial_rotary_factor": share, "rope_parameters": parameters | {"partial_rotary_factor": share}}


def _scaling(metadata: Metadata, turned: int, values: Values) -> dict[str, Any]:
    # As in llama.cpp, a factor without a type divides all frequencies, and 0, or none, is 1.
    is_stretched = metadata.number("rope.scaling.factor", 0.0) not in (0, 1)
    kind = metadata.text("rope.scaling.type", "linear" if is_stretched else "none")
    short, long = values("rope_factors_short.weight"), values("rope_factors_long.weight")
    if short is not None and long is not None:
        parameters = _by_factors(short, long, trained_length(metadata), turned)
        if (key := "rope.scaling.attn_factor") in metadata:
            parameters["attention_factor"] = metadata.number(key)
        return parameters
    if kind == "yarn" and values("rope_freqs.weight") is None:
        return _yarn(metadata)
    if metadata.number(key := "rope.scaling.attn_factor", 1.0) != 1:
        raise metadata.refused(key)
    if (factors := values("rope_freqs.weight")) is not None:
        if kind != "none":
            raise metadata.refused("rope.scaling.type" if "rope.scaling.type" in metadata else "rope.scaling.factor")
        # Frequencies that llama.cpp has divided already (Llama 3.1): the same at any length, and nothing is scaled.
        return _by_factors(factors, factors, metadata.integer("context_length"), turned) | {"attention_factor": 1.0}
    if kind == "none" or (kind == "linear" and not is_stretched):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    raise metadata.refused("rope.scaling.type")


def _yarn(metadata: Metadata) -> dict[str, Any]:
    factor = metadata.number("rope.scaling.factor")
    parameters: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained_length(metadata),
    }
    for name in ("beta_fast", "beta_slow"):
        if (key := f"rope.scaling.yarn_{name}") in metadata:
            parameters[name] = metadata.number(key)
    of_all, of_yarn = "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"
    if of_all in metadata or of_yarn in metadata:
        # llama.cpp's converter writes of_yarn for two keys of a config.json. One is a factor to the usual magnitude,
        # which published models use to cancel it; the other, from 1 on, stands in its place.
        if metadata.number(of_yarn, 1.0) > 1:
            raise metadata.refused(of_yarn)
        usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        parameters["attention_factor"] = usual * metadata.number(of_all, 1.0) * metadata.number(of_yarn, 1.0)
    return parameters


def _by_factors(short: np.ndarray, long: np.ndarray, trained: int, turned: int) -> dict[str, Any]:
    for factors in (short, long):
        if factors.shape != (turned // 2,):
            raise GGUFError(f"rotary factors have shape {factors.shape}, not {(turned // 2,)}")
    return {
        "rope_type": "longrope",
        "short_factor": short.astype(float).tolist(),
        "long_factor": long.astype(float).tolist(),
        "original_max_position_embeddings": trained,
    }
