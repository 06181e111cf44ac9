"""Children of a supervisor: named when they die, and gone when it is, whatever ends it. The plan that `serve` makes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.serving import plan as serving_plan
from octavo.shared.processes import supervisor as shared
from octavo.shared.processes.supervisor import Child, Supervisor
from tests.processes import Unread, is_alive

ROOT = Path(__file__).parents[1]
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN)"


def python(first: str = "", *, begun: Path | None = None, until: Path | None = None, then: str = "") -> list[str]:
    """Does `first`, says so by the file `begun`, waits for the file `until` (None: for ever), and does `then`."""
    said = "" if begun is None else f"pathlib.Path({str(begun)!r}).touch()"
    wait = f"while not os.path.exists({str(until)!r}): time.sleep(0.01)"
    return [sys.executable, "-c", "\n".join(("import os, pathlib, sys, time", first, said, wait, then))]


def one_more_in(log: Path) -> str:
    return f"with open({str(log)!r}, 'a') as file: file.write('x')"


def child(name: str, command: list[str], essential: bool = False) -> Child:
    return Child(name, command, dict(os.environ), essential)


async def ready_at_once() -> None:
    await asyncio.sleep(0.05)


def ready_with(*files: Path) -> Callable[[], Coroutine[Any, Any, None]]:
    async def are_there() -> None:
        async with asyncio.timeout(30):
            while not all(file.exists() for file in files):
                await asyncio.sleep(0.01)

    return are_there


async def never_ready() -> None:
    await asyncio.sleep(600)


def send(*numbers: int) -> None:
    """Signals this process, as a terminal does."""
    for i, number in enumerate(numbers):
        asyncio.get_running_loop().call_later(0.1 * i, os.kill, os.getpid(), number)


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Of those that the test has started: other tests before it in this process may have helpers that live on."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert [p for p in psutil.Process().children(recursive=True) if p not in before and is_alive(p)] == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
async def test_a_signal_ends_everything(number: int, code: int) -> None:
    supervisor = Supervisor([child("a", SLEEP, True), child("b", SLEEP)], ready_at_once)
    readiness: list[float] = []

    def ready(seconds: float) -> None:
        readiness.append(seconds)
        send(number)

    assert await supervisor.run(ready) == code
    assert len(readiness) == 1 and 0.04 < readiness[0] < 5


async def test_the_end_of_a_terminal_that_is_told_twice_lets_children_finish(tmp_path: Path) -> None:
    begun, finished = tmp_path / "begun", tmp_path / "finished"
    finishes = f"import signal; signal.signal(15, lambda *_: (time.sleep(0.5), sys.exit(open({str(finished)!r}, 'x'))))"
    children = [child("scheduler", python(finishes, begun=begun), True)]
    supervisor = Supervisor(children, ready_with(begun))
    assert await supervisor.run(lambda _: send(signal.SIGHUP, signal.SIGHUP)) == 0
    assert finished.exists(), "it was killed"


async def test_children_that_ignore_sigterm_are_killed_after_less_than_5_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(shared._GRACE_S.values()) < 5
    monkeypatch.setattr(shared, "_GRACE_S", {True: 0.3, False: 0.2})
    begun = {name: tmp_path / name for name in "ab"}
    children = [child(name, python(STUBBORN, begun=file), name == "a") for name, file in begun.items()]
    told: list[float] = []

    def ready(_: float) -> None:
        told.append(time.monotonic())
        send(signal.SIGINT)

    assert await Supervisor(children, ready_with(*begun.values())).run(ready) == 130
    assert 0.5 <= time.monotonic() - told[0] < 5


async def test_the_end_of_a_child_is_seen_while_a_child_of_it_lives_on(tmp_path: Path) -> None:
    """And holds what the child wrote to."""
    left, said = tmp_path / "left", 'echo "octavo worker: error: no memory" >&2'
    command = ["/bin/sh", "-c", f"sleep 600 & echo $! >{left}; {said}; exit 3"]
    supervisor = Supervisor([child("a", command, True)], never_ready)
    try:
        async with asyncio.timeout(30):
            assert await supervisor.run(lambda _: None) == 1
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)
    assert supervisor.reason == "the a has ended with exit code 3: no memory"


async def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_GRACE_S", {True: 60.0, False: 60.0})
    begun = {name: tmp_path / name for name in "ab"}
    children = [child(name, python(STUBBORN, begun=file), name == "a") for name, file in begun.items()]
    ready = ready_with(*begun.values())

    async def told_before_they_are_ready() -> None:
        await ready()
        send(signal.SIGINT, signal.SIGINT)
        await never_ready()

    started = time.monotonic()
    assert await Supervisor(children, told_before_they_are_ready).run(lambda _: None) == 130
    assert time.monotonic() - started < 30


async def test_a_child_that_cannot_start_ends_all_and_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    failing = child("worker 1", [sys.executable, "-c", "raise SystemExit(7)"])
    supervisor = Supervisor([child("scheduler", SLEEP, True), failing], never_ready)
    assert await supervisor.run(lambda _: None) == 1
    said = "".join(capfd.readouterr())
    assert "worker 1" in said and "7" in said
    assert supervisor.reason == "the worker 1 has ended with exit code 7: it said nothing"


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (70, 1)])
async def test_why_a_child_failed_is_the_reason_for_all(
    code: int, expected: int, capfd: pytest.CaptureFixture[str]
) -> None:
    program = f"""if True:
        import sys
        print('{{"event": "loading"}}', file=sys.stderr)
        print("octavo worker: error: there is no model folder /x", end="", file=sys.stderr)
        sys.exit({code})
    """
    failing = child("worker", [sys.executable, "-c", program])
    supervisor = Supervisor([child("scheduler", SLEEP, True), failing], never_ready)
    assert await supervisor.run(lambda _: None) == expected
    assert supervisor.reason == f"the worker has ended with exit code {code}: there is no model folder /x"
    said = capfd.readouterr().err.splitlines()
    assert '{"event": "loading"}' in said and "octavo worker: error: there is no model folder /x" in said


async def test_the_end_of_an_essential_child_ends_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """After all were ready."""
    go = tmp_path / "go"
    dying = python(until=go, then="os.kill(os.getpid(), 9)")
    supervisor = Supervisor([child("scheduler", dying, True), child("worker", SLEEP)], ready_at_once)
    assert await supervisor.run(lambda _: go.touch()) == 1
    said = "".join(capfd.readouterr())
    assert "scheduler" in said and "SIGKILL" in said
    assert supervisor.reason == "the scheduler was ended by SIGKILL, as the system does when memory runs out"


async def test_a_child_that_says_much_does_not_wait_for_a_reader_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of our standard error, as after its terminal was closed."""
    monkeypatch.setattr("sys.stderr", Unread())
    much = [sys.executable, "-c", "import sys; sys.stderr.write('a line of a log\\n' * (1 << 16))"]
    async with asyncio.timeout(30):
        assert await Supervisor([child("scheduler", much, True)], never_ready).run(lambda _: None) == 0


async def test_an_essential_child_that_ends_well_ends_all_well(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a scheduler does that was told to drain."""
    go = tmp_path / "go"
    supervisor = Supervisor([child("scheduler", python(until=go), True), child("worker", SLEEP)], ready_at_once)
    assert await supervisor.run(lambda _: go.touch()) == 0
    assert "error" not in "".join(capfd.readouterr())


async def test_a_command_that_cannot_be_run_ends_all_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(child: Child) -> asyncio.subprocess.Process:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(shared, "_start", start)
    supervisor = Supervisor([child("scheduler", SLEEP, True)], never_ready)
    assert await asyncio.wait_for(supervisor.run(lambda _: None), 10) == 1
    assert "Cannot allocate memory" in supervisor.reason


async def test_a_worker_that_dies_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_FIRST_PAUSE_S", 0.01)
    log, go = tmp_path / "starts", tmp_path / "go"
    lives_the_third_time = f"if len(open({str(log)!r}).read()) == 3: time.sleep(600)"
    dying_twice = child("worker", python(one_more_in(log), until=go, then=lives_the_third_time))
    supervisor = Supervisor([child("scheduler", SLEEP, True), dying_twice], ready_at_once)
    running = asyncio.create_task(supervisor.run(lambda _: go.touch()))
    deadline = time.monotonic() + 20
    while not log.exists() or len(log.read_text()) < 3:
        assert time.monotonic() < deadline and not running.done()
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0
    assert log.read_text() == "xxx"


async def test_a_worker_that_keeps_dying_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_MAX_RESTARTS", 2)
    monkeypatch.setattr(shared, "_FIRST_PAUSE_S", 0.01)
    log, go = tmp_path / "starts", tmp_path / "go"
    dying = python(one_more_in(log), until=go, then="sys.exit('no more')")
    supervisor = Supervisor([child("scheduler", SLEEP, True), child("worker", dying)], ready_at_once)
    assert await supervisor.run(lambda _: go.touch()) == 1
    assert supervisor.reason == "the worker has ended with exit code 1: no more"
    assert log.read_text() == "xxx"


async def test_a_good_life_makes_up_for_all_earlier_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(shared, "_GOOD_LIFE_S", 0.1)
    monkeypatch.setattr(shared, "_MAX_RESTARTS", 1)
    log, go = tmp_path / "starts", tmp_path / "go"
    living = python(one_more_in(log), until=go, then="time.sleep(0.11)")
    supervisor = Supervisor([child("scheduler", SLEEP, True), child("worker", living)], ready_at_once)
    running = asyncio.create_task(supervisor.run(lambda _: go.touch()))
    deadline = time.monotonic() + 20
    while not running.done() and (not log.exists() or len(log.read_text()) < 4):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert not running.done(), "it was given up"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_nothing_is_left_when_the_supervisor_is_killed() -> None:
    program = f"""
        import asyncio, os
        from octavo.shared.processes.supervisor import Child, Supervisor
        async def never(): await asyncio.sleep(600)
        child = lambda name, essential: Child(name, {SLEEP!r}, dict(os.environ), essential)
        asyncio.run(Supervisor([child("a", True), child("b", False)], never).run(print))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT)
    orphans: list[psutil.Process] = []
    deadline = time.monotonic() + 10
    while len(orphans) < 2 and time.monotonic() < deadline:
        orphans = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.02)
    time.sleep(0.3)  # past exec
    process.kill()
    process.wait()
    assert len(orphans) == 2
    deadline = time.monotonic() + 10
    while any(is_alive(orphan) for orphan in orphans):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_worker_environment_keeps_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "4")
    environment = serving_plan.worker_environment(3)
    assert environment["OMP_NUM_THREADS"] == "3" and "OCTAVO_MAX_NUM_SEQS" not in environment
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert serving_plan.worker_environment(3)["OMP_NUM_THREADS"] == "1"


def test_how_threads_wait_is_chosen_only_where_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert serving_plan.waiting_threads() == {"GOMP_SPINCOUNT": serving_plan.SPIN_COUNT}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "7")
            assert serving_plan.waiting_threads() == {}


async def test_a_front_that_keeps_dying_ends_all_and_its_living_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(shared, "_MAX_RESTARTS", 1)
    go = tmp_path / "go"
    dying = python(until=go, then="sys.exit('no more')")
    for front, worker, named in ((dying, SLEEP, "front"), (SLEEP, dying, "worker")):
        children = [child("scheduler", SLEEP, True), child("worker", worker), child("front", front)]
        children[2] = dataclasses.replace(children[2], is_front=True)
        go.unlink(missing_ok=True)
        supervisor = Supervisor(children, ready_at_once)
        assert await supervisor.run(lambda _: go.touch()) == 1
        assert supervisor.reason == f"the {named} has ended with exit code 1: no more"


async def test_a_front_is_ended_before_what_others_wait_for(tmp_path: Path) -> None:
    log, names = tmp_path / "ends", ("worker", "front", "scheduler")
    says = "import signal; signal.signal(15, lambda *_: sys.exit(open({!r}, 'a').write({!r}) and 0))"
    begun = [tmp_path / name for name in names]
    commands = [python(says.format(str(log), file.name[0]), begun=file) for file in begun]
    children = [child(name, command, name == "scheduler") for name, command in zip(names, commands, strict=True)]
    children[1] = dataclasses.replace(children[1], is_front=True)
    assert await Supervisor(children, ready_with(*begun)).run(lambda _: send(signal.SIGTERM)) == 0
    assert sorted(log.read_text()[:2]) == ["f", "s"] and log.read_text()[2:] == "w"
