"""Python code that lies in a model's folder: never run unless asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.tiny_models import make_tiny_model
from tests.worker.model_cases import Stepper
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.loader import load_model
from worker_svc.tokenizers.slow_tokenizer import make_tokenizer_json

TOKENS = [1, 50, 200, 7]
SIZES = {
    "vocab_size": 300, "hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 99, "max_position_embeddings": 64,
}  # fmt: skip


def code(trace: Path) -> str:
    """A model by another name, and a trace that somebody has run this."""
    return f"""
from transformers import Olmo2Config, Olmo2ForCausalLM

open({str(trace)!r}, "a").close()


class OwnConfig(Olmo2Config):
    model_type = "own"


class OwnForCausalLM(Olmo2ForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code of its own, for weights of an OLMo 2 in `plain` beside it."""
    from transformers import Olmo2Config, dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    make_tiny_model(tmp_path / "plain", Olmo2Config(**SIZES))
    folder = make_tiny_model(tmp_path / "own", Olmo2Config(**SIZES))
    (folder / "own.py").write_text(code(tmp_path / "ran"))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    changes = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": auto_map}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def logits(folder: Path, trusted: bool = False) -> torch.Tensor:
    config = ModelConfig.from_folder(folder, "float32", trust_remote_code=trusted)
    model = load_model(folder, config, "cpu", trust_remote_code=trusted)
    return Stepper(model, [TOKENS]).step({0: (0, len(TOKENS))})[0]


def test_code_of_a_folder_is_not_run_unless_asked_for(own: Path) -> None:
    with pytest.raises(ModelError, match="is code of its own, run only with --trust-remote-code") as caught:
        logits(own)
    assert "\n" not in str(caught.value) and not (own.parent / "ran").exists()


def test_code_of_a_folder_is_run_where_asked_for(own: Path) -> None:
    expected = logits(own.parent / "plain")
    torch.testing.assert_close(logits(own, trusted=True), expected, rtol=1e-5, atol=1e-5)
    assert (own.parent / "ran").exists()


def test_code_of_a_tokenizer_is_not_run_unless_asked_for(own: Path) -> None:
    (own / "tokenizer.json").unlink()
    (own / "vocab.json").write_text("{}")
    auto_map = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    (own / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": auto_map}))
    with pytest.raises(ModelError, match=r"there is no tokenizer\.json"):
        make_tokenizer_json(own)
    assert not (own.parent / "ran").exists()
