"""A model whose layers are divided among stages computes what the whole one does, bit for bit; each reads its own."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.families import FAMILIES, make_family
from tests.worker.kept import wait_until_kept
from tests.worker.ranks_in_threads import on_all_ranks
from tests.worker.test_model_parts import LENGTHS, SPLITS, logits_of, reads, tokens
from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.decoder import Decoder
from worker_svc.models.loader import load_model
from worker_svc.models.logit_reader import LogitReader
from worker_svc.models.parts import ModelPart, layers_of
from worker_svc.parallel.process_stages import ProcessStages
from worker_svc.parallel.ranks import Ranks
from worker_svc.parallel.stages import OnlyStage, Stages

__all__ = ["reads"]


class QueuedStage:
    """See `Stages`: of one process, which computes one stage after the other."""

    def __init__(self, stage: int, count: int, before: deque[torch.Tensor], behind: deque[torch.Tensor]) -> None:
        self.stage, self.count, self.bytes_sent, self._before, self._behind = stage, count, 0, before, behind

    def receive(self, out: torch.Tensor) -> None:
        out.copy_(self._before.popleft())

    def hand_on(self, x: torch.Tensor) -> None:
        self.bytes_sent += x.nbytes
        self._behind.append(x)


def stage(number: int, count: int) -> QueuedStage:
    """One that has a part, and computes nothing."""
    return QueuedStage(number, count, deque(), deque())


class Pipeline:
    """All stages of a model as one; see `Model`."""

    def __init__(
        self, folder: Path, count: int, ranks: Ranks | None = None, load_format: str = "auto", quantization: str = ""
    ) -> None:
        self.config, self.device = ModelConfig.from_folder(folder, quantization=quantization), torch.device("cpu")
        self.weights_bytes, self.is_capturable = 0, False
        queues = [deque[torch.Tensor]() for _ in range(count + 1)]
        self.stages = [QueuedStage(number, count, *queues[number : number + 2]) for number in range(count)]
        self.parts = [ModelPart.of(self.config, ranks, each) for each in self.stages]
        self.config = replace(self.parts[0].own, num_layers=self.config.num_layers)
        self.models = [load_model(folder, part, "cpu", load_format) for part in self.parts]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        attention: AttentionMetadata,
        logits_rows: torch.Tensor,
        reader: LogitReader | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out is None, "stages are not captured"
        for part, model in zip(self.parts, self.models, strict=True):
            own = caches[part.layers.start : part.layers.stop]
            logits = model.forward(token_ids, positions, own, attention, logits_rows, reader if part.is_last else None)
        return logits


def whole(folder: Path, load_format: str = "auto") -> Any:
    return load_model(folder, ModelConfig.from_folder(folder), "cpu", load_format)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_have_the_bits_of_the_whole(name: str, tmp_path: Path) -> None:
    folder = make_family(name, tmp_path / "model")
    sequences = [tokens(length) for length in LENGTHS]
    expected, pipeline = logits_of(whole(folder), sequences), Pipeline(folder, 2)
    for found, logits in zip(logits_of(pipeline, sequences), expected, strict=True):
        assert torch.equal(found, logits)
    config, num_rows = pipeline.config, sum(LENGTHS)
    assert pipeline.stages[0].bytes_sent == num_rows * config.hidden_size * config.dtype.itemsize


@pytest.mark.parametrize(("name", "load_format"), [("llama-yarn", "dummy"), ("gemma2", "auto")])
def test_more_stages_and_other_sources(name: str, load_format: str, tmp_path: Path) -> None:
    folder = make_family(name, tmp_path / "model", num_hidden_layers=5)
    expected = logits_of(whole(folder, load_format), [tokens(20)])[0]
    for count in (3, 5):
        pipeline = Pipeline(folder, count, load_format=load_format)
        assert torch.equal(logits_of(pipeline, [tokens(20)])[0], expected)


@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_of_eight_bits_are_kept_apart(is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    folder = make_family("llama-yarn", tmp_path / "model", tie_word_embeddings=is_tied)
    config = ModelConfig.from_folder(folder, quantization="int8")
    expected = logits_of(load_model(folder, config, "cpu"), [tokens(20)])[0]
    for _ in range(2):  # made, and then found
        assert torch.equal(logits_of(Pipeline(folder, 2, quantization="int8"), [tokens(20)])[0], expected)
        wait_until_kept()
        kept = [path.stem.partition("-int8-")[2] for path in (tmp_path / "cache" / "quantized").iterdir()]
        assert sorted(kept) == ["7", "7-layers-0-2", "7-layers-2-3"]


@pytest.mark.parametrize("name", ["llama-yarn", "qwen3-moe-mixed"])
def test_stages_of_several_ranks(name: str, tmp_path: Path) -> None:
    folder = make_family(name, tmp_path / "model", **SPLITS[name][1])

    def work(ranks: Ranks, count: int) -> torch.Tensor:
        return logits_of(Pipeline(folder, count, ranks), [tokens(30)])[0]

    for one, two in zip(on_all_ranks(2, lambda r: work(r, 1)), on_all_ranks(2, lambda r: work(r, 2)), strict=True):
        assert torch.equal(one, two)


def test_stages_of_a_tied_model_whose_files_have_the_head_alone_or_another(tmp_path: Path) -> None:
    folder = make_family("llama-yarn", tmp_path / "model", tie_word_embeddings=True)
    stored = load_file(folder / "model.safetensors")
    table = stored.pop("model.embed_tokens.weight")
    for tensors in ({"lm_head.weight": table}, {"lm_head.weight": table * 2, "model.embed_tokens.weight": table}):
        save_file(stored | tensors, folder / "model.safetensors")
        expected = logits_of(whole(folder), [tokens(20)])[0]
        assert torch.equal(logits_of(Pipeline(folder, 2), [tokens(20)])[0], expected)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_stage_reads_its_part_of_the_file_alone(is_tied: bool, tmp_path: Path, reads: list[int]) -> None:
    folder = make_family("llama-yarn", tmp_path / "model", num_hidden_layers=3, tie_word_embeddings=is_tied)
    stored = load_file(folder / "model.safetensors")
    config = ModelConfig.from_folder(folder)
    layers = [(0, 1), (2,)]
    others = [{"model.embed_tokens"}, {"model.norm", "model.embed_tokens" if is_tied else "lm_head"}]
    for number in range(2):
        reads.clear()
        model = load_model(folder, ModelPart.of(config, None, stage(number, 2)), "cpu")
        expected = [
            tensor.nbytes
            for name, tensor in stored.items()
            if name.removesuffix(".weight") in others[number]
            or any(name.startswith(f"model.layers.{layer}.") for layer in layers[number])
        ]
        assert sum(reads) == sum(expected)
        assert isinstance(model, Decoder) and len(model.layers) == len(layers[number])


@pytest.mark.parametrize("is_tied", [False, True])
def test_memory_is_asked_for_what_a_stage_takes(
    is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_padding: None
) -> None:
    """The ends have the vocabulary, which no other stage divides with them: on the last one the head as it is read,
    too."""
    folder = make_family("llama-yarn", tmp_path / "model", num_hidden_layers=4, tie_word_embeddings=is_tied)
    needed: list[int] = []
    monkeypatch.setattr("worker_svc.models.loader._check_memory", lambda part, device, num, free: needed.append(num))
    config = ModelConfig.from_folder(folder, "float32")
    stays = [load_model(folder, ModelPart.of(config, None, stage(i, 4)), "cpu").weights_bytes for i in range(4)]
    tables = [table.nbytes for table in whole(folder)._rotary_tables]
    pair = 2 * 4 * config.hidden_size * config.intermediate_size  # gate and up, on their way into one product
    head = 4 * config.hidden_size * config.vocab_size
    assert head > pair
    beside = [pair, pair, pair, head]
    assert needed[:4] == [kept - sum(tables) + more for kept, more in zip(stays, beside, strict=True)]


def test_layers_are_dealt_out_once_and_the_last_stage_has_none_more() -> None:
    for count, num_layers in ((1, 5), (2, 5), (3, 5), (4, 30), (7, 30), (5, 5)):
        dealt = [layers_of(stage(number, count), num_layers) for number in range(count)]
        assert [layer for layers in dealt for layer in layers] == list(range(num_layers))
        sizes = list(map(len, dealt))
        assert max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)
    assert layers_of(OnlyStage(), 30) == range(30)


def test_a_tensor_without_a_place_is_found_by_the_stage_that_has_its_layer(tmp_path: Path) -> None:
    folder = make_family("llama-yarn", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.2.surprise.weight": torch.zeros(2)}, folder / "model.safetensors")
    config = ModelConfig.from_folder(folder)
    load_model(folder, ModelPart.of(config, None, stage(0, 2)), "cpu")
    with pytest.raises(ModelError, match=r"no place for tensor model\.layers\.2\.surprise"):
        load_model(folder, ModelPart.of(config, None, stage(1, 2)), "cpu")


class Sent:
    """A transfer of gloo's, which is not completed before somebody has waited for it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = weakref.ref(data)
        self.is_over = False

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        self.is_over = True


def test_what_has_been_handed_on_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Sent] = []

    def isend(data: torch.Tensor, to: int) -> Sent:
        sent.append(Sent(data))
        return sent[-1]

    monkeypatch.setattr("torch.distributed.isend", isend)
    stages = ProcessStages(0, 2, -1, 1)
    for _ in range(20):
        stages.hand_on(torch.zeros(3, 4))
    kept = [each for each in sent if each.data() is not None]
    assert 0 < len(kept) <= stages.count and not any(each.is_over for each in kept)
    assert stages.bytes_sent == 20 * 48
    sent[-2].is_over = True  # as NCCL says by itself
    stages.hand_on(torch.zeros(3, 4))
    assert sent[-3].data() is None


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    config, pair = ModelConfig.from_folder(make_family("llama-yarn", tmp_path / "model")), stage(0, 2)
    many: Stages = stage(0, config.num_layers + 1)
    for changed, stages, complaint in (
        (replace(config, impl="transformers"), pair, "is computed by transformers, on one rank alone"),
        (config, many, f"the model has {config.num_layers} layers, fewer than stages"),
    ):
        with pytest.raises(ModelError, match=f"pipeline_parallel_size {stages.count}: .*{complaint}"):
            ModelPart.of(changed, None, stages)
