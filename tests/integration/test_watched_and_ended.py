"""A scheduler that is watched (metrics, steps) and ended (drained, stopped): what its operator and its clients see."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import urlopen

import grpc
import pytest

from octavo.shared.ports import free_port
from protos import inference_pb2 as pb
from tests.fakes import FakeWorker, spell
from tests.integration.scheduler_process import Service, read_last, scheduler, stub_of

GENERATE = "octavo.v1.Inference/Generate"
NOT_FOUND, UNAVAILABLE = 5, 14
SLOW = spell("slow " * 200)


FRONTENDS = ("--frontends=1", "--frontends=2")  # in the process that schedules, and in processes of their own


@contextmanager
def a_slow_scheduler(*flags: str) -> Iterator[Service]:
    with FakeWorker(SLOW, delay_s=0.02) as worker, scheduler(f"--worker={worker.address}", *flags) as it:
        it.wait_until_ready()
        yield it


REQUEST = pb.GenerateRequest(prompt="say|", sampling_params=pb.SamplingParams(max_tokens=40))


@pytest.mark.parametrize("frontends", FRONTENDS)
async def test_metrics_are_served_over_http(frontends):
    port = free_port()
    flags = [f"--metrics-port={port}", frontends]
    with FakeWorker() as worker, scheduler(f"--worker={worker.address}", *flags) as it:
        it.wait_until_ready()
        await it.call(GENERATE, {"prompt": "x", "sampling_params": {"max_tokens": 5, "ignore_eos": True}})
        await it.call(GENERATE, {"prompt": ""})
        with await asyncio.to_thread(urlopen, f"http://127.0.0.1:{port}/metrics") as response:
            lines = response.read().decode().splitlines()
    assert 'octavo:generation_tokens_total{model_name="fake-model"} 5.0' in lines
    assert 'octavo:request_success_total{finished_reason="length",model_name="fake-model"} 1.0' in lines
    assert 'octavo:admission_rejections_total{reason="invalid"} 1.0' in lines


async def test_a_metrics_port_that_is_taken_is_said():
    with a_slow_scheduler() as other:
        port = other.address.rpartition(":")[2]
        with scheduler("--worker=127.0.0.1:1", f"--metrics-port={port}") as it:
            assert await asyncio.to_thread(it.process.wait, 10) == 1


async def test_steps_can_be_watched_with_grpcurl():
    with a_slow_scheduler() as it:
        watching = asyncio.create_task(it.call("octavo.v1.Control/WatchSteps", {}, "-max-time=3"))
        async with stub_of(it) as stub:
            while not watching.done():
                await read_last(stub.Generate(REQUEST))
    steps = watching.result().messages
    prompt = next(step for step in steps if "num_prefill_tokens" in step)
    assert (prompt["num_rows"], prompt["num_prefill_tokens"]) == (1, 4) and "num_decode_tokens" not in prompt
    decodes = [step for step in steps if "num_decode_tokens" in step]
    assert {step["num_decode_tokens"] for step in decodes} == {1} and len(decodes) > 40
    first = int(steps[0]["step_id"])
    assert [int(step["step_id"]) for step in steps] == list(range(first, first + len(steps)))
    assert {step["worker"] for step in steps} == {steps[0]["worker"]}
    assert int(steps[0]["phase_ns"]["schedule"]) > 0


@pytest.mark.parametrize("frontends", FRONTENDS)
@pytest.mark.parametrize("how", [["SIGTERM"], ["Drain"], ["Drain", "SIGTERM"], ["SIGHUP", "SIGHUP"]], ids=" ".join)
async def test_told_to_end_it_takes_no_more_and_finishes_what_it_has(how, frontends):
    with a_slow_scheduler(frontends) as it:
        async with stub_of(it) as stub:
            call = stub.Generate(REQUEST)
            await call.read(), await call.read()
            if "Drain" in how:
                assert (await it.call("octavo.v1.Control/Drain", {})).messages == [{"num_requests_left": 1}]
            for name in how:
                if name != "Drain":
                    it.process.send_signal(getattr(signal, name))
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.1)
            refused = await it.call(GENERATE, {"prompt": "x"})
            assert refused.code == 64 + UNAVAILABLE and "draining" in refused.stderr
            ready = await it.call("grpc.health.v1.Health/Check", {"service": "octavo.v1.Inference"})
            assert ready.messages == [{"status": "NOT_SERVING"}]
            last = await read_last(call)
            assert last.outputs[0].finish_reason == pb.FINISH_REASON_LENGTH and last.usage.completion_tokens == 40
        assert await asyncio.to_thread(it.process.wait, 5) == 0


@pytest.mark.parametrize("frontends", FRONTENDS)
@pytest.mark.parametrize(
    ("flags", "signals"), [(["--drain-timeout=0.2"], ["SIGTERM"]), ([], ["SIGTERM", "SIGTERM"]), ([], ["SIGINT"])]
)
async def test_requests_that_cannot_finish_are_for_another_scheduler(flags, signals, frontends):
    with a_slow_scheduler(frontends, *flags) as it:
        async with stub_of(it) as stub:
            call = stub.Generate(REQUEST)
            await call.read(), await call.read()
            for name in signals:
                it.process.send_signal(getattr(signal, name))
                await asyncio.sleep(0.05)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await read_last(call)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "another can go on with `resume`" in raised.value.details()
        assert await asyncio.to_thread(it.process.wait, 5) == 0


async def test_a_drained_worker_is_given_back_and_its_requests_move():
    with FakeWorker(SLOW, delay_s=0.02) as first, FakeWorker(SLOW, delay_s=0.02) as second:
        with scheduler(f"--worker={first.address}", f"--worker={second.address}") as it:
            it.wait_until_ready()
            async with stub_of(it) as stub:
                call = stub.Generate(REQUEST)
                await call.read(), await call.read()
                (state,) = (await it.call("octavo.v1.Control/ListRequests", {})).messages
                (busy,) = (request["worker"] for request in state["requests"])
                (left,) = (await it.call("octavo.v1.Control/Drain", {"worker": busy})).messages
                assert left == {"num_requests_left": 1}
                last = await read_last(call)
                assert last.timings.times_moved == 1 and last.usage.completion_tokens == 40
            (listed,) = (await it.call("octavo.v1.Control/ListWorkers", {})).messages
            states = {state["address"]: state for state in listed["workers"]}
            assert states[busy]["health"] == "WORKER_HEALTH_REFUSED" and "drained" in states[busy]["problem"]
            unknown = await it.call("octavo.v1.Control/Drain", {"worker": "nowhere:1"})
            assert unknown.code == 64 + NOT_FOUND and busy not in unknown.stderr


async def test_clients_that_resume_with_much_hold_up_neither_the_others_nor_the_end():
    """Most of a million tokens, looked through for long stop strings: seconds of work, in pieces that end with it."""
    num_tokens = 900_000
    request = pb.GenerateRequest(prompt="say|", resume=[pb.ResumedOutput(index=0, token_ids=[97] * num_tokens)])
    request.sampling_params.seed = 5
    request.sampling_params.stop.extend("a" * 1000 + letter for letter in "bcdefghijklmnop")
    worker = FakeWorker(delay_s=0.02, max_model_len=1_000_000, num_blocks=1000, block_size=1024, max_num_seqs=2)
    with worker, scheduler(f"--worker={worker.address}") as it:
        it.wait_until_ready()
        async with stub_of(it) as stub:
            calls = [stub.Generate(request) for _ in range(3)]
            await asyncio.sleep(1)
            calls[0].cancel()
            last = await asyncio.wait_for(read_last(stub.Generate(REQUEST)), 20)
            assert last.usage.completion_tokens == 40
            assert not any(call.done() for call in calls[1:]), "it was less work than was meant"
            it.process.terminate()
            assert await asyncio.to_thread(it.process.wait, 5) == 0
