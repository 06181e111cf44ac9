"""The tokenizer against the `tokenizers` object it was written from, and what its files say of special tokens."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo.models.resolve import resolve_model
from scheduler_svc.text.tokenizer import Tokenizer, TokenizerError
from tests.scheduler import tiny_tokenizers
from tests.scheduler.tiny_tokenizers import TEXTS, files_of, panicking_files

KINDS = {"byte_level": tiny_tokenizers.byte_level(), "sentencepiece": tiny_tokenizers.sentencepiece()}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_the_library(kind: str, text: str) -> None:
    oracle, tokenizer = KINDS[kind], Tokenizer(files_of(KINDS[kind]))
    for add_special_tokens in (True, False):
        ids = tokenizer.encode(text, add_special_tokens)
        assert ids == oracle.encode(text, add_special_tokens=add_special_tokens).ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_bos_is_added_where_the_post_processor_says_so() -> None:
    with_bos = Tokenizer(files_of(KINDS["sentencepiece"], bos_token="<s>"))
    assert with_bos.bos_token_id == 1
    assert with_bos.encode("the")[0] == 1 and with_bos.encode("the", add_special_tokens=False)[0] != 1
    assert Tokenizer(files_of(KINDS["byte_level"])).encode("the") == KINDS["byte_level"].encode("the").ids


def test_padding_and_truncation_of_the_training_are_dropped() -> None:
    oracle = tiny_tokenizers.byte_level()
    oracle.enable_truncation(3)
    oracle.enable_padding(length=20)
    tokenizer = Tokenizer(files_of(oracle))
    assert tokenizer.encode(TEXTS[0]) == KINDS["byte_level"].encode(TEXTS[0]).ids


@kinds
def test_text_of_single_tokens(kind: str) -> None:
    oracle, tokenizer = KINDS[kind], Tokenizer(files_of(KINDS[kind]))
    for token_id in range(tokenizer.vocab_size + 3):
        assert tokenizer.token_text(token_id) == oracle.decode([token_id], skip_special_tokens=False)
        assert tokenizer.token(token_id) == oracle.id_to_token(token_id)


def test_special_tokens_are_read_in_both_spellings() -> None:
    eos = {"content": "</s>", "lstrip": False}
    files = files_of(KINDS["byte_level"], bos_token="<s>", eos_token=eos, pad_token=None)
    files["special_tokens_map.json"] = json.dumps({"unk_token": "<extra>", "bos_token": "<extra>"}).encode()
    tokenizer = Tokenizer(files)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<extra>"}
    assert tokenizer.special_token_ids == {0, 1, tokenizer.vocab_size - 1}


@pytest.mark.parametrize(
    ("config", "of_map"),
    [
        ({"eos_token": "<|end|>"}, {}),
        ({"eos_token": {"__type": "AddedToken", "content": "<|end|>", "normalized": False}}, {}),
        ({"image_token": "<|end|>"}, {}),
        ({"additional_special_tokens": ["<|end|>"]}, {}),
        ({"extra_special_tokens": {"image_token": "<|end|>"}}, {}),
        ({}, {"additional_special_tokens": ["<|end|>"]}),
    ],
)
@pytest.mark.parametrize("is_added", [True, False])
def test_what_the_configs_name_is_special_as_in_transformers(
    config: dict[str, Any], of_map: dict[str, Any], is_added: bool, tmp_path: Path
) -> None:
    """Whether tokenizer.json has it as an added token that is not special, or among its words alone."""
    from transformers import AutoTokenizer

    whole = json.loads(KINDS["byte_level"].to_str())
    index = KINDS["byte_level"].get_vocab_size()
    if is_added:
        flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
        whole["added_tokens"].append({"id": index, "content": "<|end|>", **flags})
    else:
        whole["model"]["vocab"]["<|end|>"] = index
    said = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": "<s>", **config}
    files = {"tokenizer.json": whole, "tokenizer_config.json": said, "special_tokens_map.json": of_map}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer, oracle = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ids = tokenizer.encode("hi<|end|> x")
    assert ids == oracle("hi<|end|> x").input_ids and index in ids
    assert index in tokenizer.special_token_ids and tokenizer.control_tokens["<|end|>"] == index
    stream = tokenizer.stream()
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True) == stream.push(ids) == "hi x"


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [({"eos_token_id": [5, 7]}, {"eos_token_id": 9}, (5, 7)), ({"eos_token_id": 0}, {}, (0,)), ({}, {}, (1,)),
     (None, {"eos_token_id": 9}, (9,)), ({"eos_token_id": None}, {"eos_token_id": None}, (1,))],
)  # fmt: skip
def test_what_ends_an_output(generation: Any, model: Any, expected: tuple[int, ...]) -> None:
    files = files_of(KINDS["byte_level"], eos_token="</s>") | {"config.json": json.dumps(model).encode()}
    if generation is not None:
        files["generation_config.json"] = json.dumps(generation).encode()
    tokenizer = Tokenizer(files)
    assert tokenizer.eos_token_ids == expected and tokenizer.eos_token_id == 1


@pytest.mark.parametrize(
    ("config", "jinja", "expected"),
    [
        ({}, None, None),
        ({"chat_template": "A{{ bos_token }}"}, None, "A<s>"),
        ({"chat_template": "A"}, b"B", "B"),
        ({"chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]}, None, "D"),
        ({"chat_template": [{"name": "tools", "template": "T"}]}, None, None),
    ],
)
def test_where_the_chat_template_comes_from(config: Any, jinja: bytes | None, expected: str | None) -> None:
    files = files_of(KINDS["byte_level"], bos_token="<s>", **config)
    if jinja is not None:
        files["chat_template.jinja"] = jinja
    template = Tokenizer(files).chat_template
    assert (template.render([{"role": "user", "content": ""}]) if template else None) == expected


def test_equal_files_share_one_tokenizer(tmp_path: Path) -> None:
    files = files_of(KINDS["byte_level"], eos_token="</s>")
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "model.safetensors").write_bytes(b"not looked at")
    assert Tokenizer.load(files) is Tokenizer.load(dict(reversed(files.items()))) is Tokenizer.from_folder(tmp_path)
    assert Tokenizer.load(files | {"README.md": b""}) is Tokenizer.load(files)
    assert Tokenizer.load(files_of(KINDS["byte_level"])) is not Tokenizer.load(files)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.model": b""}, r"tokenizer\.json is missing: only models that have one, or that a worker"),
        ({"tokenizer.json": b"{}"}, r"tokenizer\.json is not readable: "),
        ({"tokenizer.json": b"\xff"}, r"tokenizer\.json is not readable: "),
        (files_of(KINDS["byte_level"]) | {"tokenizer_config.json": b"{"}, r"tokenizer_config\.json is not JSON"),
        (files_of(KINDS["byte_level"]) | {"config.json": b"[]"}, r"config\.json is not a JSON object"),
        (files_of(KINDS["byte_level"]) | {"chat_template.jinja": b"\xff"}, r"chat_template\.jinja is not UTF-8"),
        (panicking_files(), r"tokenizer\.json is not readable: "),
        (files_of(KINDS["byte_level"]) | {"config.json": b"[" * 100_000}, r"config\.json is not JSON"),
        (
            files_of(KINDS["byte_level"]) | {"generation_config.json": b'{"eos_token_id": [1, "</s>"]}'},
            r"generation_config\.json: eos_token_id is \[1, '</s>'\]",
        ),
        (files_of(KINDS["byte_level"]) | {"config.json": b'{"eos_token_id": -1}'}, r"config\.json: eos_token_id is -1"),
        (
            files_of(KINDS["byte_level"]) | {"tokenizer_config.json": b'{"eos_token": "\\ud800"}'},
            "a special token is no text",
        ),
    ],
)
def test_what_makes_no_tokenizer_is_named(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=message) as error:
        Tokenizer.load(files)
    assert "\n" not in str(error.value)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(TokenizerError, match=message) as error:
        Tokenizer.from_folder(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}: ")


@kinds
def test_many_threads_may_use_one_tokenizer(kind: str) -> None:
    tokenizer = Tokenizer(files_of(KINDS[kind]))
    expected = {text: tokenizer.encode(text) for text in TEXTS}

    def streamed(ids: list[int]) -> str:
        stream = tokenizer.stream()
        return "".join([stream.push([index]) for index in ids]) + stream.finish()

    def work(_: int) -> bool:
        return all(
            tokenizer.encode(text) == ids and tokenizer.decode(ids) == streamed(ids) for text, ids in expected.items()
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))


@pytest.mark.smollm2
def test_the_real_vocabulary_agrees_with_transformers() -> None:
    from transformers import AutoTokenizer, GenerationConfig

    folder = resolve_model("smollm2-135m-instruct")
    tokenizer, oracle = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    ends = GenerationConfig.from_pretrained(folder).eos_token_id  # one, or several where a GGUF file became the folder
    assert tokenizer.eos_token_ids == (tuple(ends) if isinstance(ends, list) else (ends,))
    assert oracle.convert_ids_to_tokens(tokenizer.eos_token_ids[0]) == "<|im_end|>"
    assert tokenizer.chat_template is not None
    messages = [{"role": "user", "content": TEXTS[3]}]
    prompt = tokenizer.chat_template.render(messages)
    assert prompt == oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for text in [*TEXTS, prompt, "  7 apples", "١٢٣ ½"]:
        assert tokenizer.encode(text) == oracle(text).input_ids
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(rng.choice((280, 49_152))) for _ in range(rng.randrange(60))]
        stream = tokenizer.stream()
        text = "".join([stream.push([index]) for index in ids]) + stream.finish()
        assert text == oracle.decode(ids, skip_special_tokens=True)


def test_neither_torch_nor_transformers_is_needed() -> None:
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import scheduler_svc.text.detokenizer"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
