"""Adapters in PEFT's form with random numbers, and models that they are merged into by the formula: W + s B A."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PREFIX = "base_model.model."


def make_adapter(
    folder: Path,
    model: Path,
    targets: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    ranks: dict[str, int] | None = None,
    **config: Any,
) -> Path:
    """An adapter of the model's layers in `folder`: of modules whose last name is in `targets`. `ranks`: of some of
    them, as `rank_pattern`; `config` goes to adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    tensors, ranks = {}, ranks or {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets or weight.dim() != 2:
            continue
        size, inputs = weight.t().shape if _is_transposed(model) else weight.shape
        of_module = ranks.get(module.rpartition(".")[2], rank)
        a = torch.randn(of_module, inputs, generator=generator) / inputs**0.5
        b = torch.randn(size, of_module, generator=generator) / of_module**0.5 / 4
        tensors[f"{PREFIX}{module}.lora_A.weight"], tensors[f"{PREFIX}{module}.lora_B.weight"] = a, b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "rank_pattern": ranks,
        "alpha_pattern": {},
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "base_model_name_or_path": model.name,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def merge(folder: Path, model: Path, adapter: Path) -> Path:
    """A copy of the model in `folder` with the adapter in its weights."""
    shutil.copytree(model, folder)
    weights, low = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name in [name for name in low if ".lora_A." in name]:
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        last = module.rpartition(".")[2]
        rank = config["rank_pattern"].get(last, config["r"])
        alpha = config["alpha_pattern"].get(last, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        added = scale * low[name.replace("lora_A", "lora_B")].double() @ low[name].double()
        weight = weights[f"{module}.weight"]
        merged = weight.double() + (added.t() if _is_transposed(model) else added)
        weights[f"{module}.weight"] = merged.to(weight.dtype).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _is_transposed(model: Path) -> bool:
    kind: str = json.loads((model / "config.json").read_text())["model_type"]
    return kind == "gpt2"
