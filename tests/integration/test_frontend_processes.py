"""`--frontends 2`: what clients get is what one process gives them, whichever frontend they reach and whoever dies."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import psutil
import pytest

from octavo import AsyncClient, SamplingParams
from octavo.errors import RequestFailed
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.fakes import FakeWorker
from tests.integration.scheduler_process import Service, scheduler
from tests.waiting import until

DEADLINE_S = 20.0


def frontends_of(service: Service) -> list[psutil.Process]:
    """Those that listen on the port."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in service.children("scheduler_svc.frontend_process") if _listens(child, service)]
    return []


def _listens(process: psutil.Process, service: Service) -> bool:
    with contextlib.suppress(psutil.Error):
        ports = [each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        return int(service.address.rpartition(":")[2]) in ports
    return False


def _num_clients(process: psutil.Process) -> int:
    return sum(each.status == psutil.CONN_ESTABLISHED for each in process.net_connections("tcp"))


class Client:
    """One connection, and the frontend that has it."""

    def __init__(self, channel: grpc.aio.Channel, frontend: psutil.Process) -> None:
        self.frontend = frontend
        self.inference = inference_pb2_grpc.InferenceStub(channel)
        self.control = inference_pb2_grpc.ControlStub(channel)


@asynccontextmanager
async def a_client_of_each_frontend(service: Service) -> AsyncIterator[list[Client]]:
    """One client a frontend; the kernel chooses, so that it takes a few attempts."""
    found: dict[int, Client] = {}
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(200):
            before = {process.pid: _num_clients(process) for process in frontends_of(service)}
            options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(service.address, options=options))
            await inference_pb2_grpc.InferenceStub(channel).GetModelInfo(pb.GetModelInfoRequest(), wait_for_ready=True)
            for process in frontends_of(service):
                if _num_clients(process) > before.get(process.pid, 0):
                    found.setdefault(process.pid, Client(channel, process))
            if len(found) == 2:
                break
        assert len(found) == 2, "200 connections went to one frontend"
        yield list(found.values())


async def nothing_runs(client: Client) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        load = await client.control.GetLoad(pb.GetLoadRequest())
        requests = (await client.control.ListRequests(pb.ListRequestsRequest())).requests
        (worker,) = load.workers
        if not worker.num_running and not requests and worker.num_free_device_blocks == worker.num_device_blocks:
            return
        assert time.monotonic() < deadline, f"something still runs: {load} {requests}"
        await asyncio.sleep(0.02)


async def rest_of(call: grpc.aio.UnaryStreamCall) -> list[pb.GenerateResponse]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


@pytest.fixture(scope="module")
def slow() -> Iterator[Service]:
    """20 ms a step, and no end before 200 tokens."""
    with FakeWorker(delay_s=0.02) as worker, scheduler(f"--worker={worker.address}", "--frontends=2") as it:
        it.wait_until_ready()
        yield it


# ---- the same as in one process -------------------------------------------------------------------------------------

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "seed": 1}
REQUESTS: dict[str, dict[str, Any]] = {
    "text": {"sampling_params": pb.SamplingParams(**GREEDY)},
    "the prompt back": {"sampling_params": pb.SamplingParams(**GREEDY), "return_prompt_token_ids": True},
    "one message": {"sampling_params": pb.SamplingParams(**GREEDY), "stream": False},
    "stop strings": {"sampling_params": pb.SamplingParams(**GREEDY, n=1, stop=["no such", "e", "Q", "7"])},
    "logprobs": {"sampling_params": pb.SamplingParams(**GREEDY, logprobs=3)},
    "prompt logprobs": {"sampling_params": pb.SamplingParams(n=2, prompt_logprobs=2, seed=5, max_tokens=20)},
    "n": {"sampling_params": pb.SamplingParams(n=3, seed=5, max_tokens=20, logprobs=0)},
    "best_of": {"sampling_params": pb.SamplingParams(n=2, best_of=4, seed=5, max_tokens=20)},
    "beams": {
        "sampling_params": pb.SamplingParams(use_beam_search=True, best_of=4, n=2, logprobs=0, **GREEDY),
    },
    "no text": {"sampling_params": pb.SamplingParams(detokenize=False, **GREEDY)},
    "resume": {
        "sampling_params": pb.SamplingParams(**GREEDY),
        "resume": [pb.ResumedOutput(index=0, token_ids=[65, 66, 67])],
    },
    "cached": {"sampling_params": pb.SamplingParams(**GREEDY)},  # what the requests before it have left
    "refused": {"sampling_params": pb.SamplingParams(temperature=-1.0)},
    "too long to be tokenised": {"prompt": "a" * 100_000},
    "too long": {"prompt": "a" * 300},
    "an unknown adapter": {"sampling_params": pb.SamplingParams(**GREEDY), "adapter": "none"},
}


async def _answers(client: Client, salt: str = "") -> dict[str, tuple[Any, ...]]:
    """What each request gets, without what time has to do with: how tokens were spread over messages, and timings."""
    answers: dict[str, tuple[Any, ...]] = {}
    for name, fields in REQUESTS.items():
        whole = pb.GenerateResponse()
        request = pb.GenerateRequest(request_id=name, cache_salt=salt, **{"prompt": "Ü say|", **fields})
        try:
            async for part in client.inference.Generate(request):
                whole.MergeFrom(part)
        except grpc.aio.AioRpcError as error:
            failure = RequestFailed.from_rpc_error(error)
            answers[name] = (failure.code, failure.message, failure.reason, failure.violations)
            continue
        whole.ClearField("timings")
        outputs: dict[int, pb.OutputDelta] = {}
        for delta in whole.outputs:
            text = outputs[delta.index].text if delta.index in outputs else ""
            outputs.setdefault(delta.index, pb.OutputDelta()).MergeFrom(delta)
            outputs[delta.index].text = text + delta.text
        del whole.outputs[:]
        answers[name] = (str(whole), {index: str(output) for index, output in sorted(outputs.items())})
    return answers


async def test_every_kind_of_request_gets_what_it_gets_in_one_process():
    with FakeWorker() as worker:
        with scheduler(f"--worker={worker.address}", "--frontends=1") as alone:
            alone.wait_until_ready()
            async with grpc.aio.insecure_channel(alone.address) as channel:
                wanted = await _answers(Client(channel, psutil.Process(alone.process.pid)))
        assert [wanted[name][2] for name in ("too long to be tokenised", "too long")] == ["PROMPT_TOO_LONG"] * 2
        with scheduler(f"--worker={worker.address}", "--frontends=2") as both:
            both.wait_until_ready()
            async with a_client_of_each_frontend(both) as clients:
                for number, client in enumerate(clients):
                    assert await _answers(client, salt=f"of client {number}") == wanted
                await nothing_runs(clients[0])


# ---- one core behind both -------------------------------------------------------------------------------------------


async def test_control_and_abort_see_the_requests_of_the_other_frontend(slow):
    async with a_client_of_each_frontend(slow) as (one, other):
        call = one.inference.Generate(pb.GenerateRequest(prompt="say|", request_id="ours"))
        await call.read(), await call.read()
        listed = await other.control.ListRequests(pb.ListRequestsRequest())
        assert [request.request_id for request in listed.requests] == ["ours"]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await other.control.GetRequest(pb.GetRequestRequest(request_id="nobody's"))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        assert (await other.inference.Abort(pb.AbortRequest(request_id="ours"))).found
        last = (await rest_of(call))[-1]
        assert last.outputs[0].finish_reason == pb.FINISH_REASON_ABORT
        assert await call.code() is grpc.StatusCode.OK
        assert not (await other.inference.Abort(pb.AbortRequest(request_id="ours"))).found
        await nothing_runs(other)


async def test_an_id_is_live_at_the_other_frontend_too(slow):
    async with a_client_of_each_frontend(slow) as (one, other):
        call = one.inference.Generate(pb.GenerateRequest(prompt="say|", request_id="one"))
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rest_of(other.inference.Generate(pb.GenerateRequest(prompt="say|", request_id="one")))
        assert raised.value.code() is grpc.StatusCode.ALREADY_EXISTS
        again = other.inference.Generate(pb.GenerateRequest(prompt="say|", request_id="one", attempt=1))
        assert (await again.read()).request_id == "one"
        assert (await rest_of(call))[-1].outputs[0].finish_reason == pb.FINISH_REASON_ABORT, "it was replaced"
        again.cancel()
        await nothing_runs(one)


# ---- losses ---------------------------------------------------------------------------------------------------------


async def test_a_lost_frontend_takes_its_requests_along_and_no_others_and_another_one_comes():
    with FakeWorker(delay_s=0.02) as worker:
        with scheduler(f"--worker={worker.address}", "--frontends=2") as it:
            it.wait_until_ready()
            async with a_client_of_each_frontend(it) as (stays, goes):
                lost = goes.inference.Generate(pb.GenerateRequest(prompt="say|", request_id="lost"))
                kept = stays.inference.Generate(
                    pb.GenerateRequest(prompt="say|", sampling_params=pb.SamplingParams(max_tokens=100))
                )
                await lost.read(), await lost.read(), await kept.read()
                goes.frontend.kill()
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await rest_of(lost)
                assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
                last = (await rest_of(kept))[-1]
                assert last.usage.completion_tokens == 100, "the other frontend's request went on"
                await nothing_runs(stays)
                await until(lambda: len(frontends_of(it)) == 2, "another frontend", seconds=DEADLINE_S)
            async with a_client_of_each_frontend(it) as clients:
                assert goes.frontend.pid not in [client.frontend.pid for client in clients]
                for client in clients:
                    request = pb.GenerateRequest(prompt="say|", sampling_params=pb.SamplingParams(max_tokens=3))
                    assert (await rest_of(client.inference.Generate(request)))[-1].usage.completion_tokens == 3


async def test_the_client_library_goes_on_at_another_frontend(slow):
    params = SamplingParams(max_tokens=100, seed=3)
    await until(lambda: len(frontends_of(slow)) == 2, "both frontends", seconds=DEADLINE_S)
    await until(
        lambda: not any(map(_num_clients, frontends_of(slow))), "the end of others' connections", seconds=DEADLINE_S
    )
    async with AsyncClient(slow.address) as client:
        wanted = await client.complete("say|", params)
        frontends, tokens = frontends_of(slow), list[int]()
        async for output in client.generate("say|", params):
            if output.outputs and not tokens:
                (its,) = [process for process in frontends if _num_clients(process)]
                its.kill()
            tokens += [token for part in output.outputs for token in part.token_ids]
        assert tokens == list(wanted.outputs[0].token_ids)
    await until(lambda: len(frontends_of(slow)) == 2, "another frontend", seconds=DEADLINE_S)


async def test_frontends_end_with_a_core_that_is_killed():
    """As they are started at a terminal: each in an interpreter of its own."""
    with FakeWorker() as worker, scheduler(f"--worker={worker.address}", "--frontends=2", is_forked=False) as it:
        it.wait_until_ready()
        await until(lambda: len(frontends_of(it)) == 2, "both frontends", seconds=DEADLINE_S)
        frontends = frontends_of(it)
        mapped = {mapping.path for process in frontends for mapping in process.memory_maps()}
        assert not [path for path in mapped if "/torch/" in path], "they compute nothing"
        it.process.send_signal(signal.SIGKILL)
        await until(lambda: not any(_is_alive(process) for process in frontends), "their end", seconds=DEADLINE_S)


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def test_a_port_that_is_taken_is_one_clear_line(slow, capfd):
    port = slow.address.rpartition(":")[2]
    with scheduler("--worker=127.0.0.1:9", f"--port={port}", "--frontends=2") as second:
        assert await asyncio.to_thread(second.process.wait, 20) == 1
    assert f"port {port} on 127.0.0.1 is in use" in capfd.readouterr().err
