"""A model that is split over ranks computes what the whole one does, and each rank reads its own part."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo.shared.terminal_row import ByteBar
from tests.worker.exact_logits import truth_of_folder
from tests.worker.families import FAMILIES, VOCAB_SIZE, make_family
from tests.worker.gguf_files import write_gguf
from tests.worker.model_cases import Stepper
from tests.worker.ranks_in_threads import ThreadRank, on_all_ranks
from worker_svc.models.checkpoint import stored_tensor
from worker_svc.models.checkpoint.checkpoint_files import Tensors
from worker_svc.models.checkpoint.weights import CheckpointWeights
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.decoder import Decoder
from worker_svc.models.experts.experts import Experts
from worker_svc.models.experts.shared_experts import WithShared
from worker_svc.models.loader import Model, load_model
from worker_svc.models.parts import ModelPart, part_of, vocabulary_part
from worker_svc.models.products.summed import Summed
from worker_svc.parallel.ranks import OnlyRank, Ranks

LENGTHS = [1, 7, 40]

# Name of a family -> number of ranks, and what its tiny model needs to be divisible by that.
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "llama-yarn": (2, {"intermediate_size": 158}),
    "mistral": (4, {"num_attention_heads": 8, "intermediate_size": 156}),  # a key/value head for two ranks each
    "qwen2": (3, {"intermediate_size": 156, "num_key_value_heads": 1}),
    "qwen3": (2, {"intermediate_size": 158}),
    "qwen3-biased": (2, {"intermediate_size": 158}),
    "phi3": (2, {"intermediate_size": 158}),
    "starcoder2": (2, {"intermediate_size": 158}),
    "stablelm-biased": (3, {"intermediate_size": 159}),
    "gemma": (2, {"intermediate_size": 158}),
    "gemma2": (2, {"intermediate_size": 158}),
    "gemma3": (2, {"intermediate_size": 158}),
    "gpt2": (4, {"n_inner": 132}),
    "opt": (2, {"ffn_dim": 132}),
    "opt-behind": (3, {"ffn_dim": 132}),
    "bloom": (3, {}),
    "mixtral": (2, {"intermediate_size": 158}),
    "gpt-oss": (2, {"intermediate_size": 158}),
    "qwen3-moe-mixed": (2, {"moe_intermediate_size": 46, "intermediate_size": 158}),
    "deepseek-v2": (2, {"intermediate_size": 158}),
    "deepseek-v3": (3, {"intermediate_size": 159, "moe_intermediate_size": 24}),
}


def tokens(length: int) -> list[int]:
    return random.Random(length).choices(range(VOCAB_SIZE), k=length)


def load(folder: Path, ranks: Ranks, dtype: str = "float32", load_format: str = "auto", **options: Any) -> Decoder:
    part = ModelPart.of(ModelConfig.from_folder(folder, dtype), ranks, **options)
    model = load_model(folder, part, "cpu", load_format)
    assert isinstance(model, Decoder)
    return model


def logits_of(model: Model, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Of every token: prefills together, and the last token of each by itself."""
    stepper, lengths = Stepper(model, sequences), list(map(len, sequences))
    first = stepper.step({i: (0, max(length - 1, 1)) for i, length in enumerate(lengths)})
    last = stepper.step({i: (length - 1, length) for i, length in enumerate(lengths) if length > 1})
    return [torch.cat([first[i], last[i]]) if i in last else first[i] for i in range(len(sequences))]


@pytest.mark.parametrize("name", SPLITS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    size, changes = SPLITS[name]
    folder = make_family(name, tmp_path / "model", **changes)
    sequences = [tokens(length) for length in LENGTHS]
    everyones = on_all_ranks(size, lambda ranks: logits_of(load(folder, ranks), sequences))
    truth_of_folder(folder, sequences).check_whole(everyones[0])
    for others in everyones[1:]:  # all ranks draw from the same bits
        assert all(torch.equal(other, own) for other, own in zip(others, everyones[0], strict=True))


def test_every_kind_of_family_is_split_here() -> None:
    assert {name.partition("-")[0] for name in SPLITS} == {name.partition("-")[0] for name in FAMILIES}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixtral", {"num_local_experts": 4}),
        ("qwen3-moe-mixed", {}),
        ("gpt-oss", {"num_local_experts": 4}),
        ("deepseek-v3", {"n_routed_experts": 4, "topk_group": 2, "n_group": 2, "num_hidden_layers": 2}),
    ],
)
def test_whole_experts_on_each_rank(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = make_family(name, tmp_path / "model", intermediate_size=158, **changes)
    sequences = [tokens(length) for length in LENGTHS]

    def work(ranks: Ranks) -> tuple[list[torch.Tensor], int]:
        model = load(folder, ranks, is_expert_parallel=True)
        mixture = model.layers[-1].mlp
        assert isinstance(mixture, Summed)
        chosen = mixture.layer._chosen if isinstance(mixture.layer, WithShared) else mixture.layer
        assert isinstance(chosen, Experts)
        return logits_of(model, sequences), len(chosen._experts)

    (logits, num_experts), _ = on_all_ranks(2, work)
    truth_of_folder(folder, sequences).check_whole(logits)
    assert num_experts == 2


@pytest.mark.parametrize(
    ("name", "load_format"),
    [
        ("llama-yarn", "dummy"),
        ("gpt2", "dummy"),
        ("deepseek-v2", "dummy"),
        ("bloom", "bin"),
        ("phi3", "gguf"),
        ("mixtral", "gguf"),
    ],
)
def test_other_sources_of_weights_are_split_alike(name: str, load_format: str, tmp_path: Path) -> None:
    """Against the whole model from the same source; a sum in two parts is off by a rounding of its terms, or few."""
    folder = make_family(name, tmp_path / "model", **SPLITS[name][1])
    if load_format == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    if load_format == "gguf":
        write_gguf(folder, folder / "model.gguf", {"phi3": "phi3", "mixtral": "llama"}[name])
    sequences = [tokens(length) for length in LENGTHS]
    whole = logits_of(load(folder, OnlyRank(), load_format=load_format), sequences)
    parts, *_ = on_all_ranks(2, lambda ranks: logits_of(load(folder, ranks, load_format=load_format), sequences))
    for found, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_more_ranks_than_tokens_of_the_vocabulary(tmp_path: Path) -> None:
    """The last of four ranks has no row of the embedding and none of the head."""
    changes = {"vocab_size": 320, "num_attention_heads": 8, "intermediate_size": 160}
    folder = make_family("mistral", tmp_path / "model", **changes)
    whole = logits_of(load(folder, OnlyRank()), [[3, 319, 130, 7]])[0]
    everyones = on_all_ranks(4, lambda ranks: logits_of(load(folder, ranks), [[3, 319, 130, 7]])[0])
    assert not vocabulary_part(ThreadRank(3, 4), 320)[0]
    for logits in everyones:
        torch.testing.assert_close(logits, whole, rtol=0, atol=2e-5 * float(whole.abs().max()))


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    folder, sequences = make_family("gemma2", tmp_path / "model", intermediate_size=158), [tokens(30)]
    full = logits_of(load(folder, OnlyRank()), sequences)[0]
    half, *_ = on_all_ranks(2, lambda ranks: logits_of(load(folder, ranks, "bfloat16"), sequences)[0])
    assert (full - half).abs().mean() < 0.1 * full.std()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each, as they come."""
    counts: list[int] = []
    read = stored_tensor.OpenFile.read_into

    def counted(self: stored_tensor.OpenFile, out: memoryview, offset: int) -> None:
        counts.append(len(out))
        read(self, out, offset)

    monkeypatch.setattr(stored_tensor.OpenFile, "read_into", counted)
    return counts


@pytest.mark.parametrize("name", ["llama-yarn", "phi3", "gpt2", "bloom"])  # by product, fused, transposed, in turns
def test_a_rank_reads_its_part_of_the_file_alone(name: str, tmp_path: Path, reads: list[int]) -> None:
    folder = make_family(name, tmp_path / "model", **SPLITS[name][1])
    load(folder, ThreadRank(1, 2))
    stored = load_file(folder / "model.safetensors")
    assert sum(reads) == sum(tensor.nbytes * share_of_second(name) for name, tensor in stored.items())


@pytest.mark.parametrize("name", ["phi3", "gpt2"])
def test_one_rank_reads_each_tensor_at_once(name: str, tmp_path: Path, reads: list[int]) -> None:
    folder = make_family(name, tmp_path / "model")
    load(folder, OnlyRank())
    assert sorted(reads) == sorted(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


def share_of_second(tensor: str) -> Fraction:
    """Of two ranks, what the second reads of it: of the vocabulary what the first's 320 leave, no bias of a sum."""
    *_, kind, which = tensor.split(".")
    if kind in ("embed_tokens", "lm_head", "wte", "word_embeddings"):
        return Fraction(VOCAB_SIZE - 320, VOCAB_SIZE)
    if kind in ("c_proj", "dense", "dense_4h_to_h") and which == "bias":
        return Fraction(0)
    return Fraction(1) if "norm" in kind or kind in ("wpe", "ln_1", "ln_2", "ln_f") else Fraction(1, 2)


def test_a_tensor_is_made_once_for_all_that_is_taken_of_it() -> None:
    """One of a quantised file is expanded whole whenever it is made."""
    whole, made = torch.arange(60.0).view(12, 5), []

    def make() -> torch.Tensor:
        made.append("qkv")
        return whole

    tensors: Tensors = {"qkv": stored_tensor.MadeTensor((12, 5), torch.float32, make)}
    weights = CheckpointWeights(Path("model"), tensors, torch.float32, torch.device("cpu"), ByteBar("", 0))
    rows, columns = [range(3, 6), range(7, 8), range(9, 11)], [range(1, 2), range(3, 5)]
    taken = weights.take_parts(["qkv"], [12], 5, rows=rows, columns=columns)
    assert torch.equal(taken, whole[[3, 4, 5, 7, 9, 10]][:, [1, 3, 4]]) and made == ["qkv"]


@pytest.mark.parametrize(
    ("size", "changes", "complaint"),
    [
        (2, {}, "tensor_parallel_size 2: 157 neurons of an MLP do not divide among so many ranks"),
        (4, {"intermediate_size": 160}, "tensor_parallel_size 4: 6 attention heads do not divide among so many ranks"),
        (
            3,
            {"intermediate_size": 159},
            "tensor_parallel_size 3: 2 key/value heads and so many ranks do not divide each other",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    size: int, changes: dict[str, int], complaint: str, tmp_path: Path
) -> None:
    config = ModelConfig.from_folder(make_family("mistral", tmp_path / "model", **changes))
    with pytest.raises(ModelError, match=complaint):
        ModelPart.of(config, ThreadRank(0, size))


def test_what_one_rank_alone_computes_is_refused(tmp_path: Path) -> None:
    ranks = ThreadRank(0, 2)
    config = ModelConfig.from_folder(make_family("mixtral", tmp_path / "model", intermediate_size=158))
    for changed, complaint in (
        (replace(config, impl="transformers"), "MixtralForCausalLM is computed by transformers, on one rank alone"),
        (replace(config, quantization="int8"), "quantization int8 .*; --pipeline-parallel-size divides the layers"),
    ):
        with pytest.raises(ModelError, match=f"tensor_parallel_size 2: {complaint}"):
            ModelPart.of(changed, ranks)
    with pytest.raises(ModelError, match="5 experts do not divide among so many ranks"):
        ModelPart.of(config, ranks, is_expert_parallel=True)


def test_parts_cover_the_whole_once() -> None:
    for size, count in ((2, 8), (4, 8), (4, 2), (8, 2), (3, 1)):
        parts = [part_of(ThreadRank(rank, size), count, 5) for rank in range(size)]
        covered = [row for part in dict.fromkeys(parts) for row in part]
        assert covered == list(range(count * 5))
        assert [parts.count(part) for part in dict.fromkeys(parts)] == [max(size // count, 1)] * len(set(parts))
    for size, vocab_size in ((2, 523), (4, 523), (8, 130), (2, 128)):
        ids = [vocabulary_part(ThreadRank(rank, size), vocab_size) for rank in range(size)]
        assert [token for tokens, _ in ids for token in tokens] == list(range(vocab_size))
        assert len({rows for _, rows in ids}) == 1 and ids[0][1] % 64 == 0 and len(ids[0][0]) <= ids[0][1]
