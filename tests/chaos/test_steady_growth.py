"""What the soak test says of memory that leaks, and of memory that only fills late: by samples that are made up."""

from __future__ import annotations

import math
import random

import pytest

from tests.chaos.memory import MIB, Sample, steady_growth
from tests.chaos.test_soak import FEW, MANY, MOST_SAMPLES, MOST_STEADY_BYTES_A_REQUEST


def samples_of(count: int, leak_bytes: int, step_at: float, step_bytes: int, seed: int) -> list[Sample]:
    """As the soak test takes them of a process whose pools fill, to 8 MiB, and which grows by one step somewhere."""
    chance, num_samples = random.Random(seed), min(MOST_SAMPLES, count // 10)
    samples: list[Sample] = []
    for number in range(1, num_samples + 1):
        sent = number * count // num_samples
        pools = 8 * MIB * (1 - math.exp(-sent / 1000)) + chance.uniform(-0.5, 0.5) * MIB
        step = step_bytes if number > step_at * num_samples else 0
        samples.append((sent, int(200 * MIB + pools + step + leak_bytes * sent)))
    return samples


@pytest.mark.parametrize("step_bytes", [0, 40 * MIB])
@pytest.mark.parametrize("step_at", [0.1, 0.35, 0.5, 0.8, 0.95])
@pytest.mark.parametrize(("count", "leak_bytes"), [(FEW, 100_000), (MANY, 8192), (MANY, 4096)])
def test_a_leak_is_told_from_pools_that_fill(count: int, leak_bytes: int, step_at: float, step_bytes: int) -> None:
    most = MOST_STEADY_BYTES_A_REQUEST[count]
    for seed in range(20):
        assert steady_growth(samples_of(count, 0, step_at, step_bytes, seed)) < most
        assert steady_growth(samples_of(count, leak_bytes, step_at, step_bytes, seed)) > most


def test_exact_growth_is_found_exactly() -> None:
    assert steady_growth([(10 * number, 5000 * number) for number in range(40)]) == pytest.approx(500)
