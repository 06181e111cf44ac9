"""GGUF files made of tiny models, as llama.cpp's converter makes them.

Names come from the `gguf` package's own map. The orders in which llama.cpp stores weights are written out here row by
row, the other way round than Octavo undoes them; `transformers`, which reads GGUF files too, is asked whether they are
right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

Stored = Callable[[str, np.ndarray], np.ndarray]


def write_gguf(
    folder: Path,
    path: Path,
    name: str,
    extra: dict[str, np.ndarray] | None = None,
    quantised: tuple[gguf.GGMLQuantizationType, Stored] | None = None,
    token_ids: dict[str, int] | None = None,
    **metadata: Any,
) -> Path:
    """The model in `folder` as a file of architecture `name`.

    extra: more tensors. quantised: the type of all matrices, and the bytes that one is stored as. token_ids: eos, eot.
    metadata: key below the architecture, with `__` for a dot; one that begins with a slash stands by itself. None: the
    file has no such key.
    """
    config = json.loads((folder / "config.json").read_text())
    sizes = _sizes(config) | {key.replace("__", "."): value for key, value in metadata.items()}
    writer = gguf.GGUFWriter(path, name)
    writers = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
    writers[list] = writer.add_array
    for key, value in sizes.items():
        if value is None:
            continue
        add = writers[type(value)]
        add(key[1:] if key.startswith("/") else f"{name}.{key}", value)  # type: ignore[operator]  # each takes its own type
    _write_tokenizer(writer, folder)
    for token, index in (token_ids or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{token}_token_id", index)
    for tensor, values in (_tensors(folder, name, config) | (extra or {})).items():
        if quantised and values.ndim > 1:
            writer.add_tensor(tensor, quantised[1](tensor, values), raw_dtype=quantised[0])
        else:
            writer.add_tensor(tensor, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    """What the converter says of every architecture, where the configuration has it."""
    rope = config.get("rope_parameters") or {}
    hidden = config.get("hidden_size") or config["n_embd"]
    sizes = {
        "embedding_length": hidden,
        "block_count": config.get("num_hidden_layers") or config["n_layer"],
        "feed_forward_length": config.get("intermediate_size") or config.get("n_inner") or 4 * hidden,
        "context_length": config.get("max_position_embeddings") or config.get("n_positions") or config["seq_length"],
        "attention.head_count": config.get("num_attention_heads") or config["n_head"],
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": config.get("norm_epsilon") or config.get("layer_norm_epsilon"),
        "attention.sliding_window": config.get("sliding_window"),
        "rope.freq_base": rope.get("rope_theta") or rope.get("full_attention", {}).get("rope_theta"),
        "expert_count": config.get("num_local_experts") or config.get("num_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
    return {key: value for key, value in sizes.items() if value is not None}


def _write_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    special = {token["id"] for token in content["added_tokens"]}
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    names = {index: token for token, index in vocab.items()} | {size - 1: "ab"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(index, f"[PAD{index}]") for index in range(size)])
    writer.add_token_types([3 if index in special else 1 if index in names else 5 for index in range(size)])
    writer.add_token_merges(["a b"])  # the tokenizer of bytes has none


def _tensors(folder: Path, name: str, config: dict[str, Any]) -> dict[str, np.ndarray]:
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(arch, config.get("num_hidden_layers") or config["n_layer"])
    found: dict[str, Any] = {}
    for hub_name, values in load_file(folder / "model.safetensors").items():
        stem, kind = hub_name.rsplit(".", 1)
        parts = stem.split(".")
        if "experts" in parts:
            expert = int(parts.pop(parts.index("experts") + 1))
            found.setdefault(f"{names.get_name('.'.join(parts))}.{kind}", {})[expert] = values
            continue
        tensor = names.get_name(stem) or names.get_name(stem.removeprefix("transformer."))
        assert tensor is not None, hub_name
        found[f"{tensor}.{kind}"] = _stored(name, tensor, values, config)
    return {
        key: np.stack([each[i] for i in range(len(each))]) if isinstance(each, dict) else each
        for key, each in found.items()
    }


def _stored(name: str, tensor: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    heads = config.get("num_attention_heads") or config["n_head"]
    if name == "llama" and tensor.endswith(("attn_q", "attn_k")):
        return _interleaved(values, heads if tensor.endswith("attn_q") else config["num_key_value_heads"])
    if name.startswith("gemma") and tensor.endswith("norm"):
        return values + np.float32(1)
    if name == "gpt2" and tensor.endswith(("attn_qkv", "attn_output", "ffn_up", "ffn_down")) and values.ndim == 2:
        return values.T
    if name == "bloom" and tensor.endswith("attn_qkv"):
        return _part_by_part(values, heads)
    return values


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half goes to 2 i, of its second half to 2 i + 1."""
    out, size = np.empty_like(values), len(values) // heads
    for row in range(len(values)):
        head, (half, i) = row // size, divmod(row % size, size // 2)
        out[head * size + 2 * i + half] = values[row]
    return out


def _part_by_part(values: np.ndarray, heads: int) -> np.ndarray:
    """Head after head of queries, then of keys, then of values."""
    size = len(values) // heads // 3
    rows = [(3 * head + part) * size + i for part in range(3) for head in range(heads) for i in range(size)]
    return values[rows]
