"""Reads a GGUF file of the Llama architecture as a Hugging Face folder: config, weights, tokenizer, template.

Weights are dequantised exactly as the `gguf` package does, to float32. llama.cpp stores the rows of the
query and key projections interleaved for its own rotary layout; that is undone here, so that the folder is what
`transformers` and Octavo's worker expect. Whatever a file holds beyond a plain Llama (experts, biases, scaled rotary
frequencies) is refused by name: a model that loads and answers nonsense is worse than an error.
Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.models.errors import GGUFError
from octavo.models.gguf_tokenizer import tokenizer_files
from octavo.models.safetensors_stream import PendingTensor, write_safetensors

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def write_model_folder(gguf_path: Path, folder: Path) -> None:
    """Convert `gguf_path` into the existing empty `folder`. Raises `GGUFError`."""
    write_safetensors(folder / "model.safetensors", write_description(gguf_path, folder))


def write_description(gguf_path: Path, folder: Path) -> Iterator[PendingTensor]:
    """Write all but the weights into the existing empty `folder`; the weights, by the names of Hugging Face.

    Raises `GGUFError`, for weights when they are iterated.
    """
    reader, metadata = _read(gguf_path)
    config = _config(metadata, {tensor.name: tensor for tensor in reader.tensors})
    tokenizer = tokenizer_files(metadata, config["max_position_embeddings"])
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(config))
    for name, text in tokenizer.items():
        (folder / name).write_text(text, encoding="utf-8")
    return _weights(reader, config)


def read_tensors(gguf_path: Path) -> Iterator[PendingTensor]:
    """The weights, by the names of Hugging Face. Raises `GGUFError`."""
    reader, metadata = _read(gguf_path)
    yield from _weights(reader, _config(metadata, {tensor.name: tensor for tensor in reader.tensors}))


def _read(path: Path) -> tuple[GGUFReader, dict[str, Any]]:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise GGUFError("converting a GGUF file needs the Python package `gguf`") from None
    try:
        reader = GGUFReader(path)
        return reader, {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the package checks little, so a damaged file raises whatever its bytes lead to
        raise GGUFError(f"this is not a readable GGUF file: {' '.join(str(error).split())}") from error


def _config(metadata: dict[str, Any], tensors: dict[str, ReaderTensor]) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise GGUFError(f"architecture {architecture!r} cannot be converted; only 'llama' can")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise GGUFError("scaled rotary frequencies (llama.rope.scaling, rope_freqs) cannot be converted yet")
    try:
        hidden_size = metadata["llama.embedding_length"]
        num_heads = metadata["llama.attention.head_count"]
        head_size = metadata.get("llama.attention.key_length", hidden_size // num_heads)
        if metadata.get("llama.rope.dimension_count", head_size) != head_size:
            raise GGUFError("rotary embedding over a part of each head cannot be converted")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
            "hidden_size": hidden_size,
            "intermediate_size": metadata["llama.feed_forward_length"],
            "num_hidden_layers": metadata["llama.block_count"],
            "num_attention_heads": num_heads,
            "num_key_value_heads": metadata.get("llama.attention.head_count_kv", num_heads),
            "head_dim": head_size,
            "max_position_embeddings": metadata["llama.context_length"],
            "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
            "rope_theta": _shortest(metadata.get("llama.rope.freq_base", 10000.0)),
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "pretraining_tp": 1,
            "tie_word_embeddings": "output.weight" not in tensors,
            "use_cache": True,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
            "dtype": "float32",
        }
    except KeyError as error:
        raise GGUFError(f"the file lacks {error.args[0]!r}") from None


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config[name] for name in names if config[name] is not None}


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _weights(reader: GGUFReader, config: dict[str, Any]) -> Iterator[PendingTensor]:
    missing = _shapes(config)
    for tensor in reader.tensors:
        name = _hub_name(tensor.name)
        shape = missing.pop(name, None) if name is not None else None
        if name is None or shape is None:
            raise GGUFError(f"tensor {tensor.name!r} is not part of a plain Llama model")
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != shape:
            raise GGUFError(f"tensor {tensor.name!r} has shape {found}, not {shape}")
        yield PendingTensor(name, shape, _loader(tensor, config))
    if missing:
        raise GGUFError(f"the file lacks {len(missing)} tensors, {min(missing)!r} among them")


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of the model; projections are [out, in]."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer_shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    return shapes


def _hub_name(gguf_name: str) -> str | None:
    if gguf_name in _OUTER_NAMES:
        return _OUTER_NAMES[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    layer, _, leaf = rest.partition(".")
    if prefix != "blk" or leaf not in _LAYER_NAMES:
        return None
    return f"model.layers.{layer}.{_LAYER_NAMES[leaf]}"


def _loader(tensor: ReaderTensor, config: dict[str, Any]) -> Any:
    def load() -> np.ndarray:
        from gguf import dequantize

        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name.endswith(".attn_q.weight"):
            return _unpermute(weight, config["num_attention_heads"])
        if tensor.name.endswith(".attn_k.weight"):
            return _unpermute(weight, config["num_key_value_heads"])
        return weight

    return load


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from llama.cpp's (pair, half) order back to (half, pair). weight [heads * head_size, in]."""
    rows, width = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
