"""A frontend's choice among the workers of all shards: by cost, with its own assignments counted at once and once."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from protos import shards_pb2
from scheduler_svc.core.sequences.block_hashes import extend_hashes, root_hash
from scheduler_svc.routing import routing_cost
from scheduler_svc.routing.routing_cost import Ahead, WorkerLoad, cost_s
from scheduler_svc.shards.cached_bits import CachedBits, num_bits_for, places
from scheduler_svc.shards.routing_table import LOAD_NAMES, REPORTED_NAMES, KnownWorker, RoutingTable, Wanted

BLOCK = 16


def chain(num_blocks: int, seed: int = 0) -> list[bytes]:
    hashes: list[bytes] = []
    tokens = np.random.default_rng(seed).integers(0, 50_000, num_blocks * BLOCK).astype(np.int32)
    extend_hashes(hashes, root_hash(""), tokens.tobytes(), 4 * BLOCK)
    return hashes


def worker(cached: list[bytes] | None = None, *, model: str = "m", num_blocks: int = 1024, **other: int) -> KnownWorker:
    bits = CachedBits(num_blocks)
    bits.change(cached or [], [])
    limits = {"max_model_len": 4096, "max_cached_tokens": num_blocks * BLOCK, **other}
    snapshot = np.frombuffer(bits.snapshot(), np.uint8)
    return KnownWorker(model, BLOCK, takes_adapters=False, num_bits=bits.num_bits, bits=snapshot, **limits)


def load(num_ahead: float = 0.0, running: int = 0, num_slots: int = 64) -> dict[str, float]:
    """Of a worker that computes 1,000 prompt tokens a second, with so many that wait for it."""
    return {
        "tokens_per_s": 1000.0,
        "late_s": 0.0,
        "num_uncomputed": 0.0,
        "base_s": 0.01,
        "token_s": 0.001,
        "turnover_s": 2.0,
        "num_slots": num_slots,
        "num_taken_slots": running,
        "num_blocks": 1024,
        "num_taken_blocks": 0,
        "block_size": BLOCK,
        "num_ahead_tokens": num_ahead,
        "num_ahead_slots": 0,
        "num_cached_blocks": 0,
        "num_outputs": 0.0,
    }


def table_of(*shards: dict[int, KnownWorker], num_slots: int = 64) -> RoutingTable:
    table = RoutingTable()
    for shard, workers in enumerate(shards):
        table.set_workers(shard, workers, workers)
        for number in workers:
            table.report(shard, number, load(num_slots=num_slots))
    return table


def wanted(num_tokens: int, hashes: list[bytes] | None = None, model: str = "m", max_num_tokens: int = 0) -> Wanted:
    most = max_num_tokens or num_tokens + 1
    return Wanted(model, num_tokens, most, most, 1, False, lambda block_size, shard: places(hashes or []))


def test_what_is_reported_is_what_the_cost_reads() -> None:
    """And what a shard's message has a field for."""
    assert load().keys() == set(REPORTED_NAMES)
    assert {field.name for field in shards_pb2.RoutingLoad.DESCRIPTOR.fields} == set(LOAD_NAMES)


def test_an_idle_worker_before_a_busy_one_and_the_cached_before_the_idle() -> None:
    prompt = chain(10)
    table = table_of({1: worker()}, {1: worker(prompt)}, {1: worker()})
    table.report(0, 1, load(num_ahead=50))
    asked = wanted(161, prompt)
    choice = table.choose(asked, {0, 1, 2})
    assert choice is not None and (choice.shard, choice.num_uncached) == (1, 1)
    table.report(1, 1, load(num_ahead=1000))  # longer than computing all of it anew, counted half more
    choice = table.choose(asked, {0, 1, 2})
    assert choice is not None and (choice.shard, choice.num_uncached) == (2, 161)
    choice = table.choose(asked, {0, 1})
    assert choice is not None and choice.shard == 0


def test_the_choice_is_that_of_the_cost_within_a_shard() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        table = table_of(*({1: worker(), 2: worker()} for _ in range(4)))
        loads = [load(float(rng.integers(0, 3000)), int(rng.integers(0, 80))) for _ in range(8)]
        for place, values in enumerate(loads):
            table.report(place // 2, 1 + place % 2, values)
        choice = table.choose(wanted(100), range(4))
        costs = []
        for values in loads:
            ahead = Ahead(values["num_ahead_tokens"], values["num_ahead_slots"])
            of_worker = WorkerLoad(**{name: values[name] for name in LOAD_NAMES})
            costs.append(cost_s(of_worker, ahead, routing_cost.Wanted(100, 1, 0.0)))
        assert choice is not None
        assert costs[2 * choice.shard + choice.number - 1] <= 1.02 * min(costs) + 1e-3


def test_outputs_are_expected_as_long_as_any_shard_has_seen_them_of_that_model() -> None:
    """A shard is no cheaper for knowing less of a model, nor one model dearer for another."""
    table = table_of({1: worker(), 2: worker(model="other")}, {1: worker()})
    for shard, number, num_outputs in ((0, 1, 8.0), (0, 2, 5000.0), (1, 1, 100.0)):
        table.report(shard, number, {**load(), "num_outputs": num_outputs})
    for among in ({0, 1}, {1}):
        asked = wanted(100, max_num_tokens=1000)
        costs, _ = table._costs(np.flatnonzero(table._suits(asked, among)), asked)
        of_worker = WorkerLoad(**{name: load()[name] for name in LOAD_NAMES})
        expected_s = cost_s(of_worker, Ahead(0.0, 0.0), routing_cost.Wanted(100, 1, 100.0))
        assert costs == pytest.approx([expected_s] * len(among))


def test_what_was_assigned_counts_at_once_and_not_twice() -> None:
    """480 of 480 to one worker is what comes of counting load when it is reported."""
    table = table_of({1: worker()}, {1: worker()}, {1: worker(), 2: worker()}, num_slots=1000)
    given: Counter[tuple[int, int]] = Counter()
    for number in range(1, 481):
        choice = table.choose(wanted(100), {0, 1, 2})
        assert choice is not None
        table.assign(choice, number)
        given[choice.shard, choice.number] += 1
    assert max(given.values()) - min(given.values()) <= 8, "2 % of the cost are no difference"
    for shard, count in ((0, 1), (1, 1), (2, 2)):  # all that was assigned is reported: it is the same load as before
        for each in range(1, count + 1):
            table.report(shard, each, load(12_000))
        table.contains(shard, 480)
    table.report(1, 1, load(11_000))
    choice = table.choose(wanted(100), {0, 1, 2})
    assert choice is not None and choice.shard == 1, "counted twice, or not at all, it would not be the least"


def test_a_report_that_does_not_contain_an_assignment_keeps_it() -> None:
    table = table_of({1: worker()}, {1: worker()})
    first = table.choose(wanted(1000), {0})
    assert first is not None
    table.assign(first, 7)
    table.report(0, 1, load())
    table.contains(0, 6)
    choice = table.choose(wanted(1000), {0, 1})
    assert choice is not None and choice.shard == 1
    table.contains(0, 7)
    chosen = {choice.shard for _ in range(60) if (choice := table.choose(wanted(1000), {0, 1}))}
    assert chosen == {0, 1}, "ties go to either"


def test_what_was_assigned_is_summed_as_workers_and_reports_come_and_go() -> None:
    """The sums are kept, and never made anew: one more request costs the same however many came since a report."""
    rng = random.Random(4)
    shards: list[dict[int, KnownWorker]] = [{number: worker() for number in range(3)} for _ in range(2)]
    table = table_of(*shards)
    assigned: list[dict[int, tuple[int, int]]] = [{}, {}]
    for group in range(400):
        shard = rng.randrange(2)
        match rng.choice(["assign", "assign", "report", "leave", "join"]):
            case "assign" if shards[shard] and (choice := table.choose(wanted(rng.randint(2, 90)), {shard})):
                table.assign(choice, group)
                assigned[shard][group] = choice.number, int(choice.num_uncached)
            case "report":
                last_number = rng.randrange(group + 1)
                table.contains(shard, last_number)
                assigned[shard] = {each: told for each, told in assigned[shard].items() if each > last_number}
            case "leave" if shards[shard]:
                shards[shard].pop(rng.choice(list(shards[shard])))
                table.set_workers(shard, shards[shard], {})
            case "join":
                number = rng.randrange(6)
                if number not in shards[shard]:
                    shards[shard][number] = worker()
                    table.set_workers(shard, shards[shard], {number: shards[shard][number]})
                    table.report(shard, number, load())
        ahead = table._ahead()
        for (key, number), row in table._rows.items():
            theirs = [num_tokens for each, num_tokens in assigned[key].values() if each == number]
            assert (ahead.num_tokens[row], ahead.num_slots[row]) == (sum(theirs), len(theirs))


def test_who_has_a_free_slot_can_begin_until_it_is_assigned() -> None:
    table = table_of({1: worker()}, {1: worker()}, num_slots=2)
    table.report(0, 1, load(running=2, num_slots=2))
    table.report(1, 1, load(running=1, num_slots=2))
    assert not table.can_begin(wanted(10), {0}) and table.can_begin(wanted(10), {1})
    assert not table.can_begin(wanted(10, model="other"), {0, 1})
    choice = table.choose(wanted(10), {0, 1})
    assert choice is not None and choice.shard == 1, "the other one has to wait for a slot"
    table.assign(choice, 1)
    assert not table.can_begin(wanted(10), {1})


def test_who_could_never_run_it_is_not_asked() -> None:
    table = table_of({1: worker(model="other")}, {1: worker(max_model_len=100)}, {1: worker()})
    for _ in range(20):
        choice = table.choose(wanted(50, max_num_tokens=200), {0, 1, 2})
        assert choice is not None and choice.shard == 2
    assert table.choose(wanted(50, max_num_tokens=200), {0, 1}) is None
    assert table.serves(0, "other") and not table.serves(0, "m")


def test_workers_come_and_go_and_others_keep_what_is_known_of_them() -> None:
    prompt = chain(4)
    table = table_of({1: worker(), 2: worker()}, {1: worker()})
    table.change_bits(0, 2, places(prompt) & np.uint32(num_bits_for(1024) - 1), places([]))
    table.report(1, 1, load(3000))
    table.set_workers(1, [1, 5], {5: worker()})
    table.report(1, 5, load())
    choice = table.choose(wanted(65, prompt), {0, 1})
    assert choice is not None and (choice.shard, choice.number, choice.num_uncached) == (0, 2, 1)
    table.set_workers(0, [1], {})
    choice = table.choose(wanted(65, prompt), {0})
    assert choice is not None and choice.number == 1
    table.forget(0)
    choice = table.choose(wanted(65, prompt), {0, 1})
    assert choice is not None and (choice.shard, choice.number) == (1, 5), "the other has 3 s to do"


def test_a_prefix_is_as_long_as_it_is_but_for_a_fraction_of_a_block() -> None:
    """Full caches, and prompts of which 0, 40 or 300 blocks are cached: never too short, hardly ever too long."""
    cached = [digest for seed in range(8) for digest in chain(128, seed)]
    table = table_of({1: worker(cached, num_blocks=1024)})
    extra = []
    for seed in range(400):
        known = chain(128, seed % 8)[:40] if seed % 2 else []
        prompt = known + chain(20, 1000 + seed)
        choice = table.choose(wanted(len(prompt) * BLOCK + 1, prompt), {0})
        assert choice is not None
        extra.append(len(prompt) - (int(choice.num_uncached) - 1) // BLOCK - len(known))
    assert min(extra) == 0
    assert np.mean(extra) < 0.15, "blocks too many, on average"


def test_bits_follow_a_cache_block_by_block() -> None:
    rng, blocks = np.random.default_rng(3), chain(400)
    bits, cached = CachedBits(64), set[bytes]()  # so few bits that many blocks share one
    there = np.frombuffer(bits.snapshot(), np.uint8).copy()
    table = RoutingTable()
    table.set_workers(0, [1], {1: KnownWorker("m", BLOCK, 1, 1, False, bits.num_bits, there)})
    for _ in range(200):
        came = [digest for digest in rng.choice(blocks, 20).tolist() if digest not in cached]
        came = list(dict.fromkeys(came))
        went = rng.choice(sorted(cached), min(len(cached), 15), replace=False).tolist() if cached else []
        cached.update(came)
        cached.difference_update(went)
        table.change_bits(0, 1, *bits.change(came, went))
        expected = np.zeros(bits.num_bits, np.uint8)
        expected[places(sorted(cached)) & (bits.num_bits - 1)] = 1
        packed = np.packbits(expected, bitorder="little").tobytes()
        assert table._bits_of(0).tobytes() == packed == bits.snapshot()
