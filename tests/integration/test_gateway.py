"""`octavo serve --http-port` by OpenAI's own client: what it gives is what gRPC gives, and what is lost is a pause."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai import OpenAI

from octavo import Client, SamplingParams
from octavo.shared.ports import free_ports
from protos import inference_pb2 as pb
from tests.gateway.running import Gateway
from tests.integration.test_serve import ROOT, Served, serving
from tests.tiny_models import make_tiny_llama
from tests.waiting import wait_until

HELLO: Any = [{"role": "user", "content": "hello"}]
MESSAGES = [{"role": "user", "content": "hello"}]


class ServedOverHttp:
    def __init__(self, served: Served, http_port: int) -> None:
        self.served = served
        self.url = f"http://127.0.0.1:{http_port}/v1"
        self.openai = OpenAI(base_url=self.url, api_key="none", max_retries=0)
        self.grpc = Client(served.address)

    def blocks_in_use(self) -> int:
        workers = self.grpc._unary(lambda at: at.control.GetLoad, pb.GetLoadRequest()).workers
        return sum(worker.num_device_blocks - worker.num_free_device_blocks for worker in workers)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def both(tiny: Path) -> Iterator[ServedOverHttp]:
    with serving("--model", str(tiny), "--http-port", "0", "--no-enable-prefix-caching") as served:
        served.wait_until_ready()
        both = ServedOverHttp(served, served.http_port)
        with both.openai, both.grpc:
            yield both
        served.end(signal.SIGTERM)


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "seed": 5, "top_p": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.5, "seed": 9, "logit_bias": {"104": 50, "105": 49.5}, "stop": ["hhh"]},
    {"seed": 2, "extra_body": {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 4}},
    {"seed": 4, "n": 3},
    {"seed": 4, "extra_body": {"ignore_eos": True, "stop_token_ids": [7], "skip_special_tokens": False}},
    {"temperature": 0, "extra_body": {"use_beam_search": True, "best_of": 3}},
]


def sampling_of(given: dict[str, Any], **more: Any) -> SamplingParams:
    fields = {**given, **given.get("extra_body", {}), **more}
    fields.pop("extra_body", None)
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token_id): bias for token_id, bias in fields["logit_bias"].items()}
    return SamplingParams(**fields)


@pytest.mark.parametrize("given", SAMPLING, ids=str)
def test_the_same_text_as_over_grpc(both: ServedOverHttp, given: dict[str, Any]) -> None:
    expected = both.grpc.complete("The sea", sampling_of(given, max_tokens=12)).outputs
    whole = both.openai.completions.create(model="tiny", prompt="The sea", max_tokens=12, **given)
    assert [(each.text, each.finish_reason) for each in whole.choices] == [
        (each.text, each.finish_reason) for each in expected
    ]
    parts = [""] * len(expected)
    for chunk in both.openai.completions.create(
        model="tiny", prompt="The sea", max_tokens=12, stream=True, **{k: v for k, v in given.items()}
    ):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    assert parts == [each.text for each in expected]


def test_chats_and_responses_too(both: ServedOverHttp) -> None:
    expected = both.grpc.complete(None, SamplingParams(seed=3, max_tokens=9), messages=MESSAGES).outputs[0].text
    asked: Any = {"model": "tiny", "messages": HELLO, "seed": 3, "max_completion_tokens": 9}
    assert both.openai.chat.completions.create(**asked).choices[0].message.content == expected
    with both.openai.chat.completions.create(**asked, stream=True) as chunks:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    given: Any = {"model": "tiny", "input": "hello", "max_output_tokens": 9, "extra_body": {"seed": 3}}
    assert both.openai.responses.create(**given).output_text == expected
    deltas = [event.delta for event in both.openai.responses.create(**given, stream=True) if event.type == DELTA]
    assert "".join(deltas) == expected


DELTA = "response.output_text.delta"


def test_logprobs_are_those_of_grpc(both: ServedOverHttp) -> None:
    params = SamplingParams(seed=3, max_tokens=5, logprobs=2)
    (expected,) = both.grpc.complete(None, params, messages=MESSAGES).outputs
    asked: Any = {"model": "tiny", "messages": HELLO, "seed": 3, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    found = both.openai.chat.completions.create(**asked).choices[0].logprobs
    assert found and found.content and expected.logprobs
    for entry, token_id, known in zip(found.content, expected.token_ids, expected.logprobs, strict=True):
        assert (entry.token, entry.logprob) == (known[token_id].decoded_token, known[token_id].logprob)
        assert [(each.token, each.logprob) for each in entry.top_logprobs] == [
            (each.decoded_token, each.logprob) for each in sorted(known.values(), key=lambda each: each.rank)[:2]
        ]


def test_a_prompt_is_scored(both: ServedOverHttp) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    expected = both.grpc.complete("The sea", params).prompt_logprobs
    found = both.openai.completions.create(model="tiny", prompt="The sea", max_tokens=0, echo=True, logprobs=0)
    logprobs = found.choices[0].logprobs
    assert expected and logprobs and logprobs.tokens and found.usage and found.usage.completion_tokens == 0
    assert logprobs.token_logprobs == [next(iter(entry.values())).logprob if entry else None for entry in expected]
    assert "".join(logprobs.tokens) == found.choices[0].text == "The sea"


def test_tokens_and_models(both: ServedOverHttp) -> None:
    assert [model.id for model in both.openai.models.list()] == ["tiny"]
    ids: Any = both.openai.post("/../tokenize", body={"prompt": "The sea"}, cast_to=object)
    assert ids["tokens"] == both.grpc.tokenize("The sea")
    usage = both.openai.completions.create(model="tiny", prompt=ids["tokens"], max_tokens=2).usage
    assert usage and (usage.prompt_tokens, usage.completion_tokens) == (7, 2)


@pytest.mark.parametrize(
    ("given", "raised", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"top_logprobs": 21, "logprobs": True}, openai.BadRequestError, "top_logprobs"),
        ({"n": 2, "temperature": 0}, openai.BadRequestError, "n"),
        ({"logit_bias": {"999999": 1}}, openai.BadRequestError, "logit_bias"),
        ({"stop": [""]}, openai.BadRequestError, "stop[0]"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format.type"),
        ({"extra_body": {"guided_regex": "a+"}}, openai.BadRequestError, "guided_regex"),
        ({"extra_body": {"priority": 5}}, openai.BadRequestError, "priority"),
        ({"model": "no/such"}, openai.NotFoundError, "model"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, openai.BadRequestError, "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_the_server_refuses_is_told_by_the_name_it_was_asked_by(
    both: ServedOverHttp, given: dict[str, Any], raised: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(raised) as refused:
        both.openai.chat.completions.create(**{"model": "tiny", "messages": HELLO, **given})
    error = refused.value.body
    assert isinstance(error, dict) and error["param"] == param
    if "a" * 5000 in str(given):
        assert error["code"] == "context_length_exceeded"


LONG: Any = {"model": "tiny", "prompt": "x", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}


def test_a_client_that_leaves_a_stream_frees_its_blocks(both: ServedOverHttp) -> None:
    chunks = both.openai.completions.create(**LONG, stream=True)
    next(iter(chunks))
    expect_soon(lambda: both.blocks_in_use() > 0)
    chunks.close()
    expect_soon(lambda: both.blocks_in_use() == 0)


def test_a_client_that_does_not_wait_for_a_whole_answer_does_too(both: ServedOverHttp) -> None:
    def ask() -> None:
        with contextlib.suppress(openai.APITimeoutError):
            both.openai.with_options(timeout=0.4).completions.create(**LONG, n=4)

    thread = threading.Thread(target=ask)
    thread.start()
    expect_soon(lambda: both.blocks_in_use() > 0)
    thread.join()
    expect_soon(lambda: both.blocks_in_use() == 0)


def expect_soon(what: Any, seconds: float = 20.0) -> None:
    wait_until(what, seconds=seconds)


def test_a_worker_that_dies_is_a_pause(both: ServedOverHttp) -> None:
    asked: Any = {
        "model": "tiny",
        "prompt": "The sea",
        "seed": 8,
        "max_tokens": 400,
        "extra_body": {"ignore_eos": True},
    }
    expected = both.openai.completions.create(**asked).choices[0].text
    found = ""
    worker = both.served.worker()
    for chunk in both.openai.completions.create(**asked, stream=True):
        if not found:
            worker.kill()
        found += chunk.choices[0].text
    assert found == expected
    both.served.wait_for(lambda: str(worker.pid) in both.served.said)


def test_many_streams_are_each_their_own(both: ServedOverHttp) -> None:
    expected = {
        seed: both.grpc.complete("The sea", SamplingParams(seed=seed, max_tokens=8)).outputs[0].text
        for seed in range(24)
    }
    found: dict[int, str] = {}

    def ask(seed: int) -> None:
        chunks = both.openai.completions.create(model="tiny", prompt="The sea", seed=seed, max_tokens=8, stream=True)
        found[seed] = "".join(chunk.choices[0].text for chunk in chunks)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == expected


def test_processes_share_a_port_and_are_started_again(both: ServedOverHttp) -> None:
    asked = Gateway(*free_ports(2))
    flags = ["--scheduler", both.served.address, "--port", str(asked.port), "--processes", "2"]
    flags.append(f"--metrics-port={asked.metrics_port}")
    process = subprocess.Popen([sys.executable, "-m", "octavo", "gateway", *flags], cwd=ROOT)

    def counted(number: int) -> bool:
        told = asked.metrics()[2].splitlines()
        return f'octavo:http_requests_total{{path="/v1/completions",status="200"}} {number}.0' in told

    try:
        parent = psutil.Process(process.pid)
        expect_soon(lambda: len(parent.children()) == 2 and all(map(listens, parent.children())))
        for _ in range(10):
            assert asked.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        expect_soon(lambda: counted(10))  # an answer is counted once it has been sent
        first, _ = parent.children()
        first.kill()
        expect_soon(lambda: first not in (found := parent.children()) and len(found) == 2 and all(map(listens, found)))
        assert asked.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        expect_soon(lambda: counted(11))
        family = parent.children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert psutil.wait_procs(family, timeout=20)[1] == []
    finally:
        process.kill()
        process.wait()


def listens(process: psutil.Process) -> bool:
    return any(each.status == psutil.CONN_LISTEN for each in process.net_connections())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_sigterm_lets_streams_finish_and_ctrl_c_ends_them(tiny: Path, number: int, code: int) -> None:
    with serving("--model", str(tiny), "--http-port", "0") as served:
        served.wait_until_ready()
        with OpenAI(base_url=f"http://127.0.0.1:{served.http_port}/v1", api_key="none", max_retries=0) as client:
            chunks = iter(client.completions.create(**{**LONG, "max_tokens": 600}, stream=True))
            next(chunks)
            served.process.send_signal(number)
            if number == signal.SIGTERM:
                assert list(chunks)[-1].choices[0].finish_reason == "length"
            else:
                with pytest.raises(openai.APIError):
                    list(chunks)
        assert served.process.wait(20) == code
    assert "Traceback" not in served.said
