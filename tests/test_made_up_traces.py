"""A trace that is made up has the statistics which are published of the real one, and can be played."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.mooncake_like import entries, statistics
from octavo.bench.fleet import traces


def test_conversations_are_as_published(tmp_path: Path) -> None:
    trace = list(entries(6000, seed=0))
    found = statistics(trace)
    # Four standard deviations of 6,000 draws: of lengths 1.4 % each (lognormal, sigma 0.9), of the 3,800 pauses between
    # first prompts 1.6 %; of the share, whose followers come or not, 0.5 %.
    assert found["requests"] / found["seconds"] == pytest.approx(12_031 / 3_537, rel=0.065)
    assert found["tokens_in"] == pytest.approx(12_035, rel=0.06)
    assert found["tokens_out"] == pytest.approx(343, rel=0.06)
    assert found["reusable"] == pytest.approx(0.37, abs=0.02)
    assert 15 <= found["at_once"] <= 32
    assert all(entry["timestamp"] % 3000 == 0 and entry["hash_ids"][0] == 0 for entry in trace)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in trace[:500]))
    assert [request.num_prompt_tokens for request in traces.read(path)] == [
        entry["input_length"] for entry in trace[:500]
    ]


def test_a_seed_says_it_all() -> None:
    assert list(entries(50, 1)) == list(entries(50, 1)) != list(entries(50, 2))
