"""`octavo bench serve`: when and what it sends, what it makes of the answers, and what it keeps, compares and draws."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import pty
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import grpc
import numpy as np
import pytest
from aiohttp import web

from octavo.bench.figures import percentile
from octavo.bench.load import arrivals, compare, lengths, pictures, requests, result, runner
from octavo.bench.load.figures import Slo, measure
from octavo.bench.load.http_target import HttpTarget
from octavo.bench.load.record import Record
from octavo.bench.load.requests import PlannedRequest
from octavo.bench.load.runner import Run
from octavo.cli import main
from octavo.commands.benches import bench_serve
from octavo.commands.benches.bench_serve import WORSE
from octavo.commands.flags import connection
from tests.gateway.running import gateway
from tests.integration.fake_inference import FakeServer
from tests.processes import started

ROOT = Path(__file__).parents[1]


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_of_a_gamma_distribution(burstiness: float) -> None:
    found = gaps(arrivals.times(20_000, 8.0, burstiness=burstiness, seed=3))
    mean = statistics.fmean(found)
    assert mean == pytest.approx(1 / 8, rel=0.06)
    assert statistics.pstdev(found) / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)


def test_even_arrivals_are_a_clock() -> None:
    assert arrivals.times(4, 2.0, burstiness=math.inf) == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(("first", "last"), [(2.0, 10.0), (10.0, 2.0), (5.0, 5.0)])
def test_a_ramp_has_the_rate_of_each_moment(first: float, last: float) -> None:
    count = 6000
    times = arrivals.times(count, first, burstiness=math.inf, ramp_to=last)
    length_s = 2 * count / (first + last)
    assert times[-1] == pytest.approx(length_s)
    for share in (0.1, 0.5, 0.9):
        begin, end = length_s * (share - 0.05), length_s * (share + 0.05)
        rate = sum(begin <= each < end for each in times) / (end - begin)
        assert rate == pytest.approx(first + (last - first) * share, rel=0.03)


def test_a_seed_gives_the_same_times_and_requests() -> None:
    def plan(seed: int, run: int = 0) -> tuple[list[float], list[PlannedRequest]]:
        drawn = requests.random_lengths(
            9, lengths.parse("3-9"), lengths.parse("lognormal:5:1"), shared=2, vocab_size=90, seed=seed, run=run
        )
        return arrivals.times(9, 1.0, seed=seed), drawn

    assert plan(1) == plan(1)
    assert plan(1) != plan(2)
    one, again = plan(1)[1], plan(1, run=1)[1]
    assert [len(each.prompt_token_ids) for each in one] == [len(each.prompt_token_ids) for each in again]
    assert not {each.prompt_token_ids for each in one} & {each.prompt_token_ids for each in again}
    assert len({each.prompt_token_ids[:2] for each in one}) == 1
    assert one[0].as_text() == one[0].as_text() and len(one[0].as_text().split()) == len(one[0].prompt_token_ids)


def test_lengths_are_as_they_are_described() -> None:
    import random

    rng = random.Random(1)
    assert {lengths.parse("7").draw(rng) for _ in range(9)} == {7}
    assert {lengths.parse("2-4").draw(rng) for _ in range(99)} == {2, 3, 4}
    drawn = [lengths.parse("lognormal:200:0.8:900").draw(rng) for _ in range(4000)]
    assert max(drawn) == 900 and statistics.median(drawn) == pytest.approx(200, rel=0.06)


@pytest.mark.parametrize("text", ["", "0", "-3", "5-2", "x", "lognormal:0:1", "lognormal:5", "lognormal:5:99"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        lengths.parse(text)


def test_conversations_of_sharegpt(tmp_path: Path) -> None:
    def entry(*turns: tuple[str, str]) -> dict[str, Any]:
        return {"conversations": [{"from": who, "value": text} for who, text in turns]}

    path = tmp_path / "sharegpt.json"
    good = [entry(("human", f"question {number}"), ("gpt", "x" * 9)) for number in range(3)]
    path.write_text(json.dumps([*good, entry(("gpt", "no question")), entry(("human", "")), entry()]))
    found = requests.share_gpt(path, 6, None, seed=1)
    assert {each.text for each in found} == {f"question {number}" for number in range(3)}
    assert {each.max_tokens for each in found} == {3}  # nine characters
    assert found == requests.share_gpt(path, 6, None, seed=1)
    assert requests.share_gpt(path, None, lengths.parse("7"), seed=1)[0].max_tokens == 7


@pytest.mark.parametrize(
    "text",
    ["", "{", "{}", "[]", "[1]", '[{"conversations": 3}]', '[{"conversations": [{"from": "human", "value": 1}]}]'],
)
def test_a_bad_file_of_conversations_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json"):
        requests.share_gpt(path, None, None, seed=1)


def test_a_trace_gives_times_lengths_and_what_prompts_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows: list[dict[str, Any]] = [
        {"timestamp": 1000, "input_length": 520, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 3000, "input_length": 600, "output_length": 4, "hash_ids": [0, 2]},
        {"timestamp": 3500, "input_length": 7, "output_length": 5},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = requests.trace(path, None, 2.0, vocab_size=500, seed=1)
    assert [(each.at_s, len(each.prompt_token_ids), each.max_tokens) for each in found] == [
        (0.0, 520, 3),
        (1.0, 600, 4),
        (1.25, 7, 5),
    ]
    first, second = (each.prompt_token_ids for each in found[:2])
    assert first[:512] == second[:512] and first[512:] != second[512:520]
    path.write_text('{"timestamp": 0, "input_length": "long", "output_length": 1}')
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 1: input_length"):
        requests.trace(path, None, 1.0, vocab_size=500, seed=1)


def test_percentiles_are_those_of_numpy_that_are_values_themselves() -> None:
    values = np.random.default_rng(5).lognormal(size=1003).tolist()
    for percent in (50, 90, 99):
        assert percentile(values, percent) == np.percentile(values, percent, method="inverted_cdf")


def record(sent_s: float, *times_s: float, tokens: int | None = None, error: str | None = None) -> Record:
    end_s = times_s[-1] if times_s else sent_s + 1
    return Record(sent_s - 0.5, sent_s, end_s, list(times_s), 10, len(times_s) if tokens is None else tokens, error)


def hand_made() -> Run:
    records = [
        record(0.0, 9.0),  # the warm-up
        record(1.0, 1.1, 1.2, 1.3),  # TTFT 100 ms, TPOT 100 ms
        record(2.0, 2.4, 2.5),  # TTFT 400 ms
        record(3.0, 3.1, 3.9, tokens=5),  # TTFT 100 ms, TPOT 200 ms
        record(4.0, error="HTTP 429"),
    ]
    return Run(records, wall_s=10.0, cpu_s=9.0)


def test_figures_of_hand_made_records() -> None:
    found = measure(hand_made(), load="x", warm_up=1, slo=Slo(ttft_ms=150, tpot_ms=150))
    assert (found.requests, found.failed, found.errors) == (4, 1, {"HTTP 429": 1})
    assert (found.seconds, found.output_tokens, found.requests_per_s) == (4.0, 10, 0.75)
    assert found.ttft_ms == pytest.approx({"p50": 100, "p90": 400, "p99": 400})
    assert found.tpot_ms == pytest.approx({"p50": 100, "p90": 200, "p99": 200})
    assert found.between_tokens_ms == pytest.approx({"p50": 100, "p90": 800, "p99": 800})
    assert (found.goodput_share, found.goodput_per_s) == (0.25, 0.25 / 1)  # one of four requests, in four seconds
    assert found.late_ms["p50"] == pytest.approx(500)
    assert found.client_cpu_share == 0.9 and found.client_cpu_s_per_1000_tokens == pytest.approx(9000 / 11)
    assert len(found.warnings) == 2 and "500 ms" in found.warnings[0] and "90 %" in found.warnings[1]


def test_goodput_counts_one_bound_alone_and_one_token_has_no_time_per_token() -> None:
    run = hand_made()
    assert measure(run, load="x", warm_up=1, slo=Slo(ttft_ms=150)).goodput_share == 0.5
    assert measure(run, load="x", warm_up=1, slo=Slo(tpot_ms=150)).goodput_share == 0.5
    assert Slo(tpot_ms=1).holds(record(0.0, 5.0))
    assert measure(run, load="x").goodput_share is None


class _Silent:
    """A server that answers nobody until all have asked."""

    def __init__(self, count: int) -> None:
        self.asked, self._all = 0, asyncio.Barrier(count)

    async def send(self, request: PlannedRequest, record: Record, clock: runner.Clock) -> None:
        self.asked += 1
        await self._all.wait()
        record.times_s.append(clock())


async def test_an_open_loop_does_not_wait_for_answers_and_none_is_sent_early() -> None:
    planned = [PlannedRequest(1, (1,), at_s=number / 1000) for number in range(50)]
    target = _Silent(50)
    done = await runner.run(target, planned, timeout_s=30)
    assert target.asked == 50 and all(each.error is None and each.late_s >= 0 for each in done.records)


async def test_a_closed_loop_has_no_more_on_the_way_than_streams() -> None:
    most = now = 0

    class Counting:
        async def send(self, request: PlannedRequest, record: Record, clock: runner.Clock) -> None:
            nonlocal most, now
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            record.times_s.append(clock())
            now -= 1

    done = await runner.run(Counting(), [PlannedRequest(1, (1,))] * 20, streams=3)
    assert most == 3 and len(done.records) == 20 and all(each.late_s < 1 for each in done.records)


class OpenAIServer:
    """Streams as it is told, and notes when each event was written."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.written_s: list[float] = []
        self.received_s = 0.0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.received_s = time.monotonic()
        body = await request.json()
        self.bodies.append(body)
        if body["model"] == "busy":
            return web.json_response({"error": {"message": "too many of yours"}}, status=429)
        if body["model"] == "proxy":
            return web.Response(status=502, text="<html>bad gateway</html>")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if body["model"] == "broken":
            return response
        for number in range(3):
            await asyncio.sleep(0.03)
            said = {"delta": {"content": f"t{number}"}} if "messages" in body else {"text": f"t{number}"}
            self.written_s.append(time.monotonic())
            event = json.dumps({"choices": [{"index": 0, **said}]}).encode()
            await response.write(b"data: " + event[:9])  # an event may come in parts
            await response.write(event[9:] + b"\r\n\r\n")
        usage = {"prompt_tokens": 11, "completion_tokens": 6}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        return response


@asynccontextmanager
async def openai_server() -> AsyncIterator[tuple[OpenAIServer, str]]:
    server, app = OpenAIServer(), web.Application()
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    app_runner = web.AppRunner(app)
    await app_runner.setup()
    site = web.TCPSite(app_runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield server, f"http://127.0.0.1:{app_runner.addresses[0][1]}/v1"
    finally:
        await app_runner.cleanup()


@pytest.mark.parametrize("chat", [False, True])
async def test_times_over_http_are_those_at_which_the_server_wrote(chat: bool) -> None:
    """Of each token: not before it was written, and before the next: no load on this machine changes the order."""
    async with openai_server() as (server, url):
        target = HttpTarget(url, model="m", chat=chat, takes_ids=not chat)
        started_s = time.monotonic()
        done = await runner.run(target, [PlannedRequest(6, (5, 6))], streams=1)
        await target.close()
    (got,) = done.records
    assert (got.error, got.prompt_tokens, got.output_tokens) == (None, 11, 6)
    assert got.ttft_s is not None and got.tpot_s is not None and len(got.times_s) == 3
    assert got.ttft_s >= server.written_s[0] - server.received_s  # the delay that the server made
    assert got.sent_s <= server.received_s - started_s
    assert got.tpot_s == pytest.approx((got.times_s[2] - got.times_s[0]) / 5)
    (body,) = server.bodies
    assert (body["max_tokens"], body["stream"], body["ignore_eos"]) == (6, True, True)
    assert body.get("prompt") == (None if chat else [5, 6])


@pytest.mark.parametrize(
    ("model", "kind", "reason"),
    [
        ("busy", "HTTP 429", "too many of yours"),
        ("proxy", "HTTP 502", ""),
        ("broken", "the stream broke off", ""),
    ],
)
async def test_failures_over_http_have_their_kind_and_the_servers_words(model: str, kind: str, reason: str) -> None:
    async with openai_server() as (_, url):
        target = HttpTarget(url, model=model)
        done = await runner.run(target, [PlannedRequest(6, (5, 6))] * 2, streams=1)
        await target.close()
    assert measure(done, load="x").errors == {kind: 2}
    assert [record.reason for record in done.records] == [reason] * 2


# ---- the command ----------------------------------------------------------------------------------------------------

RANDOM = ["--prompt-tokens", "2-5", "--output-tokens", "3", "--requests", "12", "--warm-up", "2"]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def bench(*flags: str) -> int:
    return main(["bench", *flags])


def test_a_sweep_is_kept_drawn_and_compared(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    asked = [*RANDOM, "--address", server.address, "--rate", "200,400", "--slo-ttft-ms", "60000"]
    server.inference.requests.clear()
    assert bench("serve", *asked, "--out", str(one), "--pictures", str(tmp_path / "drawn")) == 0
    sent = [list(each.prompt_token_ids.ids) for each in server.inference.requests]
    shown = capsys.readouterr().out
    assert "| 200 requests/s |" in shown and "100 %" in shown
    drawn = sorted(path.name for path in (tmp_path / "drawn").iterdir())
    assert drawn == ["latency.png", "timeline-1.png", "timeline-2.png"]
    assert all((tmp_path / "drawn" / name).read_bytes().startswith(b"\x89PNG") for name in drawn)
    server.inference.requests.clear()
    assert bench("serve", *asked, "--json", "--out", str(other)) == 0
    assert sorted(sent) == sorted(list(each.prompt_token_ids.ids) for each in server.inference.requests)
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["rate"], run["requests"], run["output_tokens"]) for run in runs] == [(200, 10, 30), (400, 10, 30)]
    plans = [[each["planned_s"] for each in result.read(path)["runs"][0]["requests"]] for path in (one, other)]
    assert plans[0] == plans[1] == sorted(plans[0]) and len(plans[0]) == 12
    assert bench("compare", str(one), str(other)) == 0
    after = capsys.readouterr()
    assert after.out.count("| 400 requests/s |") == 9 and "differs" not in after.err


def test_pictures_name_their_axes(tmp_path: Path) -> None:
    row = measure(hand_made(), load="4 requests/s", rate=4.0, slo=Slo(ttft_ms=1)).as_dict()
    faster = {**row, "rate": 8.0}
    axes = pictures.latency([faster, row]).axes
    assert [(each.get_xlabel(), each.get_ylabel()) for each in axes] == [
        ("planned requests/s", "ms"),
        ("planned requests/s", "ms"),
        ("planned requests/s", "requests/s"),
    ]
    assert np.array_equal(axes[0].lines[0].get_xdata(), [4.0, 8.0])
    run = {"figures": row, "warm_up": 1, "requests": [each.as_dict() for each in hand_made().records]}
    (axis,) = pictures.timeline(run).axes
    assert (axis.get_xlabel(), axis.get_ylabel(), axis.get_title()) == ("seconds", "request", "4 requests/s")
    assert len(axis.collections) == 10  # two lines a request


@pytest.mark.parametrize(
    ("library", "extra", "flags"),
    [
        ("matplotlib", "'.[pictures]'", ["--pictures", "drawn"]),
        ("aiohttp", "'.[load]'", ["--url", "http://x/v1"]),
    ],
)
def test_without_its_library_a_flag_names_the_extra_before_anything_is_sent(
    library: str,
    extra: str,
    flags: list[str],
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    server.inference.requests.clear()
    where = [] if "--url" in flags else ["--address", server.address]
    assert bench("serve", *RANDOM, *where, *flags) == 1
    assert extra in capsys.readouterr().err and not server.inference.requests


def test_what_cannot_be_kept_has_been_shown(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> list[Path]:
        raise OSError(errno.ENOSPC, "No space left on device", "x.png")

    monkeypatch.setattr("octavo.bench.load.pictures.write", full)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    assert bench("serve", *RANDOM, "--address", server.address, "--rate", "200", "--pictures", "drawn") == 1
    shown = capsys.readouterr()
    assert "| 200 requests/s |" in shown.out and "No space left on device: x.png" in shown.err


def test_the_window_of_the_environment_counts_for_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.bench.load.grpc_target.GrpcTarget", lambda address, **options: options)
    monkeypatch.setattr(connection, "credentials", lambda arguments: None)
    arguments = MagicMock(url=None, retry_window=None)
    assert vars(bench_serve)["_target"](arguments)["retry_window_s"] == 0.0
    monkeypatch.setenv("OCTAVO_RETRY_WINDOW", "7")
    assert vars(bench_serve)["_target"](arguments)["retry_window_s"] == 7.0
    arguments.retry_window = 2.0
    assert vars(bench_serve)["_target"](arguments)["retry_window_s"] == 2.0


def test_errors_are_counted_by_kind_and_a_run_without_answers_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as failing:
        failing.inference.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full", ())
        assert bench("serve", *RANDOM, "--address", failing.address) == 1
    assert "10 RESOURCE_EXHAUSTED" in capsys.readouterr().out


def kept(path: Path, ttft_ms: float, *, cores: int = 2, seed: int = 1, repeats: tuple[float, ...] = (1.0,)) -> str:
    runs = []
    for factor in repeats:
        row = measure(hand_made(), load="4 requests/s", rate=4.0, warm_up=1).as_dict()
        row["ttft_ms"] = {"p50": ttft_ms * factor, "p90": None, "p99": None}
        runs.append({"figures": row, "warm_up": 1, "requests": []})
    found = {"hardware": {"cpu": "x", "cores": cores}, "target": {"over": "Generate"}, "workload": {"seed": seed}}
    path.write_text(json.dumps({"schema": result.SCHEMA, **found, "runs": runs}))
    return str(path)


def test_compare_gives_ratios_of_medians_their_spread_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = kept(tmp_path / "a.json", 100, repeats=(0.9, 1.0, 1.5))
    b = kept(tmp_path / "b.json", 120, repeats=(1.0, 1.1, 0.5), cores=4, seed=2)
    (ttft,) = (
        each for each in compare.compare(result.read(Path(a)), result.read(Path(b))) if each.figure == "TTFT p50"
    )
    assert (ttft.ratio, ttft.low, ttft.high) == pytest.approx((1.2, 60 / 150, 132 / 90))
    assert bench("compare", a, b, "--threshold", "25") == 0
    assert bench("compare", a, b, "--threshold", "15") == WORSE
    shown = capsys.readouterr()
    assert "hardware differs: cores is 2, then 4" in shown.err and "workload differs: seed is 1, then 2" in shown.err
    assert "worse by more than 15 %: TTFT p50 at 4 requests/s" in shown.err
    assert bench("compare", b, a, "--threshold", "1") == 0, "the other way round it is better"


def test_throughput_is_worse_when_it_is_less() -> None:
    less = compare.Ratio("x", "tokens/s", 10, 8, 0.8, 0.8, 0.8, more_is_better=True)
    assert less.is_worse_by(20) and not less.is_worse_by(30)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "octavo-load-1", "runs": []}', '{"schema": "octavo-load-1", "runs": [{}]}']
)
def test_other_files_are_not_compared(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert bench("compare", str(path), str(path)) == 1
    assert "bad.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--rate", "1", "--streams", "2"],
        ["--rate", "0"],
        ["--ramp-to", "3"],
        ["--chat"],
        ["--shared-tokens", "4"],
        ["--prompt-tokens", "4", "--sharegpt", "x.json"],
        ["--speedup", "2"],
        ["--url", "http://127.0.0.1:1/v1", "--tls-ca-file", "ca.pem"],
    ],
)
def test_contradictions_are_usage_errors(flags: list[str]) -> None:
    try:
        code: Any = bench("serve", *flags)
    except SystemExit as ended:
        code = ended.code
    assert code == 2


def test_over_grpc_and_through_the_gateway_at_a_terminal(server: FakeServer, tmp_path: Path) -> None:
    with gateway(server.address) as running:
        for where in (["--address", server.address], ["--url", f"{running.url}/v1", "--chat", "--model", "fake"]):
            flags = ["bench", "serve", *RANDOM, "--rate", "300", *where]
            front, back = pty.openpty()
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            with started(
                [sys.executable, "-m", "octavo", *flags], stdout=back, stderr=back, stdin=back, env=environment
            ) as process:
                os.close(back)
                shown = b""
                while part := _read(front):
                    shown += part
                assert process.wait(60) == 0, shown.decode()
            os.close(front)
            row = next(line for line in shown.decode().splitlines() if line.startswith("| 300 requests/s"))
            assert len(row.split(" | ")) == 9 and "errors" not in shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other side is closed
        return b""
