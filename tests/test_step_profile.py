"""`benchmarks.step_profile` with a tiny model: operators, the parts of the pass and of a step, and what is kept."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import machine_limits, step_parts, step_profile
from tests.tiny_models import make_tiny_llama


def test_a_profile_says_where_a_step_and_its_pass_spend_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    monkeypatch.setattr(machine_limits, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine_limits, "_SHAPES", ((4, 64, 64),))
    monkeypatch.setattr(step_parts, "_STEP_TOKENS", 8)
    monkeypatch.setattr(step_parts, "_STEP_RUNS", 1)
    monkeypatch.setattr(step_profile, "RESULTS", tmp_path)
    monkeypatch.setattr(step_profile, "waiting_threads", dict)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started again"))
    options = ["--types", "float32", "--sequences", "1", "--seq-len", "20", "--passes", "4", "--threads", "1", "--save"]
    monkeypatch.setattr(sys, "argv", ["step_profile", "--model", str(model), *options])
    threads = torch.get_num_threads()
    try:
        assert step_profile.main() == 0
    finally:
        torch.set_num_threads(threads)
    (path,) = tmp_path.glob("*-step-profile-*.json")
    (kept,) = json.loads(path.read_text()).values()
    assert step_parts.is_in(kept)
    parts = step_parts.PassParts(**kept["sequences"]["1"]["parts"])
    num_layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    # A layer has nine phases; behind it come the head's norm, which one thread does alone, and its product.
    assert 9 * num_layers + 1 <= parts.phases <= 9 * num_layers + 3
    assert parts.products_ms > 0 and parts.attention_ms > 0 and parts.rows_ms > 0
    assert 0 < parts.python_ms < parts.pass_ms
    step = kept["step"]
    assert 0 < step["forward_ms"] + step["sample_ms"] + step["prepare_ms"] < step["step_ms"]
    said = capsys.readouterr().out
    assert "1 sequence of 20 tokens, `--dtype float32`" in said and "| tiny, float32 |" in said
