"""Families on a GPU's kernels against transformers: all of them on a card, and under the interpreter those whose layers
differ most."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kernels import select
from tests.kernels.device import DEVICE, IS_INTERPRETED
from tests.worker.exact_logits import truth_of_folder
from tests.worker.families import FAMILIES, VOCAB_SIZE, make_family
from tests.worker.model_cases import Stepper
from worker_svc.models.config import ModelConfig
from worker_svc.models.loader import load_model

NAMES = ["bloom", "qwen3-moe-mixed"] if IS_INTERPRETED else list(FAMILIES)
LENGTHS = [1, 7, 40] if IS_INTERPRETED else [1, 7, 83, 150]
SIZES = {"num_hidden_layers": 2} if IS_INTERPRETED else {}  # of the mixed one a layer of experts, and one without


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers_whole_and_in_pieces(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece of a sequence is computed beside another's, and single tokens at its end."""
    folder = make_family(name, tmp_path / "model", **SIZES)
    monkeypatch.setitem(select._MODULES, "cpu", "kernels.gpu.operations")
    model = load_model(folder, ModelConfig.from_folder(folder, "float32", device=DEVICE), DEVICE)
    sequences = [random.Random(length).choices(range(VOCAB_SIZE), k=length) for length in LENGTHS]
    truth = truth_of_folder(folder, sequences)
    whole = Stepper(model, sequences).step({i: (0, length) for i, length in enumerate(LENGTHS)})
    truth.check_whole([whole[i].cpu() for i in range(len(LENGTHS))])

    stepper, (short, long) = Stepper(model, sequences), (LENGTHS.index(7), len(LENGTHS) - 1)
    pieces = [{long: (0, 25), short: (0, 6)}, {short: (6, 7), long: (25, LENGTHS[-1] - 1)}]
    pieces.append({long: (LENGTHS[-1] - 1, LENGTHS[-1])})
    found = [(i, slice(*step[i]), logits.cpu()) for step in pieces for i, logits in stepper.step(step).items()]
    truth.check(found)
