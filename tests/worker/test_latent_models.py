"""Models with latent attention beyond what all families are shown to do: cache, experts, checkpoints, a GPU's way.

tests/worker/test_families.py has their logits, test_model_parts.py those of ranks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import select
from octavo.cli import main
from tests.kernels.device import DEVICE
from tests.worker.families import make_family
from tests.worker.model_cases import Stepper
from tests.worker.quantised_checkpoints import FORMATS, write_quantised
from tests.worker.test_gpu_path import NUM_NEW, PROMPTS, check_greedy_tokens
from worker_svc import server
from worker_svc.cache.cache_engine import CacheEngine
from worker_svc.errors import StartupError
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.experts.router import Router
from worker_svc.models.latent.head_products import BatchedHeads, GroupedHeads, PackedHeads
from worker_svc.models.latent.latent_config import check_cache_type
from worker_svc.models.loader import Model, load_model

PUBLISHED = {  # what DeepSeek-V3's and V2-Lite's files say of attention
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}


def load(folder: Path, dtype: str = "float32", **options: Any) -> Model:
    return load_model(folder, ModelConfig.from_folder(folder, dtype, **options), "cpu")


def logits(model: Model, tokens: list[int]) -> torch.Tensor:
    stepper, half = Stepper(model, [tokens]), len(tokens) // 2
    return torch.cat([stepper.step({0: piece})[0] for piece in ((0, half), (half, len(tokens)))])


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_token_takes_576_numbers_a_layer(tmp_path: Path) -> None:
    folder = make_family("deepseek-v2-lite", tmp_path / "model")
    configure(folder, **PUBLISHED, num_hidden_layers=27)
    config = ModelConfig.from_folder(folder, "bfloat16")
    assert CacheEngine.block_bytes(config, 16, torch.bfloat16) == 16 * 27 * 576 * 2
    engine = CacheEngine(replace(config, num_layers=2), 16, 3, 2, torch.bfloat16, "cpu")
    assert engine.store.shape == (2, 1, 3, 1, 16, 576)
    keys, values = engine.layers[1]
    assert values.shape == (3, 1, 16, 512) and values.data_ptr() == keys.data_ptr(), "values are a part of keys"
    keys[1] = torch.randn(1, 16, 576)
    before = keys[1].clone()
    engine.swap_out(torch.tensor([[1, 0]]))
    engine.swap_in(torch.tensor([[0, 2]]))
    engine.copy(torch.tensor([[2, 0]]))
    assert torch.equal(keys[2], before) and torch.equal(keys[0], before)


@pytest.mark.parametrize(
    ("name", "num_weights"),
    [("deepseek-v2-lite", 15_706_484_224), ("deepseek-v3", 671_026_419_200)],
)
def test_published_models_have_as_many_weights(name: str, num_weights: int, tmp_path: Path) -> None:
    """As the headers of their files say, but for norms and routers."""
    folder = make_family(name, tmp_path / "model")
    sizes: dict[str, Any] = {"vocab_size": 102400, "hidden_size": 2048, "num_hidden_layers": 27, "q_lora_rank": None}
    sizes |= {"intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2}
    sizes |= {"num_attention_heads": 16, "num_experts_per_tok": 6, "first_k_dense_replace": 1}
    if name == "deepseek-v3":
        sizes = {"vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61, "q_lora_rank": 1536}
        sizes |= {"intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256}
        sizes |= {"num_attention_heads": 128, "num_experts_per_tok": 8, "first_k_dense_replace": 3}
        sizes |= {"n_shared_experts": 1, "n_group": 8, "topk_group": 4}
    configure(folder, **PUBLISHED, **sizes, num_key_value_heads=None)
    found = ModelConfig.from_folder(folder, "bfloat16").weights_bytes / 2
    assert found == pytest.approx(num_weights, rel=3e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("deepseek-v3", tmp_path_factory.mktemp("latent") / "model")


def test_layers_that_guess_at_further_tokens_are_left_out(folder: Path, tmp_path: Path) -> None:
    """DeepSeek-V3 has one behind its last layer."""
    expected = logits(load(folder), PROMPTS[0])
    path = folder / "model.safetensors"
    more = {name.replace("layers.2.", "layers.3."): tensor for name, tensor in load_file(path).items()}
    (other := tmp_path / "more").mkdir()
    for name in ("config.json", "generation_config.json"):
        (other / name).write_bytes((folder / name).read_bytes())
    save_file(load_file(path) | more, other / "model.safetensors", metadata={"format": "pt"})
    configure(other, num_nextn_predict_layers=1)
    assert torch.equal(logits(load(other), PROMPTS[0]), expected)
    configure(other, num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match=r"no place for tensor model\.layers\.3\."):
        load(other)


def test_routers_and_their_biases_are_float32_in_a_model_of_bfloat16(folder: Path) -> None:
    """A bias of 8 bits of mantissa would let others in than the model was trained with."""
    model = load(folder, "bfloat16")
    router = cast(Any, model).layers[-1].mlp._chosen._router
    assert isinstance(router, Router) and router._bias is not None
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert torch.equal(router._bias, load_file(folder / "model.safetensors")[name])
    assert router.logits(torch.ones(1, 60, dtype=torch.bfloat16)).dtype == torch.float32
    full, half = (logits(load(folder, dtype), PROMPTS[0] * 3) for dtype in ("float32", "bfloat16"))
    assert (full - half).abs().mean() < 0.1 * full.std()


def test_weights_of_eight_bits_of_a_cpu(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What heads multiply latents by stays as it is, and so do routers."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    exact = logits(load(folder), PROMPTS[0])
    made, found = (logits(load(folder, quantization="int8"), PROMPTS[0]) for _ in range(2))
    assert torch.equal(made, found)
    # As experts are chosen by near-ties in so small a model; unrelated logits differ by 1.1 of it.
    assert 0 < (made - exact).abs().mean() < 0.3 * exact.std()


def test_fp8_blocks_as_deepseek_publishes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint gives the logits of the numbers that it stands for; the latents' product is expanded."""
    from kernels import cpu

    monkeypatch.setattr(cpu, "quantized_product", lambda weight, bias: None, raising=False)
    changes = {"hidden_size": 64, "q_lora_rank": 32, "intermediate_size": 96, "moe_intermediate_size": 32}
    folder = make_family("deepseek-v3", tmp_path / "plain", num_hidden_layers=2, **changes)
    quantised, twin = write_quantised(folder, tmp_path, FORMATS["fp8-small-blocks"])
    found, expected = (logits(load(each), PROMPTS[0]) for each in (quantised, twin))
    assert torch.equal(found, expected)


def test_caches_of_other_types_are_refused_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    style, gpu, cpu = ModelConfig.from_folder(folder).style, torch.device("cuda"), torch.device("cpu")
    check_cache_type(style, torch.bfloat16, torch.float32, cpu)
    check_cache_type(style, torch.bfloat16, torch.float16, gpu)
    with pytest.raises(ModelError, match="kv_cache_dtype fp8: a cache of latents is kept in 16 or 32 bits"):
        check_cache_type(style, torch.bfloat16, torch.float8_e4m3fn, gpu)
    with pytest.raises(ModelError, match="kv_cache_dtype float32: on a GPU latents have no more bits than dtype bfl"):
        check_cache_type(style, torch.bfloat16, torch.float32, gpu)
    assert main(["model", "calibrate", str(folder), "--text", str(folder / "config.json"), "--device", "cpu"]) == 1
    assert "has a cache of latents, which is not kept in 8 bits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, only 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported, only noaux_tc"),
        ({"n_group": 5}, "12 experts are not 5 groups, of which 2 are chosen"),
        ({"topk_group": 1, "num_experts_per_tok": 4}, "4 experts cannot be chosen among 1 groups of 3"),
    ],
)
def test_choices_that_no_model_makes_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_family("deepseek-v3", tmp_path / "model", num_hidden_layers=1)
    configure(folder, **changes)
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_folder(folder)


def test_all_forms_of_heads_products_agree() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn(3, 20, 12, generator=generator), torch.randn(5, 3, 17, generator=generator)[..., 5:]
    exact = torch.einsum("hoi,thi->tho", weight.double(), x.double())
    for heads, device in (
        (PackedHeads(weight), "cpu"),
        (BatchedHeads(weight.to(DEVICE)), DEVICE),
        (GroupedHeads(weight.to(DEVICE)), DEVICE),
    ):
        wide = torch.full((5, 3, 24), torch.nan, device=device)
        heads(wide[..., :20], x.to(device))
        torch.testing.assert_close(wide[..., :20].cpu().double(), exact, rtol=1e-5, atol=1e-5)
        assert wide[..., 20:].isnan().all() and heads.weight_bytes >= weight.nbytes


def test_greedy_tokens_on_the_kernels_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, chunks beside decodes, and decodes, all replayed."""
    from transformers import AutoModelForCausalLM

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3, "n_group": 2}
    folder = make_family("deepseek-v3", tmp_path / "model", **sizes)
    monkeypatch.setitem(select._MODULES, "cpu", "kernels.gpu.operations")
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    expected = []
    for prompt in PROMPTS:
        options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None}
        tokens = oracle.generate(torch.tensor([prompt]), **options)[0].tolist()
        expected.append((tokens, torch.empty(0)))
    model = load_model(folder, ModelConfig.from_folder(folder, device=DEVICE), DEVICE)
    check_greedy_tokens(model, expected, has_graphs=True)


def test_adapters_are_refused_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker_svc.config import WorkerConfig

    with pytest.raises(StartupError, match="enable_lora: DeepseekV3ForCausalLM has latent attention, without adapters"):
        server.load(WorkerConfig(model=str(folder), enable_lora=True, device="cpu"))
