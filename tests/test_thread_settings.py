"""What `benchmarks.thread_settings` makes of its measurements."""

from __future__ import annotations

import pytest

from benchmarks.thread_settings import fair_share, table


@pytest.mark.parametrize(
    ("cores", "threads", "neighbours", "share"),
    [(2, 2, 1, 2 / 3), (2, 1, 1, 1.0), (16, 16, 1, 16 / 17), (1, 1, 1, 0.5)],
)
def test_a_fair_share_is_that_of_equal_threads(cores: int, threads: int, neighbours: int, share: float) -> None:
    assert fair_share(cores, threads, neighbours) == pytest.approx(share)


def test_neighbours_are_set_beside_the_same_round_alone() -> None:
    speeds = {"W1 | 2 | passive | 0": [40.0, 20.0, 30.0], "W1 | 2 | passive | 1": [10.0, 15.0, 15.0]}
    cores_taken = {"W1 | 2 | passive | 0": [0.0, 0.0, 0.0], "W1 | 2 | passive | 1": [0.9, 0.8, 1.0]}
    assert table(speeds, cores_taken, num_cores=2).splitlines()[2:] == [
        "| W1 | 2 | passive | 0 | 30.0 | - | - | - |",
        "| W1 | 2 | passive | 1 | 15.0 | 0.50 | 0.55 | 0.67 |",
    ]
