"""A scheduler with a keys file: who may call what, whose requests are whose, and what one tenant learns of another."""

from __future__ import annotations

import asyncio
import json
import queue
import re
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo.cli import main
from octavo.shared.access.keys import hash_of
from octavo.shared.ports import free_port
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.fakes import FakeWorker
from tests.integration.scheduler_process import Service, scheduler

CODE = grpc.StatusCode
KEYS: dict[str, dict[str, object]] = {
    "web": {},
    "web-too": {"tenant": "web"},
    "shop": {},
    "ops": {"roles": ["control"]},
    "eyes": {"roles": ["metrics"]},
    "one": {"prefixes": "both"},
    "other": {"prefixes": "both"},
}
PROMPT = list(range(1, 65))


def with_key(name: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer key of {name}")]


def write_keys(path: Path, *names: str) -> None:
    entries = [{"name": name, "sha256": hash_of(f"key of {name}"), **KEYS[name]} for name in names]
    path.write_text(yaml.safe_dump({"keys": entries}))


class Served:
    def __init__(self, service: Service, keys_file: Path, metrics_port: int) -> None:
        self.service, self.keys_file, self.metrics_port = service, keys_file, metrics_port
        self.channel = grpc.insecure_channel(service.address)
        self.inference = inference_pb2_grpc.InferenceStub(self.channel)
        self.control = inference_pb2_grpc.ControlStub(self.channel)

    def generate(self, name: str, request_id: str = "", cache_salt: str = "") -> list[pb.GenerateResponse]:
        prompt = pb.TokenIds(ids=PROMPT)
        request = pb.GenerateRequest(request_id=request_id, prompt_token_ids=prompt, cache_salt=cache_salt)
        request.sampling_params.max_tokens = 2
        return list(self.inference.Generate(request, metadata=with_key(name)))

    def num_cached(self, name: str, cache_salt: str = "") -> int:
        return self.generate(name, cache_salt=cache_salt)[-1].usage.cached_tokens

    def num_hits(self) -> float:
        """Prompt tokens that were found in the cache, whoever asked."""
        text = scraped(self, "key of eyes")[1]
        return sum(map(float, re.findall(r"^octavo:prefix_cache_hits_total\S* (\S+)$", text, re.MULTILINE)))


@pytest.fixture(scope="module", params=["one process", "frontends"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys_file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(keys_file, *KEYS)
    port = free_port()
    flags = ["--frontends=2"] if request.param == "frontends" else []
    with FakeWorker() as worker:
        options = [f"--worker={worker.address}", f"--keys-file={keys_file}", f"--metrics-port={port}", *flags]
        with scheduler(*options) as service:
            service.wait_until_ready()
            it = Served(service, keys_file, port)
            with it.channel:
                yield it


def refusal(call: object, *arguments: object, metadata: object = None) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        answer = call(*arguments, metadata=metadata)  # type: ignore[operator]  # a stub's method
        list(answer)
    return raised.value.code(), raised.value.details()


@pytest.mark.parametrize("metadata", [None, with_key("nobody"), [("authorization", "key of web")]])
def test_without_a_known_key_nothing_is_answered(served: Served, metadata: object) -> None:
    for call, request in (
        (served.inference.Generate, pb.GenerateRequest(prompt="a")),
        (served.inference.ListModels, pb.ListModelsRequest()),
        (served.inference.Abort, pb.AbortRequest(request_id="a")),
        (served.control.Drain, pb.DrainRequest()),
        (served.control.GetLoad, pb.GetLoadRequest()),
        (served.control.WatchSteps, pb.WatchStepsRequest()),
        (channelz_pb2_grpc.ChannelzStub(served.channel).GetServers, channelz_pb2.GetServersRequest()),
    ):
        assert refusal(call, request, metadata=metadata)[0] is CODE.UNAUTHENTICATED, call
    many = served.inference.GenerateMany
    assert refusal(many, iter([pb.GenerateManyRequest(key=1)]), metadata=metadata)[0] is CODE.UNAUTHENTICATED


def test_each_role_opens_its_own(served: Served) -> None:
    code, why = refusal(served.control.Drain, pb.DrainRequest(), metadata=with_key("web"))
    assert code is CODE.PERMISSION_DENIED and why == "key 'web' is not for this call; it takes role control"
    assert refusal(served.control.ListRequests, pb.ListRequestsRequest(), metadata=with_key("eyes"))[0] is (
        CODE.PERMISSION_DENIED
    )
    generate = pb.GenerateRequest(prompt="a")
    for name in ("ops", "eyes"):
        assert refusal(served.inference.Generate, generate, metadata=with_key(name))[0] is CODE.PERMISSION_DENIED
    assert served.generate("web")[-1].usage.completion_tokens == 2
    assert served.control.ListWorkers(pb.ListWorkersRequest(), metadata=with_key("ops")).workers
    for name in ("ops", "eyes"):
        assert served.control.GetLoad(pb.GetLoadRequest(), metadata=with_key(name)).workers


def test_probes_need_no_key_and_reflection_any(served: Served) -> None:
    health = health_pb2_grpc.HealthStub(served.channel)
    asked = health_pb2.HealthCheckRequest(service="octavo.v1.Inference")
    assert health.Check(asked).status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(served.channel).ServerReflectionInfo
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    assert refusal(reflection, iter([question]))[0] is CODE.UNAUTHENTICATED
    (answer,) = reflection(iter([question]), metadata=with_key("eyes"))
    assert "octavo.v1.Inference" in {service.name for service in answer.list_services_response.service}


def test_a_request_is_of_its_keys_tenant_and_nobody_elses(served: Served) -> None:
    request = pb.GenerateRequest(request_id="mine", prompt_token_ids=pb.TokenIds(ids=PROMPT))
    request.sampling_params.max_tokens, request.sampling_params.ignore_eos = 400, True
    running = served.inference.Generate(request, metadata=with_key("web"))
    next(running)
    (state,) = served.control.ListRequests(pb.ListRequestsRequest(), metadata=with_key("ops")).requests
    assert (state.request_id, state.tenant) == ("mine", "web")
    abort = pb.AbortRequest(request_id="mine")
    assert not served.inference.Abort(abort, metadata=with_key("shop")).found
    assert served.generate("shop", "mine")[-1].usage.completion_tokens == 2  # ids are a tenant's own
    claimed = pb.AbortRequest(request_id="mine", tenant="web")
    code, why = refusal(served.inference.Abort, claimed, metadata=with_key("shop"))
    assert code is CODE.INVALID_ARGUMENT and "as the key brings it" in why
    assert served.inference.Abort(abort, metadata=with_key("web-too")).found
    assert [output.finish_reason for message in running for output in message.outputs][-1] == pb.FINISH_REASON_ABORT


def test_a_flight_record_is_for_those_who_control(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, why = refusal(served.control.DumpFlightRecord, pb.DumpFlightRecordRequest(), metadata=with_key("web"))
    assert code is CODE.PERMISSION_DENIED and "role control" in why
    served.generate("web")
    path = tmp_path / "record.jsonl.gz"
    fetch = ["replay", str(path), "--address", served.service.address, "--api-key"]
    assert main([*fetch, "key of web"]) == 1 and not path.exists()
    assert main([*fetch, "key of ops"]) == 0 and path.stat().st_size > 0
    assert main([*fetch, "key of ops"]) == 1, "what is there is not written over"
    capsys.readouterr()
    assert main(["replay", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["agrees"] and told["same"] == told["steps"] > 0


def test_prefixes_are_shared_within_a_tenant_and_where_the_file_says_so(served: Served) -> None:
    served.generate("web")
    assert served.num_cached("web-too") > 0
    served.control.FlushPrefixCache(pb.FlushPrefixCacheRequest(), metadata=with_key("ops"))
    served.generate("web")
    assert served.num_cached("shop") == 0 and served.num_cached("one") == 0
    before = served.num_hits()
    assert served.num_cached("other") == 0, "it has found them, and is not told: that would show what others have sent"
    after = served.num_hits()
    assert after > before
    assert served.num_cached("other", cache_salt="own") == 0  # a request's salt counts all the same
    assert served.num_hits() == after
    # What two salts and tenants are made of cannot be shifted from one to the other.
    assert served.num_cached("shop", cache_salt="x") == 0


def scraped(served: Served, key: str | None) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{served.metrics_port}/metrics")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, str(error.headers["WWW-Authenticate"])


def test_metrics_are_for_keys_with_that_role(served: Served) -> None:
    assert scraped(served, None) == scraped(served, "key of nobody") == (401, "Bearer")
    assert scraped(served, "key of web")[0] == 403
    for name in ("eyes", "ops"):
        status, text = scraped(served, f"key of {name}")
        assert status == 200 and "octavo:num_requests_running" in text


def test_wrong_keys_cost_nobody_else_the_connection(served: Served) -> None:
    """A gateway has one for all of its clients, and passes on what keys they bring."""
    watching = served.control.WatchSteps(pb.WatchStepsRequest(), metadata=with_key("ops"))
    ask = served.inference.ListModels
    for _ in range(20):
        for call in [ask.future(pb.ListModelsRequest(), metadata=with_key("nobody")) for _ in range(100)]:
            assert call.code() is CODE.UNAUTHENTICATED
    served.generate("web")
    assert next(watching)
    watching.cancel()


async def test_who_writes_on_to_a_call_without_a_key_is_told_why_it_ends(served: Served) -> None:
    """Their library gives a write that fails as the call ends a status of its own, INTERNAL: half of these had it."""

    async def messages() -> AsyncIterator[pb.GenerateManyRequest]:
        for key in range(1, 4):
            yield pb.GenerateManyRequest(key=key)
            await asyncio.sleep(0)

    async def code(stub: inference_pb2_grpc.InferenceStub) -> grpc.StatusCode:
        return await stub.GenerateMany(messages(), metadata=with_key("nobody")).code()

    async with grpc.aio.insecure_channel(served.service.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for _ in range(5):
            codes = await asyncio.gather(*(code(stub) for _ in range(20)))
            assert set(codes) == {CODE.UNAUTHENTICATED}


def test_a_key_that_is_taken_away_or_added_counts_within_moments(served: Served) -> None:
    """The last test of this server."""
    ask = pb.ListModelsRequest()
    sent: queue.SimpleQueue[pb.GenerateManyRequest] = queue.SimpleQueue()
    many = served.inference.GenerateMany(iter(sent.get, None), metadata=with_key("web"))
    generate = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=PROMPT)).SerializeToString()
    watching = served.control.WatchSteps(pb.WatchStepsRequest(), metadata=with_key("ops"))
    served.keys_file.write_text("keys: [")
    time.sleep(2.2)
    assert 'octavo:access_file_failures_total{file="keys"} 1.0' in scraped(served, "key of eyes")[1]
    assert served.inference.ListModels(ask, metadata=with_key("web")).models, "what was there stays in force"
    write_keys(served.keys_file, "shop")
    deadline = time.monotonic() + 10
    while True:
        try:
            served.inference.ListModels(ask, metadata=with_key("web"))
        except grpc.RpcError as error:
            assert error.code() is CODE.UNAUTHENTICATED
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert served.inference.ListModels(ask, metadata=with_key("shop")).models
    # Nor does it count for what was open.
    sent.put(pb.GenerateManyRequest(key=1, request=generate))
    ((part,),) = ([*message.parts] for message in [next(many)])
    assert part.ending.code == CODE.UNAUTHENTICATED.value[0]
    many.cancel()
    with pytest.raises(grpc.RpcError) as raised:
        list(watching)
    assert raised.value.code() is CODE.UNAUTHENTICATED


@pytest.mark.parametrize("flags", [[], ["--frontends=2"]])
def test_a_keys_file_that_cannot_be_read_keeps_a_server_from_starting(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with scheduler("--worker=127.0.0.1:1", f"--keys-file={tmp_path}/nowhere", *flags) as service:
        assert service.process.wait(timeout=20) == 2
    said = capfd.readouterr().err
    assert f"--keys-file: {tmp_path}/nowhere: No such file or directory" in said and "Traceback" not in said


@pytest.mark.parametrize("flags", [["--frontends=2"], ["--shards=2", "--frontends=2"]], ids=["frontends", "shards"])
def test_control_may_have_a_port_of_its_own(flags: list[str], tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.yaml", "web", "ops")
    port = free_port()
    with FakeWorker() as worker:
        options = [f"--worker={worker.address}", f"--keys-file={tmp_path}/keys.yaml", f"--control-port={port}", *flags]
        with scheduler(*options) as service, ExitStack() as stack:
            service.wait_until_ready()
            public, apart = (
                stack.enter_context(grpc.insecure_channel(address))
                for address in (service.address, f"127.0.0.1:{port}")
            )
            asked = pb.GetLoadRequest()
            here, there = (inference_pb2_grpc.ControlStub(channel).GetLoad for channel in (public, apart))
            assert refusal(here, asked, metadata=with_key("ops"))[0] is CODE.UNIMPLEMENTED
            assert there(asked, metadata=with_key("ops")).workers
            assert refusal(there, asked, metadata=with_key("web"))[0] is CODE.PERMISSION_DENIED
            models = pb.ListModelsRequest()
            assert inference_pb2_grpc.InferenceStub(public).ListModels(models, metadata=with_key("web")).models
            elsewhere = inference_pb2_grpc.InferenceStub(apart).ListModels
            assert refusal(elsewhere, models, metadata=with_key("web"))[0] is CODE.UNIMPLEMENTED
