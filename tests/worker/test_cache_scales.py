"""Scales of a cache of eight bits: measured, read from checkpoints, found in their order, and announced."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from kernels.gpu.attention import paged_attention
from kernels.gpu.cache import reshape_and_cache, rotary_and_cache
from octavo.cli import main
from scheduler_svc.models.served_model import fingerprint_of
from tests.tiny_models import make_tiny_model
from tests.worker.fake_model import FakeModel, fake_config
from worker_svc.cache.cache_sizing import Limits
from worker_svc.config import WorkerConfig
from worker_svc.host.device_memory import HostMemory
from worker_svc.models.cache_scales.cache_scales import CacheScales, calibrated_path
from worker_svc.models.cache_scales.checkpoint_scales import is_cache_scale, numbers_of, scales_of_checkpoint
from worker_svc.models.cache_scales.found_scales import find_scales
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.decoder import Decoder
from worker_svc.models.loader import load_model
from worker_svc.models.parts import ModelPart
from worker_svc.parallel.ranks import Ranks
from worker_svc.parallel.stages import OnlyStage, Stages
from worker_svc.service.worker_service import WorkerService
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.profile import Profiler
from worker_svc.steps.worker import Worker
from worker_svc.tokenizers.tokenizer_files import TokenizerFiles

LAYERS, HEADS = 3, 2
TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen 2, with biased keys beyond what 8 bits can tell in its second layer."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=1031, hidden_size=48, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=HEADS,
        intermediate_size=40, max_position_embeddings=64, head_dim=12,
    )  # fmt: skip
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen2", config, seed=3)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.bias"][3] = 700.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


def with_tensors(folder: Path, to: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """The model with more tensors, and more in its config."""
    shutil.copytree(folder, to)
    save_file(load_file(folder / "model.safetensors") | tensors, to / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(content | config))
    return to


# ---- measured --------------------------------------------------------------------------------------------------------


def test_scales_are_powers_of_two_with_room_above_what_was_seen() -> None:
    largest = torch.tensor([[[448.0, 449.0], [0.0, 1e-3]], [[224.0, 225.0], [3e38, 1.0]]])
    scales = CacheScales.of_largest(largest)
    assert scales.key == ((2.0, 4.0), (1.0, 2.0))
    assert scales.value[0] == (1.0, 2.0**-17)
    stored = largest / torch.tensor([scales.key, scales.value]).transpose(0, 1)
    assert stored.max() <= 224 and stored[stored > 0].min() > 112
    (of_noise,) = CacheScales.of_largest(torch.full((1, 2, 1), 1e-44)).key[0]
    assert float(np.float32(of_noise)) == of_noise > 0
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ModelError, match="not finite"):
            CacheScales.of_largest(torch.full((1, 2, 1), bad))


def test_a_layer_gets_the_scales_of_its_heads() -> None:
    scales = CacheScales(((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)), ((7.0, 8.0, 9.0), (10.0, 11.0, 12.0)))
    of_layer = scales.of_layer(1, range(1, 3), torch.device("cpu"))
    assert {name: scale.tolist() for name, scale in of_layer.items()} == {"key_scale": [5, 6], "value_scale": [11, 12]}
    assert {scale.dtype for scale in of_layer.values()} == {torch.float32}


def test_calibrating_finds_what_the_cache_of_transformers_holds(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys rotated. In pieces that the model can take; and the worker finds the file by the model's hash."""
    from transformers import AutoModelForCausalLM

    text = tmp_path / "text"
    text.write_text(TEXT)
    assert main(["model", "calibrate", str(folder), "--text", str(text), "--device", "cpu", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    config = ModelConfig.from_folder(folder)
    assert row["path"] == str(calibrated_path(config.model_hash))
    assert (row["tokens"], row["layers_cut_without_scales"]) == (len(TEXT), [1])

    oracle, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    token_ids = list(TEXT.encode())
    for start in (0, 63):
        with torch.inference_mode():
            held = oracle(torch.tensor([token_ids[start : start + 63]]), use_cache=True).past_key_values
        both = [torch.stack((layer.keys[0], layer.values[0])) for layer in held.layers]
        found.append(torch.stack(both).abs().amax(dim=(3, 4)))
    largest = torch.stack(found).amax(0)
    assert row["largest"] == pytest.approx(float(largest.max()), rel=1e-5)
    scales = find_scales(folder, config, "auto", None)
    assert scales == CacheScales.of_largest(largest)
    assert scales.digest == row["digest"]


def test_a_text_without_tokens_and_an_impossible_option_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    assert main(["model", "calibrate", str(folder), "--text", str(empty), "--device", "cpu"]) == 1
    assert f"{empty} has no tokens to compute" in capsys.readouterr().err
    assert main(["model", "calibrate", str(folder), "--text", str(empty), "--device", "tpu"]) == 2
    assert "device is 'tpu'" in capsys.readouterr().err


def test_a_file_is_for_one_model_and_read_whole_or_refused(tmp_path: Path) -> None:
    scales = CacheScales(((0.5, 2.0),) * LAYERS, ((1.5, 3.0),) * LAYERS)
    path = tmp_path / "scales.json"
    scales.write(path, "tiny", "hash", tokens=7)
    assert CacheScales.of_file(path, LAYERS, HEADS, "hash") == scales
    for sizes, why in (
        ((LAYERS, HEADS, "other"), "was made for another model, 'tiny'"),
        ((LAYERS + 1, HEADS, "hash"), "has no scales for 4 layers of 2 key/value heads"),
        ((LAYERS, 1, "hash"), "has no scales for 3 layers of 1 key/value heads"),
    ):
        with pytest.raises(ModelError, match=why):
            CacheScales.of_file(path, *sizes)
    for text, why in (
        ("{", "is no file of"),
        ("[]", "has no key and value scales above 0"),
        (json.dumps({"key": [[0]], "value": [[1]]}), "has no key and value scales above 0"),
        (json.dumps({"key": [[1e999]], "value": [[1]]}), "has no key and value scales above 0"),
        (json.dumps({"key": [[1e-46]], "value": [[1]]}), "has no key and value scales above 0"),  # 0 in float32
        (json.dumps({"key": [[1]], "value": [[1e39]]}), "has no key and value scales above 0"),  # infinite there
    ):
        path.write_text(text)
        with pytest.raises(ModelError, match=why):
            CacheScales.of_file(path, 1, 1, "hash")
    with pytest.raises(ModelError, match="cannot read"):
        CacheScales.of_file(tmp_path / "none", 1, 1, "hash")


# ---- of checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
def test_scales_have_these_names_in_checkpoints(folder: Path, tmp_path: Path, key: str, value: str) -> None:
    """With one number or one a head, in any type; and a cache of more bits does without."""
    tensors = {"model.layers.0.self_attn.q_scale": torch.tensor(9.0)}
    for layer in range(LAYERS):
        of_heads = torch.tensor([0.5 + layer, 3.0], dtype=torch.bfloat16)
        tensors[f"model.layers.{layer}.{key}"] = of_heads
        tensors[f"model.layers.{layer}.{value}"] = torch.tensor(0.25) if layer else torch.tensor([[[0.25]]])
    scaled = with_tensors(folder, tmp_path / "model", tensors)
    found = scales_of_checkpoint(scaled, "auto", LAYERS, HEADS)
    assert found == (CacheScales(((0.5, 3.0), (1.5, 3.0), (2.5, 3.0)), ((0.25, 0.25),) * LAYERS), [])
    assert load_model(scaled, ModelConfig.from_folder(scaled), "cpu").weights_bytes > 0


def test_one_scale_may_be_for_both_and_those_that_lack_are_1(folder: Path, tmp_path: Path) -> None:
    tensors = {
        "model.layers.1.self_attn.kv_scale": torch.tensor(2.0),
        "model.layers.1.self_attn.v_scale": torch.tensor(0.5),
    }
    scaled = with_tensors(folder, tmp_path / "model", tensors)
    config = ModelConfig.from_folder(scaled)
    with capture_logs() as lines:
        scales = find_scales(scaled, config, "safetensors", None)
    assert scales == CacheScales(((1.0, 1.0), (2.0, 2.0), (1.0, 1.0)), ((1.0, 1.0), (0.5, 0.5), (1.0, 1.0)))
    assert [line["layers"] for line in lines if line["log_level"] == "warning"] == ["0, 2"]
    assert numbers_of([0, 3, 4, 5, 9, 10]) == "0, 3-5, 9-10"


def test_a_scheme_that_is_a_word_is_no_other_kind_of_cache(folder: Path, tmp_path: Path) -> None:
    """As AutoFP8 writes it."""
    described = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
    tensors = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(2.0) for layer in range(LAYERS)}
    scaled = with_tensors(folder, tmp_path / "model", tensors, quantization_config=described)
    of_all = ((2.0,) * HEADS,) * LAYERS
    assert scales_of_checkpoint(scaled, "auto", LAYERS, HEADS) == (CacheScales(of_all, of_all), [])


def test_scales_of_a_tower_beside_the_model_are_not_the_models(folder: Path, tmp_path: Path) -> None:
    towers = ["vision_tower.vision_model.encoder.layers", "model.visual.blocks", "audio_tower.layers"]
    of_towers = {f"{tower}.1.self_attn.{part}_scale": torch.tensor(5.0) for tower in towers for part in ("k", "v", "q")}
    assert not any(map(is_cache_scale, of_towers))
    own = {f"model.language_model.layers.{layer}.self_attn.kv_scale": torch.tensor(2.0) for layer in range(LAYERS)}
    scaled = with_tensors(folder, tmp_path / "model", of_towers | own)
    found = scales_of_checkpoint(scaled, "auto", LAYERS, HEADS)
    assert found == (CacheScales(((2.0,) * HEADS,) * LAYERS, ((2.0,) * HEADS,) * LAYERS), [])
    alone = with_tensors(folder, tmp_path / "alone", of_towers)
    assert scales_of_checkpoint(alone, "auto", LAYERS, HEADS) is None


def test_what_is_no_scale_of_this_cache_is_refused(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_scale"
    for number, (tensor, why) in enumerate(
        [
            (
                torch.ones(3),
                r"scale model.layers.0.self_attn.k_scale is \[3\], neither one number nor one for each of 2",
            ),
            (torch.tensor(0.0), r"k_scale is \[0.0\]: no numbers above 0"),
            (torch.tensor([1.0, torch.inf]), "no numbers above 0"),
        ]
    ):
        scaled = with_tensors(folder, tmp_path / str(number), {name: tensor})
        with pytest.raises(ModelError, match=why):
            scales_of_checkpoint(scaled, "auto", LAYERS, HEADS)
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}
    scaled = with_tensors(folder, tmp_path / "int", {name: torch.tensor(1.0)}, quantization_config=scheme)
    with pytest.raises(ModelError, match="its scales are for a cache of int of 8 bits, not for kv_cache_dtype fp8"):
        scales_of_checkpoint(scaled, "auto", LAYERS, HEADS)


# ---- of a worker -----------------------------------------------------------------------------------------------------


def test_a_file_that_is_given_is_first_then_the_checkpoint_then_what_was_measured_then_1(
    folder: Path, tmp_path: Path
) -> None:
    def scales(number: float) -> CacheScales:
        return CacheScales(((number,) * HEADS,) * LAYERS, ((number,) * HEADS,) * LAYERS)

    tensors = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(2.0) for layer in range(LAYERS)}
    scaled = with_tensors(folder, tmp_path / "model", tensors)
    given = tmp_path / "given.json"
    for model in (folder, scaled):
        config = ModelConfig.from_folder(model)
        assert find_scales(model, config, "auto", None) == scales(1.0 if model == folder else 2.0)
        scales(3.0).write(calibrated_path(config.model_hash), "tiny", config.model_hash)
        assert find_scales(model, config, "auto", None) == scales(3.0 if model == folder else 2.0)
        scales(4.0).write(given, "tiny", config.model_hash)
        assert find_scales(model, config, "auto", given) == scales(4.0)


class Writing(FakeModel):
    """Has a key of this size in its cache."""

    def __init__(self, config: ModelConfig, key: float) -> None:
        super().__init__(config)
        self._key = key

    def forward(self, token_ids, positions, caches, attention, logits_rows, reader=None, out=None):
        caches[0][0][0, 0, 0, 0] = self._key
        return super().forward(token_ids, positions, caches, attention, logits_rows, reader, out)


@pytest.mark.parametrize(
    ("scale", "key", "said"),
    [
        (1.0, 416.0, ("keys or values beyond 448 are cut in the cache of 8 bits, which has no scales", None)),
        (1.0, -448.0, ("keys or values are cut in the cache of 8 bits, which has no scales", "0")),
        (2.0, 448.0, ("keys or values are cut in the cache of 8 bits", "0")),
        (2.0, -416.0, None),
    ],
)
def test_a_first_step_tells_which_layers_are_cut(scale: float, key: float, said: tuple[str, str | None] | None) -> None:
    config = replace(fake_config(), cache_scales=CacheScales(((scale,),), ((1.0,),)))
    with capture_logs() as lines:
        Profiler(_runner(config, key), HostMemory()).measure(Limits(2, 16, 64))
    warnings = [(line["event"], line.get("layers")) for line in lines if line["log_level"] == "warning"]
    assert warnings == ([said] if said else [])


def test_layers_have_their_numbers_in_the_model_at_every_stage(folder: Path) -> None:
    whole = replace(ModelConfig.from_folder(folder), cache_scales=CacheScales.ones(LAYERS, HEADS))

    class Last(OnlyStage):
        stage, count = 1, 2

    own = ModelPart.of(whole, stages=Last()).own
    config = replace(fake_config(), cache_scales=whole.cache_scales, first_layer=own.first_layer)
    with capture_logs() as lines:
        Profiler(_runner(config, key=448.0), HostMemory()).measure(Limits(2, 16, 64))
    assert own.first_layer == 2 == LAYERS - own.num_layers
    assert [line["layers"] for line in lines if line["log_level"] == "warning"] == ["2"]


def _runner(config: ModelConfig, key: float) -> ModelRunner:
    return ModelRunner(Writing(config, key), config, 4, cache_dtype=torch.float8_e4m3fn)


def test_workers_with_other_scales_serve_another_model() -> None:
    ones, others = CacheScales.ones(LAYERS, HEADS), CacheScales(((2.0,) * HEADS,) * LAYERS, ((1.0,) * HEADS,) * LAYERS)
    assert ones.digest == "" and len(others.digest) == 8
    fingerprints, names = set(), []
    for scales in (None, ones, others, replace(others, key=others.value, value=others.key)):
        info = _info(scales)
        names.append(info.kv_cache_dtype)
        fingerprints.add(fingerprint_of(info, "tokenizer"))
    assert names[:2] == ["fp8", "fp8"] and names[2] == f"fp8:{others.digest}"
    assert len(fingerprints) == 3, "scales of 1 are none"


def _info(scales: CacheScales | None) -> Any:
    config = replace(fake_config(), cache_scales=scales)
    worker = Worker(ModelRunner(FakeModel(config), config, 4), WorkerConfig(kv_cache_dtype="fp8", max_model_len=64))
    service = WorkerService(worker, config, TokenizerFiles({}))
    try:
        return asyncio.run(service.GetInfo(None, None))  # type: ignore[arg-type]  # it looks at neither
    finally:
        worker.thread.stop(1)


def test_scales_are_for_a_cache_of_8_bits() -> None:
    with pytest.raises(ValueError, match="kv_cache_scales are for kv_cache_dtype fp8, not for auto"):
        WorkerConfig(kv_cache_scales=Path("scales.json"))


def test_what_a_cache_of_8_bits_is_served_with_is_compiled() -> None:
    """It always has scales."""
    for operation in (reshape_and_cache, rotary_and_cache, paged_attention):
        names = [variant.name for variant in operation.variants() if _is_served_with_8_bits(variant)]
        assert names, operation.__name__


def _is_served_with_8_bits(variant: Any) -> bool:
    signature = variant.signature
    return "*fp8e4nv" in signature.values() and any(
        signature.get(f"{part}_scale") == "*fp32" for part in ("key", "value")
    )


def test_ranks_and_stages_have_the_scales_of_their_heads_and_layers(folder: Path) -> None:
    table = tuple([tuple([float(10 * layer + head + 1) for head in range(HEADS)]) for layer in range(LAYERS)])
    config = replace(ModelConfig.from_folder(folder), cache_scales=CacheScales(table, table))
    found = []
    for rank in range(4):  # more than heads: a head is on two of them
        part = ModelPart.of(config, cast(Ranks, SimpleNamespace(rank=rank, size=4)))
        assert [len(part.kv_heads) * config.head_size] * 2 == [len(rows) for rows in part.outputs_of_heads[1:]]
        layer = CacheScales(table, table).of_layer(1, part.kv_heads, torch.device("cpu"))
        found.append(layer["key_scale"].tolist())
    assert found == [[11.0], [11.0], [12.0], [12.0]]
    last = ModelPart.of(config, stages=cast(Stages, SimpleNamespace(stage=1, count=2)))
    model = load_model(folder, last, "cpu")
    assert isinstance(model, Decoder)
    assert [layer._cache_scales["value_scale"].tolist() for layer in model.layers] == [[21.0, 22.0]]
