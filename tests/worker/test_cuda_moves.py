"""What waits for what when blocks are swapped on a GPU, on a simulated one."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.oracles import reference
from protos import worker_pb2
from tests.worker.fake_model import FakeModel, decode, fake_config, prefill, slots_u16, u32
from tests.worker.late_outputs import Arrivals
from tests.worker.simulated_device import Operation, SimulatedDevice, Work, addresses
from worker_svc.cache.cuda_moves import CudaMoves
from worker_svc.mirror.sequence_states import SequenceStates
from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.logit_reader import LogitReader
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.step_pipeline import StepPipeline
from worker_svc.steps.step_timer import StepTimer

LAYERS, BLOCK = 2, (1, 2, 4)
NUM_BLOCKS, NUM_HOST_BLOCKS = 12, 9
BLOCK_BYTES = LAYERS * 2 * 8 * 4


def new_cache() -> torch.Tensor:
    values = torch.arange(LAYERS * 2 * NUM_BLOCKS * 8, dtype=torch.float32)
    return values.view(LAYERS, 2, NUM_BLOCKS, *BLOCK)


def pairs_of(sources: list[int], destinations: list[int]) -> torch.Tensor:
    return torch.tensor([sources, destinations], dtype=torch.int64).T.contiguous()


class Device(Protocol):
    """Where steps are computed: a simulated GPU, or one that is there (`tests.worker.test_gpu_streams`)."""

    def enqueue(self, name: str, work: Work, reads: Iterable[int] = (), writes: Iterable[int] = ()) -> Operation:
        """On the current stream."""


@dataclass
class Steps:
    """What a worker does with a cache: moves, and steps that read and write blocks; and what has to come of it."""

    device: Device
    moves: CudaMoves
    cache: torch.Tensor
    expected: torch.Tensor
    expected_host: torch.Tensor
    lost: set[int] = field(default_factory=set)  # blocks that a failed operation was to write
    lost_on_host: set[int] = field(default_factory=set)
    count: int = 0

    @classmethod
    def of(cls, device: SimulatedDevice, piece_blocks: int, num_areas: int = 2) -> Steps:
        cache = new_cache()
        moves = CudaMoves(cache, NUM_HOST_BLOCKS, piece_blocks * BLOCK_BYTES, num_areas)
        return cls(device, moves, cache, cache.clone(), moves._host.clone())

    def compute(self, read: list[int], written: list[int]) -> Operation:
        """What it writes depends on all that it reads."""
        self.count += 1
        self.moves.hold_steps(
            torch.tensor(read, dtype=torch.int64).numpy(), torch.tensor(written, dtype=torch.int64).numpy()
        )
        cache, number = self.cache, self.count
        operation = self.device.enqueue(
            f"step {number}",
            lambda: _compute(cache, read, written, number),
            addresses(cache, read),
            addresses(cache, written),
        )
        _compute(self.expected, read, written, number)
        self.lost -= set(written)
        return operation

    def swap_out(self, cached: list[int], hosted: list[int]) -> None:
        self.lost_on_host |= set(hosted)
        self.moves.swap_out(pairs_of(cached, hosted))
        reference.copy_blocks(self.expected, self.expected_host, pairs_of(cached, hosted))
        self.lost_on_host -= set(hosted)

    def swap_in(self, hosted: list[int], cached: list[int]) -> None:
        self.lost |= set(cached)
        self.moves.swap_in(pairs_of(hosted, cached))
        reference.copy_blocks(self.expected_host, self.expected, pairs_of(hosted, cached))
        self.lost -= set(cached)

    def copy(self, sources: list[int], destinations: list[int]) -> None:
        self.lost |= set(destinations)
        self.moves.copy(pairs_of(sources, destinations))
        reference.copy_blocks(self.expected, self.expected, pairs_of(sources, destinations))
        self.lost -= set(destinations)

    def check(self) -> None:
        """Once everything is done."""
        kept = [block for block in range(NUM_BLOCKS) if block not in self.lost]
        assert torch.equal(self.cache.cpu()[:, :, kept], self.expected[:, :, kept])
        kept = [block for block in range(NUM_HOST_BLOCKS) if block not in self.lost_on_host]
        assert torch.equal(self.moves._host[:, :, kept], self.expected_host[:, :, kept])


def _compute(cache: torch.Tensor, read: list[int], written: list[int], number: int) -> None:
    at = cache.device
    weights = torch.arange(1, len(read) + 1, device=at)[:, None, None, None]
    seen = (cache[:, :, read] * weights).sum(2, keepdim=True) if read else torch.zeros(1, device=at)
    cache[:, :, written] = (seen + 31 * number + torch.arange(len(written), device=at)[:, None, None, None]) % 4093


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    return SimulatedDevice(monkeypatch)


# ---- one swap --------------------------------------------------------------------------------------------------------


def test_a_step_waits_for_no_swap_of_other_blocks(device: SimulatedDevice) -> None:
    """However large the swap is."""
    steps = Steps.of(device, piece_blocks=1)
    first = steps.compute([0, 1, 2, 3, 4, 5], [6])
    steps.swap_out([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4])
    assert steps.compute([6, 7, 0], [8]).after == {first}, "a block may be read while it is gathered"
    steps.swap_in([5, 3, 1, 0], [9, 10, 11, 0])
    before = steps.compute([6, 8], [7])
    assert {operation.name for operation in before.after} == {"step 1", "step 2"}


def test_who_overwrites_a_block_waits_until_it_is_gathered_and_not_for_the_bus(device: SimulatedDevice) -> None:
    steps = Steps.of(device, piece_blocks=2)
    steps.swap_out([0, 1, 2, 3], [0, 1, 5, 6])
    after = steps.compute([], [0, 3]).after
    assert [operation.name for operation in device.operations if operation in after] == ["copy_blocks"] * 2
    steps.swap_out([4, 5], [2, 3])  # into the first area again
    after = steps.compute([], [5]).after
    assert sum(operation.name == "transfer" for operation in after) == 1, "what was in the area before has left it"


def test_what_comes_back_is_on_the_bus_beside_the_step_and_put_in_its_place_after_it(device: SimulatedDevice) -> None:
    steps = Steps.of(device, piece_blocks=1)
    first = steps.compute([0, 1, 2], [3])
    steps.swap_in([4, 7], [0, 1])
    fetched, scattered = device.operations[1], device.operations[2]
    assert (fetched.name, fetched.after) == ("transfer", set())
    assert scattered.after == {first, fetched}
    assert steps.compute([2], [4]).after == {first}
    reader = steps.compute([0, 2], [4])
    assert scattered in reader.after and device.operations[4] not in reader.after, "the second piece"


def test_a_block_that_a_swap_still_fills_on_the_host_is_not_read(device: SimulatedDevice) -> None:
    steps = Steps.of(device, piece_blocks=4)
    steps.swap_out([0, 1], [3, 4])
    stored = device.operations[-1]
    steps.swap_in([7, 8], [2, 3])
    assert stored not in device.operations[-2].after
    steps.swap_in([4], [5])
    assert stored in device.operations[-2].after


def test_a_copy_waits_for_its_blocks(device: SimulatedDevice) -> None:
    steps = Steps.of(device, piece_blocks=4)
    steps.swap_in([0], [0])
    scattered = device.operations[-1]
    steps.copy([1, 2], [3, 4])
    assert device.operations[-1].after == set()
    steps.copy([0], [5])
    assert scattered in device.operations[-1].after


def test_when_everything_is_over_nothing_is_waited_for(device: SimulatedDevice) -> None:
    steps = Steps.of(device, piece_blocks=1)
    are_under_way = [steps.moves.are_under_way]
    steps.swap_out([0, 1, 2], [0, 1, 2])
    steps.swap_in([0, 1], [0, 1])
    are_under_way.append(steps.moves.are_under_way)
    device.advance(random.Random(0))
    assert [*are_under_way, steps.moves.are_under_way] == [False, True, False]
    steps.compute([0, 1], [2])
    assert [operation.name for operation, _ in device.steps.queue] == ["step 1"], "no event is waited for"


def test_areas_hold_what_is_worth_it(device: SimulatedDevice) -> None:
    """Never more blocks than the host has, as many as fit in their bytes, and one at least."""
    cache = new_cache()
    for area_bytes, capacity in ((100 * BLOCK_BYTES, NUM_HOST_BLOCKS), (3 * BLOCK_BYTES - 1, 2), (1, 1)):
        area = next(CudaMoves(cache, NUM_HOST_BLOCKS, area_bytes, 2)._areas_out)
        assert area.blocks.shape == (LAYERS, 2, capacity, *BLOCK)


class TouchingModel(FakeModel):
    """Reads the blocks of its sequences on a simulated device, and writes those of its tokens."""

    def __init__(self, simulated: SimulatedDevice) -> None:
        super().__init__()
        self.simulated, self.steps = simulated, list[Operation]()

    @classmethod
    def in_a_worker(cls, simulated: SimulatedDevice) -> tuple[TouchingModel, StepPipeline]:
        """With 16 blocks of 4 tokens, and 8 on the host."""
        model = cls(simulated)
        runner = ModelRunner(model, fake_config(16), block_size=4)
        runner.allocate_cache(16, 8)
        runner.cache._moves = CudaMoves(runner.cache.store, 8, 1, 2)
        states = SequenceStates(4, 16, 4, 16, 8)
        return model, StepPipeline(runner, states, 64, Arrivals().when_here, lambda: None, lambda: None)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        attention: AttentionMetadata,
        logits_rows: torch.Tensor,
        reader: LogitReader | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys = caches[0][0]
        tables = zip(attention.block_tables.tolist(), attention.seq_lens.tolist(), strict=True)
        read = [keys[block].data_ptr() for table, length in tables for block in table[: -(-length // 4)]]
        written = [keys[slot // 4].data_ptr() for slot in attention.slot_mapping.tolist()]
        self.steps.append(self.simulated.enqueue("step", lambda: None, read, written))
        return super().forward(token_ids, positions, caches, attention, logits_rows, reader, out)


def test_a_worker_has_steps_wait_for_their_own_blocks(device: SimulatedDevice) -> None:
    model, pipeline = TouchingModel.in_a_worker(device)
    pairs = worker_pb2.BlockPairs
    first = prefill(1, [[3, 4, 5, 6, 7], [8, 9, 3]], max_len=16)  # in blocks 0 to 3 and 4 to 7
    second, third, fourth = (decode(number, slots) for number, slots in ((2, [1]), (3, [1]), (4, [0, 1])))
    second.swap_out.CopyFrom(pairs(pairs_u32=u32([0, 5, 1, 2, 9, 3])))
    third.swap_in.CopyFrom(pairs(pairs_u32=u32([5, 0, 2, 1])))  # of which the last step reads the second
    for step in (first, second, third, fourth):
        pipeline.take(step, StepTimer(0), lambda result: None)
    assert list(device.unordered()) == []
    assert model.steps[2].after == set(model.steps[:2]), "of the swapped blocks it has none"
    assert len(model.steps[3].after - set(model.steps)) > 0


def test_after_a_failed_step_its_swaps_are_waited_for_as_ever(device: SimulatedDevice) -> None:
    model, pipeline = TouchingModel.in_a_worker(device)
    results: list[worker_pb2.StepResult] = []
    failing = decode(2, [1])
    failing.swap_out.CopyFrom(worker_pb2.BlockPairs(pairs_u32=u32([0, 5, 1, 6])))
    failing.swap_in.CopyFrom(worker_pb2.BlockPairs(pairs_u32=u32([7, 9])))
    again = prefill(3, [[3, 4, 5], [8, 9, 3]], max_len=16)
    again.resume_after, again.released_slots_u16 = 2, slots_u16([0, 1])
    again.groups[1].sequences[0].block_table[:] = [9, 10, 11, 12]
    pipeline.take(prefill(1, [[3, 4, 5, 6, 7], [8, 9, 3]], max_len=16), StepTimer(0), results.append)
    model.error = RuntimeError("no more")
    for step in (failing, again):
        pipeline.take(step, StepTimer(0), results.append)
    statuses = worker_pb2.STEP_STATUS_OK, worker_pb2.STEP_STATUS_FAILED, worker_pb2.STEP_STATUS_OK
    assert tuple(result.status for result in results) == statuses
    assert list(device.unordered()) == []
    moved = [operation for operation in model.steps[2].after if operation.stream is not device.steps]
    assert len(moved) == 3, "a block is gathered, and one fetched and scattered; what was stored is of no concern"


# ---- any sequence of steps -------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), piece_blocks=st.integers(1, 4), num_areas=st.integers(1, 3), fails=st.booleans())
def test_whatever_is_enqueued_every_order_that_streams_allow_gives_what_one_after_the_other_gives(
    seed: int, piece_blocks: int, num_areas: int, fails: bool
) -> None:
    """With operations that fail, and without; then a step waits for no move whose blocks it does not touch, too."""
    chance = random.Random(seed)
    is_failing = [False]  # not while everything is set up
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = SimulatedDevice(monkeypatch, lambda: is_failing[0] and chance.random() < 0.05)
        steps = Steps.of(device, piece_blocks, num_areas)
        is_failing[0] = fails
        for _ in range(12):
            try:
                random_operations(steps, chance)
                read = chance.sample(
                    _whole(NUM_BLOCKS, steps.lost), k=min(chance.randrange(5), NUM_BLOCKS - len(steps.lost))
                )
                written = chance.sample(range(NUM_BLOCKS), k=chance.randrange(3))
                steps.compute(read, written)
            except torch.OutOfMemoryError:
                assert fails
                continue
            finally:
                device.advance(chance, chance.choice((0, 0, 3, 10)))
        assert list(device.unordered()) == []
        if not fails:
            _check_that_steps_wait_for_no_more_than_they_must(device)
        device.advance(chance)
        steps.check()


def _check_that_steps_wait_for_no_more_than_they_must(device: SimulatedDevice) -> None:
    """They come after the steps before them, and after moves of their own blocks; with all that those come after."""
    reasons: set[Operation] = set()
    for number, operation in enumerate(device.operations):
        if operation.stream is device.steps:
            for other in device.operations[:number]:
                if other.conflicts(operation):
                    reasons |= other.after | {other}
            assert operation.after <= reasons
            reasons.add(operation)


def random_operations(steps: Steps, chance: random.Random) -> None:
    """Those of a step, as the protocol allows them."""
    on_host = set(range(NUM_HOST_BLOCKS))
    if chance.random() < 0.6:
        whole = _whole(NUM_BLOCKS, steps.lost)
        hosted = chance.sample(sorted(on_host), k=min(chance.randint(1, 6), len(whole)))
        on_host -= set(hosted)
        if hosted:
            steps.swap_out(chance.sample(whole, k=len(hosted)), hosted)
    if chance.random() < 0.6:
        whole = sorted(on_host - steps.lost_on_host)
        hosted = chance.sample(whole, k=min(chance.randint(1, 6), len(whole)))
        if hosted:
            steps.swap_in(hosted, chance.sample(range(NUM_BLOCKS), k=len(hosted)))
    if chance.random() < 0.3:
        whole = _whole(NUM_BLOCKS, steps.lost)
        if len(whole) > 1:
            source = chance.choice(whole)
            others = [block for block in range(NUM_BLOCKS) if block != source]
            steps.copy([source] * 2, chance.sample(others, k=2))


def _whole(num_blocks: int, lost: set[int]) -> list[int]:
    return [block for block in range(num_blocks) if block not in lost]
