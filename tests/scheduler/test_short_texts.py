"""Short prompts, prepared without a text process: the same as in one, quickly whatever they say, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from pathlib import Path

import pytest

from octavo.models import gguf_tokenizer
from protos import inference_pb2 as pb
from scheduler_svc.errors import InvalidRequest, NotReady, RequestRefused
from scheduler_svc.request_reader import read_generate_request
from scheduler_svc.served_model import ServedModel
from scheduler_svc.served_models import ServedModels
from scheduler_svc.text.quick_tokenizers import alternatives
from scheduler_svc.text.request_checks import TextSettings
from scheduler_svc.text.request_text import RequestTexts
from scheduler_svc.text.short_texts import BURST_S, SHARE, SHORT_BYTES, ShortTexts
from scheduler_svc.text.text_processes import TextProcesses
from scheduler_svc.tokenizer import Tokenizer
from tests.scheduler.tiny_served_model import tiny_served_model

GPT4 = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
PATTERNS = {
    "llama 3": gguf_tokenizer._LLAMA3.split,
    "qwen 2": gguf_tokenizer._QWEN2.split,
    "tekken": gguf_tokenizer._TEKKEN.split,
    "gpt 4": GPT4,
}
ENDLESS = r"(a+)+b|\s+"  # twice as long for each a more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return dataclasses.replace(tiny_served_model(tmp_path_factory.mktemp("tokenizer")), max_model_len=5000)


def _splitting(model: ServedModel, pattern: str) -> ServedModel:
    content = json.loads(model.tokenizer.files["tokenizer.json"])
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    files = {**model.tokenizer.files, "tokenizer.json": json.dumps(content).encode()}
    return dataclasses.replace(model, tokenizer=Tokenizer(files))


def _short(model: ServedModel) -> ShortTexts:
    return ShortTexts(lambda: ServedModels.of(model), TextSettings())


PARAMS = pb.SamplingParams(bad_words=["no", "never"], stop=["."], seed=3)
REQUESTS = {
    "text": pb.GenerateRequest(request_id="a", prompt="hi<|im_end|>", sampling_params=PARAMS),
    "ids": pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5, 6, 7]), truncate_prompt_tokens=2),
    "no prompt": pb.GenerateRequest(request_id="a"),
    "another model": pb.GenerateRequest(prompt="hi", model="other"),
    "ids that are none": pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[400])),
    "wrong parameters": pb.GenerateRequest(prompt="hi", sampling_params=pb.SamplingParams(temperature=-1)),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_short_request_is_prepared_as_in_a_text_process(model: ServedModel, name: str) -> None:
    data = REQUESTS[name].SerializeToString()
    try:
        expected = RequestTexts(ServedModels.of(model), TextSettings()).prepare(read_generate_request(data))
    except RequestRefused as refusal:
        with pytest.raises(type(refusal)) as refused:
            _short(model).prepare(data)
        assert str(refused.value) == str(refusal)
    else:
        assert _short(model).prepare(data) == expected


def test_bytes_that_are_no_request_are_refused(model: ServedModel) -> None:
    with pytest.raises(InvalidRequest, match="these 3 bytes are no request"):
        _short(model).prepare(b"\xff\xff\xff")


def test_what_may_take_long_goes_to_a_text_process(model: ServedModel, tmp_path: Path) -> None:
    endless = _splitting(model, ENDLESS)
    words = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=[5]), sampling_params=pb.SamplingParams(bad_words=["a" * 64])
    )
    chat = pb.GenerateRequest(messages=pb.Messages(messages=[pb.ChatMessage(role="user", content="hi")]))
    long = pb.GenerateRequest(prompt="x" * (SHORT_BYTES - 2))
    for each, request in (
        (model, chat),
        (model, long),
        (endless, pb.GenerateRequest(prompt="a" * 64)),
        (endless, words),
    ):
        assert _short(each).prepare(request.SerializeToString()) is None
    ids = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5]))
    prepared = _short(endless).prepare(ids.SerializeToString())
    assert prepared is not None and list(prepared.token_ids) == [5]


async def test_short_ones_need_no_process_and_are_refused_like_all_others_once_it_drains(model: ServedModel) -> None:
    processes = TextProcesses(lambda: ServedModels.of(model), TextSettings())  # none is started
    data = pb.GenerateRequest(prompt="hey").SerializeToString()
    assert list((await processes.prepare(data)).token_ids) == list(b"hey")
    processes.close(NotReady("draining"))
    with pytest.raises(NotReady, match="draining"):
        await processes.prepare(data)


def test_many_costly_ones_at_once_go_to_text_processes(model: ServedModel) -> None:
    """All that have come are prepared before the event loop turns to anybody else."""
    now_s, cpu_s, cost_s, pause_s = 100.0, 0.0, 0.00075, 0.001

    def cpu_clock() -> float:  # asked before and after each
        nonlocal cpu_s
        cpu_s += cost_s
        return cpu_s

    short = ShortTexts(lambda: ServedModels.of(model), TextSettings(), lambda: now_s, cpu_clock)
    data = pb.GenerateRequest(prompt="hey").SerializeToString()
    are_here = [short.prepare(data) is not None for _ in range(1000)]
    assert sum(are_here) == math.ceil(BURST_S / cost_s) and are_here == sorted(are_here, reverse=True)
    num_here = 0
    for _ in range(1000):
        now_s += pause_s
        num_here += short.prepare(data) is not None
    # What is left was below nothing by less than one costs before, and is now, or it is what has come since.
    assert num_here * cost_s == pytest.approx(SHARE * 1000 * pause_s, abs=cost_s + SHARE * pause_s)


HOSTILE = [
    *(chr(code) for code in (*range(9, 14), *range(32, 127))),
    *(
        "😀",
        "\u0301",
        "\u0300\u0345",
        "a\u0301",
        "漢",
        "각",
        "\ufdfa",
        "▁",
        "\xa0",
        "\u2028",
        "\u017f",
        "'s",
        "'S ",
        " a",
        "ab",
    ),
    *("\r\n", "\n ", " \n", "\t \n", "1a", "a1", ".a", "A", "aA", "Aa", "<|im_start|>", "<|im_start|", "ʰa", "'l"),
]


@pytest.mark.parametrize("name", PATTERNS)
def test_no_text_of_that_size_takes_long(model: ServedModel, name: str) -> None:
    """Some 1 ms each; an expression that goes wrong takes seconds, or does not end."""
    splitting = _splitting(model, PATTERNS[name])
    assert splitting.tokenizer.is_quick
    # Spends what it likes.
    short, chance = ShortTexts(lambda: ServedModels.of(splitting), TextSettings(), cpu_clock=float), random.Random(1)
    texts = [each * SHORT_BYTES for each in HOSTILE]
    texts += [each * SHORT_BYTES + "!" for each in (" ", "\n", "\t", "a", "\xa0", " \n")]
    texts += ["".join(chance.choices(HOSTILE, k=SHORT_BYTES)) for _ in range(20)]
    for text in texts:
        prompt = text.encode()[: SHORT_BYTES - 8].decode(errors="ignore")
        ends = "!" if text.endswith("!") else ""
        data = pb.GenerateRequest(prompt=prompt + ends).SerializeToString()
        took_s = []
        for _ in range(3):
            started_s = time.thread_time()
            assert short.prepare(data) is not None
            took_s.append(time.thread_time() - started_s)
        assert min(took_s) < 0.1, text[:20]


def test_expressions_are_taken_apart_where_they_have_alternatives() -> None:
    assert alternatives(r"a|(b|c)[|)]+|\|d|") == ["a", "(b|c)[|)]+", r"\|d", ""]
    assert alternatives("a") == ["a"]


def test_an_expression_that_nobody_knows_is_not_quick(model: ServedModel) -> None:
    assert model.tokenizer.is_quick
    for pattern in (ENDLESS, r"\s+|(x|x)*y", ".*.*=.*", r"\p{N}{1,3}|(?i:'s|'t)"):
        assert not _splitting(model, pattern).tokenizer.is_quick
