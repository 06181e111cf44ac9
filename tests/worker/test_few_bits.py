"""A model of a file of few bits in float32: the logits of its float32 weights bit for bit, in a part of the memory."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.tiny_models import make_tiny_llama
from tests.worker.gguf_files import write_gguf
from tests.worker.model_cases import Stepper
from worker_svc.models import embedding
from worker_svc.models.checkpoint.gguf_folder import model_folder
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.loader import load_model

VOCAB_SIZE, HIDDEN, INTERMEDIATE = 1031, 64, 160
# Bits a number, scales and minima included, of a product; of the embedding, whose codes are bytes and scales float32.
KINDS = {"Q4_0": (4.5, 9.5), "Q4_1": (5, 10), "Q8_0": (8.5, 9)}


def load(folder: Path) -> Decoder:
    model = load_model(folder, ModelConfig.from_folder(folder, "float32"), "cpu")
    assert isinstance(model, Decoder)
    return model


def logits_of(model: Decoder) -> list[torch.Tensor]:
    """Of a prompt and of one token after it, alone and beside another sequence."""
    sequences = [random.Random(seed).choices(range(VOCAB_SIZE), k=40) for seed in range(2)]
    alone, beside = Stepper(model, sequences), Stepper(model, sequences)
    steps = [alone.step({0: (0, 38)}), alone.step({0: (38, 39)}), beside.step({0: (0, 38), 1: (0, 9)})]
    steps.append(beside.step({0: (38, 40), 1: (9, 10)}))
    return [logits for step in steps for logits in step.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_few_bits_computes_what_its_float32_weights_say(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = make_tiny_llama(
        tmp_path / "model",
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=INTERMEDIATE,
        tie_word_embeddings=True,
    )
    type_of = gguf.GGMLQuantizationType[kind]

    def stored(_: str, values: np.ndarray) -> np.ndarray:
        return gguf.quantize(np.ascontiguousarray(values), type_of)

    path = write_gguf(original, tmp_path / "few.gguf", "llama", quantised=(type_of, stored))
    with model_folder(path) as folder:
        small = load(folder)
        monkeypatch.setattr("kernels.cpu.quantized_product", lambda *_, **__: None)
        monkeypatch.setattr("kernels.cpu.products.packed_weight.pack_few_bits", lambda *_, **__: None)
        monkeypatch.setattr(embedding, "_take_table", lambda *arguments: embedding.take_embedding(*arguments[:-1]))
        large = load(folder)
    for one, other in zip(logits_of(small), logits_of(large), strict=True):
        assert torch.equal(one, other) and one.isfinite().all() and one.std() > 0
    layer = [(2 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
    sizes = [(VOCAB_SIZE, HIDDEN), *layer * 3]
    numbers = sum(-(-rows // 48) * 48 * depth for rows, depth in sizes)  # in whole panels
    of_product, of_table = KINDS[kind]
    saved_bits = numbers * (32 - of_product) + VOCAB_SIZE * HIDDEN * (32 - of_table)
    assert large.weights_bytes - small.weights_bytes == saved_bits / 8
