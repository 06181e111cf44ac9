"""How long outputs of a model are expected to be."""

from __future__ import annotations

import pytest

from scheduler_svc.routing.expected_outputs import FIRST_NUM_OUTPUTS, MAX_MODELS, NEWEST_OUTPUT, ExpectedOutputs


def test_each_model_has_an_average_of_its_own() -> None:
    outputs = ExpectedOutputs()
    for _ in range(400):
        outputs.ended("short", 2)
        outputs.ended("long", 900)
    assert outputs.of("short") == pytest.approx(2, abs=0.1) and outputs.of("long") == pytest.approx(900, abs=1)
    assert outputs.of("new") == FIRST_NUM_OUTPUTS


def test_the_newest_weighs_a_little() -> None:
    outputs = ExpectedOutputs()
    outputs.ended("", FIRST_NUM_OUTPUTS + 100)
    assert outputs.of("") == pytest.approx(FIRST_NUM_OUTPUTS + 100 * NEWEST_OUTPUT)


def test_so_many_are_remembered_and_who_ended_nothing_for_longest_goes_first() -> None:
    outputs = ExpectedOutputs()
    for number in range(MAX_MODELS):
        outputs.ended(f"model {number}", 1)
    outputs.ended("model 0", 1)
    outputs.ended("one more", 1)
    assert len(outputs) == MAX_MODELS
    assert outputs.of("model 1") == FIRST_NUM_OUTPUTS != outputs.of("model 0")
