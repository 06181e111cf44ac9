"""The worker that other tests believe: its sizes, its adapters, its answers, and what a broken cache does."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from octavo.shared.rpc import CHANNEL_OPTIONS
from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from tests.fakes import FakeWorker, beam_logprobs, hashed_token
from tests.worker.fake_model import decode, prefill, slots_u16, tokens_of, u32


class Lease:
    """A scheduler's end of the step stream."""

    def __init__(self, worker: FakeWorker) -> None:
        self.stub = worker_pb2_grpc.WorkerStub(grpc.insecure_channel(worker.address, options=CHANNEL_OPTIONS))
        bounds = worker_pb2.InitializeRequest(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
        self.sizes = self.stub.Initialize(bounds)
        self._requests: queue.SimpleQueue[worker_pb2.StepRequest | None] = queue.SimpleQueue()
        self._responses = self.stub.Execute(iter(self._requests.get, None))
        self._requests.put(worker_pb2.StepRequest(open=worker_pb2.OpenLease(settings_id=self.sizes.settings_id)))
        self.epoch = self.next("notice").lease.epoch

    def next(self, kind: str) -> Any:
        while (response := next(self._responses)).WhichOneof("kind") != kind:
            assert response.WhichOneof("kind") == "heartbeat"
        return getattr(response, kind)

    def run(self, step: worker_pb2.Step) -> worker_pb2.StepResult:
        self._requests.put(worker_pb2.StepRequest(epoch=self.epoch, step=step))
        result: worker_pb2.StepResult = self.next("result")
        return result

    def close(self) -> None:
        self._requests.put(None)


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    with FakeWorker(num_host_blocks=8, swap_bytes_per_s=5e8, max_loras=2) as worker:
        yield worker


def test_sizes_are_those_asked_for(worker: FakeWorker) -> None:
    sizes = Lease(worker).sizes
    assert (sizes.num_device_blocks, sizes.num_host_blocks, sizes.swap_bytes_per_s) == (64, 8, 5e8)
    assert sizes.block_bytes > 0
    with FakeWorker() as other:
        sizes = Lease(other).sizes
        assert (sizes.num_host_blocks, sizes.swap_bytes_per_s) == (0, 0)


def test_children_say_different_things_and_beams_answer_candidates(worker: FakeWorker) -> None:
    lease = Lease(worker)
    beams = inference_pb2.SamplingParams(seed=1, temperature=0, best_of=2, use_beam_search=True)
    step = prefill(1, [[40, 41], [50, 51]], max_len=8)
    step.groups[0].sequences.add(slot=2, index=1, same_as_slot=0)
    step.groups[1].sampling_params.CopyFrom(beams)
    step.rows.num_samples_u16, step.rows.child_slots_u16 = slots_u16([2, 4]), slots_u16([0, 2])
    outputs = lease.run(step).outputs
    history = np.array([40, 41])
    logprobs = beam_logprobs(np.array([50, 51]))
    best = np.argsort(-logprobs, kind="stable")[:4].tolist()
    tokens = np.frombuffer(outputs.token_ids_i32, "<i4").tolist()
    assert tokens == [hashed_token(history, 0), hashed_token(history, 1), *best] and tokens[0] != tokens[1]
    assert np.frombuffer(outputs.logprobs_f32, "<f4").tolist() == [0, 0, *logprobs[best].tolist()]


def test_adapter_is_acknowledged_before_its_groups_come(worker: FakeWorker) -> None:
    lease = Lease(worker)
    assert lease.stub.GetInfo(worker_pb2.GetInfoRequest()).max_loras == 2
    lease.stub.LoadAdapter(worker_pb2.LoadAdapterRequest(name="french", generation=3, epoch=lease.epoch))
    loaded = lease.next("notice").adapter_loaded
    assert (loaded.name, loaded.generation) == ("french", 3) and worker.adapters == {"french": 3}
    step = prefill(1, [[40, 41]], max_len=8)
    step.groups[0].adapter = "french"
    assert tokens_of(lease.run(step)) == [hashed_token(np.array([40, 41]))]
    lease.run(worker_pb2.Step(step_id=2, released_slots_u16=b"\0\0"))
    lease.stub.UnloadAdapter(worker_pb2.UnloadAdapterRequest(name="french", epoch=lease.epoch))
    assert worker.adapters == {}
    with pytest.raises(grpc.RpcError) as refused:
        lease.stub.UnloadAdapter(worker_pb2.UnloadAdapterRequest(name="french", epoch=lease.epoch))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as refused:
        lease.stub.LoadAdapter(worker_pb2.LoadAdapterRequest(name="french", generation=4, epoch=lease.epoch + 1))
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION and worker.adapters == {}


def test_new_lease_finds_neither_adapters_nor_sequences(worker: FakeWorker) -> None:
    first = Lease(worker)
    first.stub.LoadAdapter(worker_pb2.LoadAdapterRequest(name="french", generation=3, epoch=first.epoch))
    first.next("notice")
    first.run(prefill(1, [[40, 41]], max_len=8))
    first.close()
    second = Lease(worker)
    assert second.epoch == first.epoch + 1 and worker.adapters == {}
    assert tokens_of(second.run(prefill(1, [[42]], max_len=8))) == [hashed_token(np.array([42]))]


def test_broken_cache_ends_the_stream_and_the_test() -> None:
    step = prefill(1, [[40, 41, 42, 43, 44]], max_len=8)
    swapped = decode(2, [0])
    swapped.swap_in.pairs_u32 = u32([3, 0])  # a host block that nothing was swapped to
    with pytest.raises(AssertionError, match=r"step 2: .* position 0 of slot 0 .* block 0"):
        with FakeWorker(num_host_blocks=8) as worker:
            lease = Lease(worker)
            lease.run(step)
            with pytest.raises(grpc.RpcError):
                lease.run(swapped)
