"""How long a request is tried, and when: outages add up until tokens come, and clients do not come back together."""

from __future__ import annotations

import grpc
import pytest

from octavo.calls.addresses import split_addresses
from octavo.errors import RequestFailed
from octavo.retrying import Outages, RetryPolicy, Waiting

GONE = RequestFailed(grpc.StatusCode.UNAVAILABLE, "gone")
QUIET = RetryPolicy(on_wait=lambda _: None)


def outlast(outages: Outages, now_s: float, restart_s: float) -> float:
    """Attempts until one that begins `restart_s` after now is admitted; when that is. Raises RequestFailed."""
    back_s = now_s + restart_s
    while now_s < back_s:
        now_s += outages.delay_s(GONE, now_s) + 0.001
    outages.admitted(now_s)
    return now_s


def test_a_pod_s_restart_is_waited_out_by_default() -> None:
    for _ in range(50):
        outages = Outages(QUIET, "r")
        outages.admitted(0.0)
        assert outlast(outages, 10.0, restart_s=110.0) < 10.0 + 110.0 + QUIET.max_delay_s + 1


def test_it_ends_with_the_window_and_not_long_before() -> None:
    outages, now_s = Outages(QUIET, "r"), 5.0
    outages.admitted(0.0)
    with pytest.raises(RequestFailed, match="nobody went on with it for 120"):
        outlast(outages, now_s, restart_s=500.0)


def test_outages_add_up_until_tokens_come() -> None:
    outages, now_s = Outages(QUIET, "r"), 0.0
    outages.admitted(now_s)
    with pytest.raises(RequestFailed, match="nobody went on"):
        for _ in range(4):
            now_s = outlast(outages, now_s, restart_s=40.0) + 300.0  # it computes for long, and shows nothing
    outages, now_s = Outages(QUIET, "r"), 0.0
    outages.admitted(now_s)
    for _ in range(20):
        now_s = outlast(outages, now_s, restart_s=40.0)
        outages.progressed()


def test_a_resume_that_no_scheduler_takes_is_not_tried_again() -> None:
    outages = Outages(QUIET, "r")
    outages.admitted(0.0)
    outages.delay_s(GONE, 1.0)
    full = RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, "64 requests wait")
    assert outages.delay_s(full, 2.0) >= 0
    with pytest.raises(RequestFailed, match="larger than max"):
        outages.delay_s(RequestFailed(full.code, "CLIENT: Received message larger than max (1048577 vs. 1048576)"), 3.0)


def test_a_hint_beyond_the_window_ends_it_at_once() -> None:
    told: list[Waiting] = []
    policy = RetryPolicy(window_s=5.0, first_delay_s=0.0, on_wait=told.append)
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    outages = Outages(policy, "r")
    outages.admitted(0.0)
    outages.delay_s(GONE, 1.0)
    assert 3.0 <= outages.delay_s(RequestFailed(full, "full", retry_after_s=3.0), 2.0) <= 3.2 and len(told) == 2
    with pytest.raises(RequestFailed, match="a pause of 4 s, longer than the window; first UNAVAILABLE: gone"):
        outages.delay_s(RequestFailed(full, "full", retry_after_s=4.0), 2.5)
    assert len(told) == 2


def test_a_request_that_is_lost_wherever_it_goes_ends() -> None:
    outages, num_admitted = Outages(QUIET, "r"), 0
    with pytest.raises(RequestFailed, match="9 schedulers were lost"):
        while True:
            outages.admitted(float(num_admitted))
            num_admitted += 1
            outages.delay_s(GONE, float(num_admitted))
    assert num_admitted == 1 + QUIET.max_losses


def test_what_is_refused_is_not_tried_again() -> None:
    for code in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    ):
        outages = Outages(QUIET, "r")
        outages.admitted(0.0)
        with pytest.raises(RequestFailed, match=code.name):
            outages.delay_s(RequestFailed(code, "no"), 1.0)
    for code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED):
        with pytest.raises(RequestFailed, match=code.name):
            Outages(QUIET, "r").delay_s(RequestFailed(code, "no"), 1.0)  # before it was admitted


def test_what_nobody_took_is_tried_again_though_it_was_never_admitted() -> None:
    for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        assert Outages(QUIET, "r").delay_s(RequestFailed(code, "no"), 1.0) >= 0


def test_a_thousand_clients_come_back_one_by_one() -> None:
    """After an outage of 20 s no tenth of a second has more than a few of them."""
    returns = []
    for _ in range(1000):
        outages = Outages(QUIET, "r")
        outages.admitted(0.0)
        returns.append(outlast(outages, 0.0, restart_s=20.0))
    busiest = max(sum(start / 10 <= at - 20 < start / 10 + 0.1 for at in returns) for start in range(60))
    assert busiest < 100, "of 20 a tenth on average, were they spread over 5 s"
    first = [Outages(QUIET, "r").delay_s(GONE, 0.0) for _ in range(1000)]
    assert max(first) <= QUIET.first_delay_s and min(first) < 0.1 * QUIET.first_delay_s


def test_the_pause_grows_once_all_addresses_have_failed() -> None:
    policy = RetryPolicy(first_delay_s=1.0, max_delay_s=8.0, window_s=1e9, on_wait=lambda _: None)
    longest = [0.0] * 9
    for _ in range(400):
        outages = Outages(policy, "r", num_addresses=2)
        for failure in range(9):
            longest[failure] = max(longest[failure], outages.delay_s(GONE, 0.0))
    for failure, bound in enumerate((1, 1, 2, 2, 4, 4, 8, 8, 8)):
        assert 0.8 * bound < longest[failure] <= bound


def test_whoever_wants_no_retries_gets_the_loss_itself() -> None:
    told: list[Waiting] = []
    outages = Outages(RetryPolicy(window_s=0.0, on_wait=told.append), "r")
    outages.admitted(0.0)
    with pytest.raises(RequestFailed) as caught:
        outages.delay_s(GONE, 1.0)
    assert caught.value is GONE and not told
    outages = Outages(RetryPolicy(window_before_admission_s=0.0, on_wait=told.append), "r")
    with pytest.raises(RequestFailed):
        outages.delay_s(GONE, 0.0)
    outages = Outages(RetryPolicy(window_before_admission_s=0.0, on_wait=told.append), "r")
    outages.admitted(1.0)
    assert outages.delay_s(GONE, 2.0) >= 0 and told[0].left_s == 120.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a:1", ["a:1"]),
        ("a:1, b:2,a:1", ["a:1", "b:2"]),
        (["dns:///a:1", "b:2"], ["dns:///a:1", "b:2"]),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", ["ipv4:127.0.0.1:1,127.0.0.1:2"]),
    ],
)
def test_addresses(given: str | list[str], expected: list[str]) -> None:
    assert split_addresses(given) == expected


def test_no_address_is_an_error() -> None:
    with pytest.raises(ValueError, match="no address"):
        split_addresses(" ,")
