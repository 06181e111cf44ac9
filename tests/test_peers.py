"""`benchmarks.peers`: an engine as a process of its own, and what is said of several."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import made_models, peers, shapes
from benchmarks.peer_engine import ENGINES, EngineFailed, EngineKind, PeerEngine
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
    said = peers.report({"engines": engines, "runs": [{**run, "oracle": "transformers"} for run in runs]}).splitlines()
    assert "| engine | W1, tokens/s | tokens of transformers | ready | memory |" in said
    assert "| octavo | 20 | 2 of 4 | 1.5 s | 2.00 GiB |" in said
    assert said[-1] == "W1: octavo / vllm-eager = 1.75 (0.50 to 3.00 over 2 rounds)", "no 8-bit engine is a peer"


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
