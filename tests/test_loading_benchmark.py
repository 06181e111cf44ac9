"""The benchmark of loading, with a tiny model: what it prints and keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import loading
from tests.tiny_models import make_tiny_llama


def test_loads_stand_beside_reads_of_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = make_tiny_llama(tmp_path / "tiny"), tmp_path / "result.json"
    arguments = ["--model", str(folder), "--dtypes", "float32", "--rounds", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["loading", *arguments])
    # Cold or warm, the process that measures is the same: one of each kind will do, and that the files are forgotten
    # before a cold one.
    forgotten, forget, run, done = [], loading.forget, subprocess.run, dict[str, Any]()

    def run_once(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if str(command) not in done:
            done[str(command)] = run(command, **options)
        return done[str(command)]

    def forget_and_say(paths: list[Path]) -> None:
        forgotten.append(paths)
        forget(paths)

    monkeypatch.setattr(subprocess, "run", run_once)
    monkeypatch.setattr(loading, "forget", forget_and_say)
    loading.main()
    assert forgotten == [[folder / "model.safetensors"]] * 2
    content = json.loads(output.read_text())
    assert content["megabytes"] == pytest.approx((folder / "model.safetensors").stat().st_size / 1e6)
    rows = {(row["page_cache"], row["what"]): row for row in content["rows"]}
    assert set(rows) == {(cache, what) for cache in ("warm", "cold") for what in ("read", "load float32")}
    for cache in ("warm", "cold"):
        read, load = rows[cache, "read"], rows[cache, "load float32"]
        assert read["of_read"] == 1.0 < load["of_read"]  # a model of a few layers takes longer to make than to read
        assert load["peak_mb"] > read["peak_mb"] > 10
    assert capsys.readouterr().out.count("x read") == 4
