"""Tokens to their experts and back: sorted rows and sums of shares against the oracle."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.gpu.experts.combine_experts import combine_experts
from kernels.gpu.experts.route_experts import route_experts
from kernels.gpu.experts.score_experts import score_experts
from kernels.oracles import reference
from tests.kernels.device import DEVICE
from tests.kernels.rows import DTYPES, gaps_are_untouched, normal, poisoned, strided

ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # of one number, to its type


class Route:
    """What `route` makes of logits, on the host."""

    def __init__(self, route, logits, num_chosen, own=None, first_expert=0, is_normalized=True) -> None:
        count, num_experts = logits.shape
        own = num_experts if own is None else own
        shares = torch.full((count, num_chosen), torch.nan, device=DEVICE)
        places = torch.full((count, num_chosen), 99, dtype=torch.int32, device=DEVICE)
        rows = torch.full((count * num_chosen,), 99, device=DEVICE)
        starts = torch.full((own + 1,), 99, dtype=torch.int32, device=DEVICE)
        route(shares, places, rows, starts, logits, first_expert=first_expert, is_normalized=is_normalized)
        self.shares, self.places, self.starts = shares.cpu(), places.cpu(), starts.cpu()
        self.rows = rows.cpu()[: self.starts[-1]]


@DTYPES
@pytest.mark.parametrize(
    ("count", "num_experts", "num_chosen", "own", "first_expert"),
    [
        *[(1, 5, 1, 5, 0), (130, 8, 2, 8, 0), (70, 8, 2, 3, 4), (150, 60, 4, 60, 0), (37, 128, 8, 32, 32)],
        *[
            (3, 6, 6, 2, 4),
            (9, 512, 10, 512, 0),
            (140, 600, 3, 150, 450),
        ],  # tiles are summed twice
    ],
)
def test_tokens_are_sorted_by_the_experts_of_their_largest_shares(
    dtype: torch.dtype, count: int, num_experts: int, num_chosen: int, own: int, first_expert: int
) -> None:
    logits = strided(normal(count, num_experts, dtype=dtype))
    logits[:, -1] = logits[:, 0]  # equal ones: the lower number first
    is_normalized = num_chosen != 4
    ours, exact = (
        Route(route, x, num_chosen, own, first_expert, is_normalized)
        for route, x in ((route_experts, logits), (reference.route_experts, logits.double()))
    )
    assert bool(((ours.shares - exact.shares).abs() <= _bound_of_shares(logits, num_chosen) * exact.shares).all())
    assert torch.equal(ours.places, exact.places)
    assert torch.equal(ours.rows, exact.rows) and torch.equal(ours.starts, exact.starts)


def _bound_of_shares(logits: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """f64[tokens, 1], of the relative error of each share: an exponential of a difference d is off by that of d and of
    d log2(e), |d| each, and by some units of its own, in numerator and sum. Nothing in the sums is negative: each
    number in them passes at most 24 additions, in a tree or in numpy's eight columns."""
    widest = (logits.double().amax(1) - logits.double().amin(1)).cpu()[:, None]
    of_exponentials, of_sums, of_divisions = 2 * (2 * widest + 8), 24 + num_chosen, 2 * 2
    return (of_exponentials + of_sums + of_divisions) * 2**-24


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")  # the interpreter's numpy
def test_rows_of_infinities_and_nan_go_somewhere_and_disturb_nobody() -> None:
    logits = normal(6, 5)
    plain = Route(route_experts, logits[4:].clone(), 2)
    logits[0, 3] = torch.nan
    logits[1] = torch.nan
    logits[2, :4] = -torch.inf
    logits[3] = -torch.inf
    ours = Route(route_experts, logits, 2)
    assert torch.equal(ours.places.flatten().sort().values, torch.arange(12)), "every row has a place of its own"
    assert ours.shares[[0, 1, 3]].isnan().all() and ours.shares[2].tolist() == [1.0, 0.0]
    assert torch.equal(ours.shares[4:], plain.shares)
    exact = Route(reference.route_experts, logits, 2)
    assert torch.equal(ours.places, exact.places) and torch.equal(ours.rows, exact.rows)


def test_shares_of_a_token_are_the_same_in_any_company() -> None:
    logits = normal(200, 24)
    whole = Route(route_experts, logits, 3)
    for tokens in (slice(7, 8), slice(100, 131)):
        assert torch.equal(Route(route_experts, logits[tokens], 3).shares, whole.shares[tokens])


@DTYPES
@pytest.mark.parametrize(("count", "size", "num_chosen"), [(1, 33, 1), (5, 2100, 3), (9, 16, 8)])
def test_rows_are_added_up_by_shares(dtype: torch.dtype, count: int, size: int, num_chosen: int) -> None:
    x = strided(normal(count * num_chosen, size, dtype=dtype))
    shares = normal(count, num_chosen, seed=1).softmax(-1)
    places = torch.randperm(count * num_chosen, generator=torch.Generator().manual_seed(3)).view(count, num_chosen)
    places[-1, -1] = -1
    places = places.int().to(DEVICE)
    out = poisoned(count, size, dtype=dtype)
    exact, sizes = (torch.empty(count, size, dtype=torch.float64, device=DEVICE) for _ in range(2))
    combine_experts(out, x, shares, places)
    reference.combine_experts(exact, x.double(), shares.double(), places)
    reference.combine_experts(sizes, x.double().abs(), shares.double(), places)
    # A term is a product, and passes as many additions as there are; then the sum is rounded to its type.
    of_sum = (1 + num_chosen) * 2**-24 * sizes
    assert bool(((out.double() - exact).abs() <= of_sum + ROUNDING[dtype] * (exact.abs() + of_sum)).all())
    assert gaps_are_untouched(out)
    x[0] = torch.nan  # as what no expert here has made may be
    places[places == 0] = -1
    combine_experts(out, x, shares, places)
    assert out.isfinite().all()
    alone = torch.empty(1, size, dtype=dtype, device=DEVICE)
    combine_experts(alone, x, shares[:1].contiguous(), places[:1].contiguous())
    assert torch.equal(alone[0], out[0])


def test_what_does_not_fit_is_refused() -> None:
    logits, shares, places = normal(4, 6), normal(4, 2), torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
    rows, starts = torch.zeros(8, dtype=torch.int64, device=DEVICE), torch.zeros(7, dtype=torch.int32, device=DEVICE)
    for arguments, message in (
        ((shares, places, rows, starts, logits[:, :1]), "2 chosen of 1"),
        ((shares, places, rows[:3], starts, logits), "rows must be contiguous"),
        ((shares, places.long(), rows, starts, logits), "places is torch.int64"),
        ((shares.half(), places, rows, starts, logits), "shares is torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            route_experts(*arguments, is_normalized=True)
    with pytest.raises(ValueError, match="7 from 0 on"):
        route_experts(shares, places, rows, torch.zeros(8, dtype=torch.int32), logits, is_normalized=True)
    for of_sum, message in (
        ((normal(4, 9), normal(8, 5), shares, places), "for out"),
        ((normal(4, 9), normal(8, 9).half(), shares, places), "x is torch.float16"),
        ((normal(4, 9), normal(8, 9), shares, places[:3]), "places must be"),
    ):
        with pytest.raises(ValueError, match=message):
            combine_experts(*of_sum)


# An exponential of a number below 4 loses 4 roundings by its argument, 2 by itself and 1 by what is taken off before, a
# sum of 12 loses 11, and then come a quotient and a bias. A share is a quotient of two such, with a sum of 3 and a
# product.
OF_SCORES = 20 * 2**-24


@pytest.mark.parametrize(("score", "device"), [(score_experts, DEVICE), (reference.score_experts, "cpu")])
@pytest.mark.parametrize(
    ("kind", "num_groups", "is_normalized"),
    [("softmax", 1, False), ("softmax", 4, True), ("sigmoid", 1, True), ("sigmoid", 4, False)],
)
def test_experts_are_compared_in_the_best_groups(
    score, device, kind: str, num_groups: int, is_normalized: bool
) -> None:
    """Against the definition, expert by expert; a row's bits are its own."""
    logits = normal(30, 12, dtype=torch.float32).to(device)
    logits[0] = 1.0  # equal ones: the lower numbers
    bias = torch.arange(-6, 6, device=device) / 16.0 if kind == "sigmoid" else None
    size, num_chosen_groups = 12 // num_groups, min(2, num_groups)

    def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        x = logits[rows]
        shares, scores = torch.full((len(x), 3), torch.nan, device=device), torch.full_like(x, torch.nan)
        options = {"kind": kind, "num_groups": num_groups, "num_chosen_groups": num_chosen_groups}
        score(shares, scores, x, bias, **options, is_normalized=is_normalized, scale=2.5)
        return shares, scores

    shares, scores = run(slice(None))
    for row, x in enumerate(logits.double()):
        likely = x.softmax(0) if kind == "softmax" else x.sigmoid()
        compared = likely if bias is None else likely + bias
        values = compared.view(num_groups, size).topk(1 if bias is None else 2, dim=1).values.sum(1)
        groups = values.float().sort(descending=True, stable=True).indices[:num_chosen_groups].tolist()
        is_open = torch.tensor([expert // size in groups for expert in range(12)], device=device)
        expected = compared.masked_fill(~is_open, -torch.inf)
        torch.testing.assert_close(scores[row].double(), expected, rtol=OF_SCORES, atol=OF_SCORES)
        chosen = scores[row].sort(descending=True, stable=True).indices[:3]
        of_chosen = likely[chosen] / likely[chosen].sum() if is_normalized else likely[chosen]
        torch.testing.assert_close(shares[row].double(), 2.5 * of_chosen, rtol=2.5 * OF_SCORES, atol=0)
        alone = run(slice(row, row + 1))
        assert torch.equal(alone[0][0], shares[row]) and torch.equal(alone[1][0], scores[row])


def test_a_row_of_nan_is_compared_by_nothing_and_disturbs_nobody() -> None:
    in_groups = partial(score_experts, num_groups=4, num_chosen_groups=2)
    logits, expected = normal(5, 12), torch.empty(5, 12, device=DEVICE)
    shares, scores = torch.empty(5, 3, device=DEVICE), torch.empty(5, 12, device=DEVICE)
    in_groups(shares, expected, logits)
    logits[1, 3] = torch.nan
    in_groups(shares, scores, logits)
    assert scores[1].isneginf().all() and shares[1].isnan().all()
    assert torch.equal(scores[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])
    with pytest.raises(ValueError, match="7 chosen of 2 of 4 groups"):
        in_groups(torch.empty(5, 7, device=DEVICE), scores, logits)
    with pytest.raises(ValueError, match=r"scores is torch\.float16"):
        in_groups(shares, scores.half(), logits)
