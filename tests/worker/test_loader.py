"""Checkpoints are understood whole or refused with one line that names the file or tensor."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from tests.tiny_models import make_tiny_llama
from tests.worker.exact_logits import truth_of_folder
from tests.worker.model_cases import Stepper
from worker_svc.models.checkpoint.checkpoint_files import open_checkpoint
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.decoder import Decoder
from worker_svc.models.loader import Model, load_model

TOKENS = [1, 500, 20, 1030, 7]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def load(folder: Path, load_format: str = "auto") -> Model:
    return load_model(folder, ModelConfig.from_folder(folder), "cpu", load_format)


def logits(model: Model) -> torch.Tensor:
    return Stepper(model, [TOKENS]).step({0: (0, len(TOKENS))})[0]


def refusal(folder: Path, load_format: str = "auto") -> str:
    with pytest.raises(ModelError) as raised:
        load(folder, load_format)
    message = str(raised.value)
    assert "\n" not in message
    return message


def rewrite(folder: Path, changes: dict[str, torch.Tensor], without: str = "") -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    tensors.pop(without, None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file_name = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_why_a_file_cannot_be_opened_is_said(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.symlink_to(path)  # which even root may not open, as others one without leave to
    with pytest.raises(ModelError, match=r"cannot read .*model.safetensors.*Too many levels of symbolic links"):
        open_checkpoint([path], "safetensors")


def test_shards_are_the_same_model(original: Path, folder: Path) -> None:
    shard(folder)
    assert torch.equal(logits(load(folder)), logits(load(original)))


def test_a_tied_checkpoint_may_carry_its_head(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    expected = logits(load(folder))
    rewrite(folder, {"lm_head.weight": load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()})
    assert torch.equal(logits(load(folder)), expected)


@pytest.mark.parametrize("load_format", ["auto", "bin"])
def test_another_head_of_a_tied_checkpoint_is_taken_as_transformers_does(load_format: str, tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    head[-1] += 1.0  # the last row alone
    rewrite(folder, {"lm_head.weight": head})
    expected = truth_of_folder(folder, [TOKENS])
    if load_format == "bin":
        pickled(folder)
    with capture_logs() as lines:
        model = load(folder, load_format)
    expected.check_whole([logits(model)])
    assert [line["tensor"] for line in lines if line["log_level"] == "warning"] == ["lm_head.weight"]


def test_memory_is_asked_for_another_head_of_a_tied_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    needed: list[int] = []
    monkeypatch.setattr("worker_svc.models.loader._check_memory", lambda part, device, num, free: needed.append(num))
    for head in (table.clone(), table * 2):
        rewrite(folder, {"lm_head.weight": head})
        load(folder)
    tied, apart = needed
    assert apart > tied


def test_a_tied_checkpoint_may_hold_the_head_alone(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    expected = logits(load(folder))
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    rewrite(folder, {"lm_head.weight": table}, without="model.embed_tokens.weight")
    assert torch.equal(logits(load(folder)), expected)


def test_frequencies_that_old_files_carry_are_not_needed(original: Path, folder: Path) -> None:
    names = "model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"
    rewrite(folder, {name: torch.ones(5) for name in names})
    assert torch.equal(logits(load(folder)), logits(load(original)))


def test_dummy_weights_need_the_config_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first, second = logits(load(folder, "dummy")), logits(load(folder, "dummy"))
    assert torch.equal(first, second)
    other = load_model(folder, ModelConfig.from_folder(folder), "cpu", "dummy", seed=1)
    assert not torch.equal(first, logits(other))
    assert first.isfinite().all() and first.std() > 0.01


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, {}, without="model.layers.1.mlp.up_proj.weight")
    assert "the checkpoint has no tensor model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_a_tensor_too_many_is_named(folder: Path) -> None:
    rewrite(folder, {"model.layers.0.self_attn.q_norm.weight": torch.ones(10), "zz": torch.ones(1)})
    assert "no place for tensor model.layers.0.self_attn.q_norm.weight and 1 more" in refusal(folder)


def test_another_shape_is_named(folder: Path) -> None:
    rewrite(folder, {"model.norm.weight": torch.ones(61)})
    assert "tensor model.norm.weight is [61], config.json says [60]" in refusal(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert f"cannot read {path}" in refusal(folder)


def test_a_file_that_is_shortened_while_it_is_read_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = open_checkpoint([path], "safetensors")
    path.write_bytes(path.read_bytes()[:-1000])
    last = max(tensors.values(), key=lambda tensor: tensor._offset)  # type: ignore[attr-defined]  # of a FileTensor
    with pytest.raises(ModelError, match=r"model\.safetensors has become shorter while it was read"):
        last.read_into(torch.empty(last.shape), [range(last.shape[0])], [range(last.shape[-1])])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float32])
def test_numbers_of_any_type_are_converted_piece_by_piece(
    folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_svc.models.checkpoint.stored_tensor._PIECE_BYTES", 104)  # no whole rows
    written = torch.randn(1031, 60).to(dtype)
    rewrite(folder, {"model.embed_tokens.weight": written})
    stored = open_checkpoint([folder / "model.safetensors"], "safetensors")["model.embed_tokens.weight"]
    for wanted in (torch.float32, torch.bfloat16):
        out = torch.full(stored.shape, torch.nan, dtype=wanted)
        stored.read_into(out, [range(1031)], [range(60)])
        assert torch.equal(out, written.to(wanted))
        some = torch.full((902, 20), torch.nan, dtype=wanted)
        stored.read_into(some, [range(1), range(130, 1031)], [range(7, 15), range(48, 60)])
        expected = torch.cat([written[:1], written[130:]])
        assert torch.equal(some, torch.cat([expected[:, 7:15], expected[:, 48:]], dim=1).to(wanted))


def test_a_checkpoint_is_closed_when_it_is_loaded(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    load(folder)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"not tensors at all"])
def test_a_file_that_is_no_safetensors_is_named(folder: Path, content: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    assert f"cannot read {path}" in refusal(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    neither = f"{folder} holds neither model.safetensors nor model.safetensors.index.json"
    assert refusal(folder) == neither
    (folder / "pytorch_model.bin").touch()
    assert refusal(folder, "safetensors") == f"{neither}; --load-format bin reads its pickles"


def test_a_missing_shard_and_a_broken_index_are_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "names model-00002-of-00002.safetensors, which does not exist" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "has no readable weight_map" in refusal(folder)


@pytest.mark.parametrize("name", [3, None, "../tiny/model-00001-of-00002.safetensors", "", ".."])
def test_an_index_names_files_of_its_own_folder(folder: Path, name: Any) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | {"model.norm.weight": name}
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert f"names {name!r}, which is no file of this folder" in refusal(folder)


def test_a_tensor_in_two_shards_is_named(folder: Path) -> None:
    shard(folder)
    path = folder / "model-00002-of-00002.safetensors"
    first = load_file(folder / "model-00001-of-00002.safetensors")
    save_file(load_file(path) | {"lm_head.weight": first["lm_head.weight"]}, path)
    assert "tensor lm_head.weight is in more than one file" in refusal(folder)


def test_a_shard_of_another_model_is_named_by_its_first_tensor_that_differs(folder: Path, tmp_path: Path) -> None:
    shard(folder)
    other = make_tiny_llama(tmp_path / "other", intermediate_size=99)
    shard(other)
    shutil.copy(other / "model-00002-of-00002.safetensors", folder)
    assert "config.json says" in refusal(folder) and "mlp" in refusal(folder)


def test_weights_under_another_name_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert "nor model.safetensors.index.json, but consolidated.safetensors" in refusal(folder)


def test_weights_under_the_name_of_another_format_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")
    assert f"{folder / 'model.gguf'}: this is not a readable GGUF file" in refusal(folder)
    (folder / "model.gguf").rename(folder / "pytorch_model.bin")
    assert f"cannot read {folder / 'pytorch_model.bin'}" in refusal(folder, "bin")


def test_a_type_of_numbers_that_is_not_known_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"dtype":"F32"', b'"dtype":"F99"', 1))
    assert f"cannot read {path}" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_tensor_is_named(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, {"model.norm.weight": torch.ones(60).to(dtype)})
    name = str(dtype).removeprefix("torch.")
    assert f"tensor model.norm.weight is {name}, and nothing says how it was quantised" in refusal(folder)


def test_a_quantisation_method_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    assert "weights quantised by 'hqq' are not read; read are awq, compressed-tensors" in refusal(folder)


def test_the_checkpoint_of_another_model_names_the_first_tensor_that_differs(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path / "other", hidden_size=48)
    shutil.copy(other / "model.safetensors", folder)
    assert "tensor model.embed_tokens.weight is [1031, 48], config.json says [1031, 60]" in refusal(folder)


def pickled(folder: Path, num_files: int = 1, legacy: bool = False) -> Path:
    """The same weights as `.bin`, in place of the safetensors."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if num_files == 1:
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        return folder / "pytorch_model.bin"
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        part = dict(sorted(tensors.items())[number::num_files])
        path = folder / f"pytorch_model-{number}.bin"
        torch.save(part, path)
        weight_map |= dict.fromkeys(part, path.name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.parametrize(("num_files", "legacy"), [(1, False), (1, True), (3, False)])
def test_pickles_are_the_same_model_and_read_only_when_asked_for(
    original: Path, folder: Path, num_files: int, legacy: bool
) -> None:
    pickled(folder, num_files, legacy)
    assert "weights as pickles alone: --load-format bin reads them" in refusal(folder)
    assert torch.equal(logits(load(folder, "bin")), logits(load(original)))


class Payload:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


def test_a_pickle_that_carries_code_runs_none_of_it(folder: Path, tmp_path: Path) -> None:
    path = pickled(folder)
    torch.save({"model.norm.weight": Payload(tmp_path / "ran")}, path)
    assert f"cannot read {path}: it is damaged, or holds more than tensors" in refusal(folder, "bin")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("length", [0, 7, 5000])
def test_a_truncated_pickle_is_named(folder: Path, length: int) -> None:
    path = pickled(folder)
    path.write_bytes(path.read_bytes()[:length])
    assert f"cannot read {path}" in refusal(folder, "bin")


def test_a_pickle_of_something_else_is_named(folder: Path) -> None:
    path = pickled(folder)
    torch.save([torch.ones(1)], path)
    assert f"{path} holds a list, not tensors by name" in refusal(folder, "bin")
    torch.save({"model.norm.weight": 3}, path)
    assert "model.norm.weight is a int, not a tensor" in refusal(folder, "bin")


@pytest.mark.parametrize("kind", ["sparse", "csr", "meta"])
def test_a_pickled_tensor_that_does_not_hold_its_numbers_is_named(folder: Path, kind: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    path, name = pickled(folder), "model.layers.0.mlp.up_proj.weight"
    whole = tensors[name]
    other = {"sparse": whole.to_sparse(), "csr": whole.to_sparse_csr(), "meta": whole.to("meta")}[kind]
    torch.save(tensors | {name: other}, path)
    assert f"{path}: tensor {name} is sparse or without numbers, and is not read" in refusal(folder, "bin")


def test_too_little_memory_is_said_before_it_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_svc.models.loader.available_bytes", lambda: 500_000)
    assert "too little memory for tiny: loading its weights takes up to 0.00" in refusal(folder)


def test_bfloat16_is_the_same_model_as_its_numbers_in_float32_and_half_as_large(folder: Path) -> None:
    """A float32 model of a checkpoint in bfloat16: nothing of it becomes float32 when it is loaded."""
    narrow = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    models = []
    for tensors in (narrow, {name: tensor.float() for name, tensor in narrow.items()}):
        save_file(tensors, folder / "model.safetensors")
        models.append(load_model(folder, ModelConfig.from_folder(folder, "float32"), "cpu"))
    of_bfloat16, of_float32 = models
    assert torch.equal(logits(of_bfloat16), logits(of_float32))
    assert isinstance(of_bfloat16, Decoder) and isinstance(of_float32, Decoder)
    embeddings = [
        model._embedding.weight
        for model in (of_bfloat16, of_float32)
        if model._embedding is not None and model._embedding.weight is not None
    ]
    assert [each.dtype for each in embeddings] == [torch.bfloat16, torch.float32]
    assert of_float32.weights_bytes - of_bfloat16.weights_bytes == embeddings[0].nbytes


def test_memory_is_asked_for_what_a_load_takes_at_its_peak(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays alone would fit, but for a weight on its way."""
    stays = load(folder).weights_bytes
    monkeypatch.setattr("worker_svc.models.loader.available_bytes", lambda: stays + 1000)
    assert "too little memory for tiny" in refusal(folder)
    table = load_file(folder / "model.safetensors")["lm_head.weight"]
    monkeypatch.setattr("worker_svc.models.loader.available_bytes", lambda: stays + 4 * table.numel() + 100_000)
    load(folder)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_table_of_a_very_long_context_is_counted(folder: Path, device: str, load_format: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 10**11}))
    config = ModelConfig.from_folder(folder, "float32")
    with pytest.raises(ModelError, match=r"too little memory for tiny: .* takes up to 3[.]73e[+]03 GiB"):
        load_model(folder, config, device, load_format)


def test_the_estimate_of_memory_is_near_what_is_held(folder: Path, without_padding: None) -> None:
    model = load(folder)
    assert model.config.weights_bytes == pytest.approx(model.weights_bytes, rel=0.1)


def test_heads_too_large_for_a_gpu_are_refused_before_anything_is_read(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"head_dim": 258}))
    config = ModelConfig.from_folder(folder, "float32")
    said = "LlamaForCausalLM has heads of 258 elements, more than the 256 that are computed on a GPU: --device cpu"
    with pytest.raises(ModelError, match=said):
        load_model(folder, config, "cuda")
    with pytest.raises(ModelError, match=r"q_proj.weight is \[60, 60\]"):
        load_model(folder, config, "cpu")


def test_an_unknown_load_format(folder: Path) -> None:
    with pytest.raises(ModelError, match="load format 'pickle' is not one of auto, safetensors, gguf, bin, dummy"):
        load(folder, "pickle")
