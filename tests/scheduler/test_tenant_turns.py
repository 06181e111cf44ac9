"""Limits and weights of tenants in the engine, turned by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.shared.access.tenant_limits import TenantLimits, TenantTable
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.engine.load import Load
from scheduler_svc.limits.over_limit import OverLimit
from tests.scheduler.hand_turned_loop import Loop


def table(weights: dict[str, float] | None = None, /, **limits: int) -> TenantTable:
    return TenantTable({"shop": TenantLimits(**limits)} if limits else {}, weights=weights or {})


class Tables:
    """A file, as the engine sees it, and a clock."""

    def __init__(self, **limits: int) -> None:
        self.now_ns = 10**9
        self.table = table(**limits)

    def put(self, weights: dict[str, float] | None = None, **limits: int) -> None:
        self.table = table(weights, **limits)

    def loop(self, **settings: object) -> Loop:
        return Loop(clock=lambda: self.now_ns, tenants=lambda: self.table, tenants_are_known=True, **settings)


def running(loop: Loop) -> set[str]:
    (worker,) = loop.engine.workers
    return {group.request_id for group in worker.scheduler.groups.all()}


def test_a_capped_tenant_runs_no_more_than_it_may_and_others_pass_what_it_has_waiting() -> None:
    tables = Tables(running_sequences=2)
    loop = tables.loop()
    worker = loop.join(max_num_seqs=4)
    for number in range(5):
        loop.engine.submit(loop.group(f"shop {number}", tenant="shop"))
    for number in range(3):
        loop.engine.submit(loop.group(f"web {number}", tenant="web"))
    loop.turn()
    assert running(loop) == {"shop 0", "shop 1", "web 0", "web 1"}
    assert (loop.engine.num_held, loop.engine.num_waiting, loop.engine.num_waiting_tokens) == (3, 1, 3)
    assert Load.of(loop.engine).num_pending == Load.by_model(loop.engine)[""].num_pending == 1
    loop.engine.abort("shop 0")
    loop.engine.abort("shop 3")  # which is held
    loop.turn()
    assert loop.ends["shop 3"][0] is FinishReason.ABORT
    loop.answer(worker)
    loop.turn()
    assert running(loop) == {"shop 1", "shop 2", "web 0", "web 1"}, "it came before `web 2`, and stands before it"
    assert (loop.engine.num_held, loop.engine.num_waiting, loop.engine.num_waiting_tokens) == (1, 1, 3)
    loop.engine.stop()
    engine = loop.engine
    assert engine.num_held == engine.num_waiting == engine.num_waiting_tokens == engine.num_live == 0
    engine._live._tenants._ledger.check_integrity()  # type: ignore[union-attr]  # it has one


def test_generated_tokens_are_charged_while_a_request_runs() -> None:
    tables = Tables(tokens_per_minute=10)
    loop = tables.loop()
    worker = loop.join()
    loop.engine.submit(loop.group("a", 6, tenant="shop"))
    loop.engine.check_room("shop", "b")
    loop.turn()
    for _ in range(5):
        loop.answer(worker)
        loop.turn()
    tables.now_ns += 500_000_000
    loop.turn()
    with pytest.raises(OverLimit, match=r"tokens_per_minute is 10, and 1[01] are used"):
        loop.engine.check_room("shop", "b")
    loop.engine.check_room("web", "b")
    with pytest.raises(OverLimit):
        loop.engine.submit(loop.group("b", tenant="shop"))
    assert +loop.engine.metrics.num_over_limit == {("shop", "tokens_per_minute"): 1}
    assert loop.engine.metrics.num_rejected["tenant_limit"] == 1 and loop.engine.num_live == 1


def test_what_a_request_brings_along_is_charged_as_a_prompt_and_not_as_generated() -> None:
    tables = Tables(tokens_per_minute=100)
    loop = tables.loop()
    loop.join()
    loop.engine.submit(loop.group("a", 5, tenant="shop", resumed_token_ids=[[7] * 8]))
    loop.turn()
    loop.engine.abort("a")
    loop.turn()
    with pytest.raises(OverLimit, match="and 13 are used, while the prompt has 96"):
        loop.engine.submit(loop.group("b", 96, tenant="shop"))


def test_who_breaks_off_and_resumes_again_and_again_has_a_limit() -> None:
    tables = Tables(requests_per_minute=2)
    loop = tables.loop()
    worker = loop.join()
    num_taken = 0
    with pytest.raises(OverLimit, match="requests_per_minute is 2"):
        for _ in range(9):
            group = loop.group("a", tenant="shop", resumed_token_ids=[[7]] if num_taken else [[]])
            loop.engine.submit(group)
            num_taken += 1
            loop.turn()
            loop.answer(worker)
            loop.turn()
            loop.engine.abandon(group)
            loop.turn()
    assert num_taken == 4, "two, and as many in debt"


def test_held_requests_take_no_room_from_others() -> None:
    tables = Tables(running_sequences=1)
    loop = tables.loop(max_waiting_requests=3)
    loop.join(max_num_seqs=4)
    for number in range(6):
        loop.engine.submit(loop.group(f"shop {number}", tenant="shop"))
    loop.engine.submit(loop.group("web", tenant="web"))
    loop.turn()
    assert "web" in running(loop) and loop.engine.num_held == 5


def test_a_request_that_had_its_turn_goes_on_whatever_the_limit() -> None:
    tables = Tables(requests_per_minute=1)
    loop = tables.loop()
    loop.join()
    loop.engine.submit(loop.group("a", tenant="shop"))
    loop.turn()
    (group,) = loop.engine.find("a")
    loop.engine.abandon(group)
    loop.turn()
    loop.engine.submit(loop.group("a", tenant="shop", resumed_token_ids=[[7]]))
    with pytest.raises(OverLimit, match="requests_per_minute is 1, and 1 were made; try again in 120 s"):
        loop.engine.submit(loop.group("b", tenant="shop"))


def test_limits_that_are_raised_let_held_requests_begin() -> None:
    tables = Tables(running_sequences=1)
    loop = tables.loop()
    worker = loop.join()
    for name in "ab":
        loop.engine.submit(loop.group(name, tenant="shop"))
    loop.turn()
    assert running(loop) == {"a"}
    tables.put()
    loop.turn()
    loop.answer(worker)
    loop.turn()
    assert running(loop) == {"a", "b"} and loop.engine.num_held == 0


def test_weights_of_the_file_win_and_count_from_the_moment_that_they_are_read() -> None:
    tables = Tables()
    loop = tables.loop(scheduling_policy="fair", tenant_weights={"shop": 2.0, "web": 3.0})
    cost: Callable[[str], float] = lambda tenant: loop.engine._served.cost(tenant, 12)  # noqa: E731  # short
    assert (cost("shop"), cost("web"), cost("other")) == (6.0, 4.0, 12.0)
    tables.put({"shop": 4.0})
    loop.turn()
    assert (cost("shop"), cost("web")) == (3.0, 4.0)
    tables.put()
    loop.turn()
    assert cost("shop") == 6.0


def test_a_shard_takes_weights_and_leaves_limits_to_its_parent() -> None:
    tables = Tables(running_sequences=1, requests_per_minute=1)
    loop = tables.loop(has_tenant_limits=False)
    loop.join()
    for name in "ab":
        loop.engine.submit(loop.group(name, tenant="shop"))
    loop.turn()
    assert running(loop) == {"a", "b"}
