"""Tiny gpt-oss checkpoints with experts in MXFP4 as they are published, and their twins, which `transformers` expands.

Nothing here knows how Octavo reads them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.worker.families import make_family

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_local_experts": 4,
}
_NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def quantise(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """f32[experts, out, in] as blocks u8[experts, out, in / 32, 16] and scales u8[experts, out, in / 32]."""
    groups = weights.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1, keepdim=True).log2().floor() - 2  # the largest number is 6, below 2^3
    scaled = groups / torch.exp2(exponents)
    codes = (scaled.abs()[..., None] - _NUMBERS).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks.to(torch.uint8), (exponents[..., 0] + 127).to(torch.uint8)


def make_mxfp4(where: Path, seed: int = 5, **changes: Any) -> tuple[Path, Path]:
    """A quantised model and its twin in float32."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = make_family("gpt-oss", where / "model", seed, **(SIZES | changes))
    quantised, twin = where / "quantised", where / "twin"
    for path in (quantised, twin):
        shutil.copytree(folder, path)
    stored: dict[str, torch.Tensor] = {}
    expanded: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = quantise(tensor.transpose(1, 2))
            stored |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
            expanded[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        else:
            stored[name] = expanded[name] = tensor
    save_file(stored, quantised / "model.safetensors")
    save_file(expanded, twin / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return quantised, twin
