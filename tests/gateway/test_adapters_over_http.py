"""Adapters by OpenAI's API: named as models, listed below their base, loaded and unloaded where that is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes import FakeWorker
from tests.gateway.running import Gateway, gateway
from tests.integration.fake_inference import FakeServer
from tests.integration.scheduler_process import Service, scheduler

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with FakeWorker(max_loras=2) as worker, scheduler(f"--worker={worker.address}") as it:
        it.wait_until_ready()
        yield it


@pytest.fixture(scope="module")
def running(service: Service) -> Iterator[Gateway]:
    with gateway(service.address, lora_updates=True) as running:
        yield running


@pytest.fixture
def pirate(running: Gateway) -> Iterator[str]:
    asked = {"lora_name": "pirate", "lora_path": "/adapters/pirate"}
    assert running.post("/v1/load_lora_adapter", asked) == (200, {"status": "loaded", "lora_name": "pirate"})
    yield "pirate"
    assert running.post("/v1/unload_lora_adapter", {"lora_name": "pirate"})[0] == 200


def test_an_adapter_is_a_model_by_its_name(running: Gateway, pirate: str) -> None:
    with running.client() as client:
        base, adapter = client.models.list().data
        assert (adapter.id, adapter.model_dump()["parent"]) == (pirate, base.id)
        assert client.models.retrieve(pirate).id == pirate
        answer = client.chat.completions.create(model=pirate, messages=HELLO, max_tokens=3)
        assert answer.model == pirate and answer.usage and answer.usage.completion_tokens == 3
        chunks = list(client.completions.create(model=pirate, prompt="a", max_tokens=3, stream=True))
        assert {chunk.model for chunk in chunks} == {pirate}
        answer = client.chat.completions.create(model=base.id, messages=HELLO, max_tokens=3)
        assert answer.model == base.id
    status, tokens = running.post("/tokenize", {"model": pirate, "prompt": "abc"})
    assert status == 200 and tokens["count"] == 3


def test_its_own_cache_tells_that_it_was_used(running: Gateway, pirate: str) -> None:
    prompt = "a prompt of several blocks, of an adapter|" * 2

    def cached(model: str) -> int:
        body = {"model": model, "prompt": prompt, "max_tokens": 2}
        status, answer = running.post("/v1/completions", body)
        assert status == 200, answer
        return int((answer["usage"].get("prompt_tokens_details") or {"cached_tokens": 0})["cached_tokens"])

    with running.client() as client:
        base = client.models.list().data[0].id
    assert [cached(name) > 0 for name in (base, pirate, pirate, base)] == [False, False, True, True]


def test_names_of_nothing_and_wrong_bodies_are_refused(running: Gateway) -> None:
    status, answer = running.post("/v1/completions", {"model": "nobody", "prompt": "a"})
    assert status == 404 and "nobody" in answer["error"]["message"]
    status, answer = running.post("/v1/unload_lora_adapter", {"lora_name": "nobody"})
    assert status == 404 and "adapter 'nobody' is not here" in answer["error"]["message"]
    status, answer = running.post("/v1/load_lora_adapter", {"lora_name": "x"})
    assert status == 400 and "path" in answer["error"]["message"]
    status, answer = running.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x", "rank": 3})
    assert status == 400 and "rank" in answer["error"]["message"]


def test_two_adapters_in_one_request_are_refused(running: Gateway, pirate: str) -> None:
    for path, content in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": HELLO})):
        for stream in (False, True):
            body = {"model": pirate, "max_tokens": 2, "stream": stream, **content}
            status, _, answer = running.ask("POST", f"/v1/{path}", {**body, "adapter": "poet"})
            assert status == 400 and "adapter: got 'poet', and model 'pirate' is another one" in answer
            assert running.ask("POST", f"/v1/{path}", {**body, "adapter": pirate})[0] == 200


def test_a_configured_adapter_that_could_not_be_loaded_has_its_reason() -> None:
    """And not that there is no such model, whose client would look for another name."""
    worker = FakeWorker(max_loras=1)
    worker.broken_paths.add("/late")
    with worker, scheduler(f"--worker={worker.address}", "--lora-modules=late=/late") as service:
        service.wait_until_ready()
        with gateway(service.address) as running:
            status, answer = running.post("/v1/completions", {"model": "late", "prompt": "a"})
    assert status == 400 and "adapter 'late' could not be loaded: worker" in answer["error"]["message"]


def test_nothing_is_loaded_where_that_is_not_allowed(service: Service) -> None:
    with gateway(service.address) as running:
        assert running.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"})[0] == 404


def test_all_schedulers_load_and_unload_and_take_the_time_they_need() -> None:
    asked = {"lora_name": "pirate", "lora_path": "/adapters/pirate"}
    with FakeServer() as first, FakeServer() as second:
        with gateway(f"{first.address},{second.address}", lora_updates=True) as running:
            assert running.post("/v1/load_lora_adapter", asked)[0] == 200
            for server in (first, second):
                assert server.control.adapters["pirate"] > 86_400
            assert running.post("/v1/unload_lora_adapter", {"lora_name": "pirate"})[0] == 200
        assert first.control.adapters == second.control.adapters == {}
