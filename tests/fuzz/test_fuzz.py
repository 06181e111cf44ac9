"""A bounded run of the fuzzer, and that it finds what it is there to find."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError

from protos import inference_pb2 as pb
from tests.fuzz.cases import CASES, drawn
from tests.fuzz.harness import FAULT_MARKS, bench, faults_in, growth, make_model
from tests.fuzz.wire_bytes import blown_up, mangled, random_fields


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (200, ()),
        pytest.param(10_000, (), marks=pytest.mark.chaos),
        pytest.param(3000, ("--frontends=2",), marks=pytest.mark.chaos),
    ],
)
def test_nobody_is_harmed(tmp_path: Path, count: int, options: tuple[str, ...]) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    with bench(make_model(tmp_path / "model"), logs, *options) as fuzzed:
        for first in range(0, count, 100):
            fuzzed.run(1, first, min(100, count - first))
        report = fuzzed.report()
        assert [log.name for log in fuzzed.logs] == ["free-worker.log", "scheduler.log", "worker.log"]
    print(report)
    assert not report.faults, report.faults
    assert report.neighbour["num_answers"] > 0


def test_the_same_number_gives_the_same_case() -> None:
    for number in range(200):
        (case, chance), (again, chance_again) = drawn(3, number), drawn(3, number)
        assert case is again and chance.random() == chance_again.random()
    assert {drawn(3, number)[0] for number in range(1000)} == set(CASES)


def test_messages_are_drawn_from_good_to_broken() -> None:
    good = broken = large = 0
    for number in range(400):
        chance = random.Random(number)
        data = random_fields(pb.GenerateRequest.DESCRIPTOR, chance)
        for candidate in (data, mangled(data, chance), blown_up(pb.GenerateRequest.DESCRIPTOR, chance, 10_000)):
            large += len(candidate) > 5000
            try:
                pb.GenerateRequest.FromString(candidate)
                good += 1
            except DecodeError:
                broken += 1
    assert good > 400 and broken > 50 and large > 200


def test_growth_is_what_is_kept_and_not_what_is_there_for_a_moment() -> None:
    rising = [{"one": 100 + 10 * index} for index in range(41)]
    assert growth(rising)["one"] == 310
    moments = [{"one": 100 + 500 * (index % 7 == 5)} for index in range(41)]
    assert moments[-1]["one"] == 600 and growth(moments)["one"] == 0
    assert growth([{"one": 100}, {"one": 400}, {"one": 350}]) == {"one": 250}


def test_a_fault_in_the_log_is_seen(tmp_path: Path) -> None:
    lines = [f"{mark} (told to be here)" for mark in FAULT_MARKS]
    log, clean = tmp_path / "worker.log", tmp_path / "scheduler.log"
    log.write_text("\n".join(["worker ready", *lines]))
    clean.write_text("worker joined\n")
    assert faults_in([log, clean]) == [f"worker.log: {line}" for line in lines]
