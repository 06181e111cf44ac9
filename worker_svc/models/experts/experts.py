"""A mixture of experts in place of an MLP (Shazeer et al. 2017, arXiv:1701.06538).

out = sum over the chosen e of  weight[e] * expert_e(x),  weights and choice as `Router` has them
"""

from __future__ import annotations

import torch

from worker_svc.models.experts.router import Router
from worker_svc.models.mlp import Mlp


class Experts:
    """Calls map x [T, hidden] to [T, hidden]; every expert computes its rows in one product."""

    def __init__(self, router: Router, experts: list[Mlp], numbers: range) -> None:
        """`experts` are those of these `numbers`; what the router sends to others adds nothing."""
        self._router, self._experts = router, dict(zip(numbers, experts, strict=True))

    @property
    def weight_bytes(self) -> int:
        """Router and experts, chosen or not."""
        return self._router.weight_bytes + sum(expert.weight_bytes for expert in self._experts.values())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in the dtype of `x`; shares of experts are computed in float32."""
        shares, chosen = self._router.choose(x)
        shares = shares.to(x.dtype)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():  # in order, so that a row's sum does not depend on others
            if expert not in self._experts:
                continue
            rows, places = torch.where(chosen == expert)
            out[rows] += self._experts[expert](x[rows]) * shares[rows, places, None]
        return out
