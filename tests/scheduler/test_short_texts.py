"""Short prompts, prepared without a text process: the same as in one, quickly whatever they say, and nothing else."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from benchmarks.short_texts import PATTERNS, hostile, least_s, splitting
from protos import inference_pb2 as pb
from scheduler_svc.errors import InvalidRequest, NotReady, RequestRefused
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.requests.request_checks import TextSettings
from scheduler_svc.requests.request_reader import read_generate_request
from scheduler_svc.requests.request_text import RequestTexts
from scheduler_svc.requests.short_texts import BURST_S, SHARE, SHORT_BYTES, ShortTexts
from scheduler_svc.requests.text_processes import TextProcesses
from scheduler_svc.text.quick_tokenizers import alternatives
from tests.scheduler.tiny_served_model import tiny_served_model

ENDLESS = r"(a+)+b|\s+"  # twice as long for each a more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return dataclasses.replace(tiny_served_model(tmp_path_factory.mktemp("tokenizer")), max_model_len=5000)


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
    endless = splitting(model, ENDLESS)
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


@pytest.mark.parametrize("name", PATTERNS)
def test_no_text_of_that_size_takes_long(model: ServedModel, name: str) -> None:
    """A millisecond or two; an expression that goes wrong takes seconds, or does not end."""
    splits = splitting(model, PATTERNS[name])
    assert splits.tokenizer.is_quick
    took_s = least_s(splits, hostile(), rounds=3)
    assert len(took_s) > 100 and max(took_s) < 0.1


def test_expressions_are_taken_apart_where_they_have_alternatives() -> None:
    assert alternatives(r"a|(b|c)[|)]+|\|d|") == ["a", "(b|c)[|)]+", r"\|d", ""]
    assert alternatives("a") == ["a"]


def test_an_expression_that_nobody_knows_is_not_quick(model: ServedModel) -> None:
    assert model.tokenizer.is_quick
    for pattern in (ENDLESS, r"\s+|(x|x)*y", ".*.*=.*", r"\p{N}{1,3}|(?i:'s|'t)"):
        assert not splitting(model, pattern).tokenizer.is_quick
