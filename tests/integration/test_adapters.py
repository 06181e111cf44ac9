"""Adapters over the scheduler service: loaded, used, seen and unloaded with plain clients, on fake workers.

A fake worker refuses a step of more adapters than it computes with, a group of an adapter that it has not loaded, a
cache block that was computed with another adapter or generation, and to unload what one of its slots uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import pytest

from octavo import AsyncClient, SamplingParams
from octavo.cli import main
from octavo.errors import RequestFailed
from octavo.shared.ports import free_port
from tests.fakes import FakeWorker
from tests.integration.scheduler_process import Service, scheduler
from tests.scheduler.hashed_tokens import hashed_after
from tests.waiting import until

LOAD, UNLOAD = "octavo.v1.Control/LoadAdapter", "octavo.v1.Control/UnloadAdapter"
GENERATE = "octavo.v1.Inference/Generate"
PROMPT = "a prompt of several blocks|"
INVALID, NOT_FOUND, TAKEN, PRECONDITION, UNAVAILABLE = 3, 5, 6, 9, 14


@contextmanager
def service(*workers: FakeWorker, ports: tuple[int, ...] = (), num_frontends: int = 1) -> Iterator[Service]:
    with ExitStack() as stack:
        for worker in workers:
            stack.enter_context(worker)
        addresses = [worker.address for worker in workers] + [f"127.0.0.1:{port}" for port in ports]
        flags = [f"--worker={address}" for address in addresses]
        it = stack.enter_context(scheduler(*flags, f"--frontends={num_frontends}"))
        it.wait_until_ready()
        yield it


async def states(it: Service) -> dict[str, list[str]]:
    """Loaded adapters by worker."""
    (answer,) = (await it.call("octavo.v1.Control/ListWorkers", {})).messages
    return {worker["address"]: worker.get("adapters", []) for worker in answer["workers"]}


@pytest.mark.parametrize("num_frontends", [1, 2])
async def test_an_adapter_from_loading_to_unloading(num_frontends):
    with service(FakeWorker(max_loras=1), num_frontends=num_frontends) as it:
        unknown = await it.call(GENERATE, {"prompt": PROMPT, "adapter": "pirate"})
        assert unknown.code == 64 + NOT_FOUND and "adapter 'pirate' is not here; loaded: none" in unknown.stderr
        assert (await it.call(LOAD, {"name": "pirate", "path": "/adapters/pirate"})).messages == [{"generation": "1"}]
        assert (await it.call(LOAD, {"name": "poet", "path": "/adapters/poet"})).messages == [{"generation": "2"}]
        (info,) = (await it.call("octavo.v1.Inference/GetModelInfo", {})).messages
        assert info["adapters"] == ["pirate", "poet"] and list((await states(it)).values()) == [["pirate", "poet"]]
        request = {"prompt": PROMPT, "stream": False, "sampling_params": {"max_tokens": 9}}
        cached = []
        for adapter in ("", "pirate", "poet", "pirate", ""):
            (message,) = (await it.call(GENERATE, {**request, "adapter": adapter})).messages
            assert message["outputs"][0]["token_ids"] == hashed_after(PROMPT, 9)
            cached.append(message["usage"].get("cached_tokens", 0))
        assert cached == [0, 0, 0, 24, 24], "prefixes are shared within an adapter, and not across"
        assert (await it.call(UNLOAD, {"name": "pirate"})).messages == [{}]
        assert list((await states(it)).values()) == [["poet"]]
        gone = await it.call(GENERATE, {"prompt": PROMPT, "adapter": "pirate"})
        assert gone.code == 64 + NOT_FOUND and "loaded: 'poet'" in gone.stderr
        assert (await it.call(LOAD, {"name": "pirate", "path": "/adapters/pirate"})).messages == [{"generation": "3"}]
        (message,) = (await it.call(GENERATE, {**request, "adapter": "pirate"})).messages
        assert "cached_tokens" not in message["usage"], "another generation has computed other keys and values"


async def test_what_operators_get_wrong_has_its_status():
    worker = FakeWorker(max_loras=1)
    worker.broken_paths.add("/nothing/here")
    with service(worker) as it:
        await it.call(LOAD, {"name": "poet", "path": "/adapters/poet"})
        (models,) = (await it.call("octavo.v1.Inference/ListModels", {})).messages
        model = models["models"][0]["name"]
        for method, request, code, message in (
            (LOAD, {"path": "/x"}, INVALID, "name: got none"),
            (LOAD, {"name": "x"}, INVALID, "path: got none"),
            (LOAD, {"name": "poet", "path": "/x"}, TAKEN, "is loaded from '/adapters/poet'"),
            (LOAD, {"name": model, "path": "/x"}, TAKEN, "a model of this server has this name"),
            (LOAD, {"name": "x", "path": "/nothing/here"}, PRECONDITION, "NOT_FOUND: no adapter at /nothing/here"),
            (UNLOAD, {"name": "x"}, NOT_FOUND, "loaded: 'poet'"),
        ):
            answer = await it.call(method, request)
            assert answer.code == 64 + code and message in answer.stderr, answer.stderr
        assert list((await states(it)).values()) == [["poet"]]


async def test_at_most_so_many_adapters_in_a_step_and_every_request_is_served():
    with service(FakeWorker(max_loras=2), FakeWorker(max_loras=1)) as it:
        async with AsyncClient(it.address) as client:
            names = ["", "a", "b", "c", "d"]
            for name in names[1:]:
                await client.load_adapter(name, f"/adapters/{name}")
            calls = []
            for number in range(40):
                prompt, params = f"{number % 7}|", SamplingParams(temperature=0, max_tokens=5 + number % 11)
                calls.append(client.complete(prompt, params, adapter=names[number % len(names)]))
            outputs = await asyncio.gather(*calls)
            for number, output in enumerate(outputs):
                assert output.outputs[0].token_ids == hashed_after(f"{number % 7}|", 5 + number % 11)
            for name in names[1:]:
                await client.unload_adapter(name)
        assert not any((await states(it)).values())


async def test_unloading_lets_those_finish_that_run_and_that_wait():
    worker = FakeWorker(max_loras=1, max_num_seqs=2, delay_s=0.01)
    with service(worker) as it:
        async with AsyncClient(it.address) as client:
            await client.load_adapter("a", "/adapters/a")
            params = SamplingParams(temperature=0, max_tokens=60)
            calls = [asyncio.create_task(client.complete("x|", params, adapter="a")) for _ in range(6)]
            async with asyncio.timeout(10):
                while not (await it.call("octavo.v1.Control/GetLoad", {})).messages[0].get("num_requests_waiting"):
                    await asyncio.sleep(0.005)
                unloading = asyncio.create_task(client.unload_adapter("a"))
                while (await client.model_info()).adapters:
                    await asyncio.sleep(0.005)
            with pytest.raises(RequestFailed) as refused:
                await client.complete("x|", params, adapter="a")
            assert refused.value.code is grpc.StatusCode.NOT_FOUND
            with pytest.raises(RequestFailed) as impatient:
                await client.unload_adapter("a", timeout=0.02)
            assert impatient.value.code is grpc.StatusCode.DEADLINE_EXCEEDED and not unloading.done()
            for call in calls:
                assert (await call).outputs[0].token_ids == hashed_after("x|", 60)
            await unloading
            assert worker.adapters == {}


async def test_a_worker_that_joins_later_has_the_adapters_and_takes_over_their_requests():
    port = free_port()
    first = FakeWorker(max_loras=1, delay_s=0.01)
    with service(first, ports=(port,)) as it:
        async with AsyncClient(it.address) as client:
            await client.load_adapter("a", "/adapters/a")
            params = SamplingParams(temperature=0, max_tokens=60)
            call = asyncio.create_task(client.complete("x|", params, adapter="a"))
            async with asyncio.timeout(10):
                while len(first.answered) < 5:
                    await asyncio.sleep(0.005)
            await asyncio.to_thread(first.kill)
            with FakeWorker(max_loras=1, port=port) as second:
                output = await call
                assert output.outputs[0].token_ids == hashed_after("x|", 60)
                assert output.metrics.times_moved == 1 and second.adapters == {"a": 1}


async def test_configured_adapters_are_there_with_the_first_worker_and_with_every_later_one() -> None:
    flags = ["--lora-modules=pirate=/adapters/pirate", "--lora-modules=poet=/adapters/poet"]
    first, port = FakeWorker(max_loras=1), free_port()
    with first, scheduler(f"--worker={first.address}", f"--worker=127.0.0.1:{port}", *flags) as it:
        it.wait_until_ready()
        async with AsyncClient(it.address) as client:
            params = SamplingParams(max_tokens=5)
            answer = await client.complete(PROMPT, params, adapter="poet")
            assert answer.outputs[0].token_ids == hashed_after(PROMPT, 5)
            with FakeWorker(port=port, max_loras=1) as second:
                await until(lambda: set(second.adapters) == {"pirate", "poet"})


async def test_loading_before_the_first_worker_has_joined_is_a_matter_of_time() -> None:
    with scheduler(f"--worker=127.0.0.1:{free_port()}") as it:
        async with asyncio.timeout(10):  # it begins to listen within
            while "no worker has joined" not in (answer := await it.call(LOAD, {"name": "a", "path": "/a"})).stderr:
                await asyncio.sleep(0.05)
        assert answer.code == 64 + UNAVAILABLE


async def test_a_configured_adapter_that_no_worker_can_load_is_a_matter_of_time() -> None:
    with FakeWorker(max_loras=0) as worker, scheduler(f"--worker={worker.address}", "--lora-modules=a=/a") as it:
        it.wait_until_ready()
        refused = await it.call(GENERATE, {"prompt": PROMPT, "adapter": "a"})
        assert refused.code == 64 + UNAVAILABLE and "adapter 'a' is being loaded: try again" in refused.stderr


def test_the_command_loads_lists_uses_and_unloads(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeWorker(max_loras=1) as worker, scheduler(f"--worker={worker.address}") as it:
        it.wait_until_ready()

        def run(*arguments: str) -> tuple[int, str]:
            code = main([*arguments, "--address", it.address])
            shown = capsys.readouterr()
            return code, (shown.out + shown.err).strip()

        assert run("adapter", "list") == (0, "none")
        assert run("adapter", "load", "pirate", "/adapters/pirate") == (0, "pirate is loaded")
        assert run("adapter", "list", "--json") == (0, '["pirate"]')
        assert run("generate", "--adapter", "pirate", "--max-tokens=3", PROMPT)[0] == 0
        code, said = run("generate", "--adapter", "poet", PROMPT)
        assert code == 1 and "adapter 'poet' is not here; loaded: 'pirate'" in said
        assert run("adapter", "unload", "--json", "pirate") == (0, '{"name": "pirate"}')
        code, said = run("adapter", "unload", "pirate")
        assert code == 1 and "adapter 'pirate' is not here; loaded: none" in said
