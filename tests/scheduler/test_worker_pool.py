"""Who belongs to the pool: addresses of a name that come and go, and workers that it has no place for."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as pb
from protos import worker_pb2
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.serving import Serving
from scheduler_svc.workers import worker_client, worker_pool
from scheduler_svc.workers.worker_client import StepStream, WorkerClient
from scheduler_svc.workers.worker_pool import WorkerPool
from tests.fakes import VOCAB_SIZE, FakeWorker
from tests.scheduler.tiny_tokenizers import panicking_files
from tests.waiting import wait_until


@contextmanager
def pool_of(*addresses: str, **options: Any) -> Iterator[WorkerPool]:
    serving = Serving(SchedulerConfig(worker=addresses, **options), lambda delivery: None)
    serving.start()
    try:
        yield serving.pool
    finally:
        serving.stop()


def _serving(pool: WorkerPool) -> set[str]:
    return {worker.link.address for worker in pool.engine.workers}


def test_addresses_of_a_name_come_and_go_and_who_serves_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "DNS_INTERVAL_S", 0.01)
    found: set[str] = set()
    monkeypatch.setattr(worker_pool, "resolve", lambda name: set(found))
    with FakeWorker() as first, FakeWorker() as second, pool_of("dns:///workers:1") as pool:
        found.add(first.address)
        wait_until(lambda: _serving(pool) == {first.address})
        found.add(second.address)
        wait_until(lambda: _serving(pool) == {first.address, second.address})
        found.remove(first.address)
        found.add("127.0.0.1:1")
        wait_until(lambda: "127.0.0.1:1" in pool.clients)  # so it has looked since
        assert first.address in pool.clients, "no answer of a name server takes a worker that serves"
        found.remove("127.0.0.1:1")
        first.kill()
        wait_until(lambda: set(pool.clients) == _serving(pool) == {second.address})


def test_one_that_joins_in_the_moment_in_which_its_address_goes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has it already, and would go on giving it steps."""
    monkeypatch.setattr(worker_pool, "DNS_INTERVAL_S", 0.01)
    found, looks, were_looks = set[str](), list[set[str]](), threading.Event()
    now = WorkerClient._now

    def resolve(name: str) -> set[str]:
        looks.append(set(found))
        return looks[-1]

    def late(client: WorkerClient, health: pb.WorkerHealth, problem: str) -> None:
        if health == pb.WORKER_HEALTH_SERVING:  # it has joined, and has yet to say so
            found.clear()
            wait_until(lambda: looks[-2:] == [set(), set()])
            were_looks.set()
        now(client, health, problem)

    monkeypatch.setattr(worker_pool, "resolve", resolve)
    monkeypatch.setattr(WorkerClient, "_now", late)
    with FakeWorker() as worker, pool_of("dns:///workers:1") as pool:
        found.add(worker.address)
        assert were_looks.wait(60)
        wait_until(lambda: set(pool.clients) == _serving(pool) == {worker.address})


def test_a_call_over_a_channel_that_is_closed_has_failed() -> None:
    """The step loop asks before it hears that the worker is lost."""
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        stream = StepStream("127.0.0.1:1", channel, "settings")
    problems = list[str]()
    for request in (worker_pb2.LoadAdapterRequest(name="a"), worker_pb2.UnloadAdapterRequest(name="a")):
        stream.call(request, problems.append)
    assert len(problems) == 2 and all("closed" in problem for problem in problems)
    stream.close()


def test_a_worker_that_another_is_to_hold_is_given_back_with_its_answers_and_may_come_again() -> None:
    with FakeWorker(delay_s=0.01) as first, FakeWorker(delay_s=0.01) as second, pool_of() as pool:
        both = [first.address, second.address]
        pool.hold(both)
        wait_until(lambda: _serving(pool) == set(both))
        with pool_of() as other:
            other.hold([second.address])
            pool.hold([first.address])
            wait_until(lambda: _serving(pool) == {first.address} and _serving(other) == {second.address})
            assert set(pool.clients) == {first.address}
            other.hold([])
            pool.hold(both)
            wait_until(lambda: _serving(pool) == set(both) and not _serving(other))
        assert second.num_leases == 3


def test_a_worker_that_another_pool_has_drained_does_not_join() -> None:
    with FakeWorker() as worker, pool_of() as pool, pool_of() as other:
        pool.hold([worker.address])
        wait_until(lambda: _serving(pool) == {worker.address})
        pool.drain(worker.address)
        wait_until(lambda: not _serving(pool))
        other.hold([worker.address], pool.drained)
        wait_until(lambda: "it was drained" in other.clients[worker.address].state.problem)
        assert not _serving(other)


def test_a_worker_that_is_not_taken_is_asked_again_on_one_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "LEASED_RETRY_S", 0.01)
    channels, asked, check = list[str](), list[str](), WorkerPool._check

    def connect(address: str, **options: Any) -> grpc.Channel:
        channels.append(address)
        return grpc.insecure_channel(address, **options)

    def noted(pool: WorkerPool, info: worker_pb2.WorkerInfo) -> None:
        asked.append(info.instance_id)
        pool.drained = {info.instance_id} if len(asked) < 5 else set()
        check(pool, info)

    monkeypatch.setattr(WorkerPool, "_check", noted)
    with FakeWorker() as worker, pool_of() as pool:
        pool._connect = connect
        pool.hold([worker.address])
        wait_until(lambda: _serving(pool) == {worker.address})
        assert channels == [worker.address]


def test_one_that_cannot_be_reached_is_given_up_at_once() -> None:
    with pool_of() as pool:
        pool.hold(["127.0.0.1:1"])
        (client,) = pool.clients.values()
        pool.hold([])
        assert not pool.clients
        wait_until(lambda: not client._thread.is_alive())


def test_one_whose_lease_is_still_waited_for_never_joins_after_it_is_given_up() -> None:
    """It would be held for ever: nobody gives back what had not joined, and another shard is to have it."""

    asked, grants = threading.Event(), threading.Event()

    class Slow(FakeWorker):
        def Execute(self, request_iterator: Any, context: Any) -> Iterator[Any]:
            asked.set()
            assert grants.wait(60)
            yield from super().Execute(request_iterator, context)

    with Slow() as worker, pool_of() as pool:
        pool.hold([worker.address])
        (client,) = pool.clients.values()
        assert asked.wait(60)
        wait_until(lambda: client._stream is not None)
        pool.hold([])
        grants.set()
        wait_until(lambda: not client._thread.is_alive())
        assert not pool.engine.call(lambda: pool.engine.workers).result()


def test_one_that_joins_while_it_is_drained_is_drained() -> None:
    with FakeWorker() as worker, pool_of() as pool, ThreadPoolExecutor(1) as executor:
        goes_on = threading.Event()
        pool.engine.call(goes_on.wait)  # the step loop stands still
        pool.hold([worker.address])
        (client,) = pool.clients.values()
        wait_until(lambda: client.state.health == pb.WORKER_HEALTH_SERVING)
        draining = executor.submit(pool.drain, worker.address)
        wait_until(lambda: len(pool.engine._inbox) >= 2)  # it joins, and it is drained
        goes_on.set()
        assert draining.result(10) == 0
        wait_until(lambda: "it was drained" in client.state.problem)
        assert not _serving(pool)


def test_a_worker_initialises_while_its_tokenizer_is_fetched_and_made() -> None:
    class Eager(FakeWorker):
        asked = threading.Event()

        def GetTokenizer(self, request: Any, context: Any) -> Iterator[Any]:
            assert self.asked.wait(5), "Initialize is to come without waiting for the tokenizer"
            yield from super().GetTokenizer(request, context)

        def Initialize(self, request: Any, context: Any) -> Any:
            self.asked.set()
            return super().Initialize(request, context)

    with Eager() as worker, pool_of(worker.address) as pool:
        wait_until(lambda: _serving(pool) == {worker.address})
        assert pool.models.default().tokenizer.encode("a")


def test_no_more_workers_than_it_may_have_and_another_one_when_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "LEASED_RETRY_S", 0.05)
    with FakeWorker() as first, FakeWorker() as second, pool_of(first.address, max_workers=1) as pool:
        wait_until(lambda: _serving(pool) == {first.address})
        pool._add(second.address)
        refused = pool.clients[second.address]
        wait_until(lambda: refused.state.health == pb.WORKER_HEALTH_REFUSED)
        assert "there are 1 workers already (--max-workers)" in refused.state.problem
        first.kill()
        wait_until(lambda: _serving(pool) == {second.address})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("tokenizer_sha256", "another", "it sent a tokenizer .* and said another"),
        ("schema_revision", 77, "speaks schema revision 77"),
        ("vocab_size", 1 << 31, "vocab_size is .*can be"),
        ("vocab_size", 0, "vocab_size is 0"),
        ("block_size", 0, "block_size is 0"),
        ("max_num_seqs", 1 << 20, "max_num_seqs is"),
        ("max_model_len", 1 << 31, "max_model_len is"),
        ("instance_id", "", "instance_id"),
        ("device", "x" * 4096, "characters of device"),
    ],
)
def test_a_worker_that_is_not_what_it_says_is_refused(field: str, value: Any, says: str) -> None:
    with FakeWorker() as worker:
        setattr(worker._info, field, value)
        with pool_of(worker.address) as pool:
            client = pool.clients[worker.address]
            wait_until(lambda: client.state.health == pb.WORKER_HEALTH_REFUSED)
            assert re.search(says, client.state.problem) and not _serving(pool)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_device_blocks", 10**8),
        ("num_device_blocks", 0),
        ("num_host_blocks", 10**9),
        ("max_num_seqs", 9),
        ("max_model_len", 257),
        ("max_num_batched_tokens", 65),
        ("max_num_batched_tokens", 7),  # less than a token for each sequence
        ("prefill_tokens_per_s", math.nan),
        ("swap_bytes_per_s", math.inf),
        ("prefill_tokens_per_s", -1.0),
        ("prefill_tokens_per_s", 1e-310),
        ("swap_bytes_per_s", 1e-9),
        ("settings_id", ""),
    ],
)
def test_sizes_that_no_worker_has_are_refused_before_anything_is_made_of_them(field: str, value: Any) -> None:
    class Rogue(FakeWorker):
        def Initialize(self, request: Any, context: Any) -> Any:
            sizes = super().Initialize(request, context)
            setattr(sizes, field, value)
            return sizes

    with Rogue() as worker, pool_of(worker.address) as pool:
        client = pool.clients[worker.address]
        wait_until(lambda: client.state.health == pb.WORKER_HEALTH_REFUSED)
        assert "can be" in client.state.problem and not pool.models.known and not worker.num_leases


def test_who_is_wrong_time_after_time_is_asked_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "LEASED_RETRY_S", 0.05)
    asked_s: list[float] = []

    class Rogue(FakeWorker):
        def GetInfo(self, request: Any, context: Any) -> Any:
            asked_s.append(time.monotonic())
            return super().GetInfo(request, context)

    with Rogue() as worker:
        worker._info.vocab_size = 0
        with pool_of(worker.address) as pool:
            wait_until(lambda: len(asked_s) >= 5)
            gaps = [later - earlier for earlier, later in itertools.pairwise(asked_s)]
            assert all(gap >= 0.05 * 2**number for number, gap in enumerate(gaps))
            worker._info.vocab_size = VOCAB_SIZE
            wait_until(lambda: _serving(pool) == {worker.address})


@pytest.mark.parametrize("files", [panicking_files(), {"tokenizer.json": b"{}"}])
def test_a_tokenizer_that_cannot_be_used_is_its_workers_fault_alone(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client, "LEASED_RETRY_S", 0.05)

    asked: list[str] = []

    class Rogue(FakeWorker):
        def GetTokenizer(self, request: Any, context: Any) -> Iterator[Any]:
            asked.append(self.address)
            for name, data in files.items():
                yield worker_pb2.TokenizerChunk(file_name=name, data=data)

    with FakeWorker() as good, Rogue() as worker, pool_of(good.address) as pool:
        wait_until(lambda: _serving(pool) == {good.address})
        digest = hashlib.sha256(b"".join(files[name] for name in sorted(files))).hexdigest()
        worker._info.tokenizer_sha256 = digest
        pool._add(worker.address)
        client = pool.clients[worker.address]
        wait_until(lambda: len(asked) >= 3)  # it is asked again, in case its files are mended
        wait_until(lambda: client.state.health == pb.WORKER_HEALTH_REFUSED)
        assert "its tokenizer cannot be used: tokenizer.json is not readable" in client.state.problem
        assert client._num_distrusted >= 2 and _serving(pool) == {good.address}


@pytest.mark.parametrize("first", ["nothing", "end", "another lease", "heartbeat"])
def test_a_stream_that_does_not_begin_with_its_lease_is_given_up(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "LEASE_TIMEOUT_S", 0.3)

    class Rogue(FakeWorker):
        def Execute(self, request_iterator: Any, context: Any) -> Iterator[Any]:
            if first == "nothing":
                time.sleep(1.0)
            elif first == "another lease":
                lease = worker_pb2.LeaseGranted(instance_id="of another", epoch=1)
                yield worker_pb2.StepResponse(epoch=1, notice=worker_pb2.Notice(lease=lease))
            elif first == "heartbeat":
                yield worker_pb2.StepResponse(epoch=1, heartbeat=worker_pb2.Heartbeat())

    with Rogue() as worker, pool_of(worker.address) as pool:
        client = pool.clients[worker.address]
        wait_until(lambda: client.state.health == pb.WORKER_HEALTH_REFUSED)
        assert "lease" in client.state.problem or "without a word" in client.state.problem
        assert not _serving(pool) and not pool.engine.workers


def test_a_worker_that_could_never_join_defines_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another scheduler holds it: its model is not this pool's."""
    monkeypatch.setattr(worker_client, "LEASED_RETRY_S", 0.02)

    class Held(FakeWorker):
        def Execute(self, request_iterator: Any, context: Any) -> Iterator[Any]:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another scheduler holds the lease")
            yield

    with Held(model_hash="held") as held, FakeWorker() as right, pool_of(held.address) as pool:
        wait_until(lambda: "another scheduler" in pool.clients[held.address].state.problem)
        assert not pool.models.known
        pool._add(right.address)
        wait_until(lambda: _serving(pool) == {right.address})
        assert [each.model.model_hash for each in pool.models.known] == ["fake"]
