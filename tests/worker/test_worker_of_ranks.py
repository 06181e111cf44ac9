"""A worker as one rank of several: what it begins with the others, and where it ends rather than leave them waiting."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from protos import ranks_pb2
from tests.worker.fake_model import FakeModel, fake_config
from tests.worker.test_worker import CONFIG, DEADLINE_S
from worker_svc.errors import GroupError
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.worker import Worker


def test_a_rank_that_fails_alone_in_a_later_initialize_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have the cache that was asked for: asked again, they would have nothing to do, and this one would wait
    for them. Where all of them fail, all go on."""
    reasons, ends = list[str](), list[bool]()
    group: Any = SimpleNamespace(is_first=True, member=SimpleNamespace(local_size=1))
    group.exchange, group.tell = (lambda own: [own]), (lambda command: None)
    group.tell_failure = lambda error: reasons.append(str(error))
    runner = ModelRunner(FakeModel(), fake_config(), CONFIG.block_size)
    worker = Worker(runner, CONFIG, end_process=lambda: ends.append(True), group=group)
    worker.initialize(worker.bounds).result(DEADLINE_S)
    smaller = replace(worker.bounds, max_num_seqs=2)
    with monkeypatch.context() as patch:
        patch.setattr(group, "exchange", lambda own: [own, ranks_pb2.RankSizes(error="no room")])
        with pytest.raises(GroupError, match="rank 1: no room"):
            worker.initialize(smaller).result(DEADLINE_S)
    worker.initialize(smaller).result(DEADLINE_S)
    assert ends == reasons == []

    def fail(*_: int) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(runner, "allocate_cache", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        worker.initialize(worker.bounds).result(DEADLINE_S)
    assert ends == [True] and reasons == ["no memory"]
