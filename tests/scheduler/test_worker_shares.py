"""Which shard has which worker: balanced, with few moves, and handed over when a shard stays away."""

from __future__ import annotations

import random

from scheduler_svc.shards.worker_shares import WorkerShares


def all_there(num_shards: int, patience_s: float) -> WorkerShares:
    shares = WorkerShares(num_shards, patience_s, now_s=0.0)
    for shard in range(num_shards):
        shares.shard_came(shard)
    return shares


def addresses(count: int) -> list[str]:
    return [f"10.0.0.{number}:50061" for number in range(count)]


def sizes(shares: dict[int, list[str]]) -> list[int]:
    return sorted(len(share) for share in shares.values())


def test_everyone_has_as_many_as_the_others() -> None:
    shares = all_there(4, patience_s=5.0)
    assert sizes(shares.divide(addresses(10), 0.0)) == [2, 2, 3, 3]
    assert sizes(shares.divide(addresses(3), 0.0)) == [0, 1, 1, 1]
    assert sizes(shares.divide([], 0.0)) == [0, 0, 0, 0]


def test_what_is_added_and_taken_away_moves_nobody_else() -> None:
    shares = all_there(3, patience_s=5.0)
    before = shares.divide(addresses(9), 0.0)
    after = shares.divide(addresses(12), 1.0)
    assert sizes(after) == [4, 4, 4]
    assert all(set(before[shard]) <= set(after[shard]) for shard in before)


def test_a_shard_that_is_back_in_time_has_its_workers_still() -> None:
    shares = all_there(2, patience_s=5.0)
    before = shares.divide(addresses(4), 0.0)
    shares.shard_went(0, 10.0)
    assert shares.divide(addresses(4), 14.9) == before
    shares.shard_came(0)
    assert shares.divide(addresses(4), 20.0) == before


def test_others_take_the_workers_of_one_that_never_comes() -> None:
    shares = WorkerShares(2, patience_s=5.0, now_s=10.0)
    shares.shard_came(0)
    assert sizes(shares.divide(addresses(4), 14.9)) == [2, 2]
    assert shares.divide(addresses(4), 15.0) == {0: sorted(addresses(4), key=lambda each: int(each[7]) % 2)}


def test_others_take_the_workers_of_one_that_stays_away_and_give_as_many_back() -> None:
    shares = all_there(3, patience_s=5.0)
    before = shares.divide(addresses(6), 0.0)
    shares.shard_went(1, 10.0)
    shares.shard_went(1, 14.0)  # told again: it is away since 10
    without = shares.divide(addresses(6), 15.0)
    assert sizes(without) == [3, 3] and 1 not in without
    assert all(set(before[shard]) < set(without[shard]) for shard in without)
    shares.shard_came(1)
    again = shares.divide(addresses(6), 20.0)
    assert sizes(again) == [2, 2, 2]
    moved = [address for shard in without for address in without[shard] if address not in again[shard]]
    assert len(moved) == 2


def test_nobody_is_there() -> None:
    shares = all_there(1, patience_s=0.0)
    shares.shard_went(0, 0.0)
    assert shares.divide(addresses(2), 1.0) == {}
    shares.shard_came(0)
    assert shares.divide(addresses(2), 2.0) == {0: addresses(2)}


def test_any_history_leaves_every_address_with_one_shard() -> None:
    chance = random.Random(5)
    shares, now_s = all_there(5, patience_s=2.0), 0.0
    away: set[int] = set()
    for _ in range(400):
        now_s += chance.random()
        shard = chance.randrange(5)
        if chance.random() < 0.5:
            away.add(shard)
            shares.shard_went(shard, now_s)
        else:
            away.discard(shard)
            shares.shard_came(shard)
        wanted = addresses(40)[: chance.randrange(40)]
        divided = shares.divide(wanted, now_s)
        assert divided.keys() >= set(range(5)) - away
        held = sorted(address for share in divided.values() for address in share)
        assert not divided or (held == sorted(wanted) and max(sizes(divided)) - min(sizes(divided)) <= 1)
        assert all(shares.owner(address) == shard for shard, share in divided.items() for address in share)
