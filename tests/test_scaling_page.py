"""What docs/scaling.md shows is what benchmarks/results/ holds: its tables, line by line, and its pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import scaling
from octavo.bench import picture

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"


def test_tables_are_those_of_the_newest_results() -> None:
    shown = PAGE.read_text(encoding="utf-8").splitlines()
    made = scaling.tables(scaling.newest("scaling"), scaling.newest("routing"))
    assert [line for line in made.splitlines() if line and line not in shown] == []


def test_pictures_are_those_of_the_newest_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "PICTURES", tmp_path)
    scaling.draw(scaling.newest("scaling"), scaling.newest("routing"))
    for name in ("pool-sizes.svg", "worker-loss.svg", "routing-rules.svg"):
        kept = (PAGE.parent / "pictures" / name).read_text(encoding="utf-8")
        assert kept == (tmp_path / name).read_text(encoding="utf-8"), name
        assert f"pictures/{name}" in PAGE.read_text(encoding="utf-8")
        assert kept.startswith("<svg") and picture.WIDTH <= 1000
