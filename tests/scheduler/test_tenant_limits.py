"""Limits of tenants by themselves: the bucket, the ledger over all tenants, and the section of the file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from octavo.shared.access.keys import KeysFileError, TenantsOfFile, read_file
from octavo.shared.access.tenant_limits import BYTES, REQUESTS, RUNNING, TOKENS, WAITING, TenantLimits, TenantTable
from octavo.shared.watched_files import LOOK_AGAIN_S
from scheduler_svc.errors import InvalidRequest
from scheduler_svc.limits.over_limit import OTHERS, OverLimit
from scheduler_svc.limits.tenant_account import Ask
from scheduler_svc.limits.tenant_ledger import MAX_IDLE, TenantLedger
from scheduler_svc.limits.token_bucket import TokenBucket
from tests.many import trials, without_end

# ---- the bucket -----------------------------------------------------------------------------------------------------

PAUSES = st.one_of(st.just(0.0), st.floats(0.0, 90.0))
AMOUNTS = st.integers(1, 2000)


@without_end
@given(per_minute=st.integers(1, 1000), asked=st.lists(st.tuples(PAUSES, AMOUNTS, st.integers(0, 500)), max_size=40))
@settings(max_examples=trials(100), deadline=None)
def test_no_window_sees_more_than_a_minutes_worth_beside_the_rate(
    per_minute: int, asked: list[tuple[float, int, int]]
) -> None:
    """Debt at the end is what came after it was admitted, or a single request of more than a minute's worth."""
    now_s, bucket, taken = 0.0, TokenBucket(per_minute, 0.0), list[tuple[float, int]]()
    for pause_s, amount, later in asked:
        now_s += pause_s
        if not bucket.wait_s(amount, now_s):
            bucket.take(amount, now_s)
            bucket.take(later, now_s)
            taken.append((now_s, amount + later))
        debt = max(0.0, -bucket.level(now_s))
        for begin, (begin_s, _) in enumerate(taken):
            in_window = sum(amount for _, amount in taken[begin:])
            assert in_window <= per_minute + (now_s - begin_s) * per_minute / 60 + debt + 1e-3


@without_end
@given(per_minute=st.integers(1, 100_000), asked=st.lists(st.tuples(PAUSES, AMOUNTS), min_size=1, max_size=30))
@settings(max_examples=trials(100), deadline=None)
def test_who_comes_again_when_he_was_told_is_let_in_and_not_much_earlier(
    per_minute: int, asked: list[tuple[float, int]]
) -> None:
    now_s, bucket = 1e6, TokenBucket(per_minute, 1e6)
    for pause_s, amount in asked:
        now_s += pause_s
        if wait_s := bucket.wait_s(amount, now_s):
            assert wait_s * 1e3 == pytest.approx(round(wait_s * 1e3)), "whole milliseconds"
            early_s = now_s + wait_s - 2e-3
            assert early_s <= now_s or bucket.wait_s(amount, early_s), "no longer than it takes"
            now_s += wait_s
            assert not bucket.wait_s(amount, now_s)
        bucket.take(amount, now_s)


def test_a_debt_is_paid_off_before_anything_else_and_a_clock_that_falls_adds_nothing() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(90, 0.0)
    assert bucket.wait_s(1, 0.0) == 31.0 and bucket.wait_s(1, -100.0) == 31.0
    assert bucket.level(30.0) == 0.0 and not bucket.wait_s(1, 31.0)


def test_a_request_of_more_than_a_minutes_worth_is_taken_from_a_full_bucket() -> None:
    bucket = TokenBucket(60, 0.0)
    assert not bucket.wait_s(600, 0.0)
    bucket.take(600, 0.0)
    assert bucket.wait_s(600, 0.0) == 600.0 and bucket.wait_s(1, 0.0) == 541.0


def test_what_was_taken_stays_taken_when_the_rate_changes() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(60, 0.0)
    bucket.change(6000, 0.0)
    assert bucket.wait_s(1, 0.0) == 0.01
    bucket.change(6, 60.0)
    assert bucket.level(60.0) == 6 and bucket.wait_s(1, 60.0) == 0.0


# ---- the ledger -----------------------------------------------------------------------------------------------------


def ledger_of(**limits: int) -> TenantLedger[str]:
    table = TenantTable({"shop": TenantLimits(**limits)}, TenantLimits(), {})
    return TenantLedger(lambda: table)


def ask(num_prompt_tokens: int = 1, *, tenant: str = "shop", **fields: Any) -> Ask:
    return Ask(tenant, num_prompt_tokens, fields.pop("num_sequences", 1), fields.pop("num_bytes", 0), **fields)


def refused(ledger: TenantLedger[str], asked: Ask, now_s: float) -> OverLimit:
    with pytest.raises(OverLimit) as raised:
        ledger.admit("refused", asked, now_s)
    return raised.value


def test_requests_a_minute() -> None:
    ledger = ledger_of(requests_per_minute=3)
    for number in range(3):
        assert ledger.admit(str(number), ask(), 0.0)
        ledger.ended(str(number))
    over = refused(ledger, ask(), 0.0)
    assert str(over) == "tenant 'shop': requests_per_minute is 3, and 3 were made; try again in 20 s"
    assert (over.retry_after_s, over.limit, over.most, over.left, over.label) == (20.0, REQUESTS, 3, 0, "shop")
    with pytest.raises(OverLimit):
        ledger.check("shop", 0, 19.0)
    ledger.check("shop", 0, 20.0)
    assert ledger.admit("again", ask(), 20.0) and refused(ledger, ask(), 20.0).retry_after_s == 20.0
    assert ledger.admit("another's", ask(tenant="web"), 20.0), "who has no limit has none"


def test_prompt_tokens_count_at_once_and_generated_ones_as_they_come() -> None:
    ledger = ledger_of(tokens_per_minute=600)
    assert ledger.admit("a", ask(500), 0.0)
    over = refused(ledger, ask(200), 0.0)
    assert "tokens_per_minute is 600, and 500 are used, while the prompt has 200; try again in 10 s" in str(over)
    assert (over.limit, over.left) == (TOKENS, 100)
    assert ledger.to_be_counted(0.0, 1.0) == ["a"] and not ledger.to_be_counted(0.0, 1.0)
    ledger.charge("a", 150, 0.0)
    ledger.charge("a", 150, 0.0)  # all told
    over = refused(ledger, ask(1), 0.0)
    assert "and 650 are used; try again in 5.1 s" in str(over)
    assert not ledger.to_be_counted(0.9, 1.0)
    assert ledger.admit("goes on", ask(5, has_had_its_turn=True), 0.0), "it is charged, and not refused"
    assert refused(ledger, ask(1), 0.0).retry_after_s == 5.6
    assert ledger.to_be_counted(1.0, 1.0) == ["a", "goes on"]
    assert ledger.ended("a") == ledger.ended("goes on") == ledger.to_be_counted(2.0, 1.0) == []
    ledger.charge("a", 1000, 0.0)
    assert refused(ledger, ask(1), 0.0).retry_after_s == 5.6


def test_running_sequences_hold_more_in_order_and_waiting_ones_are_bounded() -> None:
    ledger = ledger_of(running_sequences=4, waiting_requests=2)
    assert ledger.admit("a", ask(num_sequences=3), 0.0)
    assert not ledger.admit("b", ask(num_sequences=2), 0.0)
    assert not ledger.admit("c", ask(), 0.0), "there is room for it, and it does not pass who came before"
    over = refused(ledger, ask(), 0.0)
    assert (over.limit, over.retry_after_s, ledger.num_held) == (WAITING, 1.0, 2)
    assert ledger.is_held("b") and not ledger.is_held("a")
    assert ledger.ended("b") == ["c"], "who gives up makes room as well"
    assert not ledger.admit("d", ask(num_sequences=4), 0.0)
    assert ledger.ended("a") == [] and ledger.ended("a") == []
    assert ledger.ended("c") == ["d"]
    with pytest.raises(InvalidRequest, match="5 sequences; accepted: at most 4, the tenant's running_sequences"):
        ledger.admit("e", ask(num_sequences=5), 0.0)
    ledger.check_integrity()


def test_bytes_are_held_until_the_request_ends() -> None:
    ledger = ledger_of(bytes=100)
    assert ledger.admit("a", ask(num_bytes=1000), 0.0), "one that is alone is taken whatever its size"
    over = refused(ledger, ask(num_bytes=1), 0.0)
    assert (over.limit, over.most, over.left) == (BYTES, 100, 0)
    ledger.ended("a")
    assert ledger.admit("b", ask(num_bytes=60), 0.0) and ledger.admit("c", ask(num_bytes=40), 0.0)
    assert "100 are held, while the request has 1" in str(refused(ledger, ask(num_bytes=1), 0.0))


def test_what_was_refused_elsewhere_is_given_back() -> None:
    ledger = ledger_of(requests_per_minute=1, tokens_per_minute=10, running_sequences=1, bytes=1)
    assert ledger.admit("a", ask(10, num_bytes=1), 0.0)
    assert ledger.cancel("a", 0.0) == [] and ledger.cancel("a", 0.0) == []
    assert ledger.admit("b", ask(10, num_bytes=1), 0.0)


def test_limits_that_change_are_in_force_at_once_and_running_requests_go_on() -> None:
    tables = [TenantTable({"shop": TenantLimits(running_sequences=1)})]
    ledger: TenantLedger[str] = TenantLedger(lambda: tables[-1])
    assert ledger.admit("a", ask(), 0.0) and not ledger.admit("b", ask(), 0.0)
    assert not ledger.admit("c", ask(), 0.0) and ledger.look(0.0) == []
    tables.append(TenantTable({"shop": TenantLimits(running_sequences=2)}))
    assert ledger.look(0.0) == ["b"]
    tables.append(TenantTable({"shop": TenantLimits(running_sequences=1, requests_per_minute=1)}))
    assert ledger.look(0.0) == [] and ledger.ended("b") == [], "one runs still"
    assert ledger.admit("d", ask(), 0.0) is False
    assert refused(ledger, ask(), 0.0).limit == REQUESTS
    tables.append(TenantTable())
    assert ledger.look(0.0) == ["c", "d"] and ledger.admit("e", ask(), 0.0)
    for key in "acde":
        ledger.ended(key)
    ledger.check_integrity()


def test_a_request_of_more_sequences_than_a_lowered_limit_runs_alone() -> None:
    tables = [TenantTable({"shop": TenantLimits(running_sequences=4)})]
    ledger: TenantLedger[str] = TenantLedger(lambda: tables[-1])
    assert ledger.admit("a", ask(num_sequences=4), 0.0) and not ledger.admit("b", ask(num_sequences=3), 0.0)
    tables.append(TenantTable({"shop": TenantLimits(running_sequences=2)}))
    assert ledger.look(0.0) == [] and ledger.ended("a") == ["b"]


def test_tenants_that_left_nothing_behind_are_forgotten_and_others_are_not() -> None:
    table = TenantTable(default=TenantLimits(requests_per_minute=2))
    ledger: TenantLedger[str] = TenantLedger(lambda: table)
    for number in range(3 * MAX_IDLE):
        assert ledger.admit("a", ask(tenant=f"t{number}"), float(number))
        ledger.ended("a")
    assert len(ledger._accounts) <= MAX_IDLE + 60
    over = None
    for _ in range(3):
        try:
            ledger.admit("b", ask(tenant=f"t{3 * MAX_IDLE - 1}"), 3.0 * MAX_IDLE)
            ledger.ended("b")
        except OverLimit as error:
            over = error
    assert over is not None and over.label == OTHERS


class Ledger(RuleBasedStateMachine):
    """Any requests of two tenants, and a file that changes under them."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.number = 0.0, 0
        self.table = TenantTable()
        self.ledger: TenantLedger[int] = TenantLedger(lambda: self.table)
        self.begun: dict[int, Ask] = {}
        self.held: dict[int, Ask] = {}

    @rule(limits=st.dictionaries(st.sampled_from([REQUESTS, TOKENS, RUNNING, BYTES]), st.integers(1, 30)))
    def change(self, limits: dict[str, int]) -> None:
        self.table = TenantTable({"a": TenantLimits(**limits)}, TenantLimits(running_sequences=3))
        self._begin(self.ledger.look(self.now_s))

    @rule(pause_s=st.floats(0, 30))
    def wait(self, pause_s: float) -> None:
        self.now_s += pause_s

    @rule(tenant=st.sampled_from("ab"), sizes=st.tuples(*[st.integers(1, 10)] * 3))
    def admit(self, tenant: str, sizes: tuple[int, int, int]) -> None:
        self.number += 1
        asked = Ask(tenant, *sizes)
        try:
            (self.begun if self.ledger.admit(self.number, asked, self.now_s) else self.held)[self.number] = asked
        except OverLimit as over:
            assert 0 < over.retry_after_s < math.inf
            if over.limit in (REQUESTS, TOKENS):
                with_room = self.now_s + over.retry_after_s
                account = self.ledger._accounts[tenant]
                bucket = account.requests if over.limit == REQUESTS else account.tokens
                assert bucket is not None
                assert not bucket.wait_s(1 if over.limit == REQUESTS else asked.num_prompt_tokens, with_room)
                self.now_s = with_room
        except InvalidRequest:
            most = self.table.of(tenant).running_sequences
            assert most is not None and asked.num_sequences > most

    @rule(which=st.integers(0, 10), ends=st.booleans())
    def end(self, which: int, ends: bool) -> None:
        lives = [*self.begun, *self.held]
        if lives:
            key = lives[which % len(lives)]
            self.begun.pop(key, None)
            self.held.pop(key, None)
            self._begin(self.ledger.ended(key) if ends else self.ledger.cancel(key, self.now_s))

    def _begin(self, keys: list[int]) -> None:
        for key in keys:
            self.begun[key] = self.held.pop(key)

    @invariant()
    def agrees(self) -> None:
        self.ledger.check_integrity()
        assert self.ledger.num_held == len(self.held)
        for tenant in "ab":
            running = [each.num_sequences for each in self.begun.values() if each.tenant == tenant]
            held = [each.num_sequences for each in self.held.values() if each.tenant == tenant]
            most = self.table.of(tenant).running_sequences
            if held and self.table is self.ledger._seen:
                assert most is not None and running and sum(running) + held[0] > most, "held for no reason"


@without_end
def test_any_order_of_requests_and_changes() -> None:
    run_state_machine_as_test(Ledger, settings=settings(max_examples=trials(40), deadline=None))


# ---- the file -------------------------------------------------------------------------------------------------------


def write(path: Path, **sections: Any) -> Path:
    path.write_text(yaml.safe_dump({"keys": [], **sections}))
    return path


def test_tenants_have_what_their_entry_says_and_others_what_default_says(tmp_path: Path) -> None:
    shop = {"name": "shop", "weight": 3, TOKENS: 1000, RUNNING: 2, WAITING: 5}
    path = write(tmp_path / "k", tenants=[shop, {"name": "free"}], default={REQUESTS: 60, BYTES: 100})
    table = read_file(path).tenants
    assert table.of("shop") == TenantLimits(tokens_per_minute=1000, running_sequences=2, waiting_requests=5)
    assert table.of("free") == TenantLimits() and table.of("web") == TenantLimits(requests_per_minute=60, bytes=100)
    assert table.weights == {"shop": 3.0}


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"tenants": {"shop": {}}}, "tenants: a list of entries is accepted"),
        ({"tenants": [{REQUESTS: 1}]}, r"tenants\[0\]: name is None"),
        ({"tenants": [{"name": "a"}, {"name": "a"}]}, r"tenants\[1\]: tenant 'a' is there twice"),
        ({"tenants": [{"name": "a", "tokens": 1}]}, r"tenants\[0\] has 'tokens'; known: name, weight, requests_per_mi"),
        ({"tenants": [{"name": "a", REQUESTS: 0}]}, "requests_per_minute is 0; a whole number from 1 on"),
        ({"tenants": [{"name": "a", TOKENS: "1k"}]}, "tokens_per_minute is '1k'"),
        ({"tenants": [{"name": "a", BYTES: True}]}, "bytes is True"),
        ({"tenants": [{"name": "a", "weight": 0}]}, "weight is 0; a positive number"),
        ({"tenants": [{"name": "a", "weight": float("inf")}]}, "weight is inf"),
        ({"tenants": [{"name": "a", WAITING: 1}]}, "waiting_requests bounds what waits for running_sequences"),
        ({"default": [1]}, "default: fields are accepted"),
        ({"default": {"weight": 1}}, "default has 'weight'"),
    ],
)
def test_sections_that_leave_anything_open_are_refused(
    sections: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(KeysFileError, match=complaint) as raised:
        read_file(write(tmp_path / "k", **sections))
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


def test_a_shard_starts_while_the_file_is_broken_and_reads_it_once_it_is_not(tmp_path: Path) -> None:
    now_s = 0.0
    path = write(tmp_path / "k", default={REQUESTS: -1})
    with pytest.raises(KeysFileError):
        TenantsOfFile(path, lambda: now_s)
    tenants = TenantsOfFile(path, lambda: now_s, starts_without=True)
    assert tenants.table() == TenantTable()
    write(path, default={REQUESTS: 2})
    now_s += LOOK_AGAIN_S
    good = tenants.table()
    assert good.of("a") == TenantLimits(requests_per_minute=2)
    write(path, default={REQUESTS: -1})
    now_s += LOOK_AGAIN_S
    assert tenants.table() is good


def test_a_wrong_section_changes_nothing_later(tmp_path: Path) -> None:
    now_s = 0.0
    path = write(tmp_path / "k", default={REQUESTS: 1})
    tenants = TenantsOfFile(path, lambda: now_s)
    before = tenants.table()
    write(path, default={REQUESTS: -1})
    now_s += LOOK_AGAIN_S
    assert tenants.table() is before
    write(path, default={REQUESTS: 2})
    now_s += LOOK_AGAIN_S
    assert tenants.table().of("a") == TenantLimits(requests_per_minute=2)
