"""Workloads are the same everywhere and of the promised shape; figures are what their names say."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import psutil
import pytest

from benchmarks import flight_recorder, readme_figures
from benchmarks.readme_figures import report, step_costs
from octavo.bench import machine, offline, steps, workloads
from octavo.bench.figures import measure, percentile, table
from octavo.bench.simulated_worker import answer
from octavo.cli import main
from octavo.embedded.worker_process import WorkerProcess
from octavo.outputs import RequestMetrics
from protos import worker_pb2
from tests.forked_worker import fork
from tests.integration.fake_inference import FakeServer
from tests.processes import is_alive, started
from tests.waiting import wait_until

VOCAB = 49152


def test_shapes() -> None:
    (only,) = workloads.make("W1", VOCAB).requests
    assert (len(only.prompt_token_ids), only.max_tokens) == (128, 128)
    mixed = workloads.make("W2", VOCAB).requests
    assert len(mixed) == 32
    assert all(32 <= len(r.prompt_token_ids) <= 256 and 32 <= r.max_tokens <= 128 for r in mixed)
    assert len({len(r.prompt_token_ids) for r in mixed}) > 16
    shared = workloads.make("W3", VOCAB).requests
    assert len(shared) == 64
    assert {(len(r.prompt_token_ids), r.max_tokens) for r in shared} == {(544, 32)}
    assert len({r.prompt_token_ids[:512] for r in shared}) == 1
    assert len({r.prompt_token_ids[512:] for r in shared}) == 64


@pytest.mark.parametrize("name", list(workloads.WORKLOADS))
def test_ids_are_ordinary_and_within_the_vocabulary(name: str) -> None:
    for vocab_size in (11, 1031, VOCAB):
        ids = {t for r in workloads.make(name, vocab_size).requests for t in r.prompt_token_ids}
        assert min(1000, vocab_size // 10) <= min(ids) and max(ids) < vocab_size


def test_ids_never_change() -> None:
    """Committed figures are only comparable while this holds."""
    flat = json.dumps(
        [[r.prompt_token_ids, r.max_tokens] for n in ("W1", "W2", "W3") for r in workloads.make(n, VOCAB).requests]
    )
    assert hashlib.sha256(flat.encode()).hexdigest()[:16] == "10ef523fa8181c42"
    assert workloads.make("W2", VOCAB, seed=1) != workloads.make("W2", VOCAB)


@pytest.mark.parametrize(("sequences", "workers"), [(1, 1), (130, 1), (130, 4), (9, 9)])
def test_every_measured_step_decodes_all_sequences(sequences: int, workers: int) -> None:
    """Prompts take several steps to begin with, and other requests wait for a place."""
    found = steps.measure(sequences, workers, steps=5, waiting=7, cached_blocks=20)
    assert all(len(times) == 5 and (times > 0).all() for times in found.us.values())
    assert set(found.us) == {*steps.PHASES, "total"}


def test_a_report_of_several_rounds_has_their_medians() -> None:
    """Of figures that an engine did not have, too."""
    metrics = [RequestMetrics(arrival_ns=0, first_token_ns=10**6, token_times_ns=[10**6, 2 * 10**6])]
    rows = [measure("W1", "LLM", 128, tokens, 10**9, metrics) for tokens in (100, 400, 300)]
    facts = {"cpu": "a processor", "cores": 2, "memory_gib": 4, "packages": {}}
    told = report(facts, [{"first_token_s": 2.0}], rows, [], {})
    assert "| W1 | LLM | 300.0 |" in told and "2.0 s" in told


def test_requests_of_one_s_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt_token_ids": [1, 2], "max_tokens": 3}\n{"prompt_token_ids": [4], "max_tokens": 5}\n')
    workload = workloads.read(path)
    assert (workload.name, workload.num_prompt_tokens, workload.num_output_tokens) == ("mine", 3, 8)


@pytest.mark.parametrize("line", ["", "x", "[]", '{"max_tokens": 1}', '{"prompt_token_ids": [], "max_tokens": 1}'])
def test_a_bad_requests_file_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=r"bad\.jsonl"):
        workloads.read(path)


def test_percentiles() -> None:
    assert percentile([3, 1, 2], 50) == 2
    assert percentile(range(1, 101), 99) == 99
    assert percentile([5], 99) == 5
    assert math.isnan(percentile([], 50))


def test_figures_and_their_table() -> None:
    ms = 1_000_000
    metrics = [
        RequestMetrics(arrival_ns=0, first_token_ns=10 * ms, token_times_ns=[10 * ms, 15 * ms, 25 * ms]),
        RequestMetrics(arrival_ns=5 * ms, first_token_ns=35 * ms, token_times_ns=[35 * ms]),
    ]
    row = measure("W9", "LLM", 7, 4, 2_000 * ms, metrics)
    assert (row.output_tokens_per_s, row.first_token_p50_ms, row.first_token_p99_ms) == (2.0, 10.0, 30.0)
    assert (row.between_tokens_p50_ms, row.between_tokens_p99_ms) == (5.0, 10.0)
    untimed = measure("W9", "another", 7, 4, 2_000 * ms, [])
    assert untimed.as_dict()["first_token_p50_ms"] is None
    assert table([row, untimed]).splitlines()[2:] == [
        "| W9 | LLM | 2.0 | 10 / 30 ms | 5 / 10 ms | 2.00 s |",
        "| W9 | another | 2.0 | - | - | 2.00 s |",
    ]


def test_what_a_start_took_stands_behind_where_it_is_known() -> None:
    row = measure("W1", "LLM", 8, 4, 2_000_000_000, [])
    assert "ready" not in table([row]) and row.as_dict()["ready_s"] is None
    lines = table([replace(row, ready_s=3.25, worker_peak_gib=0.5)]).splitlines()
    assert lines[0].endswith("| wall | ready | worker's memory |")
    assert lines[2].endswith("| 2.00 s | 3.2 s | 0.50 GiB |")


def test_step_costs_are_differences_per_step() -> None:
    def sums(factor: int) -> dict[str, object]:
        plain = ("bytes_sent", "bytes_received", "schedule_ns", "encode_ns", "decode_ns", "process_ns", "wire_ns")
        phases = ("queue", "cache_ops", "prepare", "forward", "sample", "total")
        return {
            "num_steps": 10 * factor,
            **dict.fromkeys(plain, 40_000 * factor),
            "worker_ns": dict.fromkeys(phases, 225_000_000 * factor),
        }

    costs = step_costs(sums(1), sums(2), wall_s=1.0)
    assert (costs["num_steps"], costs["bytes_sent"], costs["schedule_us"]) == (10, 4000, 4)
    assert costs["worker_busy_us"] == 90_000  # cache operations, preparing, forward and sampling; not the queue
    assert costs["share_outside_worker"] == pytest.approx(0.1)


def test_each_round_of_workloads_begins_with_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def figures(over: str) -> Any:
        order.append(over)
        return SimpleNamespace(over=over, wall_s=1.0)

    monkeypatch.setattr(readme_figures, "served", lambda model: nullcontext("address"))
    monkeypatch.setattr(readme_figures, "LLM", lambda *_, **__: nullcontext(MagicMock()))
    monkeypatch.setattr(readme_figures, "wait_until_ready", lambda address: None)
    monkeypatch.setattr(readme_figures, "step_costs", lambda *_: {})
    monkeypatch.setattr(readme_figures, "over_generate", lambda *_: figures("Generate"))
    monkeypatch.setattr(offline, "run", lambda *_: (figures("LLM"), []))
    monkeypatch.setattr(workloads, "make", lambda *_: None)
    monkeypatch.setattr(workloads, "warm_up", lambda *_: order.clear())
    arguments = Namespace(without_transformers=True, model="", rounds=2, workloads=["W1"])
    rows, steps, agreement = readme_figures._rounds(arguments)
    assert order[-4:] == ["LLM", "Generate", "Generate", "LLM"] == [row.over for row in rows]
    assert len(steps) == 2 and not agreement


def test_pairs_of_the_flight_recorder_s_cost_begin_with_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded: list[bool] = []

    def measure(num_sequences: int, on: bool) -> dict[str, float]:
        recorded.append(on)
        return {"us_per_step": 1.0, "image_us": 1.0, "bytes_per_step": 1.0}

    monkeypatch.setattr(flight_recorder, "measure", measure)
    monkeypatch.setattr(flight_recorder, "own_us", lambda num_sequences: 1.0)
    monkeypatch.setattr("sys.argv", ["flight_recorder", "--pairs", "2"])
    assert flight_recorder.main() == 0
    assert recorded == [False, True, True, False]
    assert json.loads(capsys.readouterr().out)["us_per_step"] == {"off": [1.0, 1.0], "on": [1.0, 1.0]}


def test_hardware_makes_a_file_name() -> None:
    facts = {"cpu": "Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.50GHz", "instructions": "avx2 avx512f", "cores": 2}
    assert machine.slug(facts) == "intel-xeon-platinum-8259cl-2-cores"
    assert machine.slug(facts | {"instructions": "avx2 amx_bf16 amx_int8"}) == "intel-xeon-platinum-8259cl-amx-2-cores"
    assert machine.describe()["cores"] >= 1


def test_without_git_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert machine.describe()["commit"] == "unknown"


def test_bench_serve_in_a_closed_loop(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt_token_ids": [1, 2], "max_tokens": 3}\n' * 7)
    with FakeServer() as server:
        flags = ["--address", server.address, "--requests-file", str(path), "--streams", "1,3", "--repeat", "2"]
        assert main(["bench", "serve", *flags, "--json"]) == 0
        sent = list(server.inference.requests)
        assert server.control.num_flushes == 4  # before each round, or a round would find its prompts
        rows = json.loads(capsys.readouterr().out)["runs"]
        assert main(["bench", "serve", *flags]) == 0
        shown = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [(row["requests"], row["output_tokens"]) for row in rows] == [(7, 21)] * 4
    assert [row["streams"] for row in rows] == [1, 1, 3, 3]
    assert [line[0].strip("| ") for line in shown[2:]] == ["1 streams", "1 streams", "3 streams", "3 streams"]
    assert all(r.sampling_params.ignore_eos and r.sampling_params.temperature == 0 for r in sent)


def test_a_model_that_is_not_there_is_one_line_and_no_traceback(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerProcess, "_open", fork)
    assert main(["bench", "offline", "--model", "./nosuch"]) == 1
    said = capfd.readouterr().err
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith("octavo bench: error: the worker has ended with exit code 1: ") and "nosuch" in last


def test_bench_serve_with_a_simulated_worker(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--simulated-worker", "--streams", "1,3", "--seconds", "0.3", "--step-ms", "2", "--json"]
    assert main(["bench", "serve", *flags]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["streams"], row["streams_served"]) for row in rows] == [(1, 1), (3, 3)]
    for row in rows:
        assert 0 < row["messages_per_s"] <= row["tokens_per_s"]
        assert row["cpu_s_per_1000_tokens"] == pytest.approx(1000 / row["tokens_per_cpu_s"])


def test_a_simulated_service_ends_with_whoever_measures_it() -> None:
    program = """if True:
        import time
        from octavo.bench.streaming import service
        with service(1, 0.0, 1, []):
            print("started", flush=True)
            time.sleep(600)
    """
    with started([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"started\n"
        children = psutil.Process(process.pid).children()
        process.terminate()
    assert len(children) == 2
    wait_until(lambda: not any(map(is_alive, children)), seconds=10)


def test_a_simulated_worker_draws_what_the_rows_ask_for() -> None:
    rows = worker_pb2.Rows(num_decode_rows=2, num_samples_u16=np.array([0, 1, 3], "<u2").tobytes())
    result = answer(worker_pb2.Step(step_id=7, rows=rows))
    assert result.step_id == 7 and len(np.frombuffer(result.outputs.token_ids_i32, "<i4")) == 2 + 0 + 1 + 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--simulated-worker", "--out", "x.json"], "--out does not go with --simulated-worker"),
        (["--simulated-worker", "--rate", "3"], "--rate does not go with --simulated-worker"),
        (["--simulated-worker", "--workload", "W1"], "--workload does not go with --simulated-worker"),
        (["--simulated-worker", "--tls"], "--tls does not go with --simulated-worker"),
        (["--simulated-worker", "--address", "127.0.0.1:1"], "--address does not go with --simulated-worker"),
        (["--seconds", "3"], "--seconds goes with --simulated-worker"),
        (["--step-ms", "3"], "--step-ms goes with --simulated-worker"),
        (["--frontends", "3"], "--frontends goes with --simulated-worker"),
        (["--stream-interval-ms", "3"], "--stream-interval-ms goes with --simulated-worker"),
    ],
)
def test_options_of_another_load_are_usage_errors(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *flags]) == 2
    assert said in capsys.readouterr().err


def test_wrong_numbers_of_streams_are_usage_errors() -> None:
    for text in ("0", "1,x", ""):
        with pytest.raises(SystemExit) as raised:
            main(["bench", "serve", "--simulated-worker", "--streams", text])
        assert raised.value.code == 2
