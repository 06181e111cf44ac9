"""What the way of tokens to their experts and back must compute, in plain torch; see `kernels.oracles.reference`."""

from __future__ import annotations

import torch


def route_experts(
    shares: torch.Tensor,
    places: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    logits: torch.Tensor,
    *,
    first_expert: int = 0,
    is_normalized: bool,
) -> None:
    """Which experts each token goes to, with which shares, and where its rows are once they are sorted by experts.

    logits [T, num_experts] of a router. shares f32[T, k]: the k largest of their softmax, the largest first, equal ones
    by the expert's number; where `is_normalized` divided by their sum. starts i32[own + 1]: the rows of each of the
    `own` experts from `first_expert` on, as `grouped_matmul` takes them. rows i64[T * k]: the token of each row, rising
    within an expert; of an expert that is elsewhere there are none, and what lies behind the last row means nothing.
    places i32[T, k]: the row of each token's choice, -1 where that expert is elsewhere. A row with a NaN has shares of
    NaN, and goes to some experts.
    """
    num_chosen, last_expert = shares.shape[1], first_expert + starts.numel() - 1
    likely = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    ordered = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    chosen = ordered.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    of_chosen = likely.gather(1, chosen)
    shares.copy_(of_chosen / of_chosen.sum(-1, keepdim=True) if is_normalized else of_chosen)
    places.fill_(-1)
    starts.zero_()
    num_rows = 0
    for expert in range(first_expert, last_expert):
        tokens, choices = torch.where(chosen == expert)
        places[tokens, choices] = torch.arange(num_rows, num_rows + tokens.numel(), device=places.device).int()
        rows[num_rows : num_rows + tokens.numel()] = tokens
        num_rows += tokens.numel()
        starts[expert - first_expert + 1] = num_rows


def score_experts(
    shares: torch.Tensor,
    scores: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    kind: str = "softmax",
    num_groups: int = 1,
    num_chosen_groups: int = 1,
    is_normalized: bool = False,
    scale: float = 1.0,
) -> None:
    """What experts are compared by, and the shares of the best, as DeepSeek's models choose: experts lie in groups on
    different machines, and a token's are of few groups (V2: arXiv:2405.04434; V3: arXiv:2412.19437).

    logits [T, num_experts] of a router. An expert is as likely as their softmax says, or with the kind sigmoid its own;
    a bias f32[num_experts] is added where experts are compared. Groups of num_experts / num_groups follow each other; a
    group counts as much as its best expert, with a bias as its two best together. scores f32[T, num_experts]: -inf but
    in the `num_chosen_groups` best groups. shares f32[T, k]: how likely the experts of the k largest scores are, the
    best first, equal ones by number; divided by their sum where `is_normalized`; times `scale`.
    """
    num_tokens, num_experts = logits.shape
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # A sigmoid is a softmax beside a zero. Each has the same bits in any company, which torch.sigmoid has not on a CPU.
    likely = x.softmax(-1) if kind == "softmax" else torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]
    compared = (likely if bias is None else likely + bias).nan_to_num(nan=-torch.inf)
    if num_groups > 1:
        of_groups = compared.view(num_tokens, num_groups, -1)
        best = of_groups.topk(1 if bias is None else 2, dim=-1).values.sum(-1)
        groups = best.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen_groups]
        is_open = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, value=True)
        compared = of_groups.masked_fill(~is_open[:, :, None], -torch.inf).view(num_tokens, num_experts)
    scores.copy_(compared)
    of_chosen = likely.gather(1, compared.sort(dim=-1, descending=True, stable=True).indices[:, : shares.shape[1]])
    if is_normalized:
        of_chosen = of_chosen / (of_chosen.sum(-1, keepdim=True) + 1e-20)
    shares.copy_(of_chosen * scale)


def combine_experts(out: torch.Tensor, x: torch.Tensor, shares: torch.Tensor, places: torch.Tensor) -> None:
    """out[t] = sum over c of shares[t, c] * x[places[t, c]], choice after choice; one whose place is -1 adds nothing.

    out [T, n]; x [R, n], what experts made of their rows; shares f32[T, k], places i32[T, k] of `route_experts`.
    """
    total = torch.zeros(out.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=out.device)
    for choice in range(shares.shape[1]):
        is_here = places[:, choice] >= 0
        total[is_here] += x[places[is_here, choice].long()].to(total.dtype) * shares[is_here, choice, None]
    out.copy_(total)
