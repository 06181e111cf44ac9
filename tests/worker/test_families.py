"""Every family against transformers in float32, whole, in pieces and in batches; see `families` for the models."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.exact_logits import truth_of_folder
from tests.worker.families import FAMILIES, VOCAB_SIZE, make_family
from tests.worker.model_cases import Stepper
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.loader import Model, load_model

LENGTHS = [1, 7, 83, 150]


def tokens(length: int) -> list[int]:
    return random.Random(length).choices(range(VOCAB_SIZE), k=length)


def load(folder: Path, dtype: str = "float32", max_model_len: int | None = None) -> Model:
    return load_model(folder, ModelConfig.from_folder(folder, dtype, max_model_len), "cpu")


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_whole_in_chunks_and_token_by_token(name: str, tmp_path: Path) -> None:
    folder = make_family(name, tmp_path / "model")
    model, sequences = load(folder), [tokens(length) for length in LENGTHS]
    together = Stepper(model, sequences).step({i: (0, length) for i, length in enumerate(LENGTHS)})
    truth_of_folder(folder, sequences).check_whole([together[i] for i in range(len(sequences))])

    # From here on the model is held to itself, bit for bit: chunks and single tokens, alone and beside others.
    pieces, done = Stepper(model, sequences), [0] * len(sequences)
    numbers = random.Random(3)
    while unfinished := [i for i, length in enumerate(LENGTHS) if done[i] < length]:
        chosen = numbers.sample(unfinished, numbers.randint(1, len(unfinished)))
        step = {i: (done[i], min(LENGTHS[i], done[i] + numbers.choice([1, 1, 1, 3, 40]))) for i in chosen}
        for i, logits in pieces.step(step).items():
            assert torch.equal(logits, together[i][slice(*step[i])]), (i, step[i])
            done[i] = step[i][1]


@pytest.mark.parametrize(
    "changes",
    [{"rope_parameters": {"rope_type": "default", "rope_theta": 1e4 * (1 + 1.5e-6)}}, {"rms_norm_eps": 1.15e-6}],
    ids=["angles", "norm"],
)
def test_a_model_that_is_slightly_another_is_found(changes: dict[str, Any], tmp_path: Path) -> None:
    """The bounds can fail: these are the two mistakes that change least, and 1e-4 of a logit lets both of them pass."""
    folder, sequences = make_family("mistral-all", tmp_path / "model"), [tokens(length) for length in LENGTHS]
    truth, path = truth_of_folder(folder, sequences), folder / "config.json"
    for change in ({}, changes):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        found = Stepper(load(folder), sequences).step({i: (0, length) for i, length in enumerate(LENGTHS)})
        assert max(float((found[i] - truth.library[i]).abs().max()) for i in found) < 1e-4
        if change:
            with pytest.raises(AssertionError):
                truth.check_whole(list(found.values()))
        else:
            truth.check_whole(list(found.values()))


def check_whole(folder: Path, **changes: Any) -> None:
    """A prompt, once config.json has these changes."""
    path, sequences = folder / "config.json", [tokens(83)]
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    got = Stepper(load(folder), sequences).step({0: (0, 83)})
    truth_of_folder(folder, sequences).check_whole([got[0]])


@pytest.mark.parametrize("name", ["llama-gelu", "gemma3", "deepseek-v2-lite"])
def test_rope_scaling_beside_rope_parameters_is_what_counts(name: str, tmp_path: Path) -> None:
    """As users add it to a file of transformers 5; Gemma 3 has it for its layers without a window, in part here."""
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    new: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e5}
    if name == "gemma3":
        scaling, new = {"factor": 2.5}, {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5}}
    elif name == "deepseek-v2-lite":
        scaling |= {"mscale": 0.707, "mscale_all_dim": 1.1}
    check_whole(make_family(name, tmp_path / "model"), rope_parameters=new, rope_scaling=scaling, rope_theta=2e4)


@pytest.mark.parametrize("name", ["gemma", "gemma2"])
def test_gelu_is_an_approximation_in_files_of_the_first_gemma_alone(name: str, tmp_path: Path) -> None:
    check_whole(make_family(name, tmp_path / "model"), hidden_act="gelu", hidden_activation="gelu")


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "bloom", "mixtral"])
def test_bfloat16_is_near_float32(name: str, tmp_path: Path) -> None:
    folder, sequence = make_family(name, tmp_path / "model"), tokens(30)
    full, half = (Stepper(load(folder, dtype), [sequence]).step({0: (0, 30)})[0] for dtype in ("float32", "bfloat16"))
    assert (full - half).abs().mean() < 0.1 * full.std()


def test_longrope_serves_the_length_of_training_unless_asked_for_more(tmp_path: Path) -> None:
    """Beyond it all sequences take the long factors, as those of transformers do that are as long."""
    folder, sequence = make_family("phi3", tmp_path / "model"), tokens(250)
    model = load(folder)
    assert model.config.max_model_len == 192
    for limit, length in ((256, 250), (192, 192)):
        got = Stepper(load(folder, max_model_len=limit), [sequence]).step({0: (0, length)})[0]
        truth_of_folder(folder, [sequence[:length]]).check_whole([got])
    with pytest.raises(ModelError, match="max_model_len 257 is not within 1 and 256"):
        load(folder, max_model_len=257)


def test_yarn_may_be_asked_for_the_length_that_it_stretches_to(tmp_path: Path) -> None:
    folder = make_family("llama-yarn", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    assert load(folder).config.max_model_len == 64
    sequence = tokens(200)
    got = Stepper(load(folder, max_model_len=256), [sequence]).step({0: (0, 200)})[0]
    truth_of_folder(folder, [sequence]).check_whole([got])


def test_dynamic_rope_may_be_asked_for_the_length_that_it_grows_to(tmp_path: Path) -> None:
    """All sequences then take the frequencies of that length, as those of transformers do that are as long."""
    folder = make_family("llama-dynamic", tmp_path / "model")
    assert load(folder).config.max_model_len == 256
    sequence = tokens(400)
    got = Stepper(load(folder, max_model_len=400), [sequence]).step({0: (0, 400)})[0]
    truth_of_folder(folder, [sequence]).check_whole([got])
    with pytest.raises(ModelError, match="max_model_len 513 is not within 1 and 512"):
        load(folder, max_model_len=513)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt"])
def test_files_without_the_name_of_the_base_are_read(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_family(name, tmp_path / "model")
    expected = Stepper(load(folder), [tokens(7)]).step({0: (0, 7)})[0]
    prefix = "model." if name == "opt" else "transformer."
    tensors = load_file(folder / "model.safetensors")
    save_file({key.removeprefix(prefix): value for key, value in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(Stepper(load(folder), [tokens(7)]).step({0: (0, 7)})[0], expected)


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "bloom", "opt", "qwen3-moe-mixed"])
def test_weights_bytes_counts_what_is_held(name: str, tmp_path: Path, without_padding: None) -> None:
    folder = make_family(name, tmp_path / "model")
    model = load(folder)
    on_disk = (folder / "model.safetensors").stat().st_size
    head_again = VOCAB_SIZE * 60 * 4 if model.config.tie_word_embeddings else 0
    tables = sum(rope.size * 256 * 4 for rope in model.config.style.ropes)
    assert model.weights_bytes == pytest.approx(on_disk + head_again + tables, abs=16384)  # the file has a header
    assert model.config.weights_bytes == pytest.approx(model.weights_bytes, rel=0.25)
