"""How long a worker's steps take by those that it has answered, and how many prompt tokens fit into one."""

from __future__ import annotations

import pytest

from scheduler_svc.leases.step_pace import LEAST_PROMPT_TOKENS, StepPace

BASE_S, TOKEN_S = 0.02, 0.001


def paced(base_s: float = BASE_S, token_s: float = TOKEN_S) -> StepPace:
    """Of a worker that has answered many steps of 20 decodes, some with 200 prompt tokens besides."""
    pace = StepPace(0.0, 2048)
    for number in range(200):
        num_prompt_tokens = 200 * (number % 2)
        pace.answered(20 + num_prompt_tokens, num_prompt_tokens, base_s + token_s * (20 + num_prompt_tokens))
    return pace


@pytest.mark.parametrize(
    ("goal_s", "num_decodes", "expected"),
    [
        (0.25, 0, 230),
        (0.25, 30, 200),  # what base and decodes leave
        (0.25, 180, 200),  # 200 ms are gone without a prompt, and may be doubled
        (0.01, 20, 40),
        (0.01, 1, LEAST_PROMPT_TOKENS),
    ],
)
def test_prompts_have_what_is_left_of_a_goal_and_half_at_least(goal_s: float, num_decodes: int, expected: int) -> None:
    assert paced().prompt_tokens_in(goal_s, num_decodes) == pytest.approx(expected, abs=1)


def test_many_decodes_do_not_lock_the_pace_at_the_least() -> None:
    """Steps of 500 decodes and few prompt tokens say nothing of what each costs; prompts still grow to their half."""
    pace, num_prompt_tokens = StepPace(1e6, 2048), LEAST_PROMPT_TOKENS
    for number in range(400):
        more = num_prompt_tokens * (number % 2)
        pace.answered(500 + more, more, 0.1 + TOKEN_S * (500 + more))
        num_prompt_tokens = pace.prompt_tokens_in(0.25, 500)
    assert num_prompt_tokens == pytest.approx(600, rel=0.05)


def test_a_speed_counts_only_the_prompt_tokens_that_steps_take() -> None:
    pace = paced()
    assert pace.prompt_tokens_per_s(0, 2048, 2048) == pytest.approx(2048 / (BASE_S + 2.048), rel=0.01)
    assert pace.prompt_tokens_per_s(100, 2048, 130) == pytest.approx(130 / (BASE_S + 0.230), rel=0.01)
