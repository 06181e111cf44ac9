"""gpt-oss beyond what all families have: its config, stacked experts, and experts in MXFP4, on both kinds of device.

Its logits stand beside those of other families in `test_families`, its ranks in `test_model_parts`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import select
from kernels.cpu.products.packed_weight import Kind
from kernels.gpu.quantized.packed_codes import PackedCodes
from kernels.oracles import reference
from kernels.quantized_weight import Numbers
from tests.kernels.device import DEVICE
from tests.worker import test_gpu_path
from tests.worker.families import VOCAB_SIZE, make_family
from tests.worker.model_cases import Stepper
from tests.worker.mxfp4_checkpoints import CONFIG, SIZES, make_mxfp4, quantise
from tests.worker.ranks_in_threads import on_all_ranks
from worker_svc.models.checkpoint.stored_tensor import MadeTensor, StoredTensor
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.decoder import Decoder
from worker_svc.models.experts.experts import Experts
from worker_svc.models.experts.grouped_experts import GroupedExperts
from worker_svc.models.loader import load_model
from worker_svc.models.parts import ModelPart
from worker_svc.models.products.compiled_linear import CompiledLinear
from worker_svc.models.quantized.mxfp4 import Mxfp4Tensor
from worker_svc.models.quantized.stored_module import StoredModule
from worker_svc.parallel.ranks import Ranks

PROMPT = random.Random(1).choices(range(VOCAB_SIZE), k=70)  # more than a window
PUBLISHED: dict[str, Any] = {  # the keys of gpt-oss-20b's config.json
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": CONFIG,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
# The interpreter's numpy says so where a GPU's sigmoid of a large negative number is 0 without a word.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def read_config(tmp_path: Path, changes: dict[str, Any], device: str = "cuda") -> ModelConfig:
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in (PUBLISHED | changes).items() if value is not None})
    )
    return ModelConfig.from_folder(tmp_path, device=device)


def load(folder: Path, device: str = "cpu", dtype: str = "float32", **options: Any) -> Decoder:
    model = load_model(folder, ModelConfig.from_folder(folder, dtype), device, **options)
    assert isinstance(model, Decoder)
    return model


def logits_of(model: Decoder, *edges: int) -> torch.Tensor:
    """A prompt in pieces: two, and then a token of its own."""
    stepper = Stepper(model, [PROMPT])
    return torch.cat([stepper.step({0: piece})[0].cpu() for piece in pairwise(edges or (0, 40, 69, 70))])


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, torch.Tensor]:
    """A quantised model, its twin in float32, and the logits of that on a CPU's kernels."""
    quantised, twin = make_mxfp4(tmp_path_factory.mktemp("mxfp4"))
    return quantised, twin, logits_of(load(twin))


@pytest.fixture
def on_gpu_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(select._MODULES, "cpu", "kernels.gpu.operations")
        yield


def test_a_published_config_is_read(tmp_path: Path) -> None:
    config = read_config(tmp_path, {})
    style, (rope,) = config.style, config.style.ropes
    assert style.windows == (128, 0) * 12 and style.experts is not None
    assert (style.experts.num_experts, style.experts.num_chosen, style.experts.are_biased) == (32, 4, True)
    assert (style.activation, style.swiglu_alpha, style.swiglu_limit) == ("clamped_swiglu", 1.702, 7.0)
    assert (rope.theta, rope.factor, rope.truncate) == (150000, 32, False)
    assert rope.magnitude == pytest.approx(1.3465736)
    assert config.max_model_len == 131072 and config.eos_token_ids == (200002,)
    assert config.dtype == torch.bfloat16  # of which the file says nothing
    # 13.8 GB of files, whose scales take a byte where ours take two.
    assert 13.5e9 < config.weights_bytes < 14.5e9
    assert 41e9 < read_config(tmp_path, {"quantization_config": None}).weights_bytes < 42e9


def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    from transformers import GptOssConfig

    absent = ["layer_types", "rope_scaling", "rope_theta", "sliding_window", "swiglu_limit", "head_dim"]
    absent += ["num_experts_per_tok", "num_local_experts", "num_key_value_heads", "attention_bias", "rms_norm_eps"]
    found, given = read_config(tmp_path, dict.fromkeys(absent)), read_config(tmp_path, {"num_local_experts": 128})
    assert found.style == given.style and found.num_kv_heads == given.num_kv_heads == 8
    library = GptOssConfig()
    assert found.style.windows[:2] == (library.sliding_window, 0)
    assert (found.head_size, found.style.norm_eps) == (library.head_dim, library.rms_norm_eps)


def test_another_activation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="hidden_act 'gelu' is not supported, only 'silu'"):
        read_config(tmp_path, {"hidden_act": "gelu"})


def test_the_gate_is_that_of_transformers() -> None:
    """Which has gates and ups in turn."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(intermediate_size=50, hidden_size=1, num_local_experts=1, swiglu_alpha=1.5, swiglu_limit=3.0)
    x = 4 * torch.randn(3, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = torch.empty(3, 50, dtype=torch.float64)
    reference.clamped_swiglu(out, torch.cat([x[:, ::2], x[:, 1::2]], dim=1), alpha=1.5, limit=3.0)
    torch.testing.assert_close(out, GptOssExperts(config)._apply_gate(x), rtol=1e-14, atol=1e-14)


def test_weights_bytes_counts_what_is_held(tmp_path: Path, without_padding: None) -> None:
    folder = make_family("gpt-oss", tmp_path / "model")
    model = load(folder)
    on_disk, table = (folder / "model.safetensors").stat().st_size, 10 * 256 * 4
    assert model.weights_bytes == pytest.approx(on_disk + table, abs=16384)  # the file has a header


def test_pickled_experts_are_taken_apart_alike(tmp_path: Path) -> None:
    folder = make_family("gpt-oss", tmp_path / "model", **SIZES)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    assert torch.equal(logits_of(load(folder, load_format="bin")), logits_of(load(folder)))


def test_int8_is_made_of_stacked_experts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is read from the file that the first start has kept."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    folder = make_family("gpt-oss", tmp_path / "model", **SIZES)
    config = ModelConfig.from_folder(folder, "float32", quantization="int8")
    exact, first, second = (logits_of(load(folder)), *[logits_of(_decoder(folder, config)) for _ in range(2)])
    assert torch.equal(first, second)
    assert 1e-4 * exact.std() < (first - exact).abs().mean() < 0.1 * exact.std()


def _decoder(folder: Path, config: ModelConfig | ModelPart) -> Decoder:
    model = load_model(folder, config, "cpu")
    assert isinstance(model, Decoder)
    return model


def test_mxfp4_says_what_transformers_says_whole_and_in_parts() -> None:
    """With scales from the least to the largest; a part may begin within a group."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (1, 20, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 250, (1, 20, 3), generator=generator, dtype=torch.uint8)
    exact = convert_moe_packed_tensors(blocks, scales, dtype=torch.float64)[0].T.float()
    tensor = Mxfp4Tensor(module({"blocks": blocks[0].flatten(1), "scales": scales[0]}))
    assert tensor.shape == (20, 96) and tensor.num_bytes == blocks.nbytes + scales.nbytes
    for rows, columns in [(range(20), range(96)), (range(3, 9), range(32, 96)), (range(20), range(48, 96))]:
        weight = tensor.read(rows, columns, torch.device("cpu"))
        assert weight.numbers is Numbers.E2M1 and weight.group == (16 if columns.start == 48 else 32)
        assert weight.codes.is_contiguous() and weight.scale.is_contiguous()
        assert torch.equal(weight.dequantized(), exact[rows.start : rows.stop, columns.start : columns.stop])
    nan = Mxfp4Tensor(module({"blocks": blocks[0].flatten(1), "scales": torch.full_like(scales[0], 255)}))
    assert nan.read(range(20), range(96), torch.device("cpu")).dequantized().isnan().all()


def module(leaves: dict[str, torch.Tensor]) -> StoredModule:
    def made(tensor: torch.Tensor) -> StoredTensor:
        return MadeTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    return StoredModule(Path("model"), "mxfp4", "experts.0.down_proj", {name: made(x) for name, x in leaves.items()})


def test_experts_of_mxfp4_stay_in_four_bits_and_compute_what_the_twin_does(
    twins: tuple[Path, Path, torch.Tensor],
) -> None:
    """To the bit: every sum has the same terms in the same order."""
    quantised, _, exact = twins
    model = load(quantised)
    for layer in model.layers:
        assert isinstance(layer.mlp, Experts) and isinstance(layer.qkv, CompiledLinear)
        for expert in layer.mlp._experts.values():
            assert isinstance(expert.inner, CompiledLinear) and isinstance(expert.outer, CompiledLinear)
            assert expert.inner.product.kind is expert.outer.product.kind is Kind.RECORDS
            # 4.5 bits a number, of outputs in panels of 48, and float32 biases.
            assert expert.inner.weight_bytes == 192 * 64 * 4.5 / 8 + 192 * 4
            assert expert.outer.weight_bytes == 96 * 96 * 4.5 / 8 + 64 * 4
    assert torch.equal(logits_of(model), exact)


def test_greedy_tokens_of_mxfp4_are_those_of_transformers(twins: tuple[Path, Path, torch.Tensor]) -> None:
    from transformers import AutoModelForCausalLM

    quantised, twin, _ = twins
    oracle = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, experts_implementation="eager")
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = oracle.generate(torch.tensor([PROMPT]), **options)[0].tolist()
    logits = Stepper(load(quantised), [expected]).step({0: (0, len(expected))})[0]
    assert logits.argmax(-1)[len(PROMPT) - 1 : -1].tolist() == expected[len(PROMPT) :]


@pytest.mark.parametrize("is_expert_parallel", [False, True])
def test_ranks_have_parts_of_the_same_experts(is_expert_parallel: bool, twins: tuple[Path, Path, torch.Tensor]) -> None:
    """Half of 96 neurons are a group and a half: groups become smaller, with the same numbers."""
    found = []
    for folder in twins[:2]:

        def work(ranks: Ranks, folder: Path = folder) -> torch.Tensor:
            config = ModelConfig.from_folder(folder, "float32")
            return logits_of(_decoder(folder, ModelPart.of(config, ranks, is_expert_parallel=is_expert_parallel)))

        first, second = on_all_ranks(2, work)
        assert torch.equal(first, second)
        found.append(first)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], twins[2], rtol=1e-4, atol=1e-4)


def test_dummy_weights_have_experts_of_four_bits_and_the_rest_plain(twins: tuple[Path, Path, torch.Tensor]) -> None:
    model = load(twins[0], load_format="dummy")
    assert isinstance(model.layers[0].mlp, Experts) and isinstance(model.layers[0].qkv, CompiledLinear)
    inner = model.layers[0].mlp._experts[0].inner
    assert isinstance(inner, CompiledLinear) and inner.product.kind is Kind.RECORDS
    logits = logits_of(model)
    assert logits.isfinite().all() and logits.std() > 0.01


@pytest.mark.parametrize(
    ("name", "tensor", "complaint"),
    [
        ("gate_up_proj_scales", None, "mxfp4 layer {}.0.gate_up_proj: the checkpoint has no tensor scales"),
        ("down_proj_blocks", None, "mxfp4 layer {}.0.down_proj: the checkpoint has no tensor blocks"),
        (
            "down_proj_scales",
            torch.zeros(4, 64, 2, dtype=torch.uint8),
            "mxfp4 layer {}.0.down_proj: blocks is [64, 48], the layer's other tensors make it [64, 32]",
        ),
        (
            "down_proj_blocks",
            torch.zeros(4, 64, 3, 16, dtype=torch.int8),
            "mxfp4 layer {}.0.down_proj: blocks is int8 [64, 48], not uint8 of 2 dimensions",
        ),
        (
            "down_proj_bias",
            torch.zeros(3, 64),
            "tensor {}.down_proj_bias is [3, 64], not of 2 dimensions, the first of 4 experts",
        ),
        (
            "gate_up_proj_blocks",
            torch.zeros(4, 192, 32, dtype=torch.uint8),
            "tensor {}.gate_up_proj_blocks is [4, 192, 32], not of 4 dimensions, the first of 4 experts",
        ),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(
    name: str, tensor: torch.Tensor | None, complaint: str, twins: tuple[Path, Path, torch.Tensor], tmp_path: Path
) -> None:
    layer = "model.layers.1.mlp.experts"
    tensors = load_file(twins[0] / "model.safetensors")
    del tensors[f"{layer}.{name}"]
    save_file(tensors | ({} if tensor is None else {f"{layer}.{name}": tensor}), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((twins[0] / "config.json").read_text())
    with pytest.raises(ModelError, match=re.escape(complaint.format(layer))) as raised:
        load(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("on_gpu_kernels")
def test_a_gpu_multiplies_stacked_experts_together(twins: tuple[Path, Path, torch.Tensor]) -> None:
    model = load(twins[1], DEVICE)
    experts = model.layers[0].mlp
    assert isinstance(experts, GroupedExperts) and isinstance(experts._inner, torch.Tensor)
    torch.testing.assert_close(logits_of(model, 0, 34, 35), twins[2][:35], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_gpu_kernels")
def test_replayed_steps_draw_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Of experts in four bits; decode steps are graphs, sent off before the last one's tokens are here."""
    from transformers import AutoModelForCausalLM

    changes = {"vocab_size": test_gpu_path.VOCAB_SIZE, "max_position_embeddings": 64, "sliding_window": 5}
    changes["num_hidden_layers"] = 1  # with a window
    quantised, twin = make_mxfp4(tmp_path, seed=11, **changes)
    oracle, expected = AutoModelForCausalLM.from_pretrained(twin, experts_implementation="eager"), []
    for prompt in test_gpu_path.PROMPTS:
        options = {"max_new_tokens": test_gpu_path.NUM_NEW, "do_sample": False, "eos_token_id": None}
        expected.append((oracle.generate(torch.tensor([prompt]), **options)[0].tolist(), torch.empty(0)))
    model = load(quantised, DEVICE)
    experts = model.layers[0].mlp
    assert isinstance(experts, GroupedExperts) and isinstance(experts._outer, PackedCodes)
    test_gpu_path.check_greedy_tokens(model, expected, has_graphs=True)


def test_the_quantiser_of_these_tests_is_near_what_it_is_given() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weights = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    expanded = convert_moe_packed_tensors(*quantise(weights), dtype=torch.float32).transpose(1, 2)
    assert (expanded - weights).abs().max() < 1 and 0.05 < (expanded - weights).std() < 0.2
