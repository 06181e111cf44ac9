"""Two models as users name them: from the command line, from Python, and in what operators read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from octavo import AsyncClient, Client, SamplingParams
from octavo.cli import main
from octavo.errors import RequestFailed
from tests.fakes import FakeWorker, spell
from tests.integration.scheduler_process import Service, scheduler

PARAMS = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with (
        FakeWorker(spell("of a"), model="a", model_hash="a") as a,
        FakeWorker(spell("of b"), model="org/b", model_hash="b", max_model_len=128) as b,
        scheduler(
            f"--worker={a.address}", f"--worker={b.address}", "--served-model-name=b=org/b", "--frontends=2"
        ) as it,
    ):
        it.wait_until_ready()
        deadline = time.monotonic() + 20
        with Client(it.address) as client:
            while len(client.list_models()) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        yield it


def test_on_the_command_line(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "list", "--address", service.address]) == 0
    lines = {line.split("@")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines.keys() == {"a", "b"}
    assert "128 tokens  1 serving, 0 draining  Fake, float32  default, takes new requests" in lines["b"]
    assert lines["a"].endswith("256 tokens  1 serving, 0 draining  Fake, float32  takes new requests")
    assert main(["model", "list", "--json", "--address", service.address]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out) if each.get("is_default")] == ["b"]
    for name, text in (("a", "of a"), ("b", "of b"), (lines["a"].split()[0], "of a")):
        assert main(["generate", "say|", "--model", name, "--temperature=0", "--address", service.address]) == 0
        assert capsys.readouterr().out == f"{text}\n"
    assert main(["generate", "say|", "--temperature=0", "--address", service.address]) == 0
    assert capsys.readouterr().out == "of b\n", "the first that was given a name is the default"
    assert main(["generate", "say|", "--model=c", "--address", service.address]) == 1
    assert "model 'c' is not served here" in capsys.readouterr().err


def test_in_python(service: Service) -> None:
    with Client(service.address) as client:
        states = {state.name: state for state in client.list_models()}
        assert states["b"].is_default and not states["a"].is_default
        assert client.complete("say|", PARAMS, model="a").outputs[0].text == "of a"
        assert client.complete("say|", PARAMS).outputs[0].text == "of b"
        assert client.model_info("a").max_model_len == 256 and client.model_info().max_model_len == 128
        assert client.tokenize("hi", model="a") == list(b"hi") and client.detokenize(list(b"hi"), model="b") == "hi"
        with pytest.raises(RequestFailed, match="model 'c' is not served here; "):
            client.tokenize("hi", model="c")


async def test_in_asyncio_and_what_operators_read(service: Service) -> None:
    async with AsyncClient(service.address) as client:
        states = {state.name: state for state in await client.list_models()}
        assert (await client.model_info("b")).model_fingerprint == states["b"].fingerprint
        assert await client.tokenize("hi", model="a") == list(b"hi")
        assert await client.detokenize(list(b"hi"), model="a") == "hi"
    (load,) = (await service.call("octavo.v1.Control/GetLoad", {})).messages
    assert {model["name"]: model["num_workers_serving"] for model in load["models"]} == {"a": 1, "b": 1}
    (listed,) = (await service.call("octavo.v1.Control/ListWorkers", {})).messages
    assert {worker["model"]: worker["model_fingerprint"] for worker in listed["workers"]} == {
        name: state.fingerprint for name, state in states.items()
    }
    (info,) = (await service.call("octavo.v1.Control/GetServerInfo", {})).messages
    assert info["model"] == "b"
    assert states["a"].is_current and states["b"].is_current
