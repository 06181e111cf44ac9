"""Pools in virtual time: figures can be worked out by hand, are the same each time, and bad input is one line."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from octavo.bench.fleet import traces
from octavo.bench.fleet.figures import FleetFigures, measure, table
from octavo.bench.fleet.outcomes import Loss
from octavo.bench.fleet.requests import Load, Request
from octavo.bench.fleet.simulation import NeverEnds, Simulation
from octavo.bench.fleet.worker import WorkerKind
from octavo.bench.picture import COLORS, TOP, Chart, Series, draw
from octavo.cli import main

KIND = WorkerKind(step_ms=10, token_us=100, cache_tokens=4096)
MS = 1_000_000


def play(num_workers: int, load: Load, *losses: Loss, kind: WorkerKind = KIND, seed: int = 0) -> FleetFigures:
    run = Simulation([kind] * num_workers, load.arrivals(seed), losses, seed).run()
    return measure(run, num_workers)


def test_one_request_takes_what_its_steps_take() -> None:
    """A prompt of 30 tokens is a step of 10 + 3 ms, and each of 4 more tokens one of 10.1 ms."""
    figures = play(1, Load(requests=1, prompt_tokens=30, output_tokens=5))
    assert figures.ttft_p50_ms == figures.ttft_p99_ms == figures.ttft_mean_ms == 13.0
    assert figures.between_tokens_p50_ms == figures.longest_silence_ms == 10.1
    assert figures.virtual_s == 0.0534 and figures.tokens_per_s == round(5 / 0.0534, 3)
    assert (figures.requests, figures.failed, figures.steps, figures.busy) == (1, 0, 5, 1.0)


def test_a_slow_worker_takes_longer() -> None:
    slow = WorkerKind(step_ms=10, token_us=100, speed=0.5)
    assert play(1, Load(requests=1, prompt_tokens=30, output_tokens=1), kind=slow).ttft_p50_ms == 26.0


def test_shared_tokens_are_found_by_those_who_come_later() -> None:
    """Of 4 requests of 64 + 16 tokens, one after the other, three find 64 of their 80 tokens."""
    load = Load(requests=4, prompt_tokens=16, shared_tokens=64, output_tokens=2, rate=0.1)
    assert play(1, load).cache_hit_rate == 3 * 64 / (4 * 80)
    assert play(1, Load(requests=4, prompt_tokens=80, output_tokens=2, rate=0.1)).cache_hit_rate == 0.0
    others = [request.prompt()[0] for request in Load(requests=40, shared_tokens=4, tenants=3).arrivals(0)]
    assert len(set(others)) == 3


def test_a_conversation_finds_what_was_said_in_it() -> None:
    """The second prompt is 32 + 17 + 32 tokens, of which 48 are full blocks that were computed."""
    load = Load(requests=1, prompt_tokens=32, output_tokens=17, turns=2, think_s=3.0)
    run = Simulation([KIND], load.arrivals(0)).run()
    first, second = run.outcomes
    assert second.request.at_ns == first.ended_ns + 3_000 * MS
    assert second.request.num_prompt_tokens == 32 + 17 + 32
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert first.request.num_tokens_at_end == second.request.num_prompt_tokens + 17


def test_what_is_drawn_follows_its_description() -> None:
    load = Load(requests=4000, prompt_tokens=100, output_tokens=10, spread=0.5, rate=50.0, burst=4)
    requests = load.arrivals(1)
    lengths = [request.num_prompt_tokens for request in requests]
    # Four standard deviations: one length has 50 / sqrt(3), and the mean of 4,000 a 63rd of that.
    assert min(lengths) == 50 and max(lengths) == 150 and np.mean(lengths) == pytest.approx(100, abs=1.9)
    times = [request.at_ns for request in requests]
    assert times == sorted(times) and len(set(times)) == 1000, "four at once"
    # Likewise: of 1,000 pauses, each with a deviation as large as its mean.
    assert times[-1] / 1e9 == pytest.approx(4000 / 50, rel=4 / 1000**0.5)
    assert len({request.prompt().tobytes() for request in requests}) == 4000, "no two are alike"


def test_a_seed_says_it_all() -> None:
    load = Load(requests=20, prompt_tokens=40, output_tokens=8, spread=0.5, rate=30, shared_tokens=16)

    def figures(seed: int, shards: int = 1) -> dict[str, object]:
        requests, losses = load.arrivals(seed), [Loss(1, 0.5, 0.9)]
        values = measure(Simulation([KIND] * 3, requests, losses, seed, shards).run(), 3).as_dict()
        values.pop("front_us_per_request")
        del values["plain_step_us"], values["begin_us_per_request"]
        assert 0 < values.pop("decision_us_per_step") < values.pop("engine_us_per_step")  # these are measured
        return values

    assert figures(1) == figures(1) != figures(2)
    assert figures(1, shards=2) == figures(1, shards=2) != figures(1)


def test_what_a_step_and_what_a_request_costs_are_told_apart() -> None:
    run = Simulation([KIND] * 2, Load(requests=20, prompt_tokens=16, output_tokens=32, rate=40).arrivals(0)).run()
    assert run.num_begun == 20 and 0 < run.num_plain_steps <= run.num_steps - 2, "most steps begin nobody"
    run.num_plain_steps, run.plain_cpu_ns = 10, 10 * 80_000
    run.decision_cpu_ns = run.num_steps * 80_000 + 20 * 150_000
    figures = measure(run, 2)
    assert (figures.plain_step_us, figures.begin_us_per_request) == (80, 150)


def test_a_lost_worker_s_requests_end_elsewhere_and_it_works_again_once_it_is_back() -> None:
    load = Load(requests=60, prompt_tokens=16, output_tokens=32, rate=40)
    run = Simulation([KIND] * 2, load.arrivals(0), [Loss(0, 0.3, 0.8)]).run()
    first, second, again = run.workers
    assert (first.address, again.address, again.epoch) == ("worker-0", "worker-0", 2)
    assert again.num_steps > 0 and second.num_steps > 0
    figures = measure(run, 2)
    assert (figures.failed, figures.output_tokens) == (0, 60 * 32)
    assert figures.longest_silence_ms > 40, "whoever was on it waited for its tokens to be computed again"


def test_shards_behind_a_front_do_as_much_as_one_step_loop() -> None:
    """Equal workers, a common prompt of each tenant: the front finds who has it, and spreads what nobody has."""
    load = Load(requests=200, prompt_tokens=32, shared_tokens=256, tenants=12, output_tokens=16, rate=150)

    def figures(shards: int) -> FleetFigures:
        run = Simulation([KIND] * 8, load.arrivals(0), num_shards=shards).run()
        assert {worker.number for worker in run.workers if worker.num_steps} == set(range(8))
        return measure(run, 8)

    one, four = figures(1), figures(4)
    assert (four.shards, four.failed, four.output_tokens) == (4, 0, 200 * 16)
    assert four.cache_hit_rate >= 0.9 * one.cache_hit_rate
    assert four.ttft_mean_ms <= 1.5 * one.ttft_mean_ms
    assert four.front_us_per_request > 0 and one.as_dict()["front_us_per_request"] is None
    with pytest.raises(NeverEnds):
        Simulation([KIND] * 2, Load(requests=2).arrivals(0), [Loss(0, 0.0), Loss(1, 0.0)], num_shards=2).run()


def test_requests_that_nobody_can_ever_serve_are_an_error_and_no_endless_run() -> None:
    with pytest.raises(NeverEnds, match="1 requests wait"):
        play(1, Load(requests=1), Loss(0, 0.0))


# ---- traces ---------------------------------------------------------------------------------------------------------

MOONCAKE = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 3, "hash_ids": [0, 5, 6]},
    {"timestamp": 6000, "input_length": 1024, "output_length": 2, "hash_ids": [0, 5]},
    {"timestamp": 6000, "input_length": 600, "output_length": 1},
]


def write_mooncake(folder: Path) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in MOONCAKE))
    return path


def test_a_trace_of_mooncake(tmp_path: Path) -> None:
    requests = traces.read(write_mooncake(tmp_path))
    assert [request.at_ns for request in requests] == [0, 3000 * MS, 3000 * MS]
    assert [request.num_prompt_tokens for request in requests] == [1100, 1024, 600]
    assert [request.num_output_tokens for request in requests] == [3, 2, 1]
    first, second, third = (request.prompt() for request in requests)
    assert (first[:1024] == second).all() and first[0] != third[0]
    assert [request.at_ns for request in traces.read(tmp_path / "trace.jsonl", 2, speedup=3.0)] == [0, 1000 * MS]


def test_a_trace_of_azure(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,0\r\n"
    )
    requests = traces.read(path)
    assert [(request.num_prompt_tokens, request.num_output_tokens) for request in requests] == [(374, 44), (396, 1)]
    # Seconds since 1970 in double precision are exact to a quarter of a microsecond, and two of them are taken.
    assert requests[1].at_ns == pytest.approx(4_314_579_000, abs=500)


GOOD = json.dumps(MOONCAKE[0])
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no requests in it"),
        ("hello\n", "line 1: it begins with 'hello'"),
        ("TIMESTAMP,Tokens\n", "line 1: it begins"),
        (GOOD + "\n\n{]\n", "line 3: no JSON"),
        (GOOD + "\n[1]\n", "line 2: no JSON object"),
        ('{"timestamp": null, "input_length": 1, "output_length": 1}', "line 1: timestamp is None"),
        ('{"timestamp": true, "input_length": 1, "output_length": 1}', "line 1: timestamp is True"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 1: timestamp is nan"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 1: input_length is 0"),
        ('{"timestamp": 1, "input_length": 1.5, "output_length": 1}', "line 1: input_length is 1.5"),
        ('{"timestamp": 1, "input_length": 1}', "line 1: output_length is None"),
        ('{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [1, 2]}', "line 1: 2 hash_ids for 1 bl"),
        ('{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": ["x"]}', "line 1: hash_ids is no list"),
        ('{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": {}}', "line 1: hash_ids is no list"),
        (GOOD + "\n" + GOOD.replace("3000", "2999"), "line 2: it came before"),
        (HEADER, "no requests in it"),
        (HEADER + "yesterday,1,1\n", "line 2: TIMESTAMP is 'yesterday'"),
        (HEADER + "2023-11-16 18:15:46,1\n", "line 2: 2 fields, not 3"),
        (HEADER + "2023-11-16 18:15:46,many,1\n", "line 2: ContextTokens is 'many'"),
        (HEADER + "2023-11-16 18:15:46,1,-1\n", "line 2: GeneratedTokens is '-1'"),
    ],
)
def test_a_bad_trace_is_one_line_that_names_the_line(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    assert main(["bench", "fleet", "--workers", "1", "--trace", str(path)]) == 1
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert f"{path}" in line and says in line and not shown.out


def test_a_trace_that_is_not_there_or_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in ("bytes", "nowhere"):
        assert main(["bench", "fleet", "--trace", str(tmp_path / name)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert name in line


# ---- the command ----------------------------------------------------------------------------------------------------

TINY = ["--requests", "12", "--prompt-tokens", "20", "--output-tokens", "4", "--step-ms", "5", "--token-us", "50"]


def test_the_command_gives_an_object_for_each_size_of_pool(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fleet", "--workers", "1,3", *TINY, "--shared-tokens", "32", "--rate", "20", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["workers"] for row in rows] == [1, 3]
    for row in rows:
        assert row["requests"] == 12 and row["output_tokens"] == 48 and row["failed"] == 0
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        assert row["tokens_per_s"] > 0 and row["decision_us_per_step"] > 0
        assert 0 < row["cache_hit_rate"] < 1 and 0 < row["balance"] <= 1


def test_the_command_shows_a_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pool.svg"
    assert main(["bench", "fleet", "--workers", "1,2", *TINY, "--picture", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and [line.split(" | ")[0] for line in lines[2:]] == ["| 1", "| 2"]
    root = ElementTree.parse(path).getroot()
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"throughput", "workers", "output tokens/s", "median", "99th percentile"} <= set(words)


def test_workers_take_speeds_and_sizes_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--speeds", "1,0.5", "--cache-tokens", "4096,2048", "--max-num-seqs", "8,4"]
    assert main(["bench", "fleet", "--workers", "3", *TINY, *flags, "--json"]) == 0
    capsys.readouterr()
    assert main(["bench", "fleet", "--workers", "1", *TINY, "--speeds", "0.5", "--requests", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["ttft_p50_ms"] == 2 * (5 + 20 * 0.05)


@pytest.mark.parametrize(
    "flags",
    [
        ["--workers", "0"],
        ["--workers", "1,x"],
        ["--workers", ""],
        ["--requests", "0"],
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--spread", "2"],
        ["--speeds", "1,0"],
        ["--rate", "1", "--rate-per-worker", "1"],
        ["--burst", "3"],
        ["--speedup", "2"],
        ["--trace", "x", "--rate", "1"],
        ["--trace", "x", "--shared-tokens", "0"],
        ["--return-at", "3"],
        ["--lose-at", "3", "--return-at", "2"],
        ["--workers", "1", "--lose-at", "3"],
        ["--picture", "x.png"],
        ["--picture", "/no/such/folder/x.svg"],
    ],
)
def test_flags_that_cannot_be_are_usage_errors_of_one_line(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", "fleet", *flags])
    except SystemExit as ended:
        code = int(ended.code or 0)
    shown = capsys.readouterr()
    assert code == 2 and len(shown.err.splitlines()) == 1 and not shown.out


def test_a_request_that_no_worker_can_hold_is_told_before_anything_is_played(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "fleet", "--workers", "1", "--cache-tokens", "64"]) == 1
    assert "192 tokens" in capsys.readouterr().err


def test_every_option_is_in_a_group_and_what_is_called_a_default_is_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        main(["bench", "fleet", "--help"])
    shown = capsys.readouterr().out
    heads = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert heads == ["options:", "workers:", "requests:", "autoscaling:", "output:"]
    flat = " ".join(shown.split())
    load, kind = Load(), WorkerKind()
    for flag, default in {
        "--requests N": load.requests,
        "--prompt-tokens N": load.prompt_tokens,
        "--output-tokens N": load.output_tokens,
        "--step-ms X": f"{kind.step_ms:g}",
        "--token-us X": f"{kind.token_us:g}",
        "--cache-tokens N[,N...]": kind.cache_tokens,
        "--max-num-seqs N[,N...]": kind.max_num_seqs,
        "--max-num-batched-tokens N": kind.max_num_batched_tokens,
    }.items():
        said = flat.partition(f" {flag} ")[2].partition(" --")[0]
        assert f"(default: {default}" in said, flag


# ---- pictures and tables --------------------------------------------------------------------------------------------


def test_points_stand_where_their_values_say() -> None:
    chart = Chart("t", "x", "y", [Series("a < b", [1, 2, 4], [0.0, float("nan"), 100.0])], log_x=True)
    root = ElementTree.fromstring(draw([chart]))
    circles = [
        (float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter("{http://www.w3.org/2000/svg}circle")
    ]
    assert len(circles) == 2, "there is no point where nothing was measured"
    (left, bottom), (right, top) = circles
    assert left < right and bottom > top
    assert "a &lt; b" in draw([chart])


@pytest.mark.parametrize("highest", [0.9, 66.0, 93.0, 569.0, 968.0, 133_477.0])
def test_an_axis_ends_at_a_tick_above_all_values(highest: float) -> None:
    chart = Chart("t", "x", "y", [Series("a", [0.0], [highest], is_joined=False)], categories=["c"])
    svg = draw([chart])
    grid = [float(y) for y in re.findall(r'd="M\d+ ([\d.]+)H\d+" stroke="#ddd"', svg)]
    point, *_ = (float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', svg))
    assert min(grid) == TOP < point


def test_a_series_keeps_its_colour_in_charts_of_others() -> None:
    charts = [Chart("t", "x", "y", [Series("b", [0.0], [1.0], color=1)], categories=["c"], is_bars=True)]
    assert f'fill="{COLORS[1]}"' in draw(charts) and f'fill="{COLORS[0]}"' not in draw(charts)


def test_a_table_has_a_row_a_pool() -> None:
    figures = play(1, Load(requests=2, prompt_tokens=16, output_tokens=2))
    assert len(table([figures, figures]).splitlines()) == 4
    only = play(1, Load(requests=1, prompt_tokens=16, output_tokens=1))
    assert only.as_dict()["between_tokens_p50_ms"] is None and "- / - / - ms" in table([only])


def test_prompts_are_alike_as_far_as_their_contents_are() -> None:
    one, other = (Request(0, ((7, 20), (own, 5)), 1).prompt() for own in (1, 2))
    assert (one[:20] == other[:20]).all() and (one[20:] != other[20:]).all()
    assert one.dtype == np.int32 and one.min() >= 0


def test_a_file_that_cannot_be_read_is_named_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fleet", "--trace", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"octavo bench: error: Is a directory: {tmp_path}\n"
