"""The scheduler service as a process of its own, without torch and triton, with a fake worker, through grpcurl."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from urllib.parse import quote

import grpc
import pytest

from octavo.shared.ports import free_port
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.fakes import FakeWorker, spell
from tests.forkserver import ForkedCommand
from tests.grpcurl import grpcurl
from tests.integration.scheduler_process import Service, in_a_new_interpreter, read_last, scheduler, stub_of

GENERATE = "octavo.v1.Inference/Generate"


FRONTENDS = ("--frontends=1", "--frontends=2")  # in the process that schedules, and in processes of their own


@pytest.fixture(scope="module", params=FRONTENDS)
def service(request) -> Iterator[Service]:
    with FakeWorker(spell("Grüße, 世界!"), num_blocks=48) as worker:
        with scheduler(f"--worker={worker.address}", request.param, is_forked=False) as it:
            it.wait_until_ready()
            it.worker = worker
            yield it


async def test_reflection_lists_the_services_and_describes_generate(service):
    listed = (await service.call("list")).stdout.split()
    assert {"octavo.v1.Inference", "octavo.v1.Control", "grpc.health.v1.Health"} <= set(listed)
    described = await grpcurl("describe", "octavo.v1.Inference.Generate", address=service.address)
    assert (
        "rpc Generate ( .octavo.v1.GenerateRequest ) returns ( stream .octavo.v1.GenerateResponse )" in described.stdout
    )


async def test_a_generation_streams_as_json(service, monkeypatch):
    monkeypatch.setattr(service.worker, "delay_s", 0.06)  # or a reader that is late is given several tokens at once
    answer = await service.call(GENERATE, {"prompt": "say|", "request_id": "mine", "sampling_params": {"seed": 7}})
    assert answer.code == 0
    first, *rest = answer.messages
    assert first["request_id"] == "mine" and first["seed"] == "7" and first["model"] == "fake-model"
    outputs = [output for message in rest for output in message["outputs"]]
    assert "".join(output.get("text", "") for output in outputs) == "Grüße, 世界!"
    assert len(rest) > 10, "it was meant to stream"
    assert [o["finish_reason"] for o in outputs if "finish_reason" in o] == ["FINISH_REASON_STOP"]
    assert rest[-1]["usage"] == {"prompt_tokens": 4, "completion_tokens": len("Grüße, 世界!".encode()) + 1}


async def test_without_streaming_there_is_one_message(service):
    answer = await service.call(GENERATE, {"prompt": "say|", "stream": False})
    (message,) = answer.messages
    assert message["outputs"][0]["text"] == "Grüße, 世界!"
    assert message["request_id"] and message["usage"]["prompt_tokens"] == 4


async def test_messages_go_through_the_chat_template(service):
    messages = [{"role": "user", "content": "hi"}]
    request = {
        "messages": {"messages": messages},
        "return_prompt_token_ids": True,
        "sampling_params": {"max_tokens": 1},
    }
    (first, *_) = (await service.call(GENERATE, request)).messages
    shown = await service.call("octavo.v1.Inference/Detokenize", {"token_ids": first["prompt_token_ids"]})
    (text,) = shown.messages
    assert text["text"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    (tokens,) = (await service.call("octavo.v1.Inference/Tokenize", {"messages": {"messages": messages}})).messages
    assert tokens["token_ids"] == first["prompt_token_ids"]


INVALID, NOT_FOUND, UNIMPLEMENTED = 3, 5, 12

BAD_INPUT = {
    "no prompt": ({}, INVALID, "prompt: got none or several"),
    "empty prompt": ({"prompt": ""}, INVALID, "which has no tokens"),
    "no token ids": ({"prompt_token_ids": {}}, INVALID, "prompt_token_ids"),
    "no messages": ({"messages": {}}, INVALID, "messages"),
    "token outside the vocabulary": (
        {"prompt_token_ids": {"ids": [3, 400]}},
        INVALID,
        "got 400; accepted: 0 to 399",
    ),
    "out of range": (
        {"prompt": "x", "sampling_params": {"temperature": 2.5}},
        INVALID,
        "temperature: got 2.5; accepted: 0 (greedy), or 1e-30 to 2",
    ),
    "zero where one is the least": (
        {"prompt": "x", "sampling_params": {"max_tokens": 0}},
        INVALID,
        "max_tokens: got 0",
    ),
    "empty stop": ({"prompt": "x", "sampling_params": {"stop": [""]}}, INVALID, "stop[0]"),
    "contradiction": (
        {"prompt": "x", "sampling_params": {"detokenize": False, "stop": ["a"]}},
        INVALID,
        "detokenize = false",
    ),
    "too many logprobs": ({"prompt": "x", "sampling_params": {"logprobs": 21}}, INVALID, "logprobs: got 21"),
    "unknown enum": ({"prompt": "x", "sampling_params": {"early_stopping": 9}}, INVALID, "early_stopping"),
    "longer than the model": ({"prompt": "x" * 256}, INVALID, "256 tokens and 1 to generate are too many"),
    "longer than the cache": ({"prompt": "x" * 200}, INVALID, "200 tokens are too many: a worker's cache holds 192"),
    "unknown model": ({"prompt": "x", "model": "gpt-17"}, NOT_FOUND, "'fake-model' is"),
    "more outputs than run at once": (
        {"prompt": "x", "sampling_params": {"n": 9}},
        INVALID,
        "n: got 9; accepted: 1 to 8",
    ),
    "equal outputs": (
        {"prompt": "x", "sampling_params": {"n": 2, "temperature": 0}},
        INVALID,
        "n: got 2; accepted: 1 with temperature 0",
    ),
    "alternatives of beams": (
        {"prompt": "x", "sampling_params": {"use_beam_search": True, "n": 2, "temperature": 0, "logprobs": 3}},
        UNIMPLEMENTED,
        "logprobs: got 3; with use_beam_search",
    ),
    "guided": ({"prompt": "x", "sampling_params": {"guided": {"regex": "a+"}}}, UNIMPLEMENTED, "guided"),
    "a penalty of beams": (
        {"prompt": "x", "sampling_params": {"use_beam_search": True, "n": 2, "temperature": 0, "presence_penalty": 1}},
        UNIMPLEMENTED,
        "presence_penalty is not implemented by this server with use_beam_search",
    ),
    "a priority": ({"prompt": "x", "priority": 3}, UNIMPLEMENTED, "only with --scheduling-policy priority"),
    "no role": ({"messages": {"messages": [{"content": "x"}]}}, INVALID, "messages[0].role"),
    "an adapter": ({"prompt": "x", "adapter": "pirate"}, UNIMPLEMENTED, "no worker of this server takes adapters"),
    "what another model began": (
        {"prompt": "x", "model_fingerprint": "f00d"},
        NOT_FOUND,
        "the request began with 'f00d'",
    ),
    "resume without its seed": (
        {"prompt": "x", "resume": [{"index": 0, "token_ids": [1]}]},
        INVALID,
        "sampling_params.seed: got none",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
async def test_bad_input_gets_its_status(service, name):
    request, code, message = BAD_INPUT[name]
    answer = await service.call(GENERATE, request)
    assert answer.code == 64 + code, answer.stderr
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr
    if code == INVALID:
        assert "google.rpc.BadRequest" in answer.stderr, "the field is named for machines, too"


PROMPT = pb.GenerateRequest(prompt="x").SerializeToString()
ONLY_ON_THE_WIRE = {
    "two prompts": (PROMPT + pb.GenerateRequest(prompt_token_ids={"ids": [1]}).SerializeToString(), "exactly one of"),
    "an image in a field of its own": (PROMPT + bytes([0xFA, 0x07, 3]) + b"png", "no other media"),
}


@pytest.mark.parametrize("name", ONLY_ON_THE_WIRE)
async def test_what_only_raw_bytes_can_say_is_invalid_too(service, name):
    """grpcurl drops the first of two prompts and refuses unknown fields before it sends."""
    data, message = ONLY_ON_THE_WIRE[name]
    async with grpc.aio.insecure_channel(service.address) as channel:
        call = channel.unary_stream(f"/{GENERATE}")(data)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in raised.value.details()


async def test_a_request_that_is_sent_again_goes_on_where_its_client_stopped(service):
    request = {"prompt": "say|", "request_id": "again", "sampling_params": {"seed": 7}}
    whole = [
        output for message in (await service.call(GENERATE, request)).messages for output in message.get("outputs", ())
    ]
    token_ids = [token_id for output in whole for token_id in output.get("token_ids", ())]
    resumed = {**request, "attempt": 1, "resume": [{"index": 0, "token_ids": token_ids[:3]}]}
    answer = await service.call(GENERATE, resumed)
    rest = [output for message in answer.messages for output in message.get("outputs", ())]
    assert [token_id for output in rest for token_id in output.get("token_ids", ())] == token_ids[3:]
    assert "".join(output.get("text", "") for output in rest) == "".join(output.get("text", "") for output in whole)[2:]
    assert answer.messages[-1]["usage"]["completion_tokens"] == len(token_ids)


@pytest.mark.parametrize(
    "method", ["Inference/Generate", "Inference/Tokenize", "Control/GetRequest", "Control/GetBlocks"]
)
async def test_bytes_that_are_no_message_are_the_clients_fault(service, method):
    async with grpc.aio.insecure_channel(service.address) as channel:
        for data in (b"\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\x7f"):  # no tag, not UTF-8, too short
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary(f"/octavo.v1.{method}")(data)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"no request of /octavo.v1.{method}" in raised.value.details()


async def test_a_request_larger_than_the_limit_is_refused_unread(service):
    async with stub_of(service) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Tokenize(pb.TokenizeRequest(prompt="x" * 8_388_608))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await service.call(GENERATE, {"prompt": "say|"})).code == 0


async def test_what_takes_long_to_tokenise_is_refused_before_it_is(service):
    many = 100 * 256 + 1
    for method, request, what in (
        ("Generate", {"prompt": "x" * many, "truncate_prompt_tokens": 3}, "characters"),
        ("Generate", {"messages": {"messages": [{"role": "x" * many}]}}, "characters"),
        ("Tokenize", {"prompt": "x" * many}, "characters"),
        ("Detokenize", {"token_ids": [33] * many}, "ids"),
    ):
        answer = await service.call(f"octavo.v1.Inference/{method}", request)
        assert answer.code == 64 + INVALID and f"{what} are too many: 25600 are the most" in answer.stderr


LONG = "x" * 20_000
WIDE = "\N{PILE OF POO}" * 600  # four bytes a character, twelve where a header escapes them

TOO_LONG_FOR_A_HEADER = {
    "a model": ({"prompt": "x", "model": LONG}, NOT_FOUND, "xxx"),
    "a request id": ({"prompt": "x", "request_id": LONG}, INVALID, "request_id"),
    "a model of wide characters": ({"prompt": "x", "model": WIDE}, NOT_FOUND, "model"),
    "empty stop strings": ({"prompt": "x", "sampling_params": {"stop": [""] * 9999}}, INVALID, "9999 strings"),
    "stop strings": ({"prompt": "x", "sampling_params": {"stop": [LONG[:5000]] * 17}}, INVALID, "stop"),
}


@pytest.mark.parametrize("name", TOO_LONG_FOR_A_HEADER)
async def test_what_is_too_long_for_a_header_keeps_its_status(service, name):
    request, code, message = TOO_LONG_FOR_A_HEADER[name]
    answer = await service.call(GENERATE, request)
    assert answer.code == 64 + code, answer.stderr[:500]
    assert message in answer.stderr


async def test_a_refusal_full_of_wide_characters_fits_the_headers_of_any_client(service):
    params = pb.SamplingParams(stop=[WIDE] * 17, detokenize=False, temperature=3, top_p=3, min_p=3)
    async with stub_of(service) as stub:
        for request in (pb.GenerateRequest(prompt="x", sampling_params=params), pb.GenerateRequest(model=WIDE)):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Generate(request).read()
            assert raised.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
            details = dict(raised.value.trailing_metadata())["grpc-status-details-bin"]
            num_bytes = len(quote(raised.value.details())) + len(base64.b64encode(details))
            assert 500 < num_bytes < 8192 - 1024, "peers take 8 KiB of headers, escaped as they are"


async def test_a_request_id_of_256_characters_is_the_longest(service):
    request = {"prompt": "say|", "stream": False}
    assert (await service.call(GENERATE, {**request, "request_id": "i" * 256})).code == 0
    assert (await service.call(GENERATE, {**request, "request_id": "i" * 257})).code == 64 + INVALID


async def test_calls_that_give_up_early_do_not_harm_the_step_loop(service):
    async with grpc.aio.insecure_channel(service.address) as channel:
        control = inference_pb2_grpc.ControlStub(channel)

        async def hurried(number: int) -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await control.GetLoad(pb.GetLoadRequest(), timeout=0.0005 + 0.0001 * (number % 30))

        for _ in range(4):
            await asyncio.gather(*map(hurried, range(50)))
            await control.GetLoad(pb.GetLoadRequest(), timeout=5)
    assert (await service.call(GENERATE, {"prompt": "say|"})).code == 0


async def test_unknown_requests_are_not_found(service):
    answer = await service.call("octavo.v1.Control/GetRequest", {"request_id": "nobody"})
    assert answer.code == 64 + NOT_FOUND and "nobody" in answer.stderr
    (aborted,) = (await service.call("octavo.v1.Inference/Abort", {"request_id": "nobody"})).messages
    assert aborted == {}


@pytest.mark.parametrize("method", ["GetBlocks", "FlushPrefixCache", "WatchSteps", "Drain"])
async def test_unknown_workers_are_not_found(service, method):
    answer = await service.call(f"octavo.v1.Control/{method}", {"worker": "nowhere:1"}, "-max-time=10")
    assert answer.code == 64 + NOT_FOUND and "no worker 'nowhere:1'; there are: 127.0.0.1:" in answer.stderr


async def test_health_model_info_and_channelz_answer(service):
    (health,) = (await service.call("grpc.health.v1.Health/Check", {"service": "octavo.v1.Inference"})).messages
    assert health == {"status": "SERVING"}
    (info,) = (await service.call("octavo.v1.Inference/GetModelInfo", {})).messages
    assert info["vocab_size"] == 400 and info["has_chat_template"] and info["eos_token_ids"] == [258]
    assert (await service.call("grpc.channelz.v1.Channelz/GetServers", {})).messages


SLOW = spell("slow " * 200)


@pytest.fixture(scope="module", params=FRONTENDS)
def slow_service(request) -> Iterator[Service]:
    """One sequence at a time, 20 ms a token, so that requests can be seen while they run and wait."""
    with FakeWorker(SLOW, delay_s=0.02, max_num_seqs=1) as worker:
        with scheduler(f"--worker={worker.address}", "--max-waiting-requests=2", request.param) as it:
            it.wait_until_ready()
            it.worker = worker
            yield it


async def _check_nothing_runs(service: Service) -> None:
    for _ in range(100):
        (load,) = (await service.call("octavo.v1.Control/GetLoad", {})).messages
        (worker,) = load["workers"]
        if "num_running" not in worker and worker["num_free_device_blocks"] == worker["num_device_blocks"]:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"something still runs: {json.dumps(load)}")


async def test_abort_ends_the_stream_with_abort_and_ok(slow_service):
    async with stub_of(slow_service) as stub:
        call = stub.Generate(pb.GenerateRequest(prompt="say|", request_id="to-abort"))
        await call.read(), await call.read()
        (state,) = (await slow_service.call("octavo.v1.Control/GetRequest", {"request_id": "to-abort"})).messages
        assert state["phase"] == "REQUEST_PHASE_RUNNING" and state["sequences"][0]["block_table"]
        assert (await stub.Abort(pb.AbortRequest(request_id="to-abort"))).found
        last = await read_last(call)
        assert last.outputs[0].finish_reason == pb.FINISH_REASON_ABORT
        assert await call.code() is grpc.StatusCode.OK
    await _check_nothing_runs(slow_service)


async def test_a_client_that_leaves_frees_its_blocks(slow_service):
    async with stub_of(slow_service) as stub:
        call = stub.Generate(pb.GenerateRequest(prompt="say|"))
        await call.read(), await call.read()
        call.cancel()
    await _check_nothing_runs(slow_service)


async def test_a_deadline_ends_the_request(slow_service):
    async with stub_of(slow_service) as stub:
        call = stub.Generate(pb.GenerateRequest(prompt="say|"), timeout=0.3)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await _check_nothing_runs(slow_service)


async def test_a_deadline_ends_a_request_that_waits(slow_service):
    async with stub_of(slow_service) as stub:
        running = stub.Generate(pb.GenerateRequest(prompt="say|", request_id="it runs"))
        await running.read(), await running.read()
        waiting = stub.Generate(pb.GenerateRequest(prompt="say|", request_id="it waits"), timeout=0.3)
        assert (await waiting.read()).request_id == "it waits"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await waiting.read()
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        (load,) = (await slow_service.call("octavo.v1.Control/GetLoad", {})).messages
        assert load["num_requests_running"] == 1 and "num_requests_waiting" not in load
        running.cancel()
    await _check_nothing_runs(slow_service)


async def test_a_full_queue_and_a_live_id_are_refused_at_once(slow_service):
    async with stub_of(slow_service) as stub:
        calls = []
        for number in range(3):
            calls.append(stub.Generate(pb.GenerateRequest(prompt="say|", request_id=f"request {number}")))
            await calls[-1].read()
            if number == 0:
                await calls[0].read()  # its first token: it runs, and waits no more
        again = await slow_service.call(GENERATE, {"prompt": "say|", "request_id": "request 0"})
        assert again.code == 64 + 6 and "'request 0' is live already" in again.stderr
        full = await slow_service.call(GENERATE, {"prompt": "say|"})
        assert full.code == 64 + 8 and "2 requests wait, at most 2 may" in full.stderr
        assert "google.rpc.RetryInfo" in full.stderr
        replaced = stub.Generate(pb.GenerateRequest(prompt="say|", request_id="request 1", attempt=1))
        assert (await replaced.read()).request_id == "request 1"
        last = await read_last(calls[1])
        assert last.outputs[0].finish_reason == pb.FINISH_REASON_ABORT
        for call in [*calls, replaced]:
            call.cancel()
    await _check_nothing_runs(slow_service)


async def test_another_attempt_replaces_only_its_own_tenants_request(slow_service):
    async with stub_of(slow_service) as stub:
        request = pb.GenerateRequest(prompt="say|", request_id="theirs", tenant="a")
        theirs = stub.Generate(request)
        await theirs.read(), await theirs.read()
        request.tenant, request.attempt = "b", 1
        other = stub.Generate(request)
        await other.read()
        assert not (await theirs.read()).outputs[0].finish_reason
        again = await slow_service.call(GENERATE, {"prompt": "say|", "request_id": "theirs", "tenant": "a"})
        assert again.code == 64 + 6, "it still lives"
        theirs.cancel(), other.cancel()
    await _check_nothing_runs(slow_service)


def test_a_name_without_a_port_is_refused_at_the_start():
    command = in_a_new_interpreter(["scheduler", "--port=0", "--worker=dns:///foo"])
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert ended.returncode == 2 and "dns:///foo" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("frontends", FRONTENDS)
async def test_without_a_worker_it_is_alive_but_not_ready(frontends):
    with scheduler(f"--worker=127.0.0.1:{free_port()}", frontends) as it:
        for _ in range(100):
            live = await it.call("grpc.health.v1.Health/Check", {})
            if live.code == 0:
                break
            await asyncio.sleep(0.1)
        assert live.messages == [{"status": "SERVING"}]
        ready = await it.call("grpc.health.v1.Health/Check", {"service": "octavo.v1.Inference"})
        assert ready.messages == [{"status": "NOT_SERVING"}]
        refused = await it.call(GENERATE, {"prompt": "x"})
        assert refused.code == 64 + 14 and "no worker has joined" in refused.stderr


async def test_the_whole_vocabulary_where_the_server_allows_it():
    params = {"logprobs": -1, "prompt_logprobs": -1, "max_tokens": 2}
    with FakeWorker(spell("Grüße")) as worker:
        with scheduler(f"--worker={worker.address}", "--max-logprobs=-1") as it:
            it.wait_until_ready()
            answer = await it.call(GENERATE, {"prompt": "say|", "stream": False, "sampling_params": params})
    (message,) = answer.messages
    entries = [*message["prompt_logprobs"][1:], *message["outputs"][0]["logprobs"]]
    assert message["prompt_logprobs"][0] == {} and len(entries) == 3 + 2
    for entry in entries:
        assert [top["rank"] for top in entry["top"]] == list(range(1, 401)), "all 400 tokens that there are"


@pytest.mark.parametrize("flags", [[], ["--frontends=2"]])
def test_a_scheduler_whose_log_nobody_reads_any_more_ends_as_any_other(flags: list[str]) -> None:
    read, write = os.pipe()
    port = free_port()
    process = ForkedCommand(
        ["scheduler", "--worker=127.0.0.1:1", f"--port={port}", "--text-processes=1", *flags], write
    )
    os.close(write)
    try:
        with os.fdopen(read) as log:
            assert any("scheduler is listening" in line for line in log)
        process.terminate()
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait(60)
