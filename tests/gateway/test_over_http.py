"""A gateway before a scheduler of known answers, by OpenAI's client and by hand: refusals, losses, clients that go."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx2
import openai
import pytest
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion

from gateway_svc.config import GatewayConfig
from gateway_svc.http import app
from gateway_svc.http.metrics import GatewayMetrics
from gateway_svc.http.server_trace import ServerTrace, ending
from octavo.calls import lingering_call
from octavo.cli import main
from octavo.retrying import RetryPolicy, Waiting
from octavo.shared.connections import allow_open_files
from octavo.shared.few_lines import LINES_PER_S
from octavo.shared.tracing.span import Span
from octavo.shared.tracing.tracer import Tracer
from protos import inference_pb2 as pb
from tests.gateway.running import Gateway, gateway
from tests.gateway.shapes import events, strictly
from tests.integration.fake_inference import FakeServer, expected_tokens, text_of
from tests.waiting import wait_until

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"prompt": "hello", "seed": 3, "max_tokens": 6}
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture(scope="module")
def shared(server: FakeServer) -> Iterator[Gateway]:
    with gateway(server.address) as running:
        yield running


@pytest.fixture
def fake(server: FakeServer) -> Any:
    server.inference.__init__()  # type: ignore[misc]  # as new
    return server.inference


def text(seed: int = 3, index: int = 0, count: int = 6) -> str:
    return text_of(expected_tokens(seed, index, count))


def details(*messages: Any) -> tuple[tuple[str, bytes], ...]:
    packed = []
    for message in messages:
        packed.append(any_pb2.Any())
        packed[-1].Pack(message)
    return (("grpc-status-details-bin", status_pb2.Status(details=packed).SerializeToString()),)


# ---- what a client gets ----


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion(fake: Any, shared: Gateway, stream: bool) -> None:
    with shared.client() as client:
        answer: Any = client.completions.create(model="fake", **GREEDY, stream=stream)
        parts = list(answer) if stream else [answer]
    assert "".join(part.choices[0].text for part in parts) == text()
    assert parts[-1].choices[0].finish_reason == "length"
    assert fake.requests[0].stream is stream, "what comes whole is made in one piece where the tokens are"
    assert fake.metadata[0]["authorization"] == "Bearer sk-of-a-test"


def test_several_prompts_and_outputs_in_one_stream(fake: Any, shared: Gateway) -> None:
    given = {**GREEDY, "prompt": ["a", "b", "c"]}
    with shared.client() as client:
        found = [""] * 6
        for part in client.completions.create(model="fake", n=2, stream=True, **given):
            for choice in part.choices:
                found[choice.index] += choice.text
    assert found == [text(index=0), text(index=1)] * 3
    assert [request.prompt for request in sorted(fake.requests, key=lambda each: each.request_id)] == ["a", "b", "c"]


def test_a_chat_and_a_response_stream(fake: Any, shared: Gateway) -> None:
    fake.script = [
        pb.GenerateResponse(admission=pb.Admission(num_prompt_tokens=1), model="fake"),
        pb.GenerateResponse(outputs=[pb.OutputDelta(text="a\u2028b \U0001f600")]),
        pb.GenerateResponse(outputs=[pb.OutputDelta(text="c", finish_reason=pb.FINISH_REASON_STOP)]),
        pb.GenerateResponse(usage=pb.Usage(prompt_tokens=1, completion_tokens=2)),
    ]
    with shared.client() as client:
        usage: Any = {"include_usage": True}
        chunks = list(client.chat.completions.create(model="fake", messages=HELLO, stream=True, stream_options=usage))
        with client.responses.stream(model="fake", input="hello") as stream:
            final = [event for event in stream][-1].type, stream.get_final_response().output_text
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == "a\u2028b \U0001f600c"
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 2
    assert final == ("response.completed", "a\u2028b \U0001f600c")


def test_models_by_name_with_and_without_slashes(fake: Any, shared: Gateway) -> None:
    with shared.client() as client:
        assert [(model.id, model.owned_by) for model in client.models.list()] == [
            ("fake", "octavo"),
            ("owner/name", "octavo"),
        ]
        assert client.models.retrieve("owner/name").id == "owner/name"
        extra = client.models.retrieve("fake").model_extra
        assert extra and extra["fingerprint"] == "bbbb", "what a request would get"
        with pytest.raises(openai.NotFoundError) as refused:
            client.models.retrieve("no/such")
    assert refused.value.code == "model_not_found"
    assert "model 'no/such' is not served here; 'fake' and 'owner/name' are" in refused.value.message


def test_tokens(fake: Any, shared: Gateway) -> None:
    status, found = shared.post("/tokenize", {"prompt": "ab"})
    assert (status, found["tokens"], found["count"], found["token_strs"]) == (200, [97, 98], 2, None)
    assert shared.post("/detokenize", {"tokens": [97, 98]}) == (200, {"prompt": "ab"})


def test_an_echo_of_token_ids_is_their_text(fake: Any, shared: Gateway) -> None:
    for stream in (False, True):
        asked = {**GREEDY, "prompt": [104, 105], "echo": True, "stream": stream}
        _, _, answer = shared.ask("POST", COMPLETIONS, asked)
        found = events(answer)[:-1] if stream else [json.loads(answer)]
        assert "".join(each["choices"][0]["text"] for each in found) == "hi" + text()


@pytest.mark.parametrize(
    ("prompt", "most", "kept", "shown"),
    [
        ("hi", 4, b"^hi", "hi"),
        ("hi", 3, b"^hi", "hi"),
        ("hi", 2, b"hi", "hi"),
        ("hi", 1, b"i", "i"),
        ("oh hi", 3, b" hi", " hi"),
        ([*b"^hi"], 3, b"^hi", "^hi"),
        ([*b"^hi"], 2, b"hi", "hi"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_shows_no_bos_of_a_prompt_of_which_all_was_kept(
    fake: Any, shared: Gateway, prompt: Any, most: int, kept: bytes, shown: str, stream: bool
) -> None:
    """`^` is what the tokenizer puts in front."""
    admission = pb.Admission(num_prompt_tokens=len(kept))
    end = pb.OutputDelta(text="!", token_ids=[33], finish_reason=pb.FINISH_REASON_LENGTH)
    fake.script = [
        pb.GenerateResponse(admission=admission, request_id="x", model="fake", prompt_token_ids=kept),
        pb.GenerateResponse(outputs=[end]),
        pb.GenerateResponse(usage=pb.Usage(prompt_tokens=len(kept), completion_tokens=1)),
    ]
    asked = {**GREEDY, "prompt": prompt, "echo": True, "truncate_prompt_tokens": most, "stream": stream}
    _, _, answer = shared.ask("POST", COMPLETIONS, asked)
    found = events(answer)[:-1] if stream else [json.loads(answer)]
    assert "".join(each["choices"][0]["text"] for each in found) == shown + "!"


def test_health_follows_the_scheduler(server: FakeServer, shared: Gateway) -> None:
    assert shared.ask("GET", "/health")[0] == 200
    server.set_ready(False)
    try:
        assert shared.ask("GET", "/health")[0] == 503
    finally:
        server.set_ready(True)


@pytest.mark.parametrize("service", ["octavo.v1.Inference", ""])
def test_octavo_health_asks_a_gateway_too(
    server: FakeServer, shared: Gateway, service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["health", shared.url, "--service", service]
    assert main(asked) == 0 and capsys.readouterr().out == f"{shared.url}: SERVING\n"
    server.set_ready(False)
    try:
        assert main(asked) == (1 if service else 0), "whether it is alive does not hang on the scheduler"
    finally:
        server.set_ready(True)
    assert main(["health", "http://127.0.0.1:1"]) == 3


def test_metrics_count_what_was_answered(fake: Any, server: FakeServer) -> None:
    with gateway(server.address) as alone:
        alone.post(COMPLETIONS, GREEDY)
        alone.post(COMPLETIONS, {"prompt": 5})
        _, headers, told = alone.metrics()
        assert alone.ask("GET", "/metrics")[0] == 404, "clients are not told of each other's traffic"
        assert alone.metrics("/v1/models")[0] == 404, "and nobody asks for an answer there"
    assert headers["content-type"].startswith("text/plain")
    for line in (
        'octavo:http_requests_total{path="/v1/completions",status="200"} 1.0',
        'octavo:http_requests_total{path="/v1/completions",status="400"} 1.0',
        "octavo:http_generation_tokens_total 6.0",
        "octavo:http_requests_open 0.0",
    ):
        assert line in told.splitlines(), told


def test_a_fault_of_the_gateways_own_is_no_client_that_went(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(fields: Any) -> Any:
        raise KeyError("of the gateway's own")

    async def ask(*_: Any) -> Any:
        raise KeyError("of the gateway's own")

    monkeypatch.setitem(app._GENERATING, COMPLETIONS, (read, app._GENERATING[COMPLETIONS][1]))
    monkeypatch.setitem(app._ASKING, "/tokenize", ("POST", ask))
    with gateway(server.address) as alone:
        assert alone.post(COMPLETIONS, GREEDY)[0] == alone.post("/tokenize", {"prompt": "hello"})[0] == 500
        told = alone.metrics()[2].splitlines()
    for path in (COMPLETIONS, "/tokenize"):
        assert f'octavo:http_requests_total{{path="{path}",status="500"}} 1.0' in told
    assert not [line for line in told if 'status="499"' in line]


def test_the_trace_of_a_fault_has_its_status_too() -> None:
    spans: list[Span] = []

    class Exporter:
        def export(self, batch: Sequence[Span]) -> str:
            spans.extend(batch)
            return ""

        def close(self) -> None:
            pass

    tracer = Tracer(1.0, Exporter)
    with pytest.raises(KeyError), GatewayMetrics().request(COMPLETIONS) as told:
        trace = ServerTrace(tracer, (), COMPLETIONS)
        with ending(trace, told):
            raise KeyError("of the gateway's own")
    tracer.close(flush_s=60.0)
    assert [span.error for span in spans] == ["500"]


# ---- losses are pauses ----


@pytest.mark.parametrize("lost_with", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
def test_a_scheduler_that_is_lost_is_a_pause(fake: Any, shared: Gateway, lost_with: grpc.StatusCode) -> None:
    fake.losses = [(2, lost_with), (1, lost_with)]
    with shared.client() as client:
        parts = list(client.completions.create(model="fake", stream=True, **GREEDY))
    assert "".join(part.choices[0].text for part in parts) == text()
    assert [len(request.resume[0].token_ids) if request.resume else 0 for request in fake.requests] == [0, 2, 3]


def test_a_whole_answer_survives_it_too(fake: Any, shared: Gateway) -> None:
    fake.losses = [(2, grpc.StatusCode.UNAVAILABLE)]
    assert shared.post(COMPLETIONS, GREEDY)[1]["choices"][0]["text"] == text()


@pytest.mark.parametrize("named", [{}, {"model": "fake"}], ids=["no-model", "model"])
def test_a_scheduler_that_comes_late_is_waited_for(named: dict[str, str]) -> None:
    """Also by the question what a name is that no scheduler has told yet."""
    with FakeServer() as there:
        port = there.port
    has_tried = threading.Event()
    policy = RetryPolicy(window_s=15.0, first_delay_s=0.01, on_wait=lambda _: has_tried.set())
    with gateway(f"127.0.0.1:{port}", policy) as early, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(early.post, COMPLETIONS, {**GREEDY, **named})
        assert has_tried.wait(15)
        with FakeServer(port):
            assert answer.result(15)[1]["choices"][0]["text"] == text()


def test_prompts_of_a_call_wait_together_for_one() -> None:
    with FakeServer() as there:
        port = there.port
    told: list[Waiting] = []
    policy = RetryPolicy(window_s=15.0, first_delay_s=0.01, on_wait=told.append)
    with gateway(f"127.0.0.1:{port}", policy) as early, ThreadPoolExecutor(3) as pool:
        first = pool.submit(early.post, COMPLETIONS, GREEDY)
        wait_until(lambda: told)
        many = [pool.submit(early.post, COMPLETIONS, {**GREEDY, "prompt": ["a"] * 50}) for _ in range(2)]
        with FakeServer(port) as server:
            assert first.result(15)[0] == 200
            assert [len(each.result(15)[1]["choices"]) for each in many] == [50, 50]
            assert len(told) == 1 and len(server.inference.requests) == 101
            assert all(not request.attempt for request in server.inference.requests if request.prompt == "a")


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_is_lost_while_an_echo_is_made_is_waited_for(fake: Any, shared: Gateway, stream: bool) -> None:
    fake.num_lost_texts = 2
    asked = {**GREEDY, "prompt": [104, 105], "echo": True, "stream": stream}
    status, _, answer = shared.ask("POST", COMPLETIONS, asked)
    assert (status, fake.num_lost_texts) == (200, 0) and '"text":"hi' in answer


def test_one_that_does_not_come_is_an_error_in_time() -> None:
    with gateway("127.0.0.1:1", RetryPolicy(window_s=0.0)) as alone:
        for asked in (GREEDY, {**GREEDY, "model": "fake"}):
            status, headers, body = alone.ask("POST", COMPLETIONS, asked)
            assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (503, "1", "unavailable")
        assert alone.ask("GET", "/health")[0] == 503


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_one_that_stops_is_an_error_to_try_again(fake: Any, server: FakeServer, code: grpc.StatusCode) -> None:
    fake.refusal = (code, "stopping", ())
    with gateway(server.address, RetryPolicy(window_s=0.0)) as alone:
        status, headers, body = alone.ask("POST", COMPLETIONS, GREEDY)
    assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (503, "1", "unavailable")


COMMENT = b": keep-alive\n\n"


def test_a_stream_that_waits_gets_comments_which_openai_s_client_drops(fake: Any, server: FakeServer) -> None:
    go_on = threading.Event()

    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(admission=pb.Admission(num_prompt_tokens=1), model="fake")
        assert go_on.wait(60)
        yield pb.GenerateResponse(outputs=[pb.OutputDelta(text="ab", finish_reason=pb.FINISH_REASON_STOP)])
        yield pb.GenerateResponse(usage=pb.Usage(prompt_tokens=1, completion_tokens=1))

    fake.answer = answer
    body = b""
    with gateway(server.address, comment_interval=0.01) as running, running.streaming(CHATS, {"messages": HELLO}) as it:
        while body.count(COMMENT) < 3:
            body += it.read1()
        go_on.set()
        body += it.read()
    assert body.count(b"data: ") == 3 and body.endswith(b"data: [DONE]\n\n")

    def replay(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=body)

    with OpenAI(api_key="k", http_client=httpx2.Client(transport=httpx2.MockTransport(replay))) as client:
        chunks = list(client.chat.completions.create(model="fake", messages=HELLO, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ab"


def test_nothing_is_written_before_the_status(fake: Any, server: FakeServer) -> None:
    def refuse(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        time.sleep(0.05)
        context.abort(CODE.INVALID_ARGUMENT, "prompt: no")
        yield from ()

    fake.answer = refuse
    with gateway(server.address, comment_interval=0.01) as running:
        status, body = running.post(COMPLETIONS, {**GREEDY, "stream": True})
    assert (status, body["error"]["message"]) == (400, "prompt: no")


# ---- refusals ----

RETRY = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=2, nanos=500_000_000))
BAD = error_details_pb2.BadRequest(
    field_violations=[error_details_pb2.BadRequest.FieldViolation(field="sampling_params.top_k", description="no")]
)
TOO_LONG = error_details_pb2.ErrorInfo(reason="PROMPT_TOO_LONG", domain="octavo.v1")
OF_PROMPT = error_details_pb2.BadRequest(
    field_violations=[error_details_pb2.BadRequest.FieldViolation(field="prompt", description="no")]
)
CODE = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "message", "trailing", "expected"),
    [
        (CODE.INVALID_ARGUMENT, "sampling_params.top_k: no", details(BAD), (400, "top_k", None)),
        (CODE.INVALID_ARGUMENT, "prompt: no", details(OF_PROMPT, TOO_LONG), (400, "prompt", "context_length_exceeded")),
        (CODE.UNIMPLEMENTED, "sampling_params.guided is not built", (), (400, "guided_regex", "unsupported_parameter")),
        (CODE.UNIMPLEMENTED, "priority: got 1", (), (400, "priority", "unsupported_parameter")),
        (CODE.UNAUTHENTICATED, "no such key", (), (401, None, "invalid_api_key")),
        (CODE.PERMISSION_DENIED, "not this model", (), (403, None, None)),
        (CODE.NOT_FOUND, "model 'x' is not served here", (), (404, "model", "model_not_found")),
        (CODE.RESOURCE_EXHAUSTED, "too many wait", details(RETRY), (429, None, "rate_limit_exceeded")),
        (CODE.RESOURCE_EXHAUSTED, "Received message larger than max (2 vs. 1)", (), (413, None, "request_too_large")),
        (CODE.RESOURCE_EXHAUSTED, "received metadata size exceeds hard limit", (), (431, None, "request_too_large")),
        (CODE.DEADLINE_EXCEEDED, "too late", (), (504, None, "timeout")),
        (CODE.INTERNAL, "its log says why", (), (500, None, None)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal(
    fake: Any, shared: Gateway, code: Any, message: str, trailing: Any, expected: tuple[int, str, str], stream: bool
) -> None:
    fake.refusal = (code, message, trailing)
    asked = {**GREEDY, "stream": stream, "guided_regex": "a"}
    status, headers, body = shared.ask("POST", COMPLETIONS, asked)
    error = json.loads(body)["error"]
    assert (status, error["param"], error["code"]) == expected and headers["content-type"] == "application/json"
    assert "sampling_params" not in error["message"] and set(error) == {"message", "type", "param", "code"}
    if trailing and expected[0] == 429:
        assert (headers["retry-after"], headers["retry-after-ms"]) == ("3", "2500")


def test_openai_s_client_raises_what_it_raises_for_openai(fake: Any, shared: Gateway) -> None:
    with shared.client() as client:
        for code, raised in (
            (CODE.UNAUTHENTICATED, openai.AuthenticationError),
            (CODE.NOT_FOUND, openai.NotFoundError),
            (CODE.RESOURCE_EXHAUSTED, openai.RateLimitError),
            (CODE.INVALID_ARGUMENT, openai.BadRequestError),
        ):
            fake.refusal = (code, "no", ())
            with pytest.raises(raised):
                client.completions.create(model="fake", stream=True, **GREEDY)


def test_one_prompt_of_several_that_is_refused_refuses_all(fake: Any, shared: Gateway) -> None:
    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.prompt == "b":
            time.sleep(0.05)
            context.abort(CODE.INVALID_ARGUMENT, "prompt: not this one")
        yield pb.GenerateResponse(admission=pb.Admission(num_prompt_tokens=1), model="fake")
        yield pb.GenerateResponse(outputs=[pb.OutputDelta(text="a", finish_reason=pb.FINISH_REASON_STOP)])
        yield pb.GenerateResponse(usage=pb.Usage(prompt_tokens=1, completion_tokens=1))

    fake.answer = answer
    status, body = shared.post(COMPLETIONS, {**GREEDY, "prompt": ["a", "b", "c"], "stream": True})
    assert (status, body["error"]["message"]) == (400, "prompt: not this one")


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/v1/responses"])
def test_a_failure_after_the_first_token_ends_the_stream_with_an_error(fake: Any, shared: Gateway, path: str) -> None:
    error = pb.OutputError(code="WORKER_LOST", message="three workers were lost", retryable=True)
    fake.script = [
        pb.GenerateResponse(admission=pb.Admission(num_prompt_tokens=1), model="fake"),
        pb.GenerateResponse(outputs=[pb.OutputDelta(text="a")]),
        pb.GenerateResponse(outputs=[pb.OutputDelta(finish_reason=pb.FINISH_REASON_ERROR, error=error)]),
        pb.GenerateResponse(usage=pb.Usage(prompt_tokens=1, completion_tokens=1)),
    ]
    asked = {"prompt": "a"} if path == COMPLETIONS else {"input": "a"} if path != CHATS else {"messages": HELLO}
    status, _, body = shared.ask("POST", path, {**asked, "stream": True})
    last = events(body)[-1]
    assert status == 200 and "three workers were lost" in json.dumps(last) and last != "[DONE]"
    assert shared.post(path, asked)[0] == 503
    if path == CHATS:
        with shared.client() as client, pytest.raises(openai.APIError, match="three workers"):
            list(client.chat.completions.create(model="fake", messages=HELLO, stream=True))


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[]", b'"x"', b"{} {}", b"[" * 100_000, b'{"n": NaN}', b'{"n": 1' + b"0" * 9000 + b"}"],
    ids=lambda value: str(value[:12]),
)  # fmt: skip
def test_bodies_that_are_no_object_of_json(shared: Gateway, body: bytes) -> None:
    status, found = shared.post(COMPLETIONS, body)
    assert status == 400 and found["error"]["type"] == "invalid_request_error"


def test_other_media_types_and_encodings_are_not_taken(shared: Gateway) -> None:
    for headers in ({"content_type": "text/plain"}, {"content_encoding": "gzip"}):
        status, body = shared.post(COMPLETIONS, GREEDY, **headers)
        assert status == 415 and body["error"]["message"]


def test_what_is_not_there(shared: Gateway) -> None:
    status, body = shared.post("/v1/embeddings", {})
    assert (status, body["error"]["code"]) == (404, "unknown_url")
    status, headers, _ = shared.ask("GET", COMPLETIONS)
    assert status == 405 and headers["allow"] == "POST"


def test_a_path_with_a_slash_too_many_leads_nowhere(shared: Gateway) -> None:
    status, headers, body = shared.ask("POST", f"{COMPLETIONS}/", GREEDY, host="elsewhere.example")
    assert (status, json.loads(body)["error"]["code"]) == (404, "unknown_url") and "location" not in headers


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /health HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=lambda value: str(value[:12]),
)
def test_what_is_no_request_of_http_gets_an_error_as_others_do(shared: Gateway, sent: bytes) -> None:
    with shared.connect() as line:
        line.sendall(sent)
        head, _, body = line.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_it_does_not_stand_in_an_answer_that_has_begun(fake: Any, shared: Gateway) -> None:
    fake.token_delay_s = 0.05
    with shared.connect() as line:
        line.sendall(request({**GREEDY, "max_tokens": 1000, "stream": True}))
        begun = line.recv(10)
        line.sendall(b"\x00\x01")
        answer = begun + line.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1") == 1
    assert fake.cancelled.wait(60)


def test_an_offer_of_another_protocol_is_overlooked(fake: Any, shared: Gateway) -> None:
    """As Java's client makes it; what follows the head is still the body."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    with shared.connect() as line:
        line.sendall(request(GREEDY).replace(b"host: x\r\n", b"host: x\r\n" + offer))
        answer = line.recv(65_536)
        while b"total_tokens" not in answer and (more := line.recv(65_536)):
            answer += more
    assert answer.startswith(b"HTTP/1.1 200 ") and fake.requests[0].prompt == "hello"


def test_a_body_that_is_too_large_is_refused_unread(server: FakeServer) -> None:
    with gateway(server.address, max_body_bytes=1000) as small:
        status, body = small.post(COMPLETIONS, {"prompt": "a" * 2000})
        assert (status, body["error"]["code"]) == (413, "request_too_large")
        with small.connect() as line:
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            line.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
            line.sendall(b"400\r\n" + b"a" * 1024 + b"\r\n")
            assert line.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_web_pages_may_call_only_where_they_are_let(server: FakeServer, shared: Gateway) -> None:
    asked = {"origin": "https://a.example", "access_control_request_method": "POST"}
    status, headers, _ = shared.ask("OPTIONS", CHATS, **asked)
    assert status == 405 and not any(name.startswith("access-control") for name in headers)
    with gateway(server.address, allow_origin=("https://a.example",)) as open_one:
        status, headers, _ = open_one.ask("OPTIONS", CHATS, **asked, access_control_request_headers="authorization")
        assert (status, headers["access-control-allow-origin"]) == (200, "https://a.example")
        assert open_one.ask("OPTIONS", CHATS, **{**asked, "origin": "https://b.example"})[0] == 400


def test_openai_s_client_in_a_web_page_may_send_and_read_its_headers(fake: Any, server: FakeServer) -> None:
    """As a browser asks for them in front of a call."""
    own = ("arch", "lang", "os", "package-version", "retry-count", "runtime", "runtime-version", "timeout")
    sent = {"authorization", "content-type", "idempotency-key", *(f"x-stainless-{name}" for name in own)}
    fake.refusal = (CODE.RESOURCE_EXHAUSTED, "too many wait", details(RETRY))
    with gateway(server.address, allow_origin=("https://a.example",)) as running:
        asked = {"origin": "https://a.example", "access_control_request_method": "POST"}
        asked["access_control_request_headers"] = ",".join(sorted(sent))
        status, headers, _ = running.ask("OPTIONS", CHATS, **asked)
        assert status == 200 and sent <= set(headers["access-control-allow-headers"].lower().split(","))
        status, headers, _ = running.ask("POST", COMPLETIONS, GREEDY, origin="https://a.example")
    exposed = set(headers["access-control-expose-headers"].split(", "))
    assert status == 429 and {"retry-after", "retry-after-ms", "x-request-id", "x-should-retry"} <= exposed
    assert {"x-ratelimit-limit-requests", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"} <= exposed


@pytest.mark.parametrize(
    ("headers", "options", "status"),
    [
        ({"host": "evil.example:8000", "origin": "http://evil.example:8000"}, {}, 403),
        ({"host": "127.0.0.1.evil.example", "origin": "http://127.0.0.1.evil.example"}, {}, 403),
        ({"host": "evil.example", "origin": "null"}, {}, 403),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, {}, 200),
        ({"host": "[::1]:8000", "origin": "http://[::1]:8000"}, {}, 200),
        ({"host": "llm.localhost", "origin": "http://llm.localhost"}, {}, 200),
        ({"host": "llm.example"}, {}, 200),
        ({"host": "llm.example", "origin": "https://llm.example"}, {"allow_origin": ("https://llm.example",)}, 200),
        ({"host": "llm.example", "origin": "https://llm.example"}, {"allow_origin": ("*",)}, 200),
        ({"host": "llm.example", "origin": "https://llm.example"}, {"host": "0.0.0.0"}, 200),
    ],
)
def test_a_page_calls_a_server_on_loopback_by_a_name_of_this_machine(
    fake: Any, server: FakeServer, headers: dict[str, str], options: dict[str, Any], status: int
) -> None:
    """A page from elsewhere that pointed its name here would be no other origin. A proxy may call it as it likes."""
    with gateway(server.address, **options) as running:
        found, body = running.post(COMPLETIONS, GREEDY, **headers)
    assert found == status and len(fake.requests) == (status == 200)
    if status == 403:
        assert body["error"]["type"] == "permission_error" and "--allow-origin" in body["error"]["message"]


def test_headers_go_on_where_they_are_named(fake: Any, server: FakeServer) -> None:
    with gateway(server.address, pass_header=("x-tenant",)) as running:
        running.post(COMPLETIONS, GREEDY, x_tenant="acme", authorization="Bearer k", x_other="1")
        for unheard in ("\xe9", "a\tb"):  # no metadata of gRPC can have it
            assert running.ask("POST", COMPLETIONS, GREEDY, x_tenant=unheard)[0] == 200
    assert [each.get("x-tenant") for each in fake.metadata] == ["acme", None, None]
    assert not {"authorization", "x-other"} & fake.metadata[0].keys()


# ---- clients that go, and that do not read ----


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_takes_its_request_along(fake: Any, shared: Gateway, stream: bool) -> None:
    fake.token_delay_s = 0.05
    with shared.connect() as line:
        line.sendall(request({**GREEDY, "max_tokens": 1000, "stream": stream}))
        wait_until(lambda: fake.requests)
        if stream:
            assert line.recv(10).startswith(b"HTTP/1.1 2")
    assert fake.cancelled.wait(60)


def request(body: Any, path: str = COMPLETIONS) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def test_an_answer_that_would_come_whole_is_given_up_a_while_after_it_began(
    fake: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler cuts a connection on which many calls are given up at once, and others' streams go over it."""
    monkeypatch.setattr(lingering_call, "LEAST_S", 3600.0)
    usage = pb.GenerateResponse(admission=pb.Admission(num_prompt_tokens=1), usage=pb.Usage(), model="fake")

    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        while request.prompt == "left" and context.is_active():
            time.sleep(0.01)
        yield usage

    fake.answer = answer
    with gateway(server.address) as running:
        with running.connect() as line:
            line.sendall(request({**GREEDY, "prompt": "left"}))
            wait_until(lambda: fake.requests)
        wait_until(lambda: 'path="/v1/completions",status="499"' in running.metrics()[2])
        assert running.post(COMPLETIONS, GREEDY)[0] == 200  # over the same connection, and so after what ended the call
        assert not fake.cancelled.is_set()
    assert fake.cancelled.wait(60)


def test_one_that_goes_with_requests_behind_it_too(fake: Any, shared: Gateway) -> None:
    fake.token_delay_s = 0.05
    with shared.connect() as line:
        line.sendall(request({**GREEDY, "max_tokens": 1000, "stream": True}) + request(GREEDY) * 3)
        assert line.recv(10).startswith(b"HTTP/1.1 2")
    assert fake.cancelled.wait(60)
    assert len(fake.requests) == 1


def test_requests_over_one_connection_are_answered_in_turn(fake: Any, shared: Gateway) -> None:
    with shared.connect() as line:
        line.sendall(b"".join(request({**GREEDY, "seed": seed}) for seed in range(5)))
        answers = b""
        while answers.count(b"total_tokens") < 5:
            answers += (more := line.recv(65_536))
            assert more, answers
    bodies = [json.loads(part.partition(b"\r\n\r\n")[2]) for part in answers.split(b"HTTP/1.1 ")[1:]]
    assert [body["choices"][0]["text"] for body in bodies] == [text(seed) for seed in range(5)]


def test_many_requests_behind_one_end_its_connection(fake: Any, shared: Gateway) -> None:
    """All of a reading is parsed at once: thousands of them would hold everybody up."""
    fake.token_delay_s = 0.05
    with shared.connect() as line:
        line.sendall(request({**GREEDY, "max_tokens": 10_000}) + b"GET /version HTTP/1.1\r\n\r\n" * 1_000)
        assert line.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_reader_that_does_not_read_is_cut_off_and_costs_no_memory(fake: Any, server: FakeServer) -> None:
    """The stand-in for a scheduler makes tokens for as long as somebody takes them."""
    made = 0
    big = pb.GenerateResponse(outputs=[pb.OutputDelta(text="x" * 10_000, token_ids=[1])])

    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        nonlocal made
        yield pb.GenerateResponse(admission=pb.Admission(num_prompt_tokens=1), model="fake")
        while context.is_active():
            made += 1
            yield big

    fake.answer = answer
    with gateway(server.address, write_timeout=1.0) as running, running.connect() as line:
        line.sendall(request({**GREEDY, "stream": True}))
        assert line.recv(10).startswith(b"HTTP/1.1 2")
        assert fake.cancelled.wait(15)
    assert 0 < made < 5_000, "50 MB: what systems and gRPC keep on the way, and no more"


def test_idle_connections_keep_nobody_out(fake: Any, server: FakeServer) -> None:
    with gateway(server.address, max_connections=20) as running:
        idle = [running.connect() for _ in range(60)]
        try:
            assert running.post(COMPLETIONS, GREEDY)[0] == 200
        finally:
            for line in idle:
                line.close()


def test_neither_do_requests_that_do_not_come_whole(fake: Any, server: FakeServer) -> None:
    """An idle one has to go first. One that is answered stays, whatever is begun behind it."""
    fake.token_delay_s = 0.05
    with gateway(server.address, max_connections=20) as running, contextlib.ExitStack() as opened:
        lines = [opened.enter_context(running.connect()) for _ in range(20)]
        lines[0].sendall(request({**GREEDY, "stream": True, "max_tokens": 1000}) + b"POST /v1")
        assert lines[0].recv(10).startswith(b"HTTP/1.1 2")
        for line in lines[1:19]:
            begin(line)
        for _ in range(3):
            lines.append(opened.enter_context(running.connect()))
            begin(lines[-1])
        lines[0].settimeout(10)
        assert lines[0].recv(10)
        wait_until(lambda: all(is_closed(line) for line in (lines[19], *lines[1:3])))
        assert not any(is_closed(line) for line in lines[3:19] + lines[20:])


def begin(line: socket.socket) -> None:
    """A request that does not come whole, after one that shows that it is waited for."""
    line.sendall(b"GET /version HTTP/1.1\r\n\r\n" + request(GREEDY)[:-1])
    assert line.recv(10).startswith(b"HTTP/1.1 2")


def is_closed(line: socket.socket) -> bool:
    """What has come is read."""
    line.setblocking(False)
    try:
        while line.recv(65_536):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of a gateway, of an authority in the folder of `tls_cert_file`."""
    folder = tmp_path_factory.mktemp("certs")
    assert main(["certs", str(folder)]) == 0
    return {"tls_cert_file": folder / "gateway.pem", "tls_key_file": folder / "gateway.key"}


def test_nor_does_who_does_not_shake_hands(fake: Any, server: FakeServer, tls: dict[str, Any]) -> None:
    trusting = ssl.create_default_context(cafile=tls["tls_cert_file"].parent / "ca.pem")
    with gateway(server.address, max_connections=5, read_timeout=3.0, **tls) as running:
        with contextlib.ExitStack() as opened:
            silent = [opened.enter_context(running.connect()) for _ in range(10)]
            for _ in range(2):
                line = trusting.wrap_socket(opened.enter_context(running.connect()), server_hostname="localhost")
                line.sendall(request(GREEDY))
                assert line.recv(100).startswith(b"HTTP/1.1 200")
            wait_until(lambda: is_closed(silent[0]))
            assert not is_closed(silent[-1])
            silent[-1].settimeout(20)
            assert silent[-1].recv(1) == b"", "after the time in which a request has to be here"


def test_a_thousand_idle_connections_and_one_request(fake: Any, shared: Gateway) -> None:
    allow_open_files(2_000)  # both ends are in this process
    idle = [shared.connect() for _ in range(1_000)]
    try:
        assert shared.post(COMPLETIONS, GREEDY)[0] == 200
    finally:
        for line in idle:
            line.close()


def test_a_request_that_does_not_come_is_not_waited_for(fake: Any, server: FakeServer) -> None:
    with gateway(server.address, read_timeout=0.2) as running:
        for begun in (b"", b"POST /v1/completions HTTP/1.1\r\nhost", request(GREEDY)[:-5]):
            with running.connect() as line:
                line.sendall(begun)
                assert line.recv(100) == b""
        fake.token_delay_s = 0.1
        with running.connect() as line:  # nor is the time counted in which it is answered, or nothing is asked
            for _ in range(2):
                line.sendall(request(GREEDY))
                answer = b""
                while b"total_tokens" not in answer:
                    answer += (more := line.recv(65_536))
                    assert more, answer
                assert answer.startswith(b"HTTP/1.1 200")
                time.sleep(0.3)


def test_one_that_is_not_here_when_the_service_ends_is_told_so(fake: Any, server: FakeServer) -> None:
    with contextlib.ExitStack() as opened:
        with gateway(server.address) as running:
            line = opened.enter_context(running.connect())
            begin(line)
        answer = line.makefile("rb").read()
    assert b"HTTP/1.1 503 " in answer and b"the gateway is shutting down" in answer


@pytest.mark.parametrize("name", ["keep_alive", "drain_timeout", "retry_window", "read_timeout"])
def test_a_time_without_end_is_no_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("inf", "nan"):
        with pytest.raises(SystemExit):
            main(["gateway", f"--{name.replace('_', '-')}", value])
        assert f"'{value}' is not a number" in capsys.readouterr().err
        given: Any = {name: float(value)}
        with pytest.raises(ValueError, match=name):
            GatewayConfig(**given)


def test_one_that_is_begun_behind_another_does_not_end_that(fake: Any, server: FakeServer) -> None:
    """Nobody may have read the rest of it."""
    fake.token_delay_s = 0.1
    with gateway(server.address, read_timeout=0.2) as running, running.connect() as line:
        line.sendall(request({**GREEDY, "stream": True, "max_tokens": 8}) + request(GREEDY)[:-5])
        assert b"data: [DONE]" in line.makefile("rb").read(), "and the second one ends the connection after it"


def test_an_empty_line_after_an_answer_keeps_no_connection(fake: Any, server: FakeServer) -> None:
    with gateway(server.address, read_timeout=0.2, keep_alive=1.0) as running, running.connect() as line:
        line.settimeout(10)
        line.sendall(b"GET /version HTTP/1.1\r\n\r\n")
        answer = http.client.HTTPResponse(line)
        answer.begin()
        assert answer.status == 200 and answer.read()  # all of it: its body may come after its head
        line.sendall(b"\r\n")
        assert line.recv(1) == b""


def test_what_is_no_http_is_few_lines_of_the_log(shared: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    with structlog.testing.capture_logs() as lines:
        for _ in range(3 * LINES_PER_S):
            with shared.connect() as line:
                line.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
                assert line.recv(100).startswith(b"HTTP/1.1 400 ")
    assert 0 < len([line for line in lines if "no request of HTTP" in line["event"]]) <= 2 * LINES_PER_S
    assert not caplog.records


def test_a_head_without_end_is_refused(shared: Gateway) -> None:
    with shared.connect() as line:
        line.sendall(b"GET /health HTTP/1.1\r\n")
        sent = threading.Thread(target=_send_headers, args=(line,), daemon=True)
        sent.start()
        assert line.recv(100).startswith(b"HTTP/1.1 400 ")


def _send_headers(line: Any) -> None:
    try:
        for _ in range(3000):  # more than one reading at once, however late the server is
            line.sendall(b"x-a: " + b"a" * 1000 + b"\r\n")
            time.sleep(0.001)
    except OSError:
        pass


CHUNKED = b"host: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


def test_trailers_without_end_are_refused(fake: Any, shared: Gateway) -> None:
    with shared.connect() as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"1\r\n{\r\n0\r\n")
        sent = threading.Thread(target=_send_headers, args=(line,), daemon=True)
        sent.start()
        answer = line.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"trailers" in answer


def test_a_body_in_pieces_of_a_byte_is_taken(fake: Any, shared: Gateway) -> None:
    body = json.dumps({**GREEDY, "prompt": "a" * 20_000}).encode()
    chunks = b"".join(b"0001;a=b\r\n%c\r\n" % byte for byte in body)
    with shared.connect() as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nconnection: close\r\n" + CHUNKED + chunks + b"0\r\n\r\n")
        answer = line.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 200 ") and len(fake.requests[0].prompt) == 20_000


def test_trailers_are_no_part_of_the_head(fake: Any, shared: Gateway) -> None:
    body = json.dumps(GREEDY).encode()
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    with shared.connect() as line:
        head = b"POST /v1/completions HTTP/1.1\r\nconnection: close\r\n" + CHUNKED
        line.sendall(head + chunks + b"authorization: Bearer of-a-trailer\r\n\r\n")  # at once, before anybody reads any
        assert line.makefile("rb").read().startswith(b"HTTP/1.1 200 ")
    assert "authorization" not in fake.metadata[0]


async def test_many_streams_at_once(fake: Any, shared: Gateway) -> None:
    """More than go over one connection to the scheduler; its stand-in answers 16 at a time."""

    async def one(client: AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(model="fake", prompt="a", seed=seed, max_tokens=3, stream=True)
        return "".join([part.choices[0].text async for part in stream])

    async with AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="k", max_retries=0) as client:
        found = await asyncio.gather(*(one(client, seed) for seed in range(150)))
    assert found == [text(seed, count=3) for seed in range(150)]


def test_a_completion_has_the_shape_of_openai_s(fake: Any, shared: Gateway) -> None:
    status, headers, body = shared.ask("POST", COMPLETIONS, {**GREEDY, "logprobs": 0})
    found = strictly(Completion, json.loads(body))
    assert status == 200 and headers["x-request-id"] == found.id == fake.requests[0].request_id
