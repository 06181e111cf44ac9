"""What an int8 layer does around attention: what it refuses. Results are held to the single operations' in models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.cpu.int8_layer import Int8Norm, Int8Product, after_attention, before_attention
from kernels.int8_weight import pack_int8, quantize_int8


def product(num_in: int, num_out: int) -> Int8Product:
    quantized, scale = quantize_int8(torch.ones(num_out, num_in))
    return Int8Product(pack_int8(quantized), scale, None, num_in)


NORM = Int8Norm(torch.ones(4), 1e-5, 0.0)


def before(**changed: Any) -> None:
    """2 rows of 4, 2 heads of 4 over 1."""
    arguments: dict[str, Any] = {
        **{name: torch.zeros(2, 4) for name in ("update", "residual", "normed")},
        **{"qkv": torch.zeros(2, 16), "norm": NORM, "product": product(4, 16), "head_counts": (2, 1)},
        **{"positions": torch.arange(2), "cos_sin": torch.ones(2, 4), "slot_mapping": torch.arange(2)},
        **{name: torch.zeros(1, 1, 2, 4) for name in ("key_cache", "value_cache")},
    }
    before_attention(**arguments | changed)


def after(**changed: Any) -> None:
    """2 rows of 4, heads of 8 in all, an MLP of 2."""
    arguments: dict[str, Any] = {
        **{name: torch.zeros(2, 4) for name in ("update", "residual", "normed")},
        **{"attended": torch.zeros(2, 8), "inner": torch.zeros(2, 6), "norm": NORM},
        **{"attention_out": product(8, 4), "mlp_in": product(4, 4), "mlp_out": product(2, 4)},
    }
    after_attention(**arguments | changed)


@pytest.mark.parametrize(
    ("call", "changed", "message"),
    [
        (before, {"product": product(5, 16)}, "a product of 5 inputs does not fit 4"),
        (before, {"qkv": torch.zeros(3, 16)}, "does not fit 4 and"),
        (before, {"head_counts": (3, 1)}, "16 outputs are not"),
        (after, {"attention_out": product(8, 5)}, "products do not fit 4 numbers a row"),
        (after, {"attended": torch.zeros(2, 9)}, "does not fit the products"),
        (after, {"inner": torch.zeros(2, 4)}, "does not fit the products"),
        (after, {"mlp_in": product(4, 5)}, "5 outputs are not gate and up of 2"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, changed: dict[str, Any], message: str) -> None:
    call()
    with pytest.raises(ValueError, match=message):
        call(**changed)


def test_types_that_differ_are_refused() -> None:
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        after(update=torch.zeros(2, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"weight .* is not packed for 20 x 4"):
        Int8Product(product(4, 16).kept[0], torch.ones(20), None, 4)
