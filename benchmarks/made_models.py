"""Checkpoints for `benchmarks.peers` with the sizes of real models: `python -m benchmarks.made_models DIR`.

Each is a folder for engines that read Hugging Face's files, DIR/NAME, and the same weights as a file for llama.cpp,
DIR/NAME.gguf, of bfloat16 and not yet quantised.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open

from benchmarks import shapes

MODELS = {"qwen3-0.6b": shapes.QWEN3_0_6B, "llama-3.2-1b": shapes.LLAMA_3_2_1B}


def main() -> int:
    """Writes those that are not there yet."""
    parser = argparse.ArgumentParser(description="Writes checkpoints with made-up weights.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    arguments = parser.parse_args()
    for name in arguments.models:
        folder, file = arguments.folder / name, arguments.folder / f"{name}.gguf"
        if not (folder / "model.safetensors").exists():
            shapes.write_checkpoint(folder, MODELS[name])
        if not file.exists():
            write_gguf(folder, file)
        print(f"{folder}\n{file}", file=sys.stderr)
    return 0


def write_gguf(folder: Path, path: Path) -> None:
    """The checkpoint in `folder`, of Llama's or Qwen 3's architecture, with names and orders of llama.cpp's converter:
    matrices as bfloat16, norms as float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = config["model_type"]
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, folder, config["vocab_size"])
    for tensor, values in _tensors(folder, config):
        if values.dim() == 1:
            writer.add_tensor(tensor, values.float().numpy())
        else:
            writer.add_tensor(tensor, values.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"] for token in content["added_tokens"]}
    names = {number: token for token, number in content["model"]["vocab"].items()}
    names |= {token["id"]: token["content"] for token in content["added_tokens"]}
    names.setdefault(vocab_size - 1, "ab")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(number, f"[PAD{number}]") for number in range(vocab_size)])
    writer.add_token_types([3 if number in special else 1 if number in names else 5 for number in range(vocab_size)])
    writer.add_token_merges(["a b"])  # the tokenizer of bytes has none, and one is wanted


def _tensors(folder: Path, config: dict[str, int | str]) -> Iterator[tuple[str, torch.Tensor]]:
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == config["model_type"])
    names = gguf.get_tensor_name_map(arch, int(config["num_hidden_layers"]))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for of_hub in file.keys():  # noqa: SIM118 - it is no mapping
            name = names.get_name(of_hub, try_suffixes=(".weight",))
            if name is None:
                raise ValueError(f"llama.cpp has no name for {of_hub}")
            values = file.get_tensor(of_hub)
            if config["model_type"] == "llama" and ".attn_q." in name:
                values = _interleaved(values, int(config["num_attention_heads"]))
            if config["model_type"] == "llama" and ".attn_k." in name:
                values = _interleaved(values, int(config["num_key_value_heads"]))
            yield name, values.contiguous()


def _interleaved(values: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp turns pairs of adjacent rows, where Hugging Face's files have the second of each half a head later."""
    rows = np.arange(len(values)).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
    return values[torch.from_numpy(rows)]


if __name__ == "__main__":
    raise SystemExit(main())
