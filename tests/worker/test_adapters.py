"""Adapters beside a model: equal to those merged into its weights, and to nothing else in the batch."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters import PREFIX, make_adapter, merge
from tests.kernels.device import DEVICE
from tests.worker.exact_logits import truth_of_folder
from tests.worker.families import VOCAB_SIZE, make_family
from tests.worker.model_cases import Stepper
from tests.worker.ranks_in_threads import on_all_ranks
from worker_svc.adapters.adapted_linear import AdaptedLinear
from worker_svc.adapters.adapter_set import AdapterSet
from worker_svc.adapters.errors import AdapterError
from worker_svc.adapters.sites import sites_of
from worker_svc.errors import ProtocolError
from worker_svc.models import patterns
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.loader import load_model
from worker_svc.models.parts import ModelPart
from worker_svc.models.products.float_linear import FloatLinear
from worker_svc.models.step_adapters import StepAdapters
from worker_svc.parallel.ranks import OnlyRank, Ranks

LENGTHS = [1, 9, 33]
LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Name of a family -> modules that an adapter is for, and what the tiny model needs besides.
TARGETS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "llama-yarn": (LLAMA, {}),
    "qwen2": (("q_proj", "v_proj", "down_proj"), {}),
    "gemma2": (LLAMA, {}),
    "phi3": (("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), {}),
    "starcoder2": (("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"), {}),
    "gpt2": (("c_attn", "c_proj", "c_fc"), {}),
    "opt": (("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"), {}),
    "bloom": (("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"), {}),
    "mixtral": (("q_proj", "k_proj", "v_proj", "o_proj"), {}),
}


def tokens(length: int) -> list[int]:
    return random.Random(length).choices(range(VOCAB_SIZE), k=length)


def load(
    folder: Path, dtype: str = "float32", ranks: Ranks | None = None, **options: Any
) -> tuple[Decoder, AdapterSet]:
    config = ModelConfig.from_folder(folder, dtype, **options)
    part = ModelPart.of(config, ranks or OnlyRank())
    model = load_model(folder, part, "cpu")
    assert isinstance(model, Decoder)
    return model, AdapterSet(model, part, max_loras=3, max_rank=256, max_loaded=4)


def logits_of(
    model: Decoder, adapters: AdapterSet, sequences: list[list[int]], numbers: list[int]
) -> list[torch.Tensor]:
    """Of every token; each sequence with the adapter of its number."""
    stepper = Stepper(model, sequences)
    of_rows = np.repeat(numbers, [len(sequence) for sequence in sequences])
    with adapters.step(of_rows):
        found = stepper.step({i: (0, len(sequence)) for i, sequence in enumerate(sequences)})
    return [found[i] for i in range(len(sequences))]


@pytest.mark.parametrize("name", TARGETS)
def test_rows_with_an_adapter_are_those_of_a_model_that_it_is_merged_into(name: str, tmp_path: Path) -> None:
    targets, changes = TARGETS[name]
    folder = make_family(name, tmp_path / "model", **changes)
    adapter = make_adapter(tmp_path / "adapter", folder, targets, rank=8)
    sequences = [tokens(length) for length in LENGTHS]
    model, adapters = load(folder)
    adapters.load("one", 1, adapters.read(str(adapter)))
    found = logits_of(model, adapters, sequences, [0] * 3)
    truth_of_folder(merge(tmp_path / "merged", folder, adapter), sequences).check_whole(found)
    without = logits_of(model, adapters, sequences, [-1] * 3)
    truth_of_folder(folder, sequences).check_whole(without)
    assert all((a - b).abs().max() > 0.1 for a, b in zip(found, without, strict=True)), "the adapter does something"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("llama-yarn", tmp_path_factory.mktemp("models") / "model", intermediate_size=158)


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 1},
        {"rank": 64, "use_rslora": True},
        {"rank": 256, "alpha": 3.5},
        {"rank": 4, "ranks": {"k_proj": 2, "down_proj": 16}, "alpha_pattern": {"k_proj": 5.0}},
    ],
    ids=["1", "rslora", "256", "patterns"],
)
def test_ranks_and_scales(options: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", folder, **options)
    sequences = [tokens(length) for length in LENGTHS]
    model, adapters = load(folder)
    adapters.load("one", 1, adapters.read(str(adapter)))
    found = logits_of(model, adapters, sequences, [0] * 3)
    truth_of_folder(merge(tmp_path / "merged", folder, adapter), sequences).check_whole(found)


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["float", "half", "int8"]
)
def test_a_row_has_the_same_bits_beside_rows_of_other_adapters_and_none(
    options: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))  # into which int8 is written
    model, adapters = load(folder, **options)
    for number, rank in enumerate((4, 16, 3)):
        made = make_adapter(tmp_path / str(number), folder, rank=rank, seed=number)
        adapters.load(f"number {number}", 1, adapters.read(str(made)))
    sequences, numbers = [tokens(length) for length in (5, 1, 21, 9, 1)], [0, -1, 1, 2, 0]
    together = logits_of(model, adapters, sequences, numbers)
    for sequence, number, expected in zip(sequences, numbers, together, strict=True):
        assert torch.equal(logits_of(model, adapters, [sequence], [number])[0], expected)
    plain = Stepper(model, sequences).step({1: (0, 1)})[1]  # the layers in one call, where they are
    assert torch.equal(plain, together[1])


def test_bfloat16_is_near_float32(folder: Path, tmp_path: Path) -> None:
    adapter, found = make_adapter(tmp_path / "adapter", folder), []
    for dtype in ("float32", "bfloat16"):
        model, adapters = load(folder, dtype)
        adapters.load("one", 1, adapters.read(str(adapter)))
        found.append(logits_of(model, adapters, [tokens(30)], [0])[0])
    assert (found[0] - found[1]).abs().mean() < 0.1 * found[0].std()


@pytest.mark.parametrize("name", ["llama-yarn", "phi3", "gpt2", "bloom"])
def test_ranks_of_a_group_add_their_parts(name: str, tmp_path: Path) -> None:
    changes = {"gpt2": {"n_inner": 132}, "bloom": {}}.get(name, {"intermediate_size": 158})
    folder = make_family(name, tmp_path / "model", **changes)
    adapter = make_adapter(tmp_path / "adapter", folder, TARGETS[name][0], rank=8)
    sequences = [tokens(length) for length in LENGTHS]

    def work(ranks: Ranks) -> list[torch.Tensor]:
        model, adapters = load(folder, ranks=ranks)
        adapters.load("one", 1, adapters.read(str(adapter)))
        return logits_of(model, adapters, sequences, [0] * 3)

    first, second = on_all_ranks(2, work)
    truth_of_folder(merge(tmp_path / "merged", folder, adapter), sequences).check_whole(first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_products_on_a_gpu_add_what_those_on_a_cpu_do(folder: Path, tmp_path: Path) -> None:
    """A fused product with three adapters, two of which lack parts."""
    part = ModelPart.of(ModelConfig.from_folder(folder), OnlyRank())
    site = next(iter(sites_of(part)))
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(site.size, 60, generator=generator), torch.randn(20, 60, generator=generator)
    slots, found = np.array([0, 1, 2, -1, 1] * 4), []
    _, adapters = load(folder)
    for device, is_host in ((DEVICE, False), ("cpu", True)):
        like, step = weight.to(device), StepAdapters(torch.device(device))
        product = AdaptedLinear(FloatLinear(like), step, site, 3, 16, like, is_host=is_host)
        for number, targets in enumerate((LLAMA, ("v_proj", "k_proj"), ("q_proj",))):
            made = make_adapter(tmp_path / str(number), folder, targets, rank=4 * (number + 1), seed=number)
            product.put(number, adapters.read(str(made)).parts[0, "qkv"])
        with step.step(slots):
            found.append(product(x.to(device)).cpu())
        assert torch.equal(found[-1][3], FloatLinear(like)(x.to(device)).cpu()[3])
    torch.testing.assert_close(*found, rtol=1e-5, atol=2e-5 * float(found[0].abs().max()))


def test_what_the_first_step_with_an_adapter_launches_is_compiled_before(folder: Path) -> None:
    """Triton compiles for types, sizes and alignments, of which those of parts of a fused product are their own."""
    part = ModelPart.of(ModelConfig.from_folder(folder), OnlyRank())
    for site in [site for site in sites_of(part) if site.layer == 0]:
        like, step = torch.ones(site.size, len(site.inputs), device=DEVICE), StepAdapters(torch.device(DEVICE))
        product = AdaptedLinear(FloatLinear(like), step, site, 3, 16, like, is_host=False)
        launched: list[Any] = []
        for name in ("_shrink", "_expand"):
            setattr(product, name, watched(name, getattr(product, name), launched))
        product.warm_up()
        compiled, launched[:] = launched[:], []
        with step.step(np.array([0, 1, -1, 2, 1])):
            product(torch.ones(5, len(site.inputs), device=DEVICE))
        assert launched == compiled and len(launched) == 2 * len(site.modules)


def watched(name: str, kernel: Callable[..., None], launched: list[Any]) -> Callable[..., None]:
    """It, which also puts into `launched` what of its tensors a kernel is compiled for, and not the number of rows."""

    def launch(*tensors: torch.Tensor) -> None:
        launched.append((name, [(x.dtype, x.stride()[-2:], x.shape[2:], x.data_ptr() % 16) for x in tensors]))
        kernel(*tensors)

    return launch


def test_every_product_of_a_gpu_is_warm_before_the_first_adapter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, on_a_cpu = load(folder)
    warm: list[AdaptedLinear] = []
    monkeypatch.setattr(AdaptedLinear, "warm_up", lambda product: warm.append(product))
    part = ModelPart.of(model.config, OnlyRank())
    AdapterSet(model, part, 3, 16, 4)
    assert warm == [], "on a CPU nothing is compiled"
    monkeypatch.setattr(model, "device", torch.device("meta"))
    adapters = AdapterSet(model, part, 3, 16, 4)
    assert warm == list(adapters._products.values()) and len(warm) == len(on_a_cpu._products)


def test_slots_are_given_to_what_a_step_needs(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    _, adapters = load(folder)
    read = adapters.read(str(make_adapter(tmp_path / "adapter", folder)))
    put: list[tuple[int, bool]] = []
    monkeypatch.setattr(adapters, "_put", lambda slot, adapter: put.append((slot, adapter is read)))
    for number in range(4):
        adapters.load(f"number {number}", 1, read)
    assert put == []

    def slots_of(*numbers: int) -> list[int]:
        with adapters.step(np.array(numbers)):
            return adapters._decoder.step_adapters.slots[: len(numbers)].tolist()

    assert slots_of(2, 0, -1, 2) == [1, 0, -1, 1] and put == [(0, True), (1, True)]
    assert slots_of(3, 0) == [2, 0] and put[2:] == [(2, True)]
    assert slots_of(0, 1) == [0, 1] and put[3:] == [(1, True)]  # 2 was used longest ago
    assert slots_of(0, 1, 3) == [0, 1, 2] and len(put) == 4
    with pytest.raises(ProtocolError, match="step with 4 adapters, more than 3"), adapters.step(np.arange(4)):
        pass


def test_adapters_are_loaded_once_by_generation_and_as_many_as_there_is_room_for(folder: Path, tmp_path: Path) -> None:
    _, adapters = load(folder)
    read = adapters.read(str(make_adapter(tmp_path / "adapter", folder)))
    adapters.load("a", 7, read)
    adapters.load("a", 7, read)
    with pytest.raises(AdapterError, match="adapter 'a' is loaded as generation 7; unload it first"):
        adapters.load("a", 8, read)
    for name in "bcd":
        adapters.load(name, 1, read)
    with pytest.raises(AdapterError, match="'e': 4 adapters are loaded, as many as --max-cpu-loras allows; unload one"):
        adapters.load("e", 1, read)
    adapters.unload("b")
    with pytest.raises(AdapterError, match="adapter 'b' is not loaded; loaded: a, c, d"):
        adapters.unload("b")
    adapters.load("e", 1, read)
    assert adapters.names == {"a": 0, "c": 2, "d": 3, "e": 1} and adapters.generations["a"] == 7
    adapters.clear()
    assert adapters.names == {}


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(adapter: Path) -> None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, adapter / "adapter_model.safetensors")

    return rewrite


Q = f"{PREFIX}model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda adapter: (adapter / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("{"), "cannot read .*adapter_config.json"),
        (lambda adapter: (adapter / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (
            lambda adapter: (adapter / "adapter_model.safetensors").write_bytes(b"nothing"),
            "cannot read .*adapter_model.safetensors",
        ),
        (with_config(peft_type="IA3"), "peft_type 'IA3' is not supported, only 'LORA'"),
        (with_config(use_dora=True), "use_dora True is not supported"),
        (with_config(bias="all"), "bias 'all' is not supported"),
        (with_config(modules_to_save=["lm_head"]), r"modules_to_save \['lm_head'\] is not supported"),
        (with_config(init_lora_weights="pissa"), "init_lora_weights 'pissa' is not supported"),
        (with_config(target_parameters=["w"]), "target_parameters .* is not supported"),
        (with_config(r=0), "rank 0 is no number from 1 on"),
        (with_config(r="four"), "rank 'four' is no number from 1 on"),
        (with_config(r=8), r"tensor .*lora_A.weight is \[4, 158\], this model wants \[8, 158\]"),
        (with_config(r=300), "rank 300 of .* is more than --max-lora-rank, 256"),
        (with_config(lora_alpha=float("nan")), "alpha nan is no number"),
        (with_config(alpha_pattern={"q_proj": True}), "alpha True is no number"),
        (with_config(lora_alpha=1e40), "B of .* times its scale, 2.5e[+]39, is not finite"),
        (with_config(kasa_config={}), "kasa_config {} is not supported"),
        (with_config(rank_pattern={"(": 3}), "is no regular expression"),
        (with_config(alpha_pattern={"q_proj": 10**400}), "int too large to convert to float"),
        (with_config(use_rslora="false"), "use_rslora 'false' is neither true nor false"),
        (with_config(target_modules="("), "is no regular expression"),
        (with_config(target_modules=[1]), r"target_modules \[1\] is no list of modules"),
        (with_config(layers_to_transform="all"), "layers_to_transform 'all' is no list of layers"),
        (with_config(modules_to_save=["x" * 100_000]), r"modules_to_save \['xxx.* \.\.\. .*merge this adapter"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("[" * 100_000), "cannot read .*recursion"),
        (
            with_tensors(lambda all_: [all_.pop(name) for name in list(all_) if "layers.1.mlp.up_proj" in name]),
            "has no tensors of model.layers.1.mlp.up_proj, which is among target_modules",
        ),
        (
            with_config(target_modules=["k_proj"]),
            "has tensors of model.layers.0.self_attn.q_proj, which is not among target_modules",
        ),
        (with_config(exclude_modules=["q_proj"]), "has tensors of .*q_proj, which is not among target_modules"),
        (with_config(layers_to_transform=[0, 2]), "has tensors of model.layers.1.*, which is not among target_modules"),
        (with_tensors(lambda all_: all_.update({"a\nb": torch.ones(1)})), r"no place for tensor a\\nb"),
        (with_tensors(lambda all_: all_.pop(f"{Q}.lora_B.weight")), "q_proj.lora_A.weight is without its other half"),
        (with_tensors(lambda all_: all_.clear()), "holds no tensors"),
        (
            with_tensors(lambda all_: all_.update({f"{Q}.lora_magnitude_vector": torch.ones(3)})),
            "is DoRA, which is not supported",
        ),
        (
            with_tensors(lambda all_: all_.update({f"{PREFIX}lm_head.lora_A.weight": torch.ones(4, 60)})),
            "is an adapter of the head, which is not supported",
        ),
        (
            with_tensors(lambda all_: all_.update({f"{PREFIX}model.embed_tokens.base_layer.weight": torch.ones(1)})),
            "is an adapter of the embedding, which is not supported",
        ),
        (
            with_tensors(
                lambda all_: all_.update({f"{PREFIX}model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(1)})
            ),
            "the model has no place for tensor",
        ),
        (
            with_tensors(lambda all_: all_.update({f"{Q}.lora_A.weight": torch.full((4, 60), torch.nan)})),
            "q_proj.lora_A.weight has numbers that are not finite",
        ),
        (
            with_tensors(lambda all_: all_.update({f"{Q}.lora_A.weight": torch.ones(4, 60, dtype=torch.int8)})),
            "q_proj.lora_A.weight is of type int8",
        ),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value)[:40] if isinstance(value, str) else "",
)
def test_what_is_damaged_or_not_computed_is_refused_in_one_line(
    damage: Callable[[Path], object], complaint: str, folder: Path, tmp_path: Path
) -> None:
    _, adapters = load(folder)
    adapter = make_adapter(tmp_path / "adapter", folder)
    damage(adapter)
    with pytest.raises(AdapterError, match=complaint) as raised:
        adapters.read(str(adapter))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("layers", "targets"),
    [
        ([0, 1, 2], {"target_modules": list(LLAMA)}),
        ([0, 1, 2], {"target_modules": "all-linear"}),
        ([0, 1, 2], {"target_modules": None}),
        ([1], {"target_modules": list(LLAMA), "layers_to_transform": 1}),
        ([0, 2], {"target_modules": list(LLAMA), "layers_to_transform": [0, 2]}),
        ([0, 2], {"target_modules": list(LLAMA), "exclude_modules": r".*\.1\..*"}),
        ([2], {"target_modules": r"model\.layers\.2\..*_proj"}),
        ([2], {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [2], "layers_pattern": "layers"}),
    ],
    ids=["names", "all", "untold", "one-layer", "layers", "excluded", "pattern", "layers-by-name"],
)
def test_an_adapter_has_what_its_configuration_says(
    layers: list[int], targets: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    _, adapters = load(folder)
    adapter = make_adapter(tmp_path / "adapter", folder)
    inside = tuple(f".{layer}." for layer in layers)
    with_tensors(lambda all_: [all_.pop(name) for name in list(all_) if not any(at in name for at in inside)])(adapter)
    with_config(**targets)(adapter)
    assert sorted({layer for layer, _ in adapters.read(str(adapter)).parts}) == layers


@pytest.mark.parametrize("pattern", [r"(([a-z._0-9]+)+)+X?Y", "([a-z]|.)?" * 30 + "Y", "([a-z.]|.)" * 28 + "Y"])
@pytest.mark.parametrize("key", ["rank_pattern", "target_modules"])
def test_a_pattern_that_would_take_years_is_refused(
    key: str, pattern: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "PATTERNS_TIMEOUT_S", 0.3)
    _, adapters = load(folder)
    adapter = make_adapter(tmp_path / "adapter", folder)
    with_config(**{key: {pattern: 4} if key == "rank_pattern" else pattern})(adapter)
    with pytest.raises(AdapterError, match=r"the patterns of .* take too long, more than 0[.]3 s"):
        adapters.read(str(adapter))
    with_config(**{key: {r".*\.k_proj": 4} if key == "rank_pattern" else r".*_proj"})(adapter)
    monkeypatch.setattr(patterns, "PATTERNS_TIMEOUT_S", 20.0)
    adapters.read(str(adapter))


@pytest.mark.parametrize(
    "path", ["/" + "a" * 300, "~nobody-of-this-name/a", "/a\0b", "/a\nb", "/a" * 20_000, " ", "a.gguf"]
)
def test_a_path_that_is_none_is_refused_in_one_short_line(path: str, folder: Path) -> None:
    _, adapters = load(folder)
    with pytest.raises(AdapterError, match=r"cannot read|does not exist") as raised:
        adapters.read(path)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 700


def test_a_folder_that_is_not_there_and_an_adapter_of_another_base_are_named(folder: Path, tmp_path: Path) -> None:
    _, adapters = load(folder)
    with pytest.raises(AdapterError, match="adapter folder /nowhere does not exist"):
        adapters.read("/nowhere")
    other = make_family("llama-yarn", tmp_path / "other", hidden_size=120)
    with pytest.raises(AdapterError, match=r"lora_A.weight is \[4, 157\], this model wants \[4, 158\]"):
        adapters.read(str(make_adapter(tmp_path / "adapter", other)))


def test_an_adapter_is_known_by_both_of_its_files(folder: Path, tmp_path: Path) -> None:
    """By which ranks of a group find that they have read the same one."""
    _, adapters = load(folder)
    one = make_adapter(tmp_path / "one", folder)
    copied = Path(shutil.copytree(one, tmp_path / "copied"))
    other_weights = make_adapter(tmp_path / "other", folder, seed=1)
    digests = [adapters.read(str(each)).digest for each in (one, copied, other_weights)]
    with_config(lora_alpha=9.0)(copied)
    digests.append(adapters.read(str(copied)).digest)
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_sites_follow_from_the_model_alone(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    sites = list(sites_of(ModelPart.of(config, OnlyRank())))
    assert len(sites) == 4 * config.num_layers
    assert sites[0].modules[2] == "model.layers.0.self_attn.v_proj" and sites[0].size == 60 + 2 * 20
    assert replace(sites[4], layer=0).modules != sites[0].modules
