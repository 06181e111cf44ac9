"""What a pass through all layers refuses. Results are held to the single operations' in models."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from kernels.cpu.layers import layer_stack
from kernels.cpu.layers.layer_stack import LayerStack, LayerWeights, StackStep
from kernels.cpu.layers.layer_workspace import StackShape
from kernels.cpu.products.layer_product import Product
from kernels.cpu.products.packed_weight import pack, pack_pairs
from kernels.int8_weight import pack_int8, quantize_int8

SHAPE = StackShape(
    hidden=8,
    intermediate=2,
    num_heads=2,
    num_kv_heads=1,
    head_size=4,
    norm_eps=1e-5,
    norm_weight_offset=0.0,
    logit_soft_cap=0.0,
)


def product(num_in: int, num_out: int) -> Product:
    return Product.of_floats(pack(torch.ones(num_out, num_in) / 3), None, num_out, num_in)


def of_pairs(num_in: int, num_out: int) -> Product:
    return Product.of_floats(pack_pairs(torch.ones(num_out, num_in).bfloat16()), None, num_out, num_in)


def of_bytes(num_in: int, num_out: int) -> Product:
    quantized, scale = quantize_int8(torch.ones(num_out, num_in))
    return Product.of_int8(pack_int8(quantized), scale, None, num_in)


def stack(**changed: Any) -> LayerStack:
    """One layer of SHAPE."""
    weights: dict[str, Any] = {
        **{"input_norm": torch.ones(8), "mlp_norm": torch.ones(8), "cos_sin": torch.ones(2, 4)},
        **{"qkv": product(8, 16), "attention_out": product(8, 8), "mlp_in": product(8, 4), "mlp_out": product(2, 8)},
        **{"attention_scale": 1.0, "sliding_window": 0},
    }
    return LayerStack(SHAPE, [LayerWeights(**weights | changed)])


def run(**changed: Any) -> None:
    """2 rows of one sequence."""
    tables, lengths, starts = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([[0]], [2], [0, 2]))
    arguments: dict[str, Any] = {
        **{"residual": torch.zeros(2, 8), "wanted": torch.arange(2)},
        **{"caches": [(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))]},
        **{"step": StackStep(torch.arange(2), torch.arange(2), tables, lengths, starts)},
    }
    stack()(**arguments | changed)


@pytest.mark.parametrize(
    ("call", "changed", "message"),
    [
        (stack, {"qkv": product(8, 12)}, "qkv is 12 x 8, not 16 x 8"),
        (stack, {"attention_out": product(4, 8)}, "attention_out is 8 x 4, not 8 x 8"),
        (stack, {"mlp_in": product(8, 2)}, "mlp_in is 2 x 8, not 4 x 8"),
        (stack, {"mlp_out": product(4, 8)}, "mlp_out is 8 x 4, not 8 x 2"),
        (stack, {"qkv": of_pairs(8, 16)}, "qkv is for rows of bfloat16, not torch.float32"),
        (stack, {"mlp_norm": torch.ones(4)}, r"mlp_norm \(4,\) is not for 8 elements"),
        (stack, {"key_norm": torch.ones(8)}, r"key_norm \(8,\) is not for 4 elements"),
        (stack, {"cos_sin": torch.ones(2, 4).bfloat16()}, r"cos_sin \(2, 4\) of torch.bfloat16 turns no heads"),
        (stack, {"cos_sin": torch.ones(2, 6)}, r"cos_sin \(2, 6\) of torch.float32 turns no heads of 4"),
        (run, {"residual": torch.zeros(2, 4)}, r"\(2, 4\) are not contiguous rows of 8"),
        (run, {"residual": torch.zeros(3, 8)}, "2 positions or 2 slots for 3 rows"),
        (run, {"caches": []}, "0 caches are not those of 1 layers"),
        (run, {"caches": [(torch.zeros(1, 2, 2, 4),) * 2]}, "are not of 1 heads of 4"),
        (run, {"caches": [(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4))]}, "are not alike and contiguous"),
        (run, {"step": StackStep(torch.arange(2), torch.arange(2), *[torch.zeros(1, 1).int()] * 3)}, "1 query starts"),
        (
            run,
            {"step": StackStep(torch.arange(2), torch.arange(2).int(), *[torch.zeros(n, 1).int() for n in (1, 1, 2)])},
            "slot_mapping is torch.int32",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, changed: dict[str, Any], message: str) -> None:
    call()
    with pytest.raises(ValueError, match=message):
        call(**changed)


def test_positions_without_angles_are_refused() -> None:
    tables, lengths, starts = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([[0]], [2], [0, 2]))
    for positions in ([1, 2], [-1, 0]):
        step = StackStep(torch.tensor(positions), torch.arange(2), tables, lengths, starts)
        with pytest.raises(IndexError, match="not within those that have angles"):
            run(step=step)


def test_types_that_differ_are_refused() -> None:
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        run(residual=torch.zeros(2, 8, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="a cache is"):
        run(caches=[(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4, dtype=torch.float16))])
    with pytest.raises(ValueError, match=r"weight .* is not packed for 20 x 5"):
        Product.of_floats(pack(torch.ones(20, 4) / 3), None, 20, 5)
    quantized, scale = quantize_int8(torch.ones(20, 4))
    with pytest.raises(ValueError, match=r"weight .* is not packed for 20 x 33"):
        Product.of_int8(pack_int8(quantized), scale, None, 33)


def test_all_rows_are_those_that_are_named_one_by_one() -> None:
    tables, lengths, starts = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([[0]], [2], [0, 2]))
    step = StackStep(torch.arange(2), torch.arange(2), tables, lengths, starts)
    results = []
    for wanted in (None, torch.arange(2), torch.tensor([1, 0])):
        caches = [(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))]
        results.append(torch.stack(stack()(torch.arange(16.0).view(2, 8), caches, step, wanted)))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2].flip(1))


def test_every_pass_writes_to_the_caches_that_it_is_given() -> None:
    layers = stack()
    tables, lengths, starts = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([[0]], [2], [0, 2]))
    step = StackStep(torch.arange(2), torch.arange(2), tables, lengths, starts)
    results = []
    for _ in range(2):
        caches = [(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))]
        for _ in range(2):
            caches[0][1].zero_()
            layers(torch.ones(2, 8), caches, step, torch.arange(2))
            assert caches[0][1].count_nonzero() == 8
            results.append(caches[0][1].clone())
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_pass_wakes_no_more_threads_than_its_phases_have_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pass of two rows by products of one panel; seen in a child, which begins without threads."""
    monkeypatch.setattr(layer_stack, "num_threads", lambda: 8)
    child = os.fork()
    if child == 0:
        before = len(os.listdir("/proc/self/task"))
        run()
        os._exit(len(os.listdir("/proc/self/task")) - before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
