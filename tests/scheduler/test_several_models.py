"""Workers of several models behind one scheduler: each request gets its own model's tokens, and models come and go."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from octavo.shared.ports import free_port
from protos import inference_pb2 as pb
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.errors import NotReady, UnknownName
from scheduler_svc.models.served_models import AwaitedModel, ServedModels
from scheduler_svc.output.output_processor import Delivery
from scheduler_svc.serving import Serving
from scheduler_svc.text.tokenizer import Tokenizer
from scheduler_svc.workers import worker_client
from tests.fakes import FakeWorker, spell
from tests.scheduler.hashed_tokens import hashed_after
from tests.scheduler.test_metrics import read

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def _asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "LEASED_RETRY_S", 0.02)


class Pool:
    """A `Serving` whose models are looked at as the scheduler's readiness does, and what came of requests."""

    def __init__(self, **options: Any) -> None:
        self._deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self.serving = Serving(SchedulerConfig(worker=("127.0.0.1:1",), **options), self._deliveries.put)
        self.text: dict[str, str] = {}
        self.ends: dict[str, pb.OutputDelta] = {}

    def add(self, worker: FakeWorker) -> None:
        """Returns when it serves."""
        self.serving.pool._add(worker.address)
        self.wait(lambda: worker.address in {each.link.address for each in self.serving.engine.workers})

    def refusal(self, worker: FakeWorker) -> str:
        """Why a worker may not join."""
        if worker.address not in self.serving.pool.clients:
            self.serving.pool._add(worker.address)
        client = self.serving.pool.clients[worker.address]
        self.wait(lambda: client.state.health == pb.WORKER_HEALTH_REFUSED)
        return client.state.problem

    @property
    def models(self) -> ServedModels:
        return self.serving.pool.look()

    def submit(self, request_id: str, model: str = "", **params: Any) -> None:
        request = pb.GenerateRequest(
            request_id=request_id,
            model=model,
            prompt="say|",
            sampling_params=pb.SamplingParams(temperature=0, **params),
        )
        self.text[request_id] = ""
        self.serving.engine.submit(self.serving.frontend.prepare(request))

    def finish(self, *request_ids: str) -> list[str]:
        """The texts of requests that are to end well."""
        self.wait(lambda: all(request_id in self.ends for request_id in request_ids))
        ends = [self.ends[request_id] for request_id in request_ids]
        assert all(end.finish_reason == pb.FINISH_REASON_STOP for end in ends), ends
        return [self.text[request_id] for request_id in request_ids]

    def wait(self, holds: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, (self.text, self.serving.pool.models)
            try:
                delivery = self._deliveries.get(timeout=0.005)
            except queue.Empty:
                continue
            for stream, response in delivery:
                for delta in response.outputs:
                    self.text[stream.group.request_id] += delta.text
                    if delta.finish_reason:
                        self.ends[stream.group.request_id] = delta


@contextmanager
def a_pool(*workers: FakeWorker, **options: Any) -> Iterator[Pool]:
    pool = Pool(**options)
    pool.serving.start()
    pool.serving.pool.hold(())  # the address that its options had to have is nobody's
    try:
        for worker in workers:
            pool.add(worker)
        yield pool
    finally:
        pool.serving.stop()


def _names(models: ServedModels) -> list[tuple[str, int, int]]:
    return [(each.model.model_hash, each.num_serving, each.num_draining) for each in models.known]


def test_requests_get_the_model_that_they_name() -> None:
    with (
        FakeWorker(spell("of a"), model="a", model_hash="a") as a,
        FakeWorker(spell("of b"), model="b", model_hash="b") as b,
        FakeWorker(spell("of b"), model="b", model_hash="b") as another_b,
        a_pool(a, b, another_b) as pool,
    ):
        assert _names(pool.models) == [("a", 1, 0), ("b", 2, 0)]
        for number in range(6):
            pool.submit(f"a{number}", model="a")
            pool.submit(f"b{number}", model="b")
            pool.submit(f"none{number}")
        assert pool.finish(*(f"a{number}" for number in range(6))) == ["of a"] * 6
        assert pool.finish(*(f"b{number}" for number in range(6))) == ["of b"] * 6
        assert pool.finish(*(f"none{number}" for number in range(6))) == ["of a"] * 6
        with pytest.raises(UnknownName, match="'a' and 'b' are"):
            pool.submit("c", model="c")


def test_models_with_one_name_are_revisions_and_the_newest_takes_new_requests() -> None:
    with (
        FakeWorker(spell("the old one's"), delay_s=0.01, model_hash="old") as old,
        FakeWorker(spell("the new one's"), model_hash="new") as new,
        a_pool(old) as pool,
    ):
        (old_model,) = (each.model for each in pool.models.known)
        pool.submit("before")
        pool.wait(lambda: pool.text["before"])
        pool.add(new)
        pool.submit("after")
        pool.submit("by revision", model=f"fake-model@{old_model.fingerprint[:8]}")
        assert pool.finish("before", "after", "by revision") == ["the old one's", "the new one's", "the old one's"]
        new.kill()
        pool.wait(lambda: _names(pool.models)[1] == ("new", 0, 0))
        pool.submit("back")
        assert pool.finish("back") == ["the old one's"]


def test_the_last_worker_of_a_model_ends_what_it_has_before_it_leaves_and_takes_nothing_new() -> None:
    with (
        FakeWorker(spell("the old one's"), delay_s=0.01, max_num_seqs=2, model_hash="old") as old,
        FakeWorker(spell("the new one's"), model_hash="new") as new,
        a_pool(old, new) as pool,
    ):
        name = f"fake-model@{pool.models.known[0].model.fingerprint}"
        waiting = [f"old {number}" for number in range(6)]  # for two places
        for request_id in waiting:
            pool.submit(request_id, model=name)
        pool.wait(lambda: pool.text["old 0"])
        pool.serving.pool.drain(old.address)
        assert _names(pool.models) == [("old", 0, 1), ("new", 1, 0)]
        pool.submit("new")
        pool.submit("late", model=name)
        assert pool.finish(*waiting, "new") == ["the old one's"] * 6 + ["the new one's"]
        assert "it was drained" in pool.refusal(old)
        assert not pool.text["late"] and "late" not in pool.ends
        with FakeWorker(spell("the old one's"), model_hash="old") as again:
            pool.add(again)
            assert pool.finish("late") == ["the old one's"]


def test_who_finishes_gives_its_requests_to_another_of_its_model_that_comes() -> None:
    with FakeWorker(delay_s=0.01, model_hash="a") as first, FakeWorker(model_hash="a") as second, a_pool(first) as pool:
        pool.submit("one", max_tokens=100)
        pool.wait(lambda: len(pool.text["one"]) > 3)
        pool.serving.pool.drain(first.address)
        pool.add(second)
        pool.wait(lambda: "one" in pool.ends)
        assert pool.text["one"] == bytes(hashed_after("say|", 100)).decode()
        assert [each.link.address for each in pool.serving.engine.workers] == [second.address]


def test_who_finishes_takes_back_what_a_fault_has_thrown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeWorker(delay_s=0.01, model_hash="a") as only, a_pool(only) as pool:
        pool.submit("one", max_tokens=60)
        pool.wait(lambda: len(pool.text["one"]) > 3)
        pool.serving.pool.drain(only.address)
        (worker,) = pool.serving.engine.workers
        schedule = worker.scheduler.schedule
        faults = iter([RuntimeError("a fault of our own")])

        def fail_once(*arguments: Any, **options: Any) -> Any:
            for fault in faults:
                raise fault
            return schedule(*arguments, **options)

        monkeypatch.setattr(worker.scheduler, "schedule", fail_once)
        pool.wait(lambda: "one" in pool.ends)
        assert pool.text["one"] == bytes(hashed_after("say|", 60)).decode()
        pool.wait(lambda: not pool.serving.engine.workers)


def test_arithmetic_and_vocabulary_of_another_worker_make_another_revision() -> None:
    with FakeWorker(spell("float32")) as first, FakeWorker(spell("int8")) as second, a_pool(first) as pool:
        second._info.quantization = "int8"
        pool.add(second)
        assert [each.model.quantization for each in pool.models.known] == ["", "int8"]
        pool.submit("one")
        assert pool.finish("one") == ["int8"]


def test_a_worker_with_blocks_of_another_size_is_refused_until_its_models_others_are_gone() -> None:
    with FakeWorker() as first, FakeWorker(block_size=8) as second, a_pool(first) as pool:
        assert "its cache blocks hold 8 tokens, those of its model's other workers 4" in pool.refusal(second)
        first.kill()
        pool.wait(lambda: [each.info.block_size for each in pool.serving.engine.workers] == [8])
        assert pool.models.default().block_size == 8


def test_a_model_without_workers_is_waited_for_and_then_unknown() -> None:
    with FakeWorker(spell("stays"), model="a", model_hash="a") as stays, a_pool(stays, worker_wait_timeout=0.4) as pool:
        with FakeWorker(spell("goes"), model="b", model_hash="b") as goes:
            pool.add(goes)
            pool.submit("one", model="b")
            assert pool.finish("one") == ["goes"]
        pool.wait(lambda: _names(pool.models) == [("a", 1, 0), ("b", 0, 0)])
        with FakeWorker(spell("back"), port=goes.port, model="b", model_hash="b"):
            pool.submit("waits", model="b")
            assert pool.finish("waits") == ["back"]
        pool.submit("in vain", model="b")
        pool.wait(lambda: "in vain" in pool.ends)
        assert "none of the workers that are left serves its model" in pool.ends["in vain"].error.message
        pool.wait(lambda: _names(pool.models) == [("a", 1, 0)])
        with pytest.raises(UnknownName, match="model 'b' is not served here; 'a' is"):
            pool.submit("late", model="b")
        pool.submit("other", model="a")
        assert pool.finish("other") == ["stays"]


def test_errors_of_a_models_outage_are_counted_under_its_name() -> None:
    with FakeWorker(model="a", model_hash="a") as stays, a_pool(stays, worker_wait_timeout=1.5) as pool:
        with FakeWorker(model="b", model_hash="b") as goes:
            pool.add(goes)
        pool.wait(lambda: _names(pool.models) == [("a", 1, 0), ("b", 0, 0)])
        pool.submit("in vain", model="b")
        pool.serving.pool._forget_after_s = 0.0  # the model is forgotten while the request waits, as any that came late
        assert _names(pool.models) == [("a", 1, 0)]
        assert read(pool.serving.engine)["octavo:num_requests_waiting b"] == 1
        pool.wait(lambda: "in vain" in pool.ends)
        assert pool.ends["in vain"].finish_reason == pb.FINISH_REASON_ERROR
        samples = read(pool.serving.engine)
        assert samples["octavo:request_success_total error b"] == 1
        assert samples["octavo:request_success_total error a"] == 0


def test_no_model_is_forgotten_while_all_workers_are_lost() -> None:
    with a_pool(worker_wait_timeout=0.05) as pool:
        with FakeWorker(model="a", model_hash="a") as a, FakeWorker(model="b", model_hash="b") as b:
            pool.add(a)
            pool.add(b)
        pool.wait(lambda: _names(pool.models) == [("a", 0, 0), ("b", 0, 0)])
        time.sleep(0.1)
        assert _names(pool.models) == [("a", 0, 0), ("b", 0, 0)]
        with FakeWorker(model="b", model_hash="b", port=b.port):
            pool.wait(lambda: _names(pool.models) == [("b", 1, 0)])


def test_no_more_models_than_may_be_known_but_an_empty_one_that_nobody_waits_for_gives_way() -> None:
    with (
        FakeWorker(model="a", model_hash="a") as a,
        FakeWorker(delay_s=0.01, model="b", model_hash="b") as b,
        FakeWorker(model="c", model_hash="c") as c,
        a_pool(a, b, max_models=2, worker_wait_timeout=60) as pool,
    ):
        assert "2 models are known already (--max-models): a, b" in pool.refusal(c)
        pool.submit("waits", model="b", max_tokens=200)
        pool.wait(lambda: pool.text["waits"])
        b.kill()
        pool.wait(lambda: _names(pool.models)[1] == ("b", 0, 0))
        assert "2 models are known already" in pool.refusal(c), "a request waits for it"
        pool.serving.engine.abort("waits")
        pool.wait(lambda: _names(pool.models) == [("a", 1, 0), ("c", 1, 0)])


def test_a_worker_that_never_gets_its_lease_takes_no_models_place() -> None:
    class Held(FakeWorker):
        def Execute(self, request_iterator: Any, context: Any) -> Iterator[Any]:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another scheduler holds the lease")
            yield

    with (
        Held(model="held", model_hash="held") as held,
        FakeWorker(model="a", model_hash="a") as a,
        a_pool(max_models=1) as pool,
    ):
        pool.serving.pool._add(held.address)
        pool.wait(lambda: "another scheduler" in pool.serving.pool.clients[held.address].state.problem)
        with pytest.raises(NotReady):
            pool.submit("early")
        pool.add(a)
        assert _names(pool.models) == [("a", 1, 0)]


def test_a_name_is_unknown_only_once_the_workers_are_known() -> None:
    """Of a worker that has not been heard of any model is awaited, of one whose lease another has its own."""

    is_held = threading.Event()
    is_held.set()

    class Held(FakeWorker):
        def Execute(self, request_iterator: Any, context: Any) -> Iterator[Any]:
            if is_held.is_set():
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another scheduler holds the lease")
            yield from super().Execute(request_iterator, context)

    port = free_port()
    with FakeWorker(spell("a"), model="a", model_hash="a") as a, a_pool(a) as pool:
        pool.serving.pool._add(f"127.0.0.1:{port}")
        assert pool.models.awaited
        for name in ("b", "nobody"):
            with pytest.raises(NotReady, match="not all workers have joined yet"):
                pool.submit("early", model=name)
        with Held(spell("b"), port=port, model="b", model_hash="b"):
            pool.wait(lambda: AwaitedModel() not in pool.models.awaited)
            with pytest.raises(NotReady, match="model 'b' is not served here; 'a' is; not all"):
                pool.submit("early", model="b")
            with pytest.raises(UnknownName, match="model 'nobody' is not served here; 'a' is"):
                pool.submit("early", model="nobody")
            is_held.clear()
            pool.wait(lambda: _names(pool.models) == [("a", 1, 0), ("b", 1, 0)])
            pool.submit("late", model="b")
            assert pool.finish("late") == ["b"]


def test_a_worker_that_is_not_heard_of_is_awaited_as_long_as_a_lost_one() -> None:
    with FakeWorker(model="a", model_hash="a") as a, a_pool(a, worker_wait_timeout=0.3) as pool:
        pool.serving.pool._add(f"127.0.0.1:{free_port()}")
        assert pool.models.awaited
        pool.wait(lambda: not pool.models.awaited)
        with pytest.raises(UnknownName):
            pool.submit("late", model="b")


def test_what_the_others_share_serves_is_not_unknown_here() -> None:
    """Its client goes on to the other scheduler, or comes back when this one has taken the worker over."""
    with (
        FakeWorker(model="a", model_hash="a") as a,
        FakeWorker(model="b", model_hash="b") as b,
        a_pool(a, worker_quota=1, takeover_after=60.0) as pool,
    ):
        assert "its share of 1" in pool.refusal(b)
        assert pool.models.awaited
        with pytest.raises(NotReady, match="model 'b' is not served here"):
            pool.submit("early", model="b")
        pool.wait(lambda: AwaitedModel() not in pool.models.awaited)
        with pytest.raises(UnknownName):
            pool.submit("early", model="c")


def test_names_that_are_given_to_models() -> None:
    names = ("big=org/large", "small=org/tiny")
    with (
        FakeWorker(spell("tiny"), model="org/tiny", model_hash="tiny") as tiny,
        FakeWorker(spell("large"), model="org/large", model_hash="large") as large,
        a_pool(tiny, served_model_name=names) as pool,
    ):
        with pytest.raises(NotReady, match="no worker of 'big', the default"):
            pool.submit("early")
        pool.add(large)
        pool.submit("default")
        pool.submit("by name", model="small")
        assert pool.finish("default", "by name") == ["large", "tiny"]


def test_what_was_prepared_for_a_model_that_has_gone_is_not_run_by_another() -> None:
    with FakeWorker(spell("b"), model="b", model_hash="b") as b, a_pool(b, worker_wait_timeout=0.3) as pool:
        with FakeWorker(spell("a"), model="a", model_hash="a") as a:
            pool.add(a)
            late = pool.serving.frontend.prepare(pb.GenerateRequest(request_id="late", model="a", prompt="say|"))
        pool.wait(lambda: _names(pool.models) == [("b", 1, 0)])
        pool.text["late"] = ""
        pool.serving.engine.submit(late)
        pool.wait(lambda: "late" in pool.ends)
        assert not pool.text["late"] and pool.ends["late"].finish_reason == pb.FINISH_REASON_ERROR


def test_a_forgotten_models_tokenizer_is_freed() -> None:
    with FakeWorker(model="a", model_hash="a") as a, a_pool(a, worker_wait_timeout=0.1) as pool:
        with FakeWorker(spell("b"), model="b", model_hash="b", tokenizer_seed=1) as b:
            pool.add(b)
            pool.submit("one", model="b")
            assert pool.finish("one") == ["b"]
            tokenizer = weakref.ref(pool.models.known[1].model.tokenizer)
            assert tokenizer() is not pool.models.known[0].model.tokenizer
        Tokenizer.load(pool.models.known[0].model.tokenizer.files)  # is the last that was asked for
        pool.wait(lambda: _names(pool.models) == [("a", 1, 0)])
        pool.submit("two", max_tokens=3)  # what is written last is held until the next is
        pool.wait(lambda: "two" in pool.ends)

        def is_freed() -> bool:
            gc.collect()
            return tokenizer() is None

        pool.wait(is_freed)
