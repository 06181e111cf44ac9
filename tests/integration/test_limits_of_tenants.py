"""Limits of tenants with real processes: they hold over all frontends and shards, and change while requests run."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from google.rpc import error_details_pb2, status_pb2

from octavo.shared.access.keys import hash_of
from octavo.shared.ports import free_port
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.fakes import FakeWorker
from tests.gateway.running import gateway
from tests.integration.scheduler_process import Service, scheduler

CODE = grpc.StatusCode
TENANTS = ("shop", "web", "slow", "short", "many", "talks")
LIMITS: list[dict[str, Any]] = [
    {"name": "shop", "requests_per_minute": 3},
    {"name": "slow", "running_sequences": 2, "waiting_requests": 3},
    {"name": "short", "running_sequences": 2, "waiting_requests": 3},
    {"name": "talks", "tokens_per_minute": 60},
    {"name": "many", "bytes": 300},
]


def write(path: Path, limits: list[dict[str, Any]]) -> None:
    keys = [{"name": name, "sha256": hash_of(f"key of {name}")} for name in TENANTS]
    eyes = {"name": "eyes", "sha256": hash_of("key of eyes"), "roles": ["metrics"]}
    path.write_text(yaml.safe_dump({"keys": [*keys, eyes], "tenants": limits}))


def with_key(name: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer key of {name}")]


class Served:
    def __init__(self, service: Service, keys_file: Path, metrics_port: int) -> None:
        self.service, self.keys_file, self.metrics_port = service, keys_file, metrics_port

    def generate(
        self,
        name: str,
        max_tokens: int = 1,
        num_prompt_tokens: int = 3,
        n: int = 1,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> tuple[grpc.StatusCode, status_pb2.Status]:
        """Over a connection of its own, so that another frontend may have it; ends early where tokens are enough."""
        request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1] * num_prompt_tokens))
        request.sampling_params.max_tokens, request.sampling_params.ignore_eos = max_tokens, True
        request.sampling_params.n = n
        with grpc.insecure_channel(self.service.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                answers = inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=with_key(name))
                for _ in answers:
                    if is_enough():
                        answers.cancel()
                        break
            except grpc.RpcError as error:
                details = {key: value for key, value in error.trailing_metadata()}.get("grpc-status-details-bin", b"")
                return error.code(), status_pb2.Status.FromString(details)
        return CODE.OK, status_pb2.Status()

    def metric(self, text: str) -> float:
        asked = urllib.request.Request(f"http://127.0.0.1:{self.metrics_port}/metrics", headers=dict(with_key("eyes")))
        with urllib.request.urlopen(asked, timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(text))


@pytest.fixture(scope="module", params=["frontends", "shards"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys_file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write(keys_file, LIMITS)
    port = free_port()
    flags = ["--frontends=2", *(["--shards=2"] if request.param == "shards" else [])]
    with ExitStack() as stack:
        workers = [stack.enter_context(FakeWorker(delay_s=0.005)) for _ in range(2)]
        options = [*(f"--worker={worker.address}" for worker in workers), f"--keys-file={keys_file}", *flags]
        service = stack.enter_context(scheduler(*options, f"--metrics-port={port}"))
        service.wait_until_ready()
        served = Served(service, keys_file, port)
        in_a_row, deadline = 0, time.monotonic() + 30
        while in_a_row < 6:  # on whichever frontend a connection ends: each hears for itself who is there
            assert time.monotonic() < deadline
            in_a_row = in_a_row + 1 if served.generate("web")[0] is CODE.OK else 0
        yield served


def quota_of(status: status_pb2.Status) -> tuple[str, dict[str, str], float]:
    """Of a refusal: what QuotaFailure, ErrorInfo and RetryInfo say."""
    quota, info, retry = error_details_pb2.QuotaFailure(), error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert {type(each) for each in (quota, info, retry) for detail in status.details if detail.Unpack(each)} == {
        error_details_pb2.QuotaFailure,
        error_details_pb2.ErrorInfo,
        error_details_pb2.RetryInfo,
    }
    (violation,) = quota.violations
    return violation.subject, dict(info.metadata), retry.retry_delay.ToTimedelta().total_seconds()


def test_requests_a_minute_hold_over_all_processes(served: Served) -> None:
    codes = Counter(served.generate("shop")[0] for _ in range(6))
    assert codes == {CODE.OK: 3, CODE.RESOURCE_EXHAUSTED: 3}
    _, status = served.generate("shop")
    subject, facts, retry_s = quota_of(status)
    assert subject == "tenant:shop" and 0 < retry_s <= 20
    assert facts == {"tenant": "shop", "limit": "requests_per_minute", "most": "3", "left": "0"}
    assert status.message.startswith("tenant 'shop': requests_per_minute is 3, and 3 were made; try again in")
    assert served.generate("web")[0] is CODE.OK


def test_running_sequences_hold_over_all_processes_and_more_wait_up_to_a_bound(served: Served) -> None:
    """Requests run until both limits have been seen at work: reading metrics takes a while beside other processes."""
    most_running, most_held, has_ended = 0, 0, threading.Event()

    def watch() -> None:
        nonlocal most_running, most_held
        while not has_ended.is_set():
            most_running = max(most_running, int(served.metric("octavo:num_requests_running")))
            most_held = max(most_held, int(served.metric("octavo:num_requests_held")))
            time.sleep(0.01)

    def is_seen() -> bool:
        return most_running >= 2 and most_held >= 3

    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(8) as pool:
        ended = [code for code, _ in pool.map(lambda _: served.generate("slow", 900, is_enough=is_seen), range(8))]
    has_ended.set()
    watching.join()
    assert (most_running, most_held) == (2, 3)
    assert Counter(ended) == {CODE.OK: 5, CODE.RESOURCE_EXHAUSTED: 3}
    code, status = served.generate("slow", n=3)
    assert code is CODE.INVALID_ARGUMENT
    assert "sampling_params.best_of: 3 sequences; accepted: at most 2, the tenant's running_sequences" in status.message


def test_requests_that_were_held_come_to_their_ends(served: Served) -> None:
    with ThreadPoolExecutor(5) as pool:
        assert {code for code, _ in pool.map(lambda _: served.generate("short", 40), range(5))} == {CODE.OK}


def test_a_request_that_is_held_can_be_aborted(served: Served) -> None:
    """Over connections of their own, so maybe at another frontend than the one that has it."""
    own: list[tuple[str, int]] = [("grpc.use_local_subchannel_pool", 1)]

    def generate(request_id: str) -> list[int]:
        """Why its output ended."""
        request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1]), request_id=request_id)
        request.sampling_params.max_tokens, request.sampling_params.ignore_eos = 900, True
        with grpc.insecure_channel(served.service.address, options=own) as channel:
            answers = inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=with_key("slow"))
            return [output.finish_reason for answer in answers for output in answer.outputs if output.finish_reason]

    def abort(request_id: str) -> bool:
        request = pb.AbortRequest(request_id=request_id)
        with grpc.insecure_channel(served.service.address, options=own) as channel:
            return bool(inference_pb2_grpc.InferenceStub(channel).Abort(request, metadata=with_key("slow")).found)

    names = ["x", "y", "z"]
    with ThreadPoolExecutor(3) as pool:
        answers = {name: pool.submit(generate, name) for name in names}
        deadline = time.monotonic() + 20
        while not (
            served.metric("octavo:num_requests_running") == 2 and served.metric("octavo:num_requests_held") == 1
        ):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert all(map(abort, names)) and not abort("x")
        assert all(answer.result(20) == [pb.FINISH_REASON_ABORT] for answer in answers.values())
    assert served.metric("octavo:num_requests_held") == 0


def test_generated_tokens_are_charged_to_a_debt(served: Served) -> None:
    assert served.generate("talks", 100)[0] is CODE.OK
    code, status = served.generate("talks")
    assert code is CODE.RESOURCE_EXHAUSTED
    _, facts, retry_s = quota_of(status)
    assert facts["limit"] == "tokens_per_minute" and 30 < retry_s < 46


def test_bytes_are_those_of_requests_that_have_not_ended(served: Served) -> None:
    is_refused = threading.Event()

    def generate(_: int) -> grpc.StatusCode:
        code = served.generate("many", 900, 120, is_enough=is_refused.is_set)[0]
        if code is CODE.RESOURCE_EXHAUSTED:
            is_refused.set()
        return code

    with ThreadPoolExecutor(3) as pool:
        assert Counter(pool.map(generate, range(3))) == {CODE.OK: 2, CODE.RESOURCE_EXHAUSTED: 1}
    deadline = time.monotonic() + 5  # the server hears later than its caller that a call was cancelled
    while served.generate("many", 1, 120)[0] is not CODE.OK:
        assert time.monotonic() < deadline


def test_over_http_a_limit_is_429_with_the_headers_that_clients_read(served: Served) -> None:
    with gateway(served.service.address) as running:
        body = {"model": "fake-model", "prompt": [1, 2], "max_tokens": 1}
        codes = [served.generate("shop")[0] for _ in range(4)]  # of three a minute some may be there again
        status, headers, text = running.ask("POST", "/v1/completions", body, authorization="Bearer key of shop")
    assert CODE.RESOURCE_EXHAUSTED in codes
    assert status == 429 and json.loads(text)["error"]["code"] == "rate_limit_exceeded"
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("3", "0")
    assert 0 < float(headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 20
    assert int(headers["retry-after"]) == -(-int(headers["retry-after-ms"]) // 1000)


def test_refusals_are_counted_by_tenant_and_limit(served: Served) -> None:
    def count() -> float:
        labels = 'limit="requests_per_minute",tenant="shop"', 'tenant="shop",limit="requests_per_minute"'
        return sum(served.metric(f"octavo:tenant_refusals_total{{{each}}}") for each in labels)

    before, deadline = count(), time.monotonic() + 5
    codes = Counter(served.generate("shop")[0] for _ in range(5))
    assert codes[CODE.RESOURCE_EXHAUSTED] >= 2
    while count() < before + codes[CODE.RESOURCE_EXHAUSTED] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert count() == before + codes[CODE.RESOURCE_EXHAUSTED]


def test_limits_change_while_the_server_runs(served: Served) -> None:
    """The last test of this server."""
    write(served.keys_file, [{"name": "web", "requests_per_minute": 1}])
    deadline = time.monotonic() + 5
    while served.generate("shop")[0] is not CODE.OK:
        assert time.monotonic() < deadline
    assert served.generate("web")[0] is CODE.OK
    assert served.generate("web")[0] is CODE.RESOURCE_EXHAUSTED
