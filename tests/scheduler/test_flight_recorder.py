"""The flight recorder: its ring, its file, what is not in it, and that a record played again is decided alike."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import itertools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from octavo.bench.fleet.outcomes import Loss
from octavo.bench.fleet.replay import Outcome, Replay
from octavo.bench.fleet.requests import Load
from octavo.bench.fleet.simulation import Simulation
from octavo.bench.fleet.worker import WorkerKind
from octavo.cli import main
from octavo.shared.access.tenant_limits import TenantLimits, TenantTable
from octavo.shared.tracing.context import TraceContext
from protos import worker_pb2
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.queues.policy import POLICIES
from scheduler_svc.core.sequences.beam_search import BeamSearch
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.engine_settings import EngineSettings
from scheduler_svc.errors import QueueFull
from scheduler_svc.flight import black_box, record_file
from scheduler_svc.flight import recorder as recorder_module
from scheduler_svc.flight.black_box import BlackBox
from scheduler_svc.flight.errors import BadRecord
from scheduler_svc.flight.image import image_of
from scheduler_svc.flight.recorder import Fault, FlightRecorder, Recording
from scheduler_svc.serving import Serving
from scheduler_svc.tracing.group_trace import GroupTrace
from tests.scheduler import pool as pools
from tests.scheduler.pool import Faults, Pool, Size, heard_by
from tests.scheduler.test_pool_histories import History

MANY = 1 << 30
ROOM = 64 << 20
KIND = WorkerKind(step_ms=10, token_us=100, cache_tokens=1024, max_num_seqs=8, max_num_batched_tokens=128)
SIZE = Size(num_slots=4, num_blocks=24, num_host_blocks=8, max_num_batched_tokens=20, max_model_len=64)


class RecordedFleet(Simulation):
    """Two workers, of which one is lost and comes back; conversations find what was said in them. Keeps the record."""

    def __init__(self, num_steps: int, seed: int = 3, **settings: Any) -> None:
        load = Load(30, 60, 40, shared_tokens=32, tenants=4, spread=0.6, rate=40, turns=2)
        recorder = self.recorder = FlightRecorder(num_steps, ROOM)
        losses = [Loss(0, 0.6, 1.0)]
        super().__init__([KIND] * 2, load.arrivals(seed), losses, seed, new_recorder=lambda: recorder, **settings)

    def _close(self) -> None:
        self.recording = self.recorder.recording()
        super()._close()


@pytest.fixture(scope="module")
def fleet() -> RecordedFleet:
    fleet = RecordedFleet(100)
    fleet.run()
    return fleet


def written(recording: Recording, settings: EngineSettings, folder: Path) -> Path:
    path = folder / "record.jsonl.gz"
    path.write_bytes(b"".join(record_file.packed(recording, record_file.header_of(settings))))
    return path


def played(recording: Recording, settings: EngineSettings, folder: Path) -> Outcome:
    return Replay(record_file.read(written(recording, settings, folder))).run()


class RecordedPool:
    """A pool turned by hand, whose engines are recorded."""

    def __init__(self, num_steps: int = MANY, max_bytes: int = ROOM) -> None:
        self.engines: list[Engine] = []
        self.faults: list[Recording] = []
        self._limits = num_steps, max_bytes

    def new_engine(self, *arguments: Any, **options: Any) -> Engine:
        options["recorder"] = FlightRecorder(*self._limits, self.faults.append)
        self.engines.append(Engine(*arguments, **options))
        return self.engines[-1]

    def patch(self) -> Any:
        return mock.patch.object(pools, "Engine", self.new_engine)

    def pool(self, faults: Faults | None = None, **settings: Any) -> Pool:
        with self.patch():
            return Pool(faults or Faults(), **settings)

    def recording(self) -> Recording:
        recorder = self.engines[-1].recorder
        assert isinstance(recorder, FlightRecorder)
        return recorder.recording()


@pytest.fixture
def recorded() -> Iterator[RecordedPool]:
    yield RecordedPool()


# ---- played again ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "mode"), [("fcfs", "auto"), ("priority", "recompute"), ("fair", "swap")])
def test_a_whole_run_is_decided_alike(policy: str, mode: str, tmp_path: Path) -> None:
    """Two workers, one of them lost and back, caches that are hit, and preemption."""
    fleet = RecordedFleet(MANY, scheduling_policy=policy, preemption_mode=mode)
    run = fleet.run()
    assert run.num_cached_tokens > 0 and run.num_preemptions > 0
    outcome = played(fleet.recording, fleet.engines[0].settings, tmp_path)
    assert outcome.difference is None and outcome.num_same == run.num_steps
    assert outcome.faults == [("worker lost", "it is lost, as the plan has it")]


@pytest.mark.parametrize("num_steps", [MANY, 100])
def test_what_limits_and_weights_of_tenants_did_is_decided_alike(num_steps: int, tmp_path: Path) -> None:
    """Requests that were held, also since before the record begins; and a file that changes meanwhile."""
    limits, tables = TenantLimits(running_sequences=2), list[TenantTable]()
    tables += [TenantTable({"tenant-0": limits}, weights={"tenant-1": weight}) for weight in (1.0, 5.0)]
    looks, numbers = itertools.count(), itertools.count()
    fleet = RecordedFleet(
        num_steps,
        scheduling_policy="fair",
        tenants=lambda: tables[next(looks) > 400],
        tenants_are_known=True,
    )
    submit = Engine.submit

    def submit_by_turns(engine: Engine, group: SequenceGroup) -> None:
        group.tenant = f"tenant-{next(numbers) % 2}"
        group.trace = GroupTrace(TraceContext.new_root(), lambda span: None)  # which changes no decision
        submit(engine, group)

    with mock.patch.object(Engine, "submit", submit_by_turns):
        fleet.run()
    outcome = played(fleet.recording, fleet.engines[0].settings, tmp_path)
    assert outcome.difference is None and outcome.num_same == outcome.num_steps >= 100
    kinds = Counter(entry.kind.value for segment in fleet.recording.segments for entry in segment.entries)
    assert kinds["due"] > 0
    if num_steps == MANY:
        assert kinds["held"] == kinds["due"] and kinds["weigh"] == 2


def test_what_begins_in_the_middle_of_requests_goes_on_from_its_state(fleet: RecordedFleet, tmp_path: Path) -> None:
    first, _ = fleet.recording.segments
    assert first.image is not None and first.notes, "requests were under way"
    outcome = played(fleet.recording, fleet.engines[0].settings, tmp_path)
    assert outcome.difference is None and outcome.num_same == outcome.num_steps >= 100


@pytest.mark.parametrize("seed", range(3, 11))
def test_any_history_is_decided_alike(seed: int, tmp_path: Path) -> None:
    """Joins, losses, failed steps, aborts, drains, flushes, withheld blocks, forks, resumed requests, beams."""
    recorded, faults = RecordedPool(num_steps=[MANY, 16][seed % 2]), Faults()
    with recorded.patch(), heard_by(faults):
        History(seed, faults).run()
    outcome = played(recorded.recording(), recorded.engines[-1].settings, tmp_path)
    assert outcome.difference is None, f"seed {seed}: {outcome}"
    assert outcome.num_same == outcome.num_steps > 0


def test_a_deliberate_fault_is_pointed_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recorded scheduler preempts the oldest, the one that plays the youngest."""

    def oldest(preemption: Preemption) -> Any:
        return min(preemption._groups.running, key=preemption._groups.policy.key)

    fleet = RecordedFleet(MANY, preemption_mode="recompute")
    with mock.patch.object(Preemption, "choose_victim", oldest):
        fleet.run()
    path = written(fleet.recording, fleet.engines[0].settings, tmp_path)
    outcome = Replay(record_file.read(path)).run()
    assert outcome.difference is not None and outcome.difference.recorded is not None
    steps = [entry for entry in record_file.read(path).entries if entry["entry"] == "step"]
    first_preemption = outcome.difference.place
    assert steps[first_preemption] == outcome.difference.recorded
    assert outcome.difference.replayed is not None
    assert outcome.difference.replayed["decision"] != outcome.difference.recorded["decision"]
    with mock.patch.object(Preemption, "choose_victim", oldest):
        assert Replay(record_file.read(path)).run().difference is None, "with the same fault it is decided alike"
    assert main(["replay", str(path)]) == 1
    said = capsys.readouterr().out
    assert f"number {first_preemption} does not:" in said and "recorded" in said and "\n* released" in said


def test_another_policy_is_another_decision(tmp_path: Path) -> None:
    last_first = dataclasses.replace(POLICIES["fcfs"], key=lambda group: (-group.order,))
    with mock.patch.dict(POLICIES, fcfs=last_first):
        fleet = RecordedFleet(MANY)
        fleet.run()
    assert played(fleet.recording, fleet.engines[0].settings, tmp_path).difference is not None


# ---- the ring -------------------------------------------------------------------------------------------------------


def test_the_ring_keeps_at_least_half_of_its_steps_and_not_more_than_all(recorded: RecordedPool) -> None:
    recorded._limits = 20, ROOM
    pool = recorded.pool()
    pool.join(SIZE)
    counts = []
    for number in range(30):
        pool.submit([number, 2, 3], 12)
        pool.run_to_end(SIZE)
        counts.append(sum(segment.num_steps for segment in recorded.recording().segments))
    assert len(recorded.recording().segments) == 2
    assert min(counts[5:]) >= 10 and max(counts) <= 20 + 2


def test_bytes_are_bounded_too(recorded: RecordedPool) -> None:
    limit = 160_000
    recorded._limits = MANY, limit
    pool = recorded.pool()
    pool.join(SIZE)
    for number in range(24):
        pool.submit([number, 2, 3], 30)
        pool.run_to_end(SIZE)
        held = sum(segment.num_bytes for segment in recorded.recording().segments)
        assert held <= limit + 10_000, "what one turn adds at most"
    assert recorded.recording().segments[0].image is not None


def test_a_state_that_does_not_fit_is_left_out_and_the_steps_can_be_shown(
    recorded: RecordedPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded._limits = MANY, 20_000
    pool = recorded.pool()
    pool.join(Size(4, 4096, 0, 20, 64))
    for number in range(6):
        pool.submit([number, 2, 3], 30)
        pool.run_to_end(SIZE)
    path = written(recorded.recording(), pool.engine.settings, tmp_path)
    assert main(["replay", str(path)]) == 1
    assert "it can be shown and not be played: its state has" in capsys.readouterr().err
    assert main(["replay", str(path), "--steps", "0:2"]) == 0
    assert "begins its state has" in (said := capsys.readouterr().out) and len(said.splitlines()) == 5


def test_a_long_and_wide_search_is_few_nodes() -> None:
    """Each is looked at while the step loop waits."""
    search = BeamSearch(16, num_returned=16, num_prompt_tokens=5, max_num_tokens=1000)
    for _ in range(300):  # no beam ends, and each goes on: 4,800 tokens
        rows = [(np.arange(16), np.linspace(-1.0, -9.0, 16, dtype=np.float32))] * search.num_live
        search.advance(rows)
    image = image_of({"search": search}, {}, 1 << 20)
    assert len(image.nodes) < 20 and 4 * 4000 < image.num_bytes < 4 * 6000


@pytest.mark.parametrize("before", [[0], [-1, 1], [-1, 2, 0], [-2]])
def test_a_line_of_tokens_without_a_beginning_is_refused(
    before: list[int], fleet: RecordedFleet, tmp_path: Path
) -> None:
    record = record_file.read(written(fleet.recording, fleet.engines[0].settings, tmp_path))
    assert record.image is not None
    record.image["nodes"].append(["token_lines", before])
    with pytest.raises(BadRecord, match="before itself"):
        Replay(record)


def test_a_request_that_cannot_be_written_down_is_served_and_the_record_begins_anew(
    recorded: RecordedPool, tmp_path: Path
) -> None:
    pool = recorded.pool()
    pool.join(SIZE)
    with mock.patch.object(recorder_module, "GroupNote", side_effect=ValueError):
        group = pool.submit([1, 2, 3], 20)
        pool.turn()
    pool.submit([4, 5, 6], 20)
    pool.run_to_end(SIZE)
    pool.check_outputs()
    assert group.is_finished
    outcome = played(recorded.recording(), pool.engine.settings, tmp_path)
    assert outcome.difference is None and outcome.num_same > 5


def test_an_idle_loop_fills_nothing(recorded: RecordedPool, tmp_path: Path) -> None:
    pool = recorded.pool()
    worker = pool.join(SIZE)
    pool.submit([1, 2, 3], 8)
    pool.run_to_end(SIZE)
    pool.turn()
    before = len(recorded.recording().segments[0].entries)
    for _ in range(100):
        beat = worker_pb2.StepResponse(epoch=worker.epoch, heartbeat=worker_pb2.Heartbeat(running_ns=1 << 40))
        pool.engine.worker_said(worker, beat.SerializeToString())
        pool.turn()
    assert len(recorded.recording().segments[0].entries) <= before + 1
    pool.submit([1, 2, 3, 4], 8)
    pool.run_to_end(SIZE)
    assert played(recorded.recording(), pool.engine.settings, tmp_path).difference is None


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_what_goes_wrong_is_told_once_a_turn(recorded: RecordedPool) -> None:
    pool = recorded.pool()
    worker = pool.join(SIZE)
    pool.submit([1, 2, 3], 8)
    pool.turn()
    worker.run("the step contradicts the mirror")
    worker.results[0].error.code = worker_pb2.STEP_ERROR_CODE_PROTOCOL
    pool.answer(worker)
    pool.turn()
    assert recorded.faults[-1].fault == Fault("step failed", "STEP_ERROR_CODE_PROTOCOL", worker.address)
    pool.lose(worker)
    pool.turn()
    assert [each.fault and each.fault.kind for each in recorded.faults] == ["step failed", "worker lost"]
    assert [each.fault and each.fault.worker for each in recorded.faults] == [worker.address] * 2


def test_a_fault_of_our_own_is_told_by_its_place_alone(recorded: RecordedPool, tmp_path: Path) -> None:
    pool = recorded.pool()
    pool.join(SIZE)
    pool.submit([1, 2, 3], 8)
    with (
        heard_by(Faults()),
        mock.patch.object(Preemption, "start_over_if_stuck", side_effect=ValueError("the words of a user")),
    ):
        pool.engine.take_events(0)
        pool.engine.send_steps()
    fault = recorded.faults[-1].fault
    assert fault is not None and fault.kind == "a fault over requests"
    assert fault.where.startswith("ValueError in ") and "words" not in fault.where
    assert b"words of a user" not in gzip.decompress(
        written(recorded.faults[-1], pool.engine.settings, tmp_path).read_bytes()
    )


def recording_of(kind: str = "worker lost", where: str = "it vanished", worker: str = "10.0.0.1:50061") -> Recording:
    return dataclasses.replace(FlightRecorder(2, ROOM).recording(), fault=Fault(kind, where, worker))


def box_of(folder: Path) -> BlackBox:
    return BlackBox(folder, record_file.header_of(EngineSettings()))


def test_a_fault_is_written_once_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "PAUSE_S", 0.0)
    box = box_of(tmp_path / "deep" / "folder")
    for seconds in range(3):
        box.take(recording_of(where=f"no message for {seconds}.5 s"))
    box.take(recording_of("step failed"))
    assert box.wait()
    files = sorted((tmp_path / "deep" / "folder").iterdir())
    assert [file.name.split("-", 4)[-1] for file in files] == ["step-failed.jsonl.gz", "worker-lost.jsonl.gz"]
    assert record_file.read(files[1]).header["fault"] == {"kind": "worker lost", "where": "no message for 0.5 s"}
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    (writer,) = (thread for thread in threading.enumerate() if thread is box._thread)
    box.close()
    writer.join(timeout=10)
    assert not writer.is_alive()
    box.take(recording_of("an event failed"))
    assert box.wait() and len(list((tmp_path / "deep" / "folder").iterdir())) == 2, "a service that ends has no faults"


def test_a_fault_of_another_kind_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "PAUSE_S", 1e9)
    box = box_of(tmp_path)
    for kind, where in (("worker lost", "it vanished"), ("step failed", "memory"), ("worker lost", "it is silent")):
        box.take(recording_of(kind, where))
    assert box.wait()
    faults = [record_file.read(path).header["fault"] for path in tmp_path.iterdir()]
    assert {(fault["kind"], fault["where"]) for fault in faults} == {
        ("worker lost", "it vanished"),
        ("step failed", "memory"),
    }


def test_there_are_never_more_than_so_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "PAUSE_S", 0.0)
    box = box_of(tmp_path)
    (tmp_path / "somebody's.jsonl.gz").touch()
    for number in range(black_box.MAX_FILES + 3):
        box.take(recording_of(f"kind {'x' * number}"))
    assert box.wait()
    assert len(list(tmp_path.glob("octavo-flight-*"))) == black_box.MAX_FILES
    assert (tmp_path / "somebody's.jsonl.gz").exists()


def test_a_file_that_cannot_be_written_is_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(black_box, "PAUSE_S", 0.0)
    (tmp_path / "file").touch()
    box = box_of(tmp_path / "file" / "folder")
    box.take(recording_of())
    assert box.wait()
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    box = box_of(tmp_path)
    with mock.patch.object(black_box, "packed", full):
        box.take(recording_of())
        assert box.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left half written"
    box.take(recording_of())
    assert box.wait()
    assert len(list(tmp_path.glob("octavo-flight-*"))) == 1, "with room again the same fault is written"


def test_a_disk_that_is_full_is_not_tried_again_at_once(tmp_path: Path) -> None:
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    box = box_of(tmp_path)
    with mock.patch.object(black_box, "packed", full):
        for _ in range(3):
            box.take(recording_of())
            assert box.wait()
    assert full.call_count == 1


def test_each_worker_has_faults_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "PAUSE_S", 0.0)
    box = box_of(tmp_path)
    with mock.patch.object(black_box, "log") as log:
        for seconds in range(2):
            for number in (1, 2):
                box.take(recording_of(where=f"no message for {seconds}.5 s", worker=f"10.0.0.{number}:50061"))
        assert box.wait()
    assert [call.args[0] for call in log.warning.call_args_list] == ["flight record written"] * 2


def test_a_clock_that_was_set_back_costs_the_older_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "PAUSE_S", 0.0)
    ahead = [tmp_path / f"octavo-flight-{number}-1-worker-lost.jsonl.gz" for number in range(black_box.MAX_FILES)]
    for number, path in enumerate(ahead):
        path.touch()
        os.utime(path, (time.time() + 3600 + number,) * 2)
    box = box_of(tmp_path)
    with mock.patch.object(black_box, "log") as log:
        for number in range(3):
            box.take(recording_of(f"kind {'x' * number}"))
            assert box.wait()
    written = [Path(call.kwargs["path"]) for call in log.warning.call_args_list]
    assert len(written) == 3 and set(tmp_path.iterdir()) == {*written, *ahead[3:]}


def test_files_that_others_remove_meanwhile_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "PAUSE_S", 0.0)
    (tmp_path / "octavo-flight-gone-1-worker-lost.jsonl.gz").symlink_to(
        tmp_path / "nowhere"
    )  # no stat(), as of one gone
    box = box_of(tmp_path)
    with mock.patch.object(black_box, "log") as log:
        box.take(recording_of())
        assert box.wait()
    assert [call.args[0] for call in log.warning.call_args_list] == ["flight record written"]


def test_a_record_is_told_also_where_an_older_one_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(black_box, "MAX_FILES", 2)
    for number in range(2):
        (tmp_path / f"octavo-flight-{number}-1-worker-lost.jsonl.gz").mkdir()  # which unlink() refuses
    box = box_of(tmp_path)
    with mock.patch.object(black_box, "log") as log:
        box.take(recording_of())
        assert box.wait()
    assert [call.args[0] for call in log.warning.call_args_list] == [
        "flight record written",
        "a flight record could not be removed",
    ]


def test_what_writers_that_were_killed_left_is_removed(tmp_path: Path) -> None:
    ages_s = {"old": 2 * black_box.LEFT_AFTER_S, "ahead": -2 * black_box.LEFT_AFTER_S, "being-written": 5.0}
    for name, age_s in ages_s.items():
        (path := tmp_path / f".octavo-flight-{name}.jsonl.gz").touch()
        os.utime(path, (time.time() - age_s,) * 2)
    box = box_of(tmp_path)
    box.take(recording_of())
    assert box.wait()
    assert [path.name for path in tmp_path.glob(".*")] == [".octavo-flight-being-written.jsonl.gz"]


# ---- the file -------------------------------------------------------------------------------------------------------


def test_no_token_no_name_and_no_hash_is_in_the_file(recorded: RecordedPool, tmp_path: Path) -> None:
    recorded._limits = 8, ROOM
    pool = recorded.pool(scheduling_policy="fair", tenant_weights={"acme-tenant": 2.0})
    pool.join(SIZE)
    secret = [1_031_337 + number for number in range(17)]
    groups = [
        pool.submit(secret, 40, request_id="secret-request", tenant="acme-tenant", cache_salt="salt-of-acme", n=2),
        pool.submit(secret, 40, beam_width=2, tenant="acme-tenant", request_id="secret-beams"),
    ]
    for _ in range(12):
        pool.turn()
        for worker in pool.workers:
            while worker.received:
                worker.run()
            while worker.results:
                pool.answer(worker)
    recording = recorded.recording()
    assert recording.segments[0].image is not None and not groups[1].is_finished
    text = gzip.decompress(written(recording, pool.engine.settings, tmp_path).read_bytes()).decode()
    for group in groups:
        for sequence in group.sequences:
            for digest in sequence.hashes(0, 4, 4):
                assert digest.hex() not in text
    for private in ("acme", "secret", "salt", *map(str, secret)):
        assert private not in text, private
    generated = groups[0].sequences[0].token_ids[len(secret) :]
    assert len(generated) > 4
    assert json.dumps(np.asarray(generated[:4]).tolist())[1:-1].replace(" ", "") not in text


def test_files_that_are_none_are_refused_in_a_line(
    fleet: RecordedFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = written(fleet.recording, fleet.engines[0].settings, tmp_path).read_bytes()
    lines = gzip.decompress(whole).splitlines(keepends=True)
    other = json.loads(lines[0]) | {"octavo_flight_record": 99}
    path = tmp_path / "other"
    cases = {
        "cut off": whole[: len(whole) // 2],
        "damaged": whole[:500] + b"\x00\x01\x02" + whole[503:],
        "no flight record": b"nothing of the kind",
        "is no flight record": gzip.compress(b'{"some": "json"}\n'),
        "format 99": gzip.compress(json.dumps(other).encode() + b"\n"),
        "it says": gzip.compress(b"".join([*lines[:3], lines[-1]])),
        "cut off, or": gzip.compress(b"".join(lines[:3])),
    }
    for said, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(BadRecord, match=said):
            record_file.read(path)
    assert main(["replay", str(path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["replay", str(tmp_path / "nowhere")]) == 1


def test_a_state_of_another_version_is_refused(fleet: RecordedFleet, tmp_path: Path) -> None:
    record = record_file.read(written(fleet.recording, fleet.engines[0].settings, tmp_path))
    assert record.image is not None
    for node in record.image["nodes"]:
        if node[0] == "object" and node[1].endswith(".WorkerHandle"):
            node[1] = "os.system"
    with pytest.raises(BadRecord, match="not one of this version"):
        Replay(record)


def test_the_steps_can_be_read(fleet: RecordedFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(fleet.recording, fleet.engines[0].settings, tmp_path)
    assert main(["replay", str(path), "--steps", "3:5"]) == 0
    head, about, _, *rows = capsys.readouterr().out.splitlines()
    assert (
        head.startswith("Octavo ")
        and "begins with its state" in about
        and [row.split()[0] for row in rows] == ["3", "4"]
    )
    assert main(["replay", str(path), "--steps", ":2", "--json"]) == 0
    assert [step["number"] for step in json.loads(capsys.readouterr().out)] == [0, 1]
    assert main(["replay", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["agrees"] and told["same"] == told["steps"] and told["difference"] is None
    with pytest.raises(SystemExit):
        main(["replay", str(path), "--steps", "five"])
    assert os.environ.get("GRPC_VERBOSITY") == "NONE"


async def test_one_flight_record_is_read_at_a_time() -> None:
    serving = Serving(SchedulerConfig(worker=("127.0.0.1:1",)), lambda delivery: None)
    serving.start()
    try:
        first = serving.flight_record()
        await anext(first)
        with pytest.raises(QueueFull, match="another flight record"):
            await anext(serving.flight_record())
        await first.aclose()
        assert [piece async for piece in serving.flight_record()]
    finally:
        await asyncio.to_thread(serving.stop)
