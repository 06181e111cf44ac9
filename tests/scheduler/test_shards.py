"""What a sharded scheduler's parent and frontends put together: ids, pages, metrics, models, and drawn tokens."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from octavo.shared.access.tenant_limits import TenantLimits, TenantTable
from protos import inference_pb2 as pb
from protos import shards_pb2, shards_pb2_grpc
from scheduler_svc.api import metrics_server
from scheduler_svc.api.metrics_exporter import EngineCollector
from scheduler_svc.config import MAX_SHARDS, SchedulerConfig
from scheduler_svc.core.queues.policy import POLICIES
from scheduler_svc.core.queues.waiting_queue import WaitingQueue
from scheduler_svc.core.sequences import sequence
from scheduler_svc.core.sequences.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.step_plan import NewTokens
from scheduler_svc.errors import InvalidRequest, QueueFull
from scheduler_svc.frontends.prepared_group import decode_group, encode_group
from scheduler_svc.limits.over_limit import OverLimit
from scheduler_svc.models.served_models import KnownModel, ServedModels
from scheduler_svc.output.mailboxes import Mailboxes
from scheduler_svc.shards import shards
from scheduler_svc.shards.cached_bits import places
from scheduler_svc.shards.front_link import AbortedOnItsWay, FrontLink
from scheduler_svc.shards.front_service import FrontService
from scheduler_svc.shards.group_wants import wanted_of
from scheduler_svc.shards.live_ids import LiveIds
from scheduler_svc.shards.routing_table import RoutingTable
from scheduler_svc.shards.shard_link import DrawnTokens, ShardLink
from scheduler_svc.shards.shard_process import share_of
from scheduler_svc.shards.shard_service import request_numbers
from scheduler_svc.shards.sharded_control import merged_page
from scheduler_svc.shards.sharded_core import ShardedCore
from scheduler_svc.shards.sharded_metrics import MetricSums
from scheduler_svc.shards.shards import Shards
from scheduler_svc.shards.shared_models import SharedModels
from scheduler_svc.shards.unserved_models import UnservedModels
from scheduler_svc.vital_parts import VitalParts
from tests.scheduler.hand_turned_loop import Loop
from tests.scheduler.tiny_served_model import tiny_served_model
from tests.waiting import until

# ---- ids ------------------------------------------------------------------------------------------------------------


def test_an_id_is_its_tenants_and_free_again_with_its_holder() -> None:
    ids, one, other = LiveIds[object](), object(), object()
    assert ids.claim(one, 1, "t", "a") and not ids.claim(other, 1, "t", "a")
    assert ids.claim(other, 2, "u", "a"), "another tenant's"
    ids.release(other, 1)  # what was refused is nobody's to release
    assert not ids.claim(other, 3, "t", "a") and len(ids) == 2
    ids.release(one, 1)
    assert ids.claim(other, 4, "t", "a")
    ids.release_all(other)
    assert len(ids) == 0 and ids.claim(one, 2, "t", "a") and ids.claim(one, 3, "u", "a")


async def test_an_id_that_was_given_to_nobody_any_more_is_free_again(tmp_path: Path) -> None:
    """Its claim waits for a live id, is given up meanwhile, and granted all the same."""
    service, server = FrontService(), grpc.aio.server()
    shards_pb2_grpc.add_FrontServicer_to_server(service, server)
    server.add_insecure_port(address := f"unix:{tmp_path}/front")
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(20):
        link = FrontLink(channel)
        following = asyncio.create_task(link.follow(_ignore, lambda group: False))
        group = Loop().group("a", tenant="t")
        number = await link.claim(group)
        assert number is not None
        given_up = asyncio.create_task(link.claim(group))
        while not service._tasks:
            await asyncio.sleep(0.001)
        given_up.cancel()
        link.release(number)
        while service._tasks or len(service.ids):
            await asyncio.sleep(0.001)
        assert await link.claim(group) is not None
        service.close()
        await following
    await server.stop(None)


async def test_a_claim_waits_for_its_tenants_turn_and_one_that_is_given_up_meanwhile_takes_none(tmp_path: Path) -> None:
    table = TenantTable({"t": TenantLimits(running_sequences=1, requests_per_minute=4)})
    service, server = FrontService(lambda: table), grpc.aio.server()
    shards_pb2_grpc.add_FrontServicer_to_server(service, server)
    server.add_insecure_port(address := f"unix:{tmp_path}/front")
    await server.start()
    a, b, c, d, e = (Loop().group(name, tenant="t") for name in "abcde")
    aborted: list[SequenceGroup] = []

    def abort(group: SequenceGroup) -> bool:
        aborted.append(group)
        return True

    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(20):
        link = FrontLink(channel)
        following = asyncio.create_task(link.follow(_ignore, abort))
        runs = await link.claim(a)
        given_up, waits = asyncio.create_task(link.claim(b)), asyncio.create_task(link.claim(c))
        while service.num_held < 2:
            await asyncio.sleep(0.001)
        given_up.cancel()
        while service.num_held > 1:
            await asyncio.sleep(0.001)
        assert not waits.done() and runs is not None
        link.release(runs)
        refused_elsewhere = await waits
        assert refused_elsewhere is not None
        link.refuse(refused_elsewhere)
        assert await link.claim(d) is not None, "what was refused elsewhere is not counted"
        waits = asyncio.create_task(link.claim(e))
        while not service.num_held:
            await asyncio.sleep(0.001)
        assert not await link.abort("e", "another") and await link.abort("d", "t"), "which is not held"
        assert aborted == [d], "whoever has claimed it ends it"
        assert await link.abort("e", "t") and service.num_held == 0 and aborted == [d]
        with pytest.raises(AbortedOnItsWay):
            await waits
        assert not await link.abort("e", None)
        with pytest.raises(OverLimit, match="requests_per_minute is 4, and 4 were made"):
            await link.claim(a)
        wide = Loop().group("f", tenant="t", num_outputs=2)
        with pytest.raises(InvalidRequest, match="2 sequences; accepted: at most 1"):
            await link.claim(wide)
        assert len(service.ids) == 1, "refused and ended ones hold no id"
        link.use(4, 1)
        service.close()
        await asyncio.gather(following, waits, return_exceptions=True)
    await server.stop(None)
    assert len(service.ids) == service.num_held == 0


@asynccontextmanager
async def front(service: FrontService, tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to it; both end also where a test fails."""
    server = grpc.aio.server()
    shards_pb2_grpc.add_FrontServicer_to_server(service, server)
    server.add_insecure_port(address := f"unix:{tmp_path}/front")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(20):
            yield channel
    finally:
        service.close()
        await server.stop(None)


async def test_who_was_refused_by_a_limit_is_refused_before_its_next_prompt_is_read(tmp_path: Path) -> None:
    table = TenantTable({"t": TenantLimits(requests_per_minute=1)})
    service = FrontService(lambda: table)
    async with front(service, tmp_path) as channel:
        mailboxes = Mailboxes(asyncio.get_running_loop())
        core = ShardedCore(channel, mailboxes, num_shards=1, wait_timeout_s=20.0, max_losses=3)
        following = asyncio.create_task(core._front.follow(_ignore, lambda group: False))
        a, b, of_t = Loop().group("a", tenant="t"), Loop().group("b", tenant="t"), pb.GenerateRequest(tenant="t")
        assert await core._front.claim(a) is not None
        await core.check_room(of_t, 0)  # which asks nobody, as nobody was refused
        with pytest.raises(OverLimit):
            await core.submit(b, replaces=False)
        with pytest.raises(OverLimit, match="requests_per_minute is 1, and 1 were made"):
            await core.check_room(of_t, 0)
        await core.check_room(pb.GenerateRequest(tenant="another"), 0)
        of_t.request_id = "a"
        await core.check_room(of_t, 0)  # it replaces a live one, or hears that there is one
        of_t.request_id, table = "b", TenantTable({})
        await core.check_room(of_t, 0)  # limits may change
        assert len(service.ids) == 1, "a question claims nothing"
        service.close()
        await following


async def test_a_claim_that_is_given_up_while_its_id_is_live_is_never_held(tmp_path: Path) -> None:
    table = TenantTable({"t": TenantLimits(running_sequences=1)})
    service = FrontService(lambda: table)
    async with front(service, tmp_path) as channel:
        link = FrontLink(channel)
        following = asyncio.create_task(link.follow(_ignore, lambda group: False))
        runs, group = Loop().group("runs", tenant="t"), Loop().group("r", tenant="t")
        assert await link.claim(runs) is not None
        held, again = asyncio.create_task(link.claim(group)), asyncio.create_task(link.claim(group))
        while not service._tasks:
            await asyncio.sleep(0.001)
        again.cancel()
        held.cancel()
        while service._tasks:
            await asyncio.sleep(0.001)
        assert service.num_held == 0 and len(service.ids) == 1 and not service._later
        service.close()
        await asyncio.gather(following, held, again, return_exceptions=True)


async def test_an_abort_finds_what_another_frontend_has_and_is_answered_when_that_one_is_gone(tmp_path: Path) -> None:
    service, server = FrontService(), grpc.aio.server()
    shards_pb2_grpc.add_FrontServicer_to_server(service, server)
    server.add_insecure_port(address := f"unix:{tmp_path}/front")
    await server.start()
    live = {name: Loop().group(name, tenant="t") for name in "abc"}
    asked = asyncio.Event()

    def end(group: SequenceGroup) -> bool:
        if group is live["c"]:
            asked.set()
            leaving.cancel()  # before it has answered
        return group is live["a"]

    async with grpc.aio.insecure_channel(address) as its, grpc.aio.insecure_channel(address) as ours:
        async with asyncio.timeout(20):
            one, other = FrontLink(its), FrontLink(ours)
            leaving = asyncio.create_task(one.follow(_ignore, end))
            following = asyncio.create_task(other.follow(_ignore, lambda group: True))
            numbers = {name: await one.claim(group) for name, group in live.items()}
            assert await asyncio.gather(*(other.abort(name, "t") for name in "ab")) == [True, False]
            assert await one.abort("a", None) and not await other.abort("d", None)
            one.release(numbers["a"] or 0)
            await one.catch_up()
            assert not await other.abort("a", "t"), "it has ended"
            assert not await other.abort("c", "t") and asked.is_set()
            service.close()
            await asyncio.gather(leaving, following, return_exceptions=True)
    await server.stop(None)


async def _ignore(state: shards_pb2.FrontState) -> None:
    pass


def test_requests_of_all_shards_have_numbers_in_the_order_of_time() -> None:
    now = itertools.count(5_000_000, 7_000)
    numbers = [request_numbers(shard, lambda: next(now)) for shard in (0, 1, MAX_SHARDS - 1)]
    taken = [next(numbers[shard]) for shard in (0, 2, 1, 1, 0, 2, 2, 0)]
    assert taken == sorted(set(taken))
    still = [request_numbers(shard, lambda: 9) for shard in range(3)]
    assert len({next(each) for each in still for _ in range(50)}) == 150, "also where time stands still"
    with pytest.raises(ValueError, match="shards is 257, 1 to 256 are accepted"):
        SchedulerConfig(shards=MAX_SHARDS + 1)  # which could not be told apart


# ---- processes and workers ------------------------------------------------------------------------------------------


async def test_shards_that_have_yet_to_come_are_not_waited_for_when_all_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shards, "_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(shards, "STOP_GRACE_S", 60.0)
    both = Shards(SchedulerConfig(shards=2), tmp_path, VitalParts(), lambda: None)
    async with asyncio.timeout(20):
        both.start()
        while len(both._processes._running) < 2:
            await asyncio.sleep(0.01)
        await both.stop()
    assert not both._processes._running


class ToldShard(shards_pb2_grpc.ShardServicer):
    """One that says what a test has it say, and keeps its latest share."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[shards_pb2.ShardStatus] = asyncio.Queue()
        self.share = shards_pb2.WorkerShare()

    async def Own(self, request_iterator: Any, context: Any) -> Any:
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                yield await self.says.get()
        finally:
            reading.cancel()

    async def _read(self, shares: Any) -> None:
        async for self.share in shares:
            pass


async def test_what_one_shard_has_drained_every_other_is_told_of_also_when_it_comes_later(tmp_path: Path) -> None:
    all_shards = Shards(SchedulerConfig(shards=3), tmp_path, VitalParts(), lambda: None)
    told, servers, following = [ToldShard() for _ in range(3)], list[grpc.aio.Server](), list[asyncio.Task[None]]()
    for index, shard in enumerate(told):
        servers.append(server := grpc.aio.server())
        shards_pb2_grpc.add_ShardServicer_to_server(shard, server)
        server.add_insecure_port(address := f"unix:{tmp_path}/{index}")
        await server.start()
        following.append(asyncio.create_task(all_shards._follow(index, address)))
    try:
        for shard in told[:2]:
            shard.says.put_nowait(shards_pb2.ShardStatus())
        await until(lambda: len(all_shards.live) == 2)
        told[0].says.put_nowait(shards_pb2.ShardStatus(drained=["instance"]))
        await until(lambda: told[1].share.drained == ["instance"])
        told[0].says.put_nowait(shards_pb2.ShardStatus())  # its next life
        told[2].says.put_nowait(shards_pb2.ShardStatus())
        await until(lambda: told[2].share.drained == ["instance"])
        assert told[1].share.drained == ["instance"]
    finally:
        all_shards._is_stopping = True
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        for server in servers:
            await server.stop(None)


# ---- pages ----------------------------------------------------------------------------------------------------------


def pages(shards: list[list[int]], limit: int, most: int) -> list[list[int]]:
    """What a client gets, of shards that have requests of these numbers and tell `most` of them at once."""
    got: list[list[int]] = []
    after = 0
    while True:
        answers = []
        for numbers in shards:
            there = [number for number in numbers if number > after]
            shown = there[: min(limit, most)]
            states = [pb.RequestState(request_id=str(number)) for number in shown]
            is_last = len(shown) == len(there)
            answers.append(shards_pb2.NumberedRequests(requests=states, numbers=shown, is_last=is_last))
        page = merged_page(answers, limit)
        got.append([int(state.request_id) for state in page.requests])
        if not page.next_page_token:
            return got
        after = int(page.next_page_token)


def test_pages_are_in_order_whole_and_each_request_is_in_one() -> None:
    rng = np.random.default_rng(1)
    for case in range(60):
        owners = rng.integers(0, 4, 50)
        shards = [[number for number in range(1, 51) if owners[number - 1] == shard] for shard in range(4)]
        limit = 1 + case % 12
        got = pages(shards, limit, most=1 + case % 5)
        assert [number for page in got for number in page] == list(range(1, 51))
        assert all(0 < len(page) <= limit for page in got)
    assert pages([[], []], 10, 10) == [[]] and pages([], 10, 10) == [[]]


# ---- metrics --------------------------------------------------------------------------------------------------------


def exposition(loop: Loop) -> str:
    registry = CollectorRegistry()
    registry.register(EngineCollector(loop.engine))
    return metrics_server.told(registry)[0].decode()


def samples_of(families: list[Metric]) -> dict[tuple[Any, ...], float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples
    }


TEXT = """# HELP octavo:generation_tokens Tokens generated
# TYPE octavo:generation_tokens counter
octavo:generation_tokens_total {tokens}
# HELP octavo:num_requests_running Requests that have slots
# TYPE octavo:num_requests_running gauge
octavo:num_requests_running {running}
# HELP octavo:kv_cache_usage_perc Share
# TYPE octavo:kv_cache_usage_perc gauge
octavo:kv_cache_usage_perc {share}
# HELP octavo:time_to_first_token_seconds From arrival
# TYPE octavo:time_to_first_token_seconds histogram
octavo:time_to_first_token_seconds_bucket{{le="0.1"}} {tokens}{exemplar}
octavo:time_to_first_token_seconds_bucket{{le="+Inf"}} {tokens}
octavo:time_to_first_token_seconds_count {tokens}
octavo:time_to_first_token_seconds_sum 1.5
# EOF
"""


def text(tokens: float, running: float, share: float, exemplar: str = "") -> str:
    return TEXT.format(tokens=tokens, running=running, share=share, exemplar=exemplar)


def test_one_shard_tells_what_it_tells_alone_but_for_shares() -> None:
    alone = exposition(Loop())
    told = samples_of(MetricSums().add({(0, "a"): alone}))
    wanted = samples_of(list(text_string_to_metric_families(alone)))
    assert wanted and {key: value for key, value in told.items() if ("shard", "0") not in key} == {
        key: value for key, value in wanted.items() if not key[0].endswith("_perc")
    }
    assert {key[0] for key in wanted if key[0].endswith("_perc")} == {key[0] for key in told if ("shard", "0") in key}


def test_counts_are_added_up_and_stay_when_a_shard_is_lost_and_comes_back() -> None:
    sums = MetricSums()
    told = samples_of(sums.add({(0, "a"): text(100, 3, 0.5), (1, "a"): text(40, 2, 0.25)}))
    assert told["octavo:generation_tokens_total",] == 140 and told["octavo:num_requests_running",] == 5
    assert told["octavo:kv_cache_usage_perc", ("shard", "1")] == 0.25
    assert told["octavo:time_to_first_token_seconds_bucket", ("le", "0.1")] == 140
    assert told["octavo:time_to_first_token_seconds_sum",] == 3.0
    told = samples_of(sums.add({(1, "a"): text(41, 5, 0.5)}))
    assert told["octavo:generation_tokens_total",] == 141 and told["octavo:num_requests_running",] == 5
    assert ("octavo:kv_cache_usage_perc", ("shard", "0")) not in told
    for life, tokens in (("b", 7), ("c", 9), ("d", 11)):
        sums.add({(0, life): text(tokens, 0, 0), (1, "a"): text(41, 5, 0.5)})
    told = samples_of(sums.add({(0, "e"): text(1, 0, 0), (1, "a"): text(41, 5, 0.5)}))
    assert told["octavo:generation_tokens_total",] == 100 + 7 + 9 + 11 + 1 + 41
    assert told["octavo:time_to_first_token_seconds_count",] == 100 + 7 + 9 + 11 + 1 + 41
    assert len(sums._last) <= 4, "ended lives are kept as one"


def test_a_shard_that_was_started_again_and_misses_an_answer_is_counted_once() -> None:
    sums = MetricSums()
    for texts in ({(0, "a"): text(100, 0, 0)}, {(0, "b"): text(7, 0, 0)}, {}):
        sums.add(texts)
    assert samples_of(sums.add({(0, "b"): text(8, 0, 0)}))["octavo:generation_tokens_total",] == 108
    sums.add({(0, "c"): text(1, 0, 0)})
    assert samples_of(sums.add({}))["octavo:generation_tokens_total",] == 109
    assert len(sums._last) == 2


def test_of_exemplars_the_latest_of_all_shards_is_told() -> None:
    early, late = (f' # {{trace_id="{name}"}} 0.05 {when}.5' for name, when in (("ab", 100), ("cd", 200)))
    for texts in ((early, late), (late, early), (late, "")):
        told = MetricSums().add({(number, "a"): text(1, 0, 0, each) for number, each in enumerate(texts)})
        found = [sample.exemplar for family in told for sample in family.samples if sample.exemplar is not None]
        assert [(each.labels, each.value) for each in found] == [({"trace_id": "cd"}, 0.05)]


# ---- models ---------------------------------------------------------------------------------------------------------


def test_models_of_all_shards_are_those_of_one_scheduler(tmp_path: Path) -> None:
    first = tiny_served_model(tmp_path)
    larger, other = replace(first, max_model_len=first.max_model_len * 2), replace(first, fingerprint="f" * 32)
    shared = SharedModels()
    one = ServedModels((KnownModel(first, 1),))
    two = ServedModels((KnownModel(other, 0, 1), KnownModel(larger, 2)))
    shared.add(one)
    shared.add(two)
    merged = shared.merged([two, one])
    assert [each.model.fingerprint for each in merged.known] == [first.fingerprint, other.fingerprint]
    assert [(each.num_serving, each.num_draining) for each in merged.known] == [(3, 0), (0, 1)]
    assert merged.known[0].model.max_model_len == larger.max_model_len
    shared.merged([one])
    assert shared.find(other.fingerprint) is None and shared.find(first.fingerprint) is not None


# ---- where a prompt is cached ---------------------------------------------------------------------------------------


async def test_prompts_of_an_adapter_are_looked_for_as_the_shard_has_cached_them() -> None:
    """Each shard numbers its adapters for itself."""
    params, prompt = pb.SamplingParams(seed=1), list(range(20))
    here, there = (SequenceGroup("r", prompt, params, max_num_tokens=30, arrival_ns=0, adapter="a") for _ in range(2))
    there.use_adapter_generation(3)
    cached = places(there.sequences[0].hashes(0, 5, 4))
    async with grpc.aio.insecure_channel("unix:/nowhere") as channel:
        mailboxes, table = Mailboxes(asyncio.get_running_loop()), RoutingTable()
        versions = {}
        for shard, process in ((0, sequence.PROCESS), (1, "another")):
            link = ShardLink(channel, mailboxes, shard, table, DrawnTokens(), SharedModels(), lambda group: None)
            adapters = [shards_pb2.ReportedAdapter(name="a", generation=3)]
            link._take_report(shards_pb2.ShardReport(process=process, adapters=adapters))
            versions[shard] = link.adapters_there["a"]
    wanted = wanted_of(here, 4, versions.get)
    assert wanted.places(4, 0).tolist() == cached.tolist() != wanted.places(4, 1).tolist()
    assert not len(wanted.places(4, 2)), "a shard that has not loaded it"


# ---- groups that move -----------------------------------------------------------------------------------------------


def test_another_shard_gets_what_was_drawn_and_which_outputs_have_ended() -> None:
    params = pb.SamplingParams(n=3, seed=1)
    group = SequenceGroup("r", [1, 2, 3], params, max_num_tokens=20, arrival_ns=5, num_outputs=3)
    drawn = DrawnTokens()

    def take(*entries: tuple[int, int, int]) -> None:
        sequences = np.empty(len(entries), np.object_)
        sequences[:] = [group.sequences[index] for index, _, _ in entries]
        token_ids = np.array([token_id for _, token_id, _ in entries], np.int32)
        reasons = np.array([reason for _, _, reason in entries], np.uint8)
        drawn.take(NewTokens(sequences, token_ids, np.arange(len(entries)), reasons))

    take((0, 10, 0), (1, 20, 0))
    take((0, 11, 0), (1, 21, 1))
    drawn.give_to(group)
    take((0, 12, 0))  # at the next shard
    drawn.give_to(group)
    group.num_moves, group.first_scheduled_ns = 2, 77
    moved = decode_group(encode_group(group, 4, reads_logprobs=False, replaces=False, is_moved=True), vocab_size=100)
    assert [s.token_ids.tolist() for s in moved.sequences] == [[1, 2, 3, 10, 11, 12], [1, 2, 3, 20, 21], [1, 2, 3]]
    assert [s.status is SequenceStatus.FINISHED for s in moved.sequences] == [False, True, False]
    assert (moved.num_moves, moved.first_scheduled_ns, moved.arrival_ns) == (2, 77, 5)
    assert len(drawn) == 0


@pytest.mark.parametrize("had_begun", [True, False])
def test_of_those_that_another_shard_had_taken_only_who_had_begun_stands_before_others(had_begun: bool) -> None:
    loop = Loop(max_waiting_requests=2)
    queue, there = WaitingQueue(POLICIES["fcfs"]), [loop.group(f"{number}") for number in range(2)]
    for group in there:
        queue.push(group)
        loop.engine.submit(group)
    group = SequenceGroup("r", [1, 2], pb.SamplingParams(seed=1), max_num_tokens=9, arrival_ns=5)
    group.num_moves, group.first_scheduled_ns = 1, 77 if had_begun else None
    moved = decode_group(encode_group(group, 4, reads_logprobs=False, replaces=False, is_moved=True), vocab_size=100)
    queue.push(moved)
    assert queue.in_order() == ([moved, *there] if had_begun else [*there, moved])
    loop.engine.submit(moved)  # though no other is taken any more
    with pytest.raises(QueueFull):
        loop.engine.submit(loop.group("another"))


def test_a_shard_has_its_part_of_what_may_wait() -> None:
    config = SchedulerConfig(worker=("a:1", "b:2"), shards=3, max_waiting_requests=10, max_waiting_tokens=100)
    share = share_of(config)
    assert (share.worker, share.max_waiting_requests, share.max_waiting_tokens) == ((), 4, 34)


def test_models_that_a_shard_has_no_worker_for_any_more_are_told_after_a_while() -> None:
    serving = {(0, "a"), (1, "a"), (1, "b")}
    unserved = UnservedModels(lambda shard, model: (shard, model) in serving, patience_s=1.0)
    assert unserved.look([0, 1], ["a", "b", "c"], 10.0) == []
    assert unserved.look([0, 1], ["a", "b", "c"], 11.0) == [(0, "b")], "nobody serves c: it is waited for"
    serving.remove((0, "a"))
    assert unserved.look([0, 1], ["a", "b", "c"], 11.5) == [(0, "b")]
    serving.add((0, "b"))
    assert unserved.look([0, 1], ["a", "b", "c"], 12.0) == []
    assert unserved.look([0, 1], ["a", "b", "c"], 12.5) == [(0, "a")]
    assert unserved.look([0], ["a", "b", "c"], 13.0) == [], "the only one that served it is gone"
