"""What users write is in no log of any service, at any level, whichever way it comes; with `--log-prompts` it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from octavo import Client, SamplingParams
from octavo.errors import RequestFailed
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.adapters import make_adapter
from tests.fakes import FakeWorker, spell
from tests.gateway.running import Gateway
from tests.integration.scheduler_process import scheduler
from tests.integration.test_serve import Served, serving
from tests.tiny_models import make_tiny_llama

MARKER = "Quetzalcoatlus"
FEW = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    model = make_tiny_llama(folder / "tiny")
    adapter = make_adapter(folder / "adapter", model, rank=4, seed=1)
    flags = ["--enable-lora", f"--lora-modules=pirate={adapter}", "--max-lora-rank=8"]
    with serving("--model", str(model), "--http-port=0", "--log-level=debug", *flags) as served:
        served.wait_until_ready()
        yield served


BODIES: dict[str, dict[str, Any]] = {
    "answered": {"prompt": MARKER, "max_tokens": 4},
    "streamed": {"prompt": MARKER, "max_tokens": 4, "stream": True},
    "of an adapter": {"prompt": MARKER, "max_tokens": 4, "model": "pirate"},
    "a stop string": {"prompt": "The sea", "max_tokens": 4, "stop": [MARKER]},
    "too long": {"prompt": f"{MARKER} " * 5000},
    "another model": {"prompt": "The sea", "model": MARKER},
    "a wrong number": {"prompt": MARKER, "temperature": MARKER},
    "an unknown field": {"prompt": "The sea", MARKER: MARKER},
    "a wrong kind": {"prompt": {MARKER: MARKER}},
    "a template's": {"messages": [{"role": MARKER, "content": MARKER}], "max_tokens": 4},
    "a chat": {"messages": [{"role": "user", "content": MARKER}], "max_tokens": 4, "user": MARKER},
    "guided": {
        "messages": [{"role": "user", "content": MARKER}],
        "max_tokens": 4,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": MARKER, "schema": {"type": "object", "properties": {MARKER: {"type": MARKER}}}},
        },
    },
    "a tool": {
        "messages": [{"role": "user", "content": MARKER}],
        "tools": [{"type": "function", "function": {"name": MARKER, "parameters": {"type": "object"}}}],
    },
    "a response": {"input": MARKER, "max_output_tokens": 4},
}


def test_content_over_http_is_in_no_log(served: Served) -> None:
    gateway, statuses = Gateway(served.http_port), set()
    answers = []
    for body in BODIES.values():
        kind = "chat/completions" if "messages" in body else "responses" if "input" in body else "completions"
        status, _, answer = gateway.ask("POST", f"/v1/{kind}", body, **{"x-request-id": "it"})
        statuses.add(status)
        answers.append(answer)
    for broken in (f'{{"prompt": "{MARKER}'.encode(), MARKER.encode(), b"\xff" + MARKER.encode()):
        statuses.add(gateway.ask("POST", "/v1/completions", broken)[0])
    statuses.add(gateway.ask("GET", f"/v1/models/{MARKER}?{MARKER}={MARKER}")[0])
    assert 200 in statuses and {400, 404} <= statuses
    text = json.loads(answers[0])["choices"][0]["text"]
    check(served, text)


def test_content_over_grpc_is_in_no_log(served: Served) -> None:
    with Client(served.address) as client:
        text = client.complete(MARKER, SamplingParams(max_tokens=24, ignore_eos=True)).outputs[0].text
        client.tokenize(MARKER)
        for asked in (
            {"prompt": MARKER, "sampling_params": SamplingParams(max_tokens=4, stop=[MARKER])},
            {"prompt": MARKER, "sampling_params": FEW, "adapter": MARKER},
            {"prompt": MARKER * 5000, "sampling_params": FEW},
            {"prompt": MARKER, "sampling_params": SamplingParams(max_tokens=4, logprobs=1000)},
        ):
            try:
                client.complete(**asked)  # type: ignore[arg-type]  # of several types
            except RequestFailed:
                continue
    with grpc.insecure_channel(served.address) as channel:
        for data in (b"\x1a\xff" + MARKER.encode(), MARKER.encode()):
            call = channel.unary_stream("/octavo.v1.Inference/Generate")(data, timeout=10)
            with pytest.raises(grpc.RpcError):
                list(call)
        stub = inference_pb2_grpc.ControlStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.LoadAdapter(pb.ControlLoadAdapterRequest(name="other", path=f"/nowhere/{MARKER[:4]}"), timeout=10)
    check(served, text)


def check(served: Served, text: str) -> None:
    """Of what three processes have said at level debug."""
    assert '"level": "debug"' in served.said or '"level": "info"' in served.said
    assert "request refused" in served.said
    assert MARKER not in served.said and (len(text) < 12 or text not in served.said)


@pytest.mark.parametrize("flags", [[], ["--frontends=2"]], ids=["one process", "frontends"])
async def test_with_log_prompts_it_is_and_that_is_said_at_the_start(
    flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with FakeWorker(spell("aye")) as worker, scheduler("--log-prompts", f"--worker={worker.address}", *flags) as it:
        await asyncio.to_thread(it.wait_until_ready)
        with Client(it.address) as client:
            answer = await asyncio.to_thread(client.complete, f"{MARKER}|", FEW, tenant="acme")
            assert answer.outputs[0].text == "aye"
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    loud = [line for line in lines if "PROMPTS AND ANSWERS" in line["event"]]
    assert [line["level"] for line in loud] == ["warning"], "once a start"
    (line,) = [line for line in lines if line["event"] == "prompt and answer"]
    assert (line["prompt"], line["answers"], line["tenant"]) == (f"{MARKER}|", ["aye"], "acme")
