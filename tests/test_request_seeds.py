"""Seeds of requests: the same in every run with one seed, distinct within it, and drawn without one."""

from __future__ import annotations

import hashlib

from octavo.embedded.request_seeds import RequestSeeds


def test_they_follow_from_the_seed_and_the_number_of_the_request() -> None:
    seeds = RequestSeeds(7)
    taken = seeds.take(2) + seeds.take(1)
    assert taken == [int.from_bytes(hashlib.sha256(f"7/{k}".encode()).digest()[:8], "little") for k in range(3)]
    assert RequestSeeds(7).take(3) == taken
    assert len({*RequestSeeds(0).take(1000), *RequestSeeds(1).take(1000)}) == 2000
    assert all(0 <= seed < 2**64 for seed in RequestSeeds(0).take(1000))


def test_without_a_seed_no_run_is_like_another() -> None:
    assert set(RequestSeeds(None).take(10)).isdisjoint(RequestSeeds(None).take(10))
