"""What one tenant has taken of its limits, and who of its requests waits for its turn."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from octavo.shared.access.tenant_limits import BYTES, REQUESTS, RUNNING, TOKENS, UNLIMITED, WAITING, TenantLimits
from scheduler_svc.errors import FieldViolation, InvalidRequest
from scheduler_svc.limits.over_limit import OTHERS, OverLimit
from scheduler_svc.limits.token_bucket import TokenBucket

MOST_WAITING = 1024  # requests of a tenant whose limits do not say: held ones are in no other bound
RETRY_AFTER_S = 1.0  # of limits that free up when a request ends, whenever that is

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request takes of its tenant's limits.

    Attributes:
        has_had_its_turn: it was admitted before and goes on: it is charged, and refused only where the tenant is a
            minute's worth in debt. Without that bound who breaks off and resumes would have no limit at all.
    """

    tenant: str
    num_prompt_tokens: int
    num_sequences: int
    num_bytes: int
    has_had_its_turn: bool = False


@dataclass(slots=True)
class TenantAccount(Generic[Key]):
    """For one thread at a time. Keys are the caller's names of requests.

    Attributes:
        num_running: sequences of requests that have begun.
        num_bytes: of requests that have not ended.
        running, held: requests that have begun, and those that wait for their turn, in order.
    """

    limits: TenantLimits = UNLIMITED
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    num_running: int = 0
    num_bytes: int = 0
    running: dict[Key, Ask] = field(default_factory=dict)
    held: dict[Key, Ask] = field(default_factory=dict)

    def take_limits(self, limits: TenantLimits, now_s: float) -> None:
        """These are in force from now on; what has been taken stays taken."""
        self.limits = limits
        self.requests = _bucket(self.requests, limits.requests_per_minute, now_s)
        self.tokens = _bucket(self.tokens, limits.tokens_per_minute, now_s)

    def check(self, ask: Ask, is_named: bool, now_s: float) -> None:
        """Raises OverLimit, and InvalidRequest for more sequences than may ever run. Takes nothing."""
        limits, tenant, credit = self.limits, ask.tenant, 1.0 if ask.has_had_its_turn else 0.0

        def over(limit: str, most: int, left: float, why: str, wait_s: float = RETRY_AFTER_S) -> OverLimit:
            message = f"tenant {tenant!r}: {limit} is {most}, {why}; try again in {wait_s:g} s"
            label, left = tenant if is_named else OTHERS, max(0, int(left))
            return OverLimit(message, wait_s, tenant=tenant, limit=limit, most=most, left=left, label=label)

        most_running = limits.running_sequences
        if most_running is not None and ask.num_sequences > most_running:
            what = f"{ask.num_sequences} sequences; accepted: at most {most_running}, the tenant's {RUNNING}"
            raise InvalidRequest(FieldViolation("sampling_params.best_of", what))
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now_s, credit)):
            most, left = int(self.requests.per_minute), self.requests.level(now_s)
            raise over(REQUESTS, most, left, f"and {most - max(0, int(left))} were made", wait_s)
        if self.tokens is not None and (wait_s := self.tokens.wait_s(ask.num_prompt_tokens, now_s, credit)):
            most, left = int(self.tokens.per_minute), self.tokens.level(now_s)
            why = f"and {most - int(left)} are used"
            if left >= 0:
                why += f", while the prompt has {ask.num_prompt_tokens}"
            raise over(TOKENS, most, left, why, wait_s)
        has_others = bool(self.running or self.held)  # one that is alone is taken whatever its size
        if limits.bytes is not None and has_others and self.num_bytes + ask.num_bytes > limits.bytes:
            why = f"and {self.num_bytes} are held, while the request has {ask.num_bytes}"
            raise over(BYTES, limits.bytes, limits.bytes - self.num_bytes, why)
        most_waiting = MOST_WAITING if limits.waiting_requests is None else limits.waiting_requests
        if len(self.held) >= most_waiting and not ask.has_had_its_turn:
            why = f"and {len(self.held)} wait for one of {self.num_running} running sequences to end"
            raise over(WAITING, most_waiting, 0, why)

    def add(self, key: Key, ask: Ask, now_s: float) -> bool:
        """Takes a request; False: it is held."""
        if self.requests is not None:
            self.requests.take(1, now_s)
        if self.tokens is not None:
            self.tokens.take(ask.num_prompt_tokens, now_s)
        self.num_bytes += ask.num_bytes
        if self.held or not self._fits(ask):
            self.held[key] = ask
            return False
        self._begin(key, ask)
        return True

    def give_back(self, key: Key, now_s: float) -> None:
        """A request that was added was of no use; `remove` has to follow."""
        ask = self.running.get(key) or self.held[key]
        if self.requests is not None:
            self.requests.give_back(1, now_s)
        if self.tokens is not None:
            self.tokens.give_back(ask.num_prompt_tokens, now_s)

    def remove(self, key: Key) -> None:
        """It lives no more; `release` may find a turn for others."""
        if (ask := self.held.pop(key, None)) is None:
            ask = self.running.pop(key)
            self.num_running -= ask.num_sequences
        self.num_bytes -= ask.num_bytes

    def release(self) -> list[Key]:
        """Held requests that begin now, in order."""
        begun: list[Key] = []
        while self.held:
            key, ask = next(iter(self.held.items()))
            if not self._fits(ask):
                break
            del self.held[key]
            self._begin(key, ask)
            begun.append(key)
        return begun

    def is_forgettable(self, now_s: float) -> bool:
        """Whether it has nothing live and all of its limits left: one that never came is no different."""
        buckets = (self.requests, self.tokens)
        is_full = all(bucket is None or bucket.level(now_s) >= bucket.per_minute for bucket in buckets)
        return is_full and not self.running and not self.held

    def check_integrity(self) -> None:
        """Raises AssertionError where sums and requests contradict one another. Reads every request."""
        assert self.num_running == sum(ask.num_sequences for ask in self.running.values()), "sequences are miscounted"
        held = sum(ask.num_bytes for ask in (*self.running.values(), *self.held.values()))
        assert self.num_bytes == held, "bytes are miscounted"
        assert not (self.held and not self.running), "requests are held, and nothing runs"

    def _fits(self, ask: Ask) -> bool:
        """One of more sequences than a limit that was lowered since runs alone."""
        most = self.limits.running_sequences
        return most is None or not self.num_running or self.num_running + ask.num_sequences <= most

    def _begin(self, key: Key, ask: Ask) -> None:
        self.running[key] = ask
        self.num_running += ask.num_sequences


def _bucket(former: TokenBucket | None, per_minute: int | None, now_s: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if former is None:
        return TokenBucket(per_minute, now_s)
    if former.per_minute != per_minute:
        former.change(per_minute, now_s)
    return former
