"""tokenizer.json made of other formats, against the libraries that these formats belong to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.models.errors import SentencePieceError
from octavo.models.sentencepiece_tokenizer import is_sentencepiece, tokenizer_json
from scheduler_svc.text.tokenizer import Tokenizer
from tests.scheduler import tiny_tokenizers
from tests.scheduler.tiny_tokenizers import TEXTS
from tests.worker.sentencepiece_fixtures import FOLDER, MODELS
from worker_svc.models.errors import ModelError
from worker_svc.tokenizers.tokenizer_files import TokenizerFiles

EXPECTED = json.loads((FOLDER / "expected.json").read_text())
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def folder_of(folder: Path, **files: Any) -> Path:
    """`files`: name, with `__` for a dot, -> a text, bytes, or what becomes JSON."""
    for name, content in files.items():
        data = content if isinstance(content, bytes) else (content if isinstance(content, str) else json.dumps(content))
        (folder / name.replace("__", ".")).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


def sent(folder: Path, mode: str = "auto") -> Tokenizer:
    """What a scheduler makes of what a worker sends."""
    contents: dict[str, bytes] = {}
    for chunk in TokenizerFiles.from_folder(folder, mode).chunks():
        contents[chunk.file_name] = contents.get(chunk.file_name, b"") + chunk.data
    return Tokenizer(contents)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join([stream.push((index,)) for index in ids]) + stream.finish()


def sentencepiece_model(name: str = "bpe") -> bytes:
    return (FOLDER / f"{name}.model").read_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_ids_and_text_are_those_of_the_sentencepiece_library(tmp_path: Path, name: str) -> None:
    tokenizer = sent(folder_of(tmp_path, tokenizer__model=sentencepiece_model(name), tokenizer_config__json=LLAMA))
    for case in EXPECTED[name]:
        ids = tokenizer.encode(case["text"], add_special_tokens=False)
        assert ids == case["ids"], case["text"]
        if 0 not in ids:  # an unknown token is " ⁇ " there, and as a special token no text here and in `transformers`
            assert tokenizer.decode(ids) == case["decoded"], case["text"]
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)
    assert any(0 in case["ids"] for case in EXPECTED["unigram"])


@pytest.mark.parametrize(
    ("config", "begins", "ends"), [({}, True, False), ({"add_bos_token": False}, False, False),
                                   ({"add_eos_token": True}, True, True)]
)  # fmt: skip
def test_bos_and_eos_are_added_as_the_config_says(
    tmp_path: Path, config: dict[str, bool], begins: bool, ends: bool
) -> None:
    tokenizer = sent(folder_of(tmp_path, tokenizer__model=sentencepiece_model(), tokenizer_config__json=LLAMA | config))
    ids = tokenizer.encode("the fox")
    assert (ids[0] == tokenizer.bos_token_id, ids[-1] == tokenizer.eos_token_id) == (begins, ends)


def test_added_tokens_get_the_ids_that_they_say(tmp_path: Path) -> None:
    size = len(json.loads(tokenizer_json(sentencepiece_model(), {}, {}))["model"]["vocab"])
    added = {str(size): {"content": "<|end|>", "special": True}, str(size + 1): {"content": "<|tool|>"}}
    files = {"tokenizer__model": sentencepiece_model(), "added_tokens__json": {"<|tool|>": size + 1, "<|end|>": size}}
    tokenizer = sent(folder_of(tmp_path, **files, tokenizer_config__json=LLAMA | {"added_tokens_decoder": added}))
    ids = tokenizer.encode("the<|tool|>fox<|end|>", add_special_tokens=False)
    assert ids[-1] == size and size + 1 in ids and size in tokenizer.special_token_ids
    assert tokenizer.decode(ids) == "the<|tool|> fox"
    not_legacy = sent(
        folder_of(tmp_path, tokenizer_config__json=LLAMA | {"added_tokens_decoder": added, "legacy": False})
    )
    ids = not_legacy.encode("the<|tool|>fox", add_special_tokens=False)
    assert not_legacy.decode(ids) == "the<|tool|>fox"
    with pytest.raises(
        SentencePieceError, match=rf"added token '<\|end\|>' would get id {size} and not its own, {size + 5}"
    ):
        tokenizer_json(sentencepiece_model(), {}, {"<|end|>": size + 5})


def test_added_tokens_that_the_configs_name_are_special(tmp_path: Path) -> None:
    """added_tokens.json has no flags: `transformers` says "the fox fox" of these."""
    size = len(json.loads(tokenizer_json(sentencepiece_model(), {}, {}))["model"]["vocab"])
    named = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    files = {"added_tokens__json": {"<|im_end|>": size, "<|im_start|>": size + 1}, "special_tokens_map__json": named}
    config = {"tokenizer_class": "LlamaTokenizer"}
    tokenizer = sent(
        folder_of(tmp_path, tokenizer__model=sentencepiece_model(), tokenizer_config__json=config, **files)
    )
    ids = tokenizer.encode("the<|im_end|>fox<|im_start|>fox")
    assert {size, size + 1} < set(ids) and tokenizer.eos_token_ids == (size,)
    assert tokenizer.decode(ids) == streamed(tokenizer, ids) == "the fox fox"


@pytest.mark.parametrize(
    ("config", "model_type", "is_taken"),
    [({}, "llama", True), ({}, "xglm", False), ({"tokenizer_class": "GemmaTokenizerFast"}, "gemma", True)],
)
def test_only_classes_whose_ids_are_the_models_own_are_taken_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, str], model_type: str, is_taken: bool
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    files = {"tokenizer_config__json": config, "config__json": {"model_type": model_type}}
    folder = folder_of(tmp_path, tokenizer__model=sentencepiece_model(), **files)
    if is_taken:
        sent(folder)
        return
    with pytest.raises(
        ModelError, match=r"making one needs the Python package `transformers`: install octavo\[transformers\]"
    ):
        sent(folder)


@pytest.mark.parametrize("config", [{"tokenizer_class": "GPT2Tokenizer"}, {}])
def test_vocabulary_and_merges_are_cut_as_transformers_cuts_them(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    model = json.loads(tiny_tokenizers.byte_level().to_str())["model"]
    merges = "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]) + "\n"
    config = config | {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
    files = {"tokenizer_config__json": config, "config__json": {"model_type": "gpt2"}}
    folder = folder_of(tmp_path, vocab__json=model["vocab"], merges__txt=merges, **files)
    oracle, tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True), sent(folder)
    trained = tiny_tokenizers.byte_level()  # the one that the files were written from; it has more added tokens
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text)
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True) == streamed(tokenizer, ids)
        if text.isascii() and "<" not in text:
            assert ids == trained.encode(text).ids


def test_the_mode_says_whether_one_is_made(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tokenizer__model=sentencepiece_model(), tokenizer_config__json=LLAMA)
    made = sent(folder)
    assert "tokenizer.json" not in dict.fromkeys(
        chunk.file_name for chunk in TokenizerFiles.from_folder(folder, "fast").chunks()
    )
    other = tiny_tokenizers.byte_level()
    folder_of(tmp_path, tokenizer__json=other.to_str())
    assert sent(folder, "auto").vocab_size == sent(folder, "fast").vocab_size == other.get_vocab_size()
    assert sent(folder, "slow").vocab_size == made.vocab_size != other.get_vocab_size()
    (folder / "tokenizer.model").unlink()
    with pytest.raises(ModelError, match="there are no files of a slow tokenizer"):
        sent(folder, "slow")


def test_a_folder_with_nothing_to_make_one_of_is_sent_as_it_is(tmp_path: Path) -> None:
    """A scheduler may have a tokenizer of its own."""
    files = TokenizerFiles.from_folder(folder_of(tmp_path, config__json={"model_type": "llama"}))
    assert [chunk.file_name for chunk in files.chunks()] == ["config.json", ""]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"tokenizer_config__json": "{"}, r"tokenizer_config\.json is not JSON"),
        ({"tokenizer_config__json": LLAMA, "added_tokens__json": {"<x>": 99999}}, r"added token '<x>' would get id"),
        ({"tokenizer__model": b"\xff\xff\xff", "tokenizer_config__json": LLAMA}, "transformers makes none"),
        ({"tokenizer_config__json": {"tokenizer_class": "FooTokenizer"}}, "there is no tokenizer.json"),
    ],
)
def test_what_cannot_be_made_is_one_line(tmp_path: Path, files: dict[str, Any], why: str) -> None:
    folder = folder_of(tmp_path, **{"tokenizer__model": sentencepiece_model(), **files})
    with pytest.raises(ModelError, match=why) as caught:
        sent(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_other_files_of_that_name_are_told_apart() -> None:
    assert is_sentencepiece(sentencepiece_model())
    assert not any(is_sentencepiece(data) for data in (b"", b"IQ== 0\nIg== 1\n", b"\x00" * 20))
    with pytest.raises(SentencePieceError, match="this is not a sentencepiece model"):
        tokenizer_json(b"IQ== 0\n", {}, {})


def test_the_tokenizer_may_lie_in_another_folder(tmp_path: Path) -> None:
    """What describes the model stays the model's own."""
    (model := tmp_path / "model").mkdir()
    (other := tmp_path / "other").mkdir()
    own = {"config__json": {"model_type": "llama"}, "chat_template__jinja": "own"}
    folder_of(model, tokenizer__json=tiny_tokenizers.byte_level().to_str(), **own)
    folder_of(other, tokenizer__model=sentencepiece_model(), tokenizer_config__json=LLAMA, config__json={"a": 1})
    files = TokenizerFiles.from_folder(model, tokenizer_folder=other)
    contents = {chunk.file_name: chunk.data for chunk in files.chunks()}
    assert set(contents) == {"config.json", "tokenizer.json", "tokenizer_config.json", ""}
    assert json.loads(contents["config.json"]) == {"model_type": "llama"}
    assert contents["tokenizer.json"].decode() == tokenizer_json(sentencepiece_model(), LLAMA, {})
    assert files.sha256 != TokenizerFiles.from_folder(model).sha256
    (other / "tokenizer.model").unlink()
    with pytest.raises(ModelError, match=r"other: there is no tokenizer\.json, nor anything to make one of"):
        TokenizerFiles.from_folder(model, tokenizer_folder=other)


@pytest.mark.usefixtures("forked_workers")
def test_a_served_worker_whose_tokenizer_is_made_of_the_files_of_another_folder(tmp_path: Path) -> None:
    from octavo import LLM, SamplingParams
    from tests.tiny_models import make_tiny_llama

    folder = make_tiny_llama(tmp_path / "model")
    (other := tmp_path / "tokenizer").mkdir()
    folder_of(other, tokenizer__model=sentencepiece_model(), tokenizer_config__json=LLAMA)
    with LLM(model=str(folder), tokenizer=str(other), max_model_len=64, kv_cache_memory=0.02) as llm:
        output = llm.generate("the quick fox", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]
        tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("the quick fox") == sent(other).encode("the quick fox") != []
    prompt = tokenizer.encode("the quick fox")
    both = tokenizer.decode([*prompt, *output.outputs[0].token_ids])
    assert tokenizer.decode(prompt) + output.outputs[0].text == both
