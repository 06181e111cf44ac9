"""On a CPU a row has the same logits alone and in any batch, of every model of the tests, whatever the processor.

That the bits are the same on this machine would not show it for others: a library has products of its own for each
processor and number of rows. So none of a library may be called at all; what is left is Octavo's compiled code.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.device import DEVICE
from tests.tiny_models import make_tiny_llama
from tests.worker.families import FAMILIES, VOCAB_SIZE, make_family
from tests.worker.model_cases import Stepper
from worker_svc.models.config import ModelConfig
from worker_svc.models.errors import ModelError
from worker_svc.models.loader import Model, load_model
from worker_svc.models.products.float_linear import FloatLinear
from worker_svc.models.products.tiled_linear import TiledLinear

COMPANIES = (1, 2, 3, 17, 64, 333)  # rows of a step, the row in question included
LONGEST = 200  # tokens of a sequence
BFLOAT16 = ("llama", "gemma2", "gpt2", "mixtral")  # rounded after every product, so a part of the families says it


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class NoProductsOfTorch(TorchDispatchMode):
    """Raises AssertionError where torch is asked for sums of products, by whichever of its libraries."""

    NAMES = re.compile(
        r"_?(add|badd)?b?mm|(add)?mv|v?dot|matmul|(bi)?linear|_linear_pointwise|einsum|addr|.*conv.*|.*dot_product.*"
    )

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert not self.NAMES.fullmatch(name), f"torch's {name} computes a part of the model"
        return function(*args, **(kwargs or {}))


def load(folder: Path, dtype: str, is_batch_invariant: bool) -> Model:
    config = ModelConfig.from_folder(folder, dtype, max_model_len=LONGEST, is_batch_invariant=is_batch_invariant)
    return load_model(folder, config, "cpu")


@pytest.mark.parametrize(
    ("name", "dtype", "is_batch_invariant"),
    [(name, "float32", False) for name in ("llama", *FAMILIES)]
    + [(name, "bfloat16", False) for name in BFLOAT16]
    + [("llama", "float32", True), ("llama", "bfloat16", True)],
)
def test_a_row_has_the_same_logits_in_any_company(
    name: str, dtype: str, is_batch_invariant: bool, tmp_path: Path
) -> None:
    folder = make_tiny_llama(tmp_path / "model") if name == "llama" else make_family(name, tmp_path / "model")
    model, numbers = load(folder, dtype, is_batch_invariant), random.Random(1)
    own, *others = (numbers.choices(range(VOCAB_SIZE), k=length) for length in (21, LONGEST, 132))
    expected = None
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        stepper = Stepper(model, [own, *others])
        stepper.step({0: (0, 20)})
        for rows in COMPANIES:
            company = [min(rows - 1, LONGEST), max(rows - 1 - LONGEST, 0)]
            pieces = {0: (20, 21)} | {i: (0, count) for i, count in enumerate(company, 1) if count}
            with NoProductsOfTorch():
                logits = stepper.step(pieces)[0]
            expected = logits if expected is None else expected
            assert torch.equal(logits, expected), (num_threads, rows)
    assert expected is not None and expected.isfinite().all() and expected.std() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_torch_would_be_found(dtype: torch.dtype) -> None:
    x, weight = torch.ones(3, 5, dtype=dtype), torch.ones(4, 5, dtype=dtype)
    products: list[Callable[[], object]] = [
        lambda: FloatLinear(weight)(x),
        lambda: FloatLinear(weight, torch.ones(4, dtype=dtype))(x),
        lambda: x @ weight.t(),
        lambda: x[None] @ weight.t(),
        lambda: x @ weight[0],
        lambda: torch.einsum("ij,kj->ik", x, weight),
        lambda: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""),
    ]
    for product in products:
        with pytest.raises(AssertionError, match="computes a part of the model"), NoProductsOfTorch():
            product()
        with (
            torch.inference_mode(),
            pytest.raises(AssertionError, match="computes a part of the model"),
            NoProductsOfTorch(),
        ):
            product()


@pytest.mark.parametrize("is_biased", [False, True])
def test_the_form_of_a_gpu_computes_the_same_layer(is_biased: bool) -> None:
    weight, x = torch.randn(50, 20, device=DEVICE), torch.randn(7, 20, device=DEVICE)
    bias = torch.randn(50, device=DEVICE) if is_biased else None
    linear = TiledLinear(weight, bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(linear(x).double(), exact, rtol=1e-5, atol=1e-5)
    assert linear.weight_bytes == 4000 + 200 * is_biased


def test_layers_of_transformers_promise_nothing(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model")
    config = ModelConfig.from_folder(folder, "float32", impl="transformers", is_batch_invariant=True)
    with pytest.raises(ModelError, match="batch_invariant is for the families that Octavo computes itself"):
        load_model(folder, config, "cpu")
