"""The bar of a load counts what files have, and ends where they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.worker.families import make_family
from tests.worker.gguf_files import write_gguf
from tests.worker.kept import wait_until_kept
from tests.worker.quantised_checkpoints import FORMATS, write_quantised
from tests.worker.test_model_stages import stage
from worker_svc.models.checkpoint.gguf_folder import model_folder
from worker_svc.models.config import ModelConfig
from worker_svc.models.loader import load_model
from worker_svc.models.parts import ModelPart

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
}


class Bar:
    """As `ByteBar`."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.steps: list[int] = []

    def add(self, num_bytes: int) -> None:
        self.steps.append(num_bytes)

    def finish(self) -> None:
        assert self.total_bytes == sum(self.steps) and len(self.steps) > 5


@pytest.fixture(autouse=True)
def bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    """Those of all loads, each of which is checked at its end."""
    made: list[Bar] = []

    def make(what: str, total_bytes: int) -> Bar:
        made.append(Bar(what, total_bytes))
        return made[-1]

    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("worker_svc.models.loader.ByteBar", make)
    return made


def load(folder: Path, quantization: str = "") -> None:
    load_model(folder, ModelConfig.from_folder(folder, "float32", quantization=quantization), "cpu")
    wait_until_kept()


@pytest.mark.parametrize("is_tied", [False, True])
def test_quantised_weights_that_are_kept_count_as_read(is_tied: bool, tmp_path: Path, bars: list[Bar]) -> None:
    folder = make_family("qwen2", tmp_path / "model", tie_word_embeddings=is_tied)
    for quantization in ("", "int8", "int8"):  # made, found
        load(folder, quantization)
    size = (folder / "model.safetensors").stat().st_size
    assert all(0.9 * size < bar.total_bytes < size for bar in bars) and len(bars) == 3


def test_a_head_that_a_tied_model_does_not_read_does_not_count(tmp_path: Path, bars: list[Bar]) -> None:
    folder = make_family("qwen2", tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    load(folder)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    load(folder)
    assert len(bars) == 2 and bars[0].total_bytes == bars[1].total_bytes


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_a_gguf_file_counts_as_it_is_stored(kind: str, tmp_path: Path, bars: list[Bar]) -> None:
    original, type_of = make_family("mixtral", tmp_path / "model", **SIZES), gguf.GGMLQuantizationType[kind]

    def stored(name: str, values: np.ndarray) -> np.ndarray:
        return gguf.quantize(np.ascontiguousarray(values), type_of)

    path = write_gguf(original, tmp_path / "model.gguf", "llama", quantised=(type_of, stored))
    with model_folder(path) as folder:
        load(folder)
        load(folder, "int8")
        load(folder, "int8")
    assert all(0.5 * path.stat().st_size < bar.total_bytes < path.stat().st_size for bar in bars) and len(bars) == 3


@pytest.mark.parametrize("name", ["awq-32", "fp8"])
def test_quantised_checkpoints(name: str, tmp_path: Path, bars: list[Bar]) -> None:
    quantised, _ = write_quantised(make_family("llama-gelu", tmp_path / "model", **SIZES), tmp_path, FORMATS[name])
    for quantization in ("", "int4", "int4"):
        load(quantised, quantization)
    assert len(bars) == 3


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_stage_counts_what_it_reads(is_tied: bool, tmp_path: Path, bars: list[Bar]) -> None:
    folder = make_family("llama-yarn", tmp_path / "model", num_hidden_layers=4, tie_word_embeddings=is_tied)
    config = ModelConfig.from_folder(folder)
    for number in range(3):
        load_model(folder, ModelPart.of(config, None, stage(number, 3)), "cpu")
    assert len({bar.total_bytes for bar in bars}) == 3
