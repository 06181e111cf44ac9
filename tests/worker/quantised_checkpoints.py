"""Tiny models in the formats of quantised checkpoints, and what their weights say in float32, for their twins.

Each quantiser writes the tensors of one layer number by number, as the format's own description has them. Nothing here
knows how Octavo reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output is in field 0, 1, ... of a word


@dataclass(frozen=True)
class Format:
    """`config`: what config.json says; `quantise` makes of a weight [N, K] a layer's tensors, and what they say."""

    config: dict[str, Any]
    quantise: Quantise
    others: dict[str, Quantise] = field(default_factory=dict)  # for layers whose names contain the key


def write_quantised(
    folder: Path, where: Path, format_: Format, plain: tuple[str, ...] = (), also: tuple[str, ...] = ()
) -> tuple[Path, Path]:
    """A model and its twin in float32; layers whose names contain one of `plain` stay as they are, those of
    `also` do not, though they usually do."""
    quantised, twin = where / "quantised", where / "twin"
    for path in (quantised, twin):
        shutil.copytree(folder, path)
    stored: Tensors = {}
    expanded: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        stored[name] = expanded[name] = tensor
        kept = ("embed", "norm", "lm_head", "mlp.gate.", "moe.gate.", *plain)
        stays = any(part in name for part in kept) and not any(part in name for part in also)
        if tensor.dim() == 2 and not stays:
            quantise = next((other for part, other in format_.others.items() if part in name), format_.quantise)
            leaves, expanded[name] = quantise(tensor)
            del stored[name]
            stored |= {f"{module}.{leaf}": value for leaf, value in leaves.items()}
    save_file(stored, quantised / "model.safetensors")
    save_file(expanded, twin / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": format_.config}))
    return quantised, twin


def rounded(
    weight: torch.Tensor, group: int, bits: int, *, is_symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N, K], scales f16[N, G] and zeros [N, G]."""
    values = weight.double().numpy()
    count, depth = values.shape
    groups = -(-depth // group)
    codes, scales, zeros = (
        np.zeros((count, depth), int),
        np.zeros((count, groups), np.float16),
        np.zeros((count, groups), int),
    )
    most = 2**bits - 1
    for g in range(groups):
        some = values[:, g * group : (g + 1) * group]
        low, high = some.min(1), some.max(1)
        if is_symmetric:
            scale = (np.abs(some).max(1) / (most / 2)).astype(np.float16)
            zero = np.full(count, 2 ** (bits - 1))
        else:
            scale = ((high - low) / most).astype(np.float16)
            zero = np.clip(np.round(-low / scale.astype(float)), 1, most).astype(int)
        codes[:, g * group : (g + 1) * group] = np.clip(
            np.round(some / scale.astype(float)[:, None]) + zero[:, None], 0, most
        )
        scales[:, g], zeros[:, g] = scale, zero
    return codes, scales, zeros


def expanded(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, groups: np.ndarray) -> torch.Tensor:
    """f32[N, K]: scale times code less zero, each number by that of its input's group."""
    out = np.empty(codes.shape, np.float32)
    for k, g in enumerate(groups):
        out[:, k] = (codes[:, k] - zeros[:, g]).astype(np.float32) * scales[:, g].astype(np.float32)
    return torch.from_numpy(out)


def in_words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, m] as i32[n, ceil(m * bits / 32)]; of each word's numbers, the one in field j is number order[j]."""
    each = 32 // bits
    order = order or tuple(range(each))
    words = np.zeros((numbers.shape[0], -(-numbers.shape[1] // each)), np.uint32)
    for word in range(words.shape[1]):
        for place, number in enumerate(order):
            if word * each + number < numbers.shape[1]:
                words[:, word] |= numbers[:, word * each + number].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def awq(group: int) -> Format:
    """As AutoAWQ packs for `gemm`."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = weight.shape[1] if group == -1 else group
        codes, scales, zeros = rounded(weight, size, 4, is_symmetric=False)
        leaves = {
            "qweight": in_words(codes.T, 4, AWQ_ORDER),
            "qzeros": in_words(zeros.T, 4, AWQ_ORDER),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        return leaves, expanded(codes, scales, zeros, np.arange(weight.shape[1]) // size)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(config, quantise)


def gptq(
    group: int = 32,
    bits: int = 4,
    *,
    version: int = 1,
    is_symmetric: bool = False,
    has_order: bool = False,
    seed: int = 0,
) -> Format:
    """As GPTQModel packs. With an order, all weights of the same number of inputs have the same."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        depth = weight.shape[1]
        size = depth if group == -1 else group
        groups = np.arange(depth) // size
        if has_order:
            groups = np.random.default_rng(seed).permutation(groups)
        codes, scales, zeros = rounded(
            weight[:, np.argsort(groups, kind="stable")], size, bits, is_symmetric=is_symmetric
        )
        of_inputs = np.empty_like(codes)
        of_inputs[:, np.argsort(groups, kind="stable")] = codes
        leaves = {
            "qweight": in_words(of_inputs, bits).t().contiguous(),
            "qzeros": in_words(zeros.T - (version == 1), bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return leaves, expanded(of_inputs, scales, zeros, groups)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": has_order,
        "sym": is_symmetric,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    return Format(config, quantise)


def packed(group: int = 32, bits: int = 4, *, is_symmetric: bool = True, has_order: bool = False) -> Format:
    """compressed-tensors, `pack-quantized`."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        depth = weight.shape[1]
        size = depth if group == -1 else group
        groups = np.arange(depth) // size
        if has_order:
            groups = np.random.default_rng(1).permutation(groups)
        codes, scales, zeros = rounded(
            weight[:, np.argsort(groups, kind="stable")], size, bits, is_symmetric=is_symmetric
        )
        of_inputs = np.empty_like(codes)
        of_inputs[:, np.argsort(groups, kind="stable")] = codes
        leaves = {
            "weight_packed": in_words(of_inputs, bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            leaves["weight_zero_point"] = in_words(zeros.T, bits).t().contiguous()
        if has_order:
            leaves["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return leaves, expanded(of_inputs, scales, zeros, groups)

    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group,
        "symmetric": is_symmetric,
        "actorder": "group" if has_order else None,
    }
    return Format(compressed("pack-quantized", weights, None), quantise)


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """A config of one group of layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def int8(*, of: str = "channel") -> Format:
    """compressed-tensors, `int-quantized`: w8a8."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        largest = weight.abs().amax(1, keepdim=True) if of == "channel" else weight.abs().max().reshape(1)
        scale = largest / 127
        codes = (weight / scale).round().to(torch.int8)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale

    weights = {"num_bits": 8, "type": "int", "strategy": of, "symmetric": True}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    return Format(compressed("int-quantized", weights, inputs), quantise)


def float8(*, of: str = "tensor", is_static: bool = False) -> Format:
    """compressed-tensors, `float-quantized`."""
    weights = {"num_bits": 8, "type": "float", "strategy": of, "symmetric": True}
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor" if is_static else "token", "dynamic": not is_static}
    return Format(compressed("float-quantized", weights, inputs), _of_e4m3(of, is_static))


def fp8(*, is_static: bool = False) -> Format:
    """`quant_method: fp8` with a scale a tensor."""
    config = {"quant_method": "fp8", "activation_scheme": "static" if is_static else "dynamic"}
    return Format(config, _of_e4m3("scalar", is_static))


def _of_e4m3(of: str, is_static: bool) -> Quantise:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        largest = weight.abs().amax(1, keepdim=True) if of == "channel" else weight.abs().max()
        scale = (largest / 448).to(torch.float32)
        codes = (weight / scale).to(torch.float8_e4m3fn)
        leaves = {"weight": codes, "weight_scale": scale.reshape(1) if of == "tensor" else scale}
        if is_static:
            leaves["input_scale"] = torch.tensor([0.01])
        return leaves, codes.float() * scale

    return quantise


def fp8_blocks(rows: int = 128, columns: int = 128) -> Format:
    """`quant_method: fp8` as DeepSeek and Qwen publish it."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        count, depth = weight.shape
        grid = torch.zeros(-(-count // rows), -(-depth // columns))
        codes, out = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(weight.shape)
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                where = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                grid[i, j] = weight[where].abs().max() / 448
                codes[where] = (weight[where] / grid[i, j]).to(torch.float8_e4m3fn)
                out[where] = codes[where].float() * grid[i, j]
        return {"weight": codes, "weight_scale_inv": grid}, out

    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [rows, columns],
    }
    return Format(config, quantise)


FORMATS: dict[str, Format] = {
    "awq-32": awq(32),
    "awq-all": awq(-1),
    "gptq-v1": gptq(),
    "gptq-v2": gptq(64, version=2),
    "gptq-all": gptq(-1),
    "gptq-symmetric": gptq(is_symmetric=True),
    "gptq-symmetric-v2": gptq(is_symmetric=True, version=2),
    "gptq-order": gptq(has_order=True, is_symmetric=True),
    "gptq-8-bits": gptq(bits=8),
    "gptq-8-bits-symmetric": gptq(bits=8, is_symmetric=True),
    "packed": packed(),
    "packed-asymmetric": packed(is_symmetric=False),
    "packed-all": packed(-1),
    "packed-order": packed(has_order=True),
    "packed-8-bits": packed(bits=8, is_symmetric=False),
    "int8-channel": int8(),
    "int8-tensor": int8(of="tensor"),
    "float8-tensor": float8(is_static=True),
    "float8-channel": float8(of="channel"),
    "fp8": fp8(),
    "fp8-static": fp8(is_static=True),
    "fp8-blocks": fp8_blocks(),
    "fp8-small-blocks": fp8_blocks(24, 40),
}
