"""Whether and when a request is sent again after its scheduler, or the way there, was lost.

An outage is the time from a loss until some scheduler has admitted the request again. What counts is the sum of outages
since the last tokens: a pod's restart is waited out however long the answer takes, and a request that is lost wherever
it goes ends before long. No channel, no clock, no sleeping.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from octavo.errors import RequestFailed
from octavo.shared.backoff import backoff_s

log = logging.getLogger("octavo.client")

# What an admitted stream also ends with when its server or the way there is lost: INTERNAL and UNKNOWN are what resets
# of an HTTP/2 stream become, RESOURCE_EXHAUSTED is the queue of the one tried next.
_LOST = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.RESOURCE_EXHAUSTED})


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that is about to wait for a scheduler.

    Attributes:
        failure: what the last attempt ended with.
        delay_s: until the next one.
        left_s: how much longer it is tried, unless tokens come; the caller's own timeout may end it sooner.
        is_first: of this outage.
    """

    request_id: str
    failure: RequestFailed
    delay_s: float
    left_s: float
    is_first: bool


def log_waiting(waiting: Waiting) -> None:
    """A warning when an outage begins; later pauses are logged at debug level."""
    level = logging.WARNING if waiting.is_first else logging.DEBUG
    log.log(
        level,
        "request %s waits for a scheduler, for up to %.0f s: %s",
        waiting.request_id,
        waiting.left_s,
        waiting.failure,
    )


@dataclass(frozen=True)
class RetryPolicy:
    """How long and how soon a request is sent again.

    Attributes:
        window_s: seconds without a scheduler, added up since the last tokens, after which a request is given up; 0: at
            the first loss, and at once where a scheduler asks for a longer pause.
        window_before_admission_s: likewise for one that nobody has admitted yet; None: the same.
        max_losses: schedulers in a row that may be lost after they admitted it and before anything came of it. One
            that comes whole at its end (`stream` = false, beams, `best_of` > `n`) has nothing come of it until then.
        first_delay_s, max_delay_s: a pause is drawn evenly between 0 and a bound that begins at the one, doubles with
            every failure at all addresses, and stays below the other: clients that lost one scheduler together do not
            come to the next one together.
        on_wait: told of every pause before it begins, on the caller's thread or event loop; must not block.
    """

    window_s: float = 120.0
    window_before_admission_s: float | None = None
    max_losses: int = 8
    first_delay_s: float = 0.2
    max_delay_s: float = 5.0
    on_wait: Callable[[Waiting], None] = log_waiting

    def bound_s(self, rounds: int) -> float:
        """The longest pause after so many failures of every address."""
        return backoff_s(self.first_delay_s, rounds, self.max_delay_s)


class Outages:
    """What one request has been through since its last tokens."""

    def __init__(self, policy: RetryPolicy, request_id: str, num_addresses: int = 1) -> None:
        self._policy, self._request_id, self._num_addresses = policy, request_id, num_addresses
        self._was_admitted = False  # once
        self._is_admitted = False  # in the attempt that is under way
        self._num_failures = self._num_losses = 0
        self._ended_s = 0.0  # of outages that are over
        self._began_s: float | None = None  # the one that is not
        self._first: RequestFailed | None = None

    def admitted(self, now_s: float) -> None:
        """Some scheduler has taken the request: the outage, if there was one, is over."""
        self._was_admitted = self._is_admitted = True
        if self._began_s is not None:
            self._ended_s += now_s - self._began_s
            self._began_s = None

    def progressed(self) -> None:
        """Tokens have come."""
        self._num_failures = self._num_losses = 0
        self._ended_s, self._began_s, self._first = 0.0, None, None

    def delay_s(self, failure: RequestFailed, now_s: float, remaining_s: float | None = None) -> float:
        """Seconds until the next attempt; raises RequestFailed when there is to be none.

        `remaining_s`: of the caller's timeout, within which the pause ends where that is possible.
        """
        if self._first is not None and failure.code is grpc.StatusCode.UNIMPLEMENTED:
            raise self._first  # a server that does not know how to resume: the error to report is the loss before it
        is_lost = self._was_admitted and failure.code in _LOST and not failure.is_too_large
        if not failure.is_unanswered and not is_lost:
            raise failure
        policy, is_first = self._policy, self._num_failures == 0
        self._num_failures += 1
        self._num_losses += self._is_admitted
        self._is_admitted = False
        self._first = self._first or failure
        if self._began_s is None:
            self._began_s = now_s
        outage_s = self._ended_s + now_s - self._began_s
        window_s = policy.window_s
        if not self._was_admitted and policy.window_before_admission_s is not None:
            window_s = policy.window_before_admission_s
        if outage_s >= window_s:
            raise self._given_up(failure, f"nobody went on with it for {outage_s:.1f} s")
        if self._num_losses > policy.max_losses:
            raise self._given_up(failure, f"{self._num_losses} schedulers were lost before anything came of it")
        bound_s = policy.bound_s(-(-self._num_failures // self._num_addresses))
        if remaining_s is not None:
            bound_s = min(bound_s, remaining_s)
        hint_s = failure.retry_after_s or 0.0
        delay_s = hint_s + min(random.uniform(0.0, bound_s), window_s - outage_s)
        if remaining_s is not None and remaining_s <= hint_s:
            raise RequestFailed(grpc.StatusCode.DEADLINE_EXCEEDED, f"no time for another attempt after: {failure}")
        if hint_s > window_s - outage_s:
            raise self._given_up(failure, f"it asks for a pause of {hint_s:.0f} s, longer than the window")
        policy.on_wait(Waiting(self._request_id, failure, delay_s, window_s - outage_s, is_first))
        return delay_s

    def _given_up(self, failure: RequestFailed, why: str) -> RequestFailed:
        """The last failure as it came where it is the only one."""
        first, self._first = self._first, None  # which would hold who asked
        if self._num_failures == 1:
            return failure
        before = "" if first in (None, failure) or str(first) == str(failure) else f"; first {first}"
        return RequestFailed(failure.code, f"{failure.message} ({why}{before})", failure.violations)
