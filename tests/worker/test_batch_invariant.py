"""--batch-invariant on a CPU: a row has the same logits alone and in any company, of every model of the tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kernels.device import DEVICE
from tests.tiny_models import make_tiny_llama
from tests.worker.families import FAMILIES, VOCAB_SIZE, make_family
from tests.worker.model_cases import Stepper
from worker_svc.models.config import ModelConfig
from worker_svc.models.dense import dense
from worker_svc.models.errors import ModelError
from worker_svc.models.loader import Model, load_model
from worker_svc.models.packed_linear import PackedLinear
from worker_svc.models.tiled_linear import TiledLinear

COMPANIES = (1, 2, 3, 17, 64, 333)  # rows of a step, the row in question included
LONGEST = 200  # tokens of a sequence
BFLOAT16 = ("llama", "gemma2", "gpt2", "mixtral")  # rounded after every product, so a part of the families says it


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load(folder: Path, dtype: str) -> Model:
    config = ModelConfig.from_folder(folder, dtype, max_model_len=LONGEST, is_batch_invariant=True)
    return load_model(folder, config, "cpu")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float32") for name in ("llama", *FAMILIES)] + [(name, "bfloat16") for name in BFLOAT16],
)
def test_a_row_has_the_same_logits_in_any_company(name: str, dtype: str, tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model") if name == "llama" else make_family(name, tmp_path / "model")
    model, numbers = load(folder, dtype), random.Random(1)
    own, *others = (numbers.choices(range(VOCAB_SIZE), k=length) for length in (21, LONGEST, 132))
    expected = None
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        stepper = Stepper(model, [own, *others])
        stepper.step({0: (0, 20)})
        for rows in COMPANIES:
            company = [min(rows - 1, LONGEST), max(rows - 1 - LONGEST, 0)]
            pieces = {0: (20, 21)} | {i: (0, count) for i, count in enumerate(company, 1) if count}
            logits = stepper.step(pieces)[0]
            expected = logits if expected is None else expected
            assert torch.equal(logits, expected), (num_threads, rows)
    assert expected is not None and expected.isfinite().all() and expected.std() > 0


def test_products_take_the_form_that_promises_it_for_every_type_and_device() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(dense(torch.ones(3, 5, dtype=dtype), is_batch_invariant=True), PackedLinear)


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
