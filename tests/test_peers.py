"""`benchmarks.peers`: an engine as a process of its own, and what is said of several."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import machine_limits, made_models, peer_figures, peers, shapes, token_bytes
from benchmarks.instruction_sets import SETS
from benchmarks.peer_engine import EngineFailed, EngineKind, PeerEngine
from benchmarks.peer_kinds import ENGINES
from octavo.bench.workloads import BenchRequest, Workload
from octavo.models.gguf_convert import read_tensors

SCRIPTS = Path(peers.__file__).parent / "peer_engines"
COUNTING = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from line_protocol import serve
print("engines print what they like")
def generate(requests):
    if requests[0][0] == [13]:
        raise ValueError("thirteen")
    if requests[0][0] == [99]:
        sys.exit("gone")
    extra = requests[0][0] == [7]
    return [list(range(prompt[-1] + 1, prompt[-1] + 1 + count + extra)) for prompt, count in requests]
serve("counting 1.0", generate)
"""


def workload(*requests: tuple[list[int], int]) -> Workload:
    return Workload("W1", "made up", tuple(BenchRequest(tuple(prompt), count) for prompt, count in requests))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[PeerEngine]:
    script = tmp_path / "counting.py"
    script.write_text(COUNTING)
    with PeerEngine(EngineKind("float32", lambda _, __: [sys.executable, str(script)]), tmp_path, tmp_path) as it:
        yield it


def test_an_engine_answers_workloads_also_after_a_pause(engine: PeerEngine) -> None:
    assert engine.version == "counting 1.0" and engine.ready_s > 0
    engine.pause()
    engine.resume()
    wall_s, token_ids = engine.run(workload(([1, 2], 3), ([5], 1)))
    assert wall_s > 0 and token_ids == [[3, 4, 5], [6]]


def test_what_an_engine_cannot_do_is_said(engine: PeerEngine) -> None:
    with pytest.raises(EngineFailed, match="ValueError: thirteen"):
        engine.run(workload(([13], 2)))
    with pytest.raises(EngineFailed, match=r"lengths \[3\], not those"):
        engine.run(workload(([7], 2)))
    assert engine.run(workload(([1], 1)))[1] == [[2]], "it goes on"
    with pytest.raises(EngineFailed, match=r"it ended; said last: .*gone"):
        engine.run(workload(([99], 1)))


def test_what_is_not_installed_is_named(tmp_path: Path) -> None:
    model = Path("models/qwen")
    assert ENGINES["octavo"].missing(tmp_path, model) is None
    assert ENGINES["openvino"].missing(tmp_path, model) == str(tmp_path / "openvino/bin/python")
    assert ENGINES["octavo-gguf4"].missing(tmp_path, model) == str(tmp_path / "made/qwen/4-bit.gguf")
    assert all(ENGINES[name].how_to_install for name in ENGINES if ENGINES[name].needs)


def test_ours_are_set_against_the_best_of_their_kind() -> None:
    speeds = {
        "octavo": (10.0, 30.0),
        "vllm-eager": (20.0, 10.0),
        "openvino": (10.0, 8.0),
        "llamacpp-q8_0": (90.0, 90.0),
    }
    runs = [
        {
            "round": number,
            "workload": "W1",
            "engine": name,
            "tokens_per_s": speed,
            "same_requests": 1,
            "num_requests": 2,
        }
        for name, values in speeds.items()
        for number, speed in enumerate(values)
    ]
    engines = {name: {"version": name, "ready_s": 1.5, "peak_gib": 2.0} for name in speeds} | {
        "vllm-compiled": {"missing": "x"}
    }
    said = peer_figures.report(
        {"engines": engines, "runs": [{**run, "oracle": "transformers"} for run in runs]}
    ).splitlines()
    assert "| engine | W1, tokens/s | tokens of transformers | ready | memory |" in said
    assert "| octavo | 20 | 2 of 4 | 1.5 s | 2.00 GiB |" in said
    assert said[-1] == "W1: octavo / vllm-eager = 1.75 (0.50 to 3.00 over 2 rounds)", "no 8-bit engine is a peer"


def test_a_workload_can_be_added_to_earlier_results_whose_runs_say_their_day() -> None:
    def run(workload: str, engine: str, speed: float, **day: str) -> dict[str, Any]:
        return {"round": 0, "workload": workload, "engine": engine, "tokens_per_s": speed} | day

    before = {
        "date": "2026-11-26T23:31:10+00:00",
        "engines": {"octavo": {"ready_s": 2.0, "peak_gib": 1.0}, "openvino": {"missing": "it"}},
        "runs": [
            run("W1", "octavo", 10.0, day="2026-11-25"),
            run("W3", "octavo", 1.0),
            run("W3", "octavo-int8", 2.0),
        ],
    }
    rows: dict[str, Any] = {
        "engines": {"octavo": {"ready_s": 3.0, "peak_gib": 2.0}},
        "runs": [run("W3", "octavo", 5.0)],
    }
    both = peers.added(before, rows)
    assert both["runs"] == [
        run("W1", "octavo", 10.0, day="2026-11-25"),
        run("W3", "octavo-int8", 2.0, day="2026-11-26"),
        run("W3", "octavo", 5.0),
    ]
    assert both["engines"]["octavo"] == {"ready_s": 3.0, "peak_gib": 2.0}
    assert both["engines"]["openvino"]["missing"] == "it"
    rows["engines"]["openvino"] = {"ready_s": 1.0}
    both = peers.added(before, rows)
    assert "missing" not in both["engines"]["openvino"]
    rows["engines"] = {name: rows["engines"][name] for name in ("openvino", "octavo")}
    assert list(peers.added(before, rows)["engines"]) == ["octavo", "openvino"], "a table has one order"
    both["runs"] += [{"round": 0, "workload": "W2", "engine": "openvino", "failed": "it"}]
    assert "| openvino | - | failed | - |" in peer_figures.report(both), "what was not run has not failed"


def test_w1_is_set_against_reading_its_weights_at_the_speed_measured_beside_it() -> None:
    # 100 tokens behind the first in 2 s read 100 x 0.4 GB: 20 GB/s of 25; then 16 of 20.
    run = {"workload": "W1", "engine": "octavo", "wall_s": 2.5, "tokens_per_s": 101 / 2.5, "prompt_s": 0.5}
    runs = [run | {"round": 0, "read_gb_per_s": 25.0}, run | {"round": 1, "read_gb_per_s": 20.0}]
    runs.append({"round": 0, "workload": "W2", "engine": "octavo", "wall_s": 1.0, "tokens_per_s": 5.0})
    rows = {"engines": {"octavo": {"ready_s": 1.5, "peak_gib": 2.0, "token_bytes": 400_000_000}}, "runs": runs}
    assert peer_figures.shares_of_bound(rows, "octavo") == pytest.approx([0.8, 1.0])
    said = peer_figures.report(rows).splitlines()
    assert said[0].startswith("| engine | W1, tokens/s | W2, tokens/s | of memory's bound |")
    assert said[2].startswith("| octavo | 40 | 5 | 0.90 |")


def test_a_request_that_is_alone_runs_between_two_looks_at_memory(engine: PeerEngine) -> None:
    said = iter([30.0, 40.0])
    asked: list[int] = []

    class Reader:
        def gb_per_s(self, num_bytes: int) -> float:
            asked.append(num_bytes)
            return next(said)

    engine.pause()
    reader: Any = Reader()
    turns = peers._Turns(workload(([1, 2], 3)), 100, 0, reader, {"octavo": {"token_bytes": 8}})
    token_ids: dict[tuple[int, str], dict[str, list[list[int]]]] = {}
    (row,) = turns.take({"octavo": engine}, token_ids)
    peers.compare([row], token_ids)
    assert row["read_gb_per_s"] == 40.0 and asked == [8, 8]
    assert row["prompt_s"] > 0 and row["same_requests"] == 1
    two = peers._Turns(workload(([1, 2], 3), ([4], 1)), 100, 0, reader, {})
    assert "read_gb_per_s" not in two.take({"octavo": engine}, {})[0]


def test_an_engine_that_fails_is_left_out_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise CalledProcessError(1, ["token_bytes"])

    ends = [sys.executable, "-c", "import sys; sys.exit('no such instructions')"]
    kinds = {
        "uncounted": EngineKind("int8", lambda *_: [], token_bytes=fail),
        "ends": EngineKind("int8", lambda *_: ends),
    }
    monkeypatch.setattr(peers, "ENGINES", kinds)
    engines: dict[str, dict[str, str]] = {}
    with ExitStack() as stack:
        arguments = argparse.Namespace(environments=tmp_path, instructions="avx2")
        assert not list(peers._start(list(kinds), arguments, tmp_path, stack, engines))
    assert "token_bytes" in engines["uncounted"]["failed"]
    assert "no such instructions" in engines["ends"]["failed"]


def test_engines_are_loaded_together_or_each_for_its_turn() -> None:
    assert peers.sittings(["a", "b"], 3, one_by_one=False) == [(["a", "b"], [0, 1, 2])]
    assert peers.sittings(["a", "b"], 2, one_by_one=True) == [(["a"], [0]), (["b"], [0]), (["b"], [1]), (["a"], [1])]


def test_each_round_begins_with_another_engine_and_the_oracle_may_be_last(engine: PeerEngine) -> None:
    reader: Any = None  # nobody is alone
    engine.pause()
    rows, token_ids = list[dict[str, Any]](), dict[tuple[int, str], dict[str, list[list[int]]]]()
    for number in range(3):
        two = peers._Turns(workload(([1, 2], 3), ([4], 1)), 100, number, reader, {})
        rows += two.take(dict.fromkeys(("octavo", "transformers", "openvino"), engine), token_ids)
    firsts = [next(row["engine"] for row in rows if row["round"] == number) for number in range(3)]
    assert firsts == ["octavo", "transformers", "openvino"]
    token_ids[2, "W1"]["transformers"] = [[3, 4, 5], [6]]
    token_ids[2, "W1"]["openvino"] = [[3, 4, 5], [7]]
    peers.compare(rows, token_ids)
    assert {row["oracle"] for row in rows} == {"transformers"}
    assert [row["same_requests"] for row in rows if row["engine"] == "openvino"] == [2, 2, 1]


def test_all_engines_can_be_limited_to_the_same_instructions(tmp_path: Path) -> None:
    (tmp_path / "llamacpp/bin").mkdir(parents=True)
    (tmp_path / "made/qwen").mkdir(parents=True)
    (tmp_path / "llamacpp/bin/llama-server").touch()
    (tmp_path / "made/qwen/8-bit.gguf").touch()
    kind, model = ENGINES["llamacpp-q8_0"], Path("models/qwen")
    assert kind.missing(tmp_path, model) is None
    missing = kind.missing(tmp_path, model, SETS["avx2"])
    assert missing == str(tmp_path / "llamacpp/avx2/libggml-cpu.so.0"), "its own library would have all instructions"
    limited = kind.variables(tmp_path, SETS["avx2"])
    assert limited["KERNELS_CPU_LEVEL"] == "avx2" and limited["LD_LIBRARY_PATH"] == str(tmp_path / "llamacpp/avx2")
    assert limited["ONEDNN_MAX_CPU_ISA"] == limited["OV_CPU_MAX_ISA"] == "AVX2"
    assert "LD_LIBRARY_PATH" not in kind.variables(tmp_path) or "LD_LIBRARY_PATH" in os.environ


def test_a_token_reads_all_weights_but_an_embedding_that_is_not_the_head(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(7, 4), "model.norm.weight": torch.zeros(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert token_bytes.of_checkpoint(tmp_path, 2) == 2 * (28 + 4)
    save_file(tensors | {"lm_head.weight": torch.zeros(7, 4)}, tmp_path / "model.safetensors")
    assert token_bytes.of_checkpoint(tmp_path, 4) == 4 * (28 + 4)


def test_ours_are_counted_as_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes.write_checkpoint(tmp_path, shapes.LLAMA_3_2_1B | shapes.TINY)
    monkeypatch.setattr("sys.argv", ["token_bytes", str(tmp_path), "dtype=float32", "max_model_len=64"])
    assert token_bytes.main() == 0
    # Numbers of 16 bits in panels of 48 outputs: of query, key and value, output, gate and up, down; of the head.
    layer = 64 * (144 + 96 + 192) + 96 * 96
    norms = 4 * 64 * (2 * 2 + 1)
    assert int(capsys.readouterr().out) == 2 * (2 * layer + 64 * 1056) + norms


def test_the_limits_of_a_machine_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_limits, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine_limits, "_SHAPES", ((4, 64, 64),))
    monkeypatch.setattr("sys.argv", ["machine_limits", "--threads", "1"])
    assert machine_limits.main() == 0
    said = r"1 threads: reads [\d.]+ GB/s, computes \d+ GFLOP/s in a large float32 product, and (\d+) in multiply-adds"
    found = re.search(said, capsys.readouterr().out)
    assert found and int(found[1]) > 0


@pytest.mark.parametrize("name", list(made_models.MODELS))
def test_a_made_model_is_the_same_in_both_kinds_of_files(name: str, tmp_path: Path) -> None:
    config = made_models.MODELS[name] | shapes.TINY
    shapes.write_checkpoint(tmp_path / name, config)
    made_models.write_gguf(tmp_path / name, tmp_path / f"{name}.gguf")
    of_hub = load_file(tmp_path / name / "model.safetensors")
    of_gguf = {
        tensor.name: torch.from_numpy(tensor.load().copy()) for tensor in read_tensors(tmp_path / f"{name}.gguf")
    }
    assert of_hub.keys() == of_gguf.keys()
    for tensor, values in of_hub.items():
        torch.testing.assert_close(of_gguf[tensor], values.float(), rtol=0, atol=0, msg=tensor)
