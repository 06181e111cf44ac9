"""`octavo top`: what it reads from a server, the tables it makes of that, and its keys at a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from rich.console import Console

from octavo import Client, SamplingParams
from octavo.cli import main
from octavo.dashboard.screen import screen
from octavo.dashboard.server_watch import ServerWatch, Speed, View
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from tests.fakes import FakeWorker, say_forever, spell
from tests.integration.scheduler_process import Service, scheduler
from tests.processes import started
from tests.terminal import Terminal

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with (
        FakeWorker(spell("of a"), model="a", model_hash="a") as a,
        FakeWorker(say_forever("b"), model="b", model_hash="b", delay_s=0.02, max_model_len=4096, num_blocks=1024) as b,
        scheduler(f"--worker={a.address}", f"--worker={b.address}") as it,
    ):
        it.wait_until_ready()
        deadline = time.monotonic() + 20
        with Client(it.address) as client:
            while len(client.list_models()) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        yield it


@pytest.fixture
def running(service: Service) -> Iterator[None]:
    """A request that runs until the test is over."""
    with Client(service.address) as client:
        stream = client.generate("say|", SamplingParams(ignore_eos=True), model="b", request_id="the-long-one")
        next(iter(stream))
        yield
        stream.close()


def text_of(view: View) -> list[str]:
    console = Console(width=240)
    with console.capture() as capture:
        console.print(screen(view, "here:1"))
    return capture.get().splitlines()


def row(lines: list[str], name: str) -> list[str]:
    return next(line for line in lines if line.startswith(name)).split()


@pytest.mark.usefixtures("running")
def test_one_look_shows_each_model_each_worker_and_what_runs(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once", "--address", service.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("1 running, 0 waiting (0 tokens); tokens/s: 0 in, ")
    models = {line.split("@")[0]: line.split()[1:5] for line in lines if "@" in line}
    assert models == {"a": ["0", "0", "1", "0"], "b": ["1", "0", "1", "0"]}
    workers = [line.split()[1:3] for line in lines if line.startswith("127.0.0.1:")]
    assert sorted(workers) == [["serving", "a"], ["serving", "b"]]
    assert row(lines, "the-long-one")[1] == "running"


@pytest.mark.usefixtures("running")
def test_a_line_of_json_has_the_messages_and_the_speeds(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--json", "--requests=1", "--address", service.address]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    state = json.loads(line)
    assert state["num_requests_running"] == 1 and [each["request_id"] for each in state["requests"]] == ["the-long-one"]
    of_b = next(worker["address"] for worker in state["workers"] if worker["model"] == "b")
    speed = state["per_second"][of_b]
    assert speed["steps"] > 0 and speed["decode_tokens"] == pytest.approx(speed["steps"]), "one token a step"


def test_a_server_that_is_not_there_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--address", "127.0.0.1:1"]) == 1
    assert "no server answers at 127.0.0.1:1 (`octavo serve` starts one" in capsys.readouterr().err


class FakeControl(pb_grpc.ControlServicer):
    """A worker that makes 20 steps between two looks, of which a slow reader sees 10, with 8 tokens in each."""

    def __init__(self) -> None:
        self.num_steps = 100
        self.refuses = False
        self.works = threading.Event()

    def GetServerInfo(self, request: pb.GetServerInfoRequest, context: grpc.ServicerContext) -> pb.ServerInfo:
        return pb.ServerInfo(version="9")

    def GetLoad(self, request: pb.GetLoadRequest, context: grpc.ServicerContext) -> pb.Load:
        self.num_steps += 20
        return pb.Load(workers=[pb.WorkerState(address="w:1", num_steps=self.num_steps)])

    def WatchSteps(self, request: pb.WatchStepsRequest, context: grpc.ServicerContext) -> Iterator[pb.StepSummary]:
        if self.refuses:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "enough watch")
        self.works.wait(20)
        for _ in range(10):
            yield pb.StepSummary(worker="w:1", num_decode_tokens=8, num_prefill_tokens=3, blocks_swapped_out=1)
        while context.is_active():
            time.sleep(0.01)


@pytest.fixture
def control() -> Iterator[tuple[FakeControl, grpc.Channel]]:
    fake, server = FakeControl(), grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_ControlServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield fake, channel
    fake.works.set()
    server.stop(None).wait()


def test_tokens_a_second_are_right_for_a_reader_that_misses_steps(control: tuple[FakeControl, grpc.Channel]) -> None:
    fake, channel = control
    with ServerWatch(channel, num_requests=0) as watch:
        assert watch.look().speeds == {}, "nobody was there before"
        fake.works.set()
        deadline = time.monotonic() + 20
        while not watch._seen or watch._seen["w:1"]["steps"] < 10:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        speed = watch.look().speeds["w:1"]
    assert speed.steps > 0
    assert (speed.decode_tokens, speed.prefill_tokens) == pytest.approx((8 * speed.steps, 3 * speed.steps))
    assert speed.blocks_swapped_out == pytest.approx(speed.steps)


def test_a_worker_that_began_again_has_no_speed_until_the_next_look(control: tuple[FakeControl, grpc.Channel]) -> None:
    fake, channel = control
    with ServerWatch(channel, num_requests=0) as watch:
        watch.look()
        fake.num_steps = 0
        assert watch.look().speeds == {}
        assert watch.look().speeds["w:1"].steps > 0


def test_without_steps_to_watch_the_rest_is_shown(control: tuple[FakeControl, grpc.Channel]) -> None:
    fake, channel = control
    fake.refuses = True
    with ServerWatch(channel, num_requests=0) as watch:
        watch.look()
        speed = watch.look().speeds["w:1"]
    assert speed.steps > 0 and speed.decode_tokens == 0


def test_ranks_stages_and_adapters_are_shown_where_there_are_any() -> None:
    one = pb.WorkerState(address="w:1", adapters=["law", "sql"], tensor_parallel_size=2, pipeline_parallel_size=3)
    two = pb.WorkerState(address="w:2", adapters=list("abcdef"), tensor_parallel_size=2, pipeline_parallel_size=1)
    three = pb.WorkerState(address="w:3", tensor_parallel_size=1, pipeline_parallel_size=1, problem="gone")
    lines = text_of(View(pb.ServerInfo(), pb.Load(workers=[one, two, three]), []))
    assert row(lines, "w:1")[-6:] == ["6", "in", "3", "stages", "law,", "sql"]
    assert " ".join(row(lines, "w:2")[-8:]) == "2 a, b, c, d and 2 more"
    assert row(lines, "w:3")[-3:] == ["1", "-", "gone"]
    alone = "\n".join(text_of(View(pb.ServerInfo(), pb.Load(workers=[three]), [])))
    assert "ranks" not in alone and "adapters" not in alone


def test_what_the_tables_say_of_speed_and_caches() -> None:
    worker = pb.WorkerState(address="w:1", health=pb.WORKER_HEALTH_LOST, problem="gone", num_running=3, num_preempted=2)
    worker.num_device_blocks, worker.num_free_device_blocks = 2000, 500
    worker.num_host_blocks, worker.num_free_host_blocks, worker.model_fingerprint = 40, 30, "f" * 64
    model = pb.ModelLoad(name="m", fingerprint="f" * 64, num_workers_serving=1)
    load = pb.Load(workers=[worker], models=[model])
    speeds = {
        "w:1": Speed(steps=9.96, decode_tokens=1234.4, prefill_tokens=0, blocks_swapped_in=2, blocks_swapped_out=1)
    }
    lines = text_of(View(pb.ServerInfo(version="9", uptime_ns=3_725 * 10**9), load, [], speeds))
    assert lines[0] == "Octavo 9 at here:1, up 1:02:05"
    assert row(lines, "m@")[-2:] == ["0.0", "1,234"]
    line = row(lines, "w:1")
    assert line[1] == "lost" and line[-1] == "gone"
    assert " ".join(line[3:]) == "75% of 2,000 25% of 40 3 2 10.0 0.0 1,234 3.0 gone" or line[2].startswith("━")
    assert line[-12:-1] == ["of", "2,000", "25%", "of", "40", "3", "2", "10.0", "0.0", "1,234", "3.0"]
    alone = row(text_of(View(pb.ServerInfo(), load, [])), "w:1")
    assert alone[-5:] == ["-", "-", "-", "-", "gone"], "no speed is known at the first look"


def test_what_the_tables_say_of_requests() -> None:
    request = pb.RequestState(
        request_id="r" * 60, phase=pb.REQUEST_PHASE_SWAPPED, worker="w:1", model="m", num_prompt_tokens=1200
    )
    request.times_preempted, request.times_moved, request.age_ns = 3, 1, 61 * 10**9
    for num_tokens in (1207, 1210):
        request.sequences.add(num_tokens=num_tokens, num_cached_tokens=64)
    line = row(text_of(View(pb.ServerInfo(), pb.Load(), [request])), "rrr")
    assert len(line[0]) == 36 and line[1:] == ["swapped", "w:1", "m", "1,200", "17", "64", "3", "1", "1:01"]


HOSTILE = "\x1b]52;c;eA==\x07\x1b[2J\n[/]m[link=http://evil]click"
SPELT_OUT = r"\u001b]52;c;eA==\u0007\u001b[2J\u000a[/]m[link=http://evil]click"


def hostile_view() -> View:
    """All words that others choose are hostile."""
    worker = pb.WorkerState(address=HOSTILE, model=HOSTILE, problem=HOSTILE, adapters=[HOSTILE])
    model = pb.ModelLoad(name=HOSTILE, fingerprint=HOSTILE)
    request = pb.RequestState(request_id=HOSTILE, worker=HOSTILE, model=HOSTILE)
    return View(pb.ServerInfo(version=HOSTILE), pb.Load(workers=[worker], models=[model]), [request])


@pytest.mark.parametrize("width", [40, 80, 600])
def test_what_others_name_is_neither_markup_nor_steers_the_terminal(width: int) -> None:
    file = io.StringIO()
    Console(width=width, file=file, force_terminal=True, color_system="truecolor").print(screen(hostile_view(), "a"))
    shown = file.getvalue()
    assert set(re.findall(r"\x1b[^m]*m", shown)) <= {f"\x1b[{code}m" for code in (0, 1, 2, 31)}
    assert not set(re.sub(r"\x1b\[\d+m", "", shown)) & {chr(code) for code in range(32) if code != ord("\n")}
    if width == 600:
        assert shown.count(SPELT_OUT) == 8, "all but a fingerprint and a request's id, which are cut"


def two_workers() -> View:
    """As a small server has them, at work."""
    workers, speeds = [], {}
    for address in ("10.1.2.11:50061", "10.1.2.12:50061"):
        worker = pb.WorkerState(address=address, health=pb.WORKER_HEALTH_DRAINING, model="smollm2-135m-instruct")
        worker.num_device_blocks, worker.num_free_device_blocks, worker.num_running = 2000, 500, 12
        workers.append(worker)
        speeds[address] = Speed(steps=31.2, prefill_tokens=15_200, decode_tokens=4_224)
    workers[1].problem = "it has been silent for 12 s, and is asked again"
    model = pb.ModelLoad(name="smollm2-135m-instruct", fingerprint="f" * 64, num_workers_draining=2)
    request = pb.RequestState(request_id="r" * 36, phase=pb.REQUEST_PHASE_PREEMPTED, worker="10.1.2.11:50061")
    return View(pb.ServerInfo(), pb.Load(workers=workers, models=[model]), [request], speeds)


def lines_of(view: View, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(screen(view, "here:1"))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    return lines


def test_a_narrow_terminal_shows_fewer_columns_and_each_of_them_whole() -> None:
    columns = ["worker", "state", "blocks", "running", "steps/s", "in/s", "out/s"]
    values = ["draining", "75% of 2,000", "12", "31", "15,200", "4,224"]
    for width, spared in ((80, ()), (60, ("running", "steps/s")), (45, ("running", "steps/s", "blocks"))):
        lines = lines_of(two_workers(), width)
        assert row(lines, "worker ") == [each for each in columns if each not in spared]
        kept = [value for title, value in zip(columns[1:], values, strict=True) if title not in spared]
        for address in ("10.1.2.11:50061", "10.1.2.12:50061"):
            assert row(lines, f"{address} ") == [address, *" ".join(kept).split()]
        said = "\n".join(lines).replace("\n", " ").replace("  ", " ")
        assert "10.1.2.12:50061: it has been silent for 12 s, and is asked again" in said, "on a line of its own"
        assert row(lines, "model ")[-2:] == ["in/s", "out/s"]
        assert row(lines, "rrr")[1] == "preempted" and row(lines, "rrr")[-1] == "0:00"


def test_a_wide_terminal_shows_all_columns() -> None:
    lines = lines_of(two_workers(), 260)
    titles = " ".join(row(lines, "worker "))
    assert titles == "worker state model cache blocks host running preempted steps/s in/s out/s swapped/s problem"
    assert row(lines, "10.1.2.12:50061 ")[-3:] == ["is", "asked", "again"]
    assert row(lines, "rrr")[0] == "r" * 36


def test_models_are_told_apart_before_steps_are_counted() -> None:
    view = two_workers()
    view.load.workers[1].model = "other"
    assert row(lines_of(view, 80), "10.1.2.12:50061 ")[2] == "other"
    assert "steps/s" not in row(lines_of(view, 80), "worker ")


def test_very_long_names_are_cut_and_state_and_speeds_are_not() -> None:
    view = two_workers()
    view.load.workers[1].address = f"worker.{'x' * 80}:50061"
    line = row(lines_of(view, 60), "worker.x")
    assert line[0].endswith("…") and line[1] == "draining" and line[-2:] == ["-", "-"]


@pytest.mark.usefixtures("running")
def test_a_locale_without_an_ellipsis_is_no_reason_to_end(service: Service) -> None:
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "36", "LINES": "40", "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "octavo", "top", "--once", "--address", service.address]
    with Terminal() as terminal:
        inside = terminal.inside
        with started(command, cwd=ROOT, env=environ, stdin=inside, stdout=inside, stderr=inside) as process:
            shown = terminal.wait_for(b"? ")  # in place of the ellipsis
            assert b"127.0.0.1" in shown and process.wait(20) == 0


@pytest.mark.usefixtures("running")
def test_at_a_terminal_it_draws_until_q_and_leaves_the_terminal_as_it_was(service: Service) -> None:
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "40"}
    command = [sys.executable, "-m", "octavo", "top", "--interval=0.05", "--address", service.address]
    with Terminal() as terminal:
        inside = terminal.inside
        before = termios.tcgetattr(inside)
        with started(command, cwd=ROOT, env=environ, stdin=inside, stdout=inside, stderr=inside) as process:
            terminal.wait_for(b"the-long-one")
            terminal.press(b"r")  # hides requests
            while b"the-long-one" in terminal.wait_for(b"steps/s"):  # a picture that was being drawn
                pass
            terminal.press(b"q")
            terminal.wait_for(b"\x1b[?1049l")  # back from the screen of its own
            assert process.wait(20) == 0
        assert termios.tcgetattr(inside) == before
