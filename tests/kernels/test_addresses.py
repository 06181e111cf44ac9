"""What launchers take for themselves begins at multiples of 16 bytes in every batch.

Triton compiles a kernel once more for an address that does not, which takes seconds, and those while serving.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.gpu.attention import joins, paged_attention, plans
from kernels.gpu.sampling import kept_range


class Launches:
    """Stands for a kernel; remembers the addresses that it is launched with."""

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: object, **options: object) -> None:
        self.addresses += [x.data_ptr() for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_filters_of_any_number_of_rows(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    for name in ("_weigh_kernel", "_list_kernel", "_gather_kernel", "_search_kernel"):
        monkeypatch.setattr(kept_range, name, launches)
    columns = [torch.ones(count) for _ in range(5)]
    columns.insert(4, torch.ones(count, dtype=torch.int64))
    smallest, largest, temperature, min_p, top_k, top_p = columns
    logits, maxima = torch.zeros(count, 128), torch.zeros(count, 2)
    kept_range.kept_range(smallest, logits, maxima, largest, temperature, min_p, top_k, top_p)
    assert len(launches.addresses) > 30 and all(address % 16 == 0 for address in launches.addresses)


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 5])
def test_attention_of_any_number_of_sequences(num_sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    for module, name in ((plans, "plan_kernel"), (paged_attention, "segment_kernel"), (joins, "join_kernel")):
        monkeypatch.setattr(module, name, launches)
    query, cache = torch.zeros(num_sequences, 3, 16), torch.zeros(4, 1, 8, 16)
    paged_attention.paged_attention(
        torch.empty_like(query),
        query,
        cache,
        cache.clone(),
        torch.zeros(num_sequences, 1, dtype=torch.int32),
        torch.ones(num_sequences, dtype=torch.int32),
        torch.arange(num_sequences + 1, dtype=torch.int32),
        scale=0.25,
        max_query_len=1,
        max_seq_len=8,
    )
    assert len(launches.addresses) > 10 and all(address % 16 == 0 for address in launches.addresses)
