"""Decoders that Octavo has no family for, computed by transformers over the paged cache; and those that are refused."""

from __future__ import annotations

import json
import random
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.oracle import GreedyOracle
from tests.tiny_models import make_tiny_model
from tests.worker.exact_logits import truth_of_folder
from tests.worker.families import make_family
from tests.worker.model_cases import Stepper
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.loader import Model, load_model

VOCAB_SIZE = 523
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 60,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 157,
    "max_position_embeddings": 256,
}
# Norms behind attention and MLP; both halves side by side, a part of each head turned; scaled logits.
LIBRARY: dict[str, dict[str, Any]] = {
    "Olmo2Config": {},
    "PhiConfig": {"partial_rotary_factor": 0.4},
    "CohereConfig": {"logit_scale": 0.25},
}
# Windows in some layers; multipliers; four norms a layer; layers without positions; squared activations; biases and one
# product for queries, keys and values; experts beside a shared one; logits that are capped.
MORE: dict[str, dict[str, Any]] = {
    "Olmo3Config": {"sliding_window": 20},
    "GraniteConfig": {"logits_scaling": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2},
    "Glm4Config": {"head_dim": 10},
    "SmolLM3Config": {"pad_token_id": 0},
    "NemotronConfig": {},
    "GPTNeoXConfig": {"num_key_value_heads": 6, "rotary_pct": 0.4},
    "Qwen2MoeConfig": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 50,
        "hidden_size": 64, "num_attention_heads": 4,  # products of all experts at once want multiples of 16
    },
    "NanoChatConfig": {},
}  # fmt: skip
LENGTHS = [1, 7, 83, 150]


def make(kind: str, folder: Path) -> Path:
    return make_tiny_model(folder, _config(kind, (LIBRARY | MORE)[kind]), seed=4)


def _config(kind: str, differences: dict[str, Any]) -> Any:
    import transformers

    return getattr(transformers, kind)(**SIZES | differences)


def load(folder: Path, impl: str = "auto", load_format: str = "auto") -> Model:
    return load_model(folder, ModelConfig.from_folder(folder, "float32", impl=impl), "cpu", load_format)


def tokens(length: int) -> list[int]:
    return random.Random(length).choices(range(VOCAB_SIZE), k=length)


def check(model: Model, folder: Path) -> None:
    """Whole prompts together, then random pieces in random batches, against whole prompts alone in transformers."""
    sequences = [tokens(length) for length in LENGTHS]
    truth = truth_of_folder(folder, sequences)
    together = Stepper(model, sequences).step({i: (0, length) for i, length in enumerate(LENGTHS)})
    truth.check_whole([together[i] for i in range(len(sequences))])
    found = []
    pieces, done, numbers = Stepper(model, sequences), [0] * len(sequences), random.Random(3)
    while unfinished := [i for i, length in enumerate(LENGTHS) if done[i] < length]:
        chosen = numbers.sample(unfinished, numbers.randint(1, len(unfinished)))
        step = {i: (done[i], min(LENGTHS[i], done[i] + numbers.choice([1, 1, 3, 40]))) for i in chosen}
        for i, logits in pieces.step(step).items():
            found.append((i, slice(*step[i]), logits))
            done[i] = step[i][1]
    truth.check(found)


@pytest.mark.parametrize("kind", [*LIBRARY, *MORE])
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = make(kind, tmp_path / "model")
    model = load(folder)
    assert model.config.impl == "transformers"
    check(model, folder)


@pytest.mark.parametrize("name", ["gemma2", "opt"])
def test_a_family_of_our_own_may_be_left_to_transformers(name: str, tmp_path: Path) -> None:
    folder = make_family(name, tmp_path / "model")
    model = load(folder, impl="transformers")
    assert model.config.impl == "transformers"
    check(model, folder)


def test_rows_without_logits_and_dummy_weights(tmp_path: Path) -> None:
    folder = make("Olmo2Config", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    models = [load(folder, load_format="dummy") for _ in range(2)]
    first, second = (Stepper(model, [tokens(7)]).step({0: (0, 7)})[0] for model in models)
    assert torch.equal(first, second) and first.shape == (7, VOCAB_SIZE)
    assert Stepper(models[0], [tokens(7)]).step({0: (0, 7)}, logits_rows=[])[0].shape == (0, VOCAB_SIZE)


def test_a_cache_is_given_up_by_who_owns_it(tmp_path: Path) -> None:
    model = load(make("Olmo2Config", tmp_path / "model"))
    stepper = Stepper(model, [tokens(7)])
    stepper.step({0: (0, 7)})
    cache = weakref.ref(stepper._caches[0][0])
    del stepper
    assert cache() is None, "its memory is wanted for the next one"


@pytest.mark.usefixtures("forked_workers")
def test_greedy_tokens_over_the_service(tmp_path: Path) -> None:
    """Of one of them: what kinds differ in is not seen outside of the model."""
    folder = make("PhiConfig", tmp_path / "model")
    oracle, prompts = GreedyOracle(folder), [tokens(length) for length in (1, 40, 90)]
    with LLM(model=str(folder), max_num_batched_tokens=32, max_num_seqs=8) as llm:
        params = SamplingParams(temperature=0, max_tokens=20)
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        oracle.check(prompt, oracle.generate(prompt, 20), list(output.outputs[0].token_ids), "over the service")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["BertForMaskedLM"], "model_type": "bert"},
            "BertForMaskedLM is not supported: it is no dec",
        ),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "T5ForConditionalGeneration is not"),
        (
            {"architectures": ["BartForCausalLM"], "model_type": "bart"},
            "BartForCausalLM is not supported: it has an en",
        ),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM is not supported: "),
        ({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}, "RwkvForCausalLM is not supported: "),
        (
            {"architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3"},
            "MiniCPM3ForCausalLM is not supported: latent attention",
        ),
        ({"architectures": ["JambaForCausalLM"], "model_type": "jamba"}, "JambaForCausalLM is not supported: "),
        ({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}, "layers of type linear_attention"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
            "Gemma3ForConditionalGeneration",
        ),
        ({"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"}, "nobodys"),
        (
            {"architectures": ["Olmo2ForCausalLM"], "model_type": "llama"},
            "Olmo2ForCausalLM is not supported: the decoder of model type llama is LlamaForCausalLM",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as raised:
        load(tmp_path, load_format="dummy")
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_without_the_library_the_refusal_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"need the Python package `transformers`: install octavo\[transformers\]"):
        ModelConfig.from_folder(tmp_path)


def test_attention_that_cannot_be_replaced_is_refused(tmp_path: Path) -> None:
    """BLOOM's adds its bias by itself; an encoder's sees what comes after."""
    with pytest.raises(ModelError, match="BloomForCausalLM is not supported: its "):
        load(make_family("bloom", tmp_path / "bloom"), impl="transformers")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("DiffLlamaConfig", "DiffLlamaForCausalLM is not supported: a layer attends more than once"),
        ("DogeConfig", "DogeForCausalLM is not supported: its attention makes a mask of its own"),
        ("GPTJConfig", "not supported: its attention cannot be replaced"),
        ("GptOssConfig", "GptOssForCausalLM is not supported: its attention takes s_aux"),
        ("PhimoeConfig", "PhimoeForCausalLM is not supported: its attention does not tell its window"),
    ],
)
def test_attention_that_is_not_what_it_seems_is_refused_in_its_first_step_at_the_latest(
    kind: str, why: str, tmp_path: Path
) -> None:
    sizes = {
        "GPTJConfig": {"n_embd": 60, "n_layer": 3, "n_head": 6, "rotary_dim": 4},
        "GptOssConfig": {"head_dim": 10},
        "PhimoeConfig": {"num_local_experts": 4, "sliding_window": 20},
    }
    with pytest.raises(ModelError, match=why):
        model = load(make_tiny_model(tmp_path / "model", _config(kind, sizes.get(kind, {}))), "transformers")
        Stepper(model, [tokens(7)]).step({0: (0, 7)})


@pytest.mark.parametrize("window", [None, 256])
def test_a_window_as_long_as_any_sequence_is_none(window: int | None, tmp_path: Path) -> None:
    differences = {"num_local_experts": 4, "sliding_window": window, "intermediate_size": 160}
    differences |= {"hidden_size": 64, "num_attention_heads": 4}  # products of all experts want multiples of 16
    folder = make_tiny_model(tmp_path / "model", _config("PhimoeConfig", differences), seed=4)
    got = Stepper(load(folder), [tokens(83)]).step({0: (0, 83)})
    truth_of_folder(folder, [tokens(83)]).check_whole([got[0]])


def test_a_rope_that_changes_with_the_length_of_a_sequence_is_served_as_far_as_it_does_not(tmp_path: Path) -> None:
    """Also where only one type of layers has it."""
    factors = {"short_factor": [1.0] * 5, "long_factor": [4.0] * 5}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    ropes = {"full_attention": longrope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    folder = make_family("gemma3", tmp_path / "model", head_dim=10, rope_parameters=ropes)
    with pytest.raises(ModelError, match=r"rope type longrope changes with a .*; max_model_len 32 can be served"):
        ModelConfig.from_folder(folder, "float32", impl="transformers")
    assert ModelConfig.from_folder(folder, "float32", 32, impl="transformers").max_model_len == 32


def test_a_configuration_whose_keys_are_others_by_layer_is_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.CONFIG_MAPPING["gemma4_unified_text"](**SIZES | {"head_dim": 16, "sliding_window": 20})
    config.architectures = ["Gemma4UnifiedForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="architecture Gemma4UnifiedForCausalLM is not supported: ") as raised:
        load(tmp_path, load_format="dummy")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"model.layers.1.mlp.more.weight": (3,)}, r"has one tensor too many: model\.layers\.1\.mlp\.more\.weight"),
        ({"model.norm.weight": (61,)}, r"tensor model\.norm\.weight is \[61\], config\.json says \[60\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_names_the_tensor(
    changes: dict[str, tuple[int, ...] | None], why: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = make("Olmo2Config", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name, shape in changes.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.ones(shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=why) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, 7, 20_000])
def test_a_truncated_checkpoint_is_one_line(length: int, tmp_path: Path) -> None:
    path = make("Olmo2Config", tmp_path / "model") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelError, match=str(path.parent)) as caught:
        load(path.parent)
    assert "\n" not in str(caught.value)
