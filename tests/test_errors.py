"""Errors of the library go from process to process, as pools of processes send them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import grpc
import pytest

from octavo.embedded.embedded import Closed
from octavo.errors import FieldViolation, Forked, InvalidPrompt, RequestFailed, WorkerEnded


@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.deepcopy])
def test_a_refusal_is_the_same_in_another_process(copied: Callable[[RequestFailed], RequestFailed]) -> None:
    violation = FieldViolation("sampling_params.n", "1 to 128")
    refusal = RequestFailed(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (violation,), 0.5, "TENANT_LIMIT", {"limit": "tokens"}
    )
    refusal.add_note("of the caller's own")
    found = copied(refusal)
    assert type(found) is RequestFailed and str(found) == str(refusal) == "RESOURCE_EXHAUSTED: full"
    assert vars(found) == vars(refusal) and found.violations[0].field == violation.field


@pytest.mark.parametrize("kind", [Closed, Forked, InvalidPrompt, WorkerEnded])
def test_others_are_as_well(kind: type[Exception]) -> None:
    found = pickle.loads(pickle.dumps(kind("why")))
    assert type(found) is kind and str(found) == "why"
