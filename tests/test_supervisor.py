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
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from octavo import serving_plan
from octavo.shared.supervisor import Child, Supervisor

ROOT = Path(__file__).parents[1]
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN); time.sleep(600)",
]


def child(name: str, command: list[str], essential: bool = False) -> Child:
    return Child(name, command, dict(os.environ), essential)


async def ready_at_once() -> None:
    await asyncio.sleep(0.2)


async def never_ready() -> None:
    await asyncio.sleep(600)


def send_after(seconds: float, *numbers: int) -> None:
    """Signals this process, as a terminal does."""
    for i, number in enumerate(numbers):
        asyncio.get_running_loop().call_later(seconds + 0.2 * i, os.kill, os.getpid(), number)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return False


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Of those that the test has started: other tests before it in this process may have helpers that live on."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert [p for p in psutil.Process().children(recursive=True) if p not in before and is_alive(p)] == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
async def test_a_signal_ends_everything(number: int, code: int) -> None:
    supervisor = Supervisor([child("a", SLEEP, True), child("b", SLEEP)], ready_at_once)
    readiness: list[float] = []
    send_after(0.5, number)
    assert await supervisor.run(readiness.append) == code
    assert len(readiness) == 1 and 0.1 < readiness[0] < 5


async def test_children_that_ignore_sigterm_are_gone_within_5_seconds() -> None:
    supervisor = Supervisor([child("a", STUBBORN, True), child("b", STUBBORN)], ready_at_once)
    send_after(0.6, signal.SIGINT)
    started = time.monotonic()
    assert await supervisor.run(lambda _: None) == 130
    assert time.monotonic() - started < 0.6 + 5


async def test_the_end_of_a_child_is_seen_while_a_child_of_it_lives_on(tmp_path: Path) -> None:
    """And holds what the child wrote to."""
    left, said = tmp_path / "left", 'echo "octavo worker: error: no memory" >&2'
    command = ["/bin/sh", "-c", f"sleep 600 & echo $! >{left}; sleep 0.5; {said}; exit 3"]
    supervisor = Supervisor([child("a", command, True)], never_ready)
    try:
        async with asyncio.timeout(30):
            assert await supervisor.run(lambda _: None) == 1
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)
    assert supervisor.reason == "the a has ended with exit code 3: no memory"


async def test_a_second_ctrl_c_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.shared.supervisor._GRACE_S", {True: 60.0, False: 60.0})
    supervisor = Supervisor([child("a", STUBBORN, True), child("b", STUBBORN)], never_ready)
    send_after(0.6, signal.SIGINT, signal.SIGINT)
    started = time.monotonic()
    assert await supervisor.run(lambda _: None) == 130
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


async def test_the_end_of_an_essential_child_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    dying = [sys.executable, "-c", "import os, time; time.sleep(0.5); os.kill(os.getpid(), 9)"]
    supervisor = Supervisor([child("scheduler", dying, True), child("worker", SLEEP)], ready_at_once)
    assert await supervisor.run(lambda _: None) == 1
    said = "".join(capfd.readouterr())
    assert "scheduler" in said and "SIGKILL" in said
    assert supervisor.reason == "the scheduler was ended by SIGKILL, as the system does when memory runs out"


async def test_an_essential_child_that_ends_well_ends_all_well(capfd: pytest.CaptureFixture[str]) -> None:
    """As a scheduler does that was told to drain."""
    draining = [sys.executable, "-c", "import time; time.sleep(0.5)"]
    supervisor = Supervisor([child("scheduler", draining, True), child("worker", SLEEP)], ready_at_once)
    assert await supervisor.run(lambda _: None) == 0
    assert "error" not in "".join(capfd.readouterr())


async def test_a_command_that_cannot_be_run_ends_all_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(child: Child) -> asyncio.subprocess.Process:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("octavo.shared.supervisor._start", start)
    supervisor = Supervisor([child("scheduler", SLEEP, True)], never_ready)
    assert await asyncio.wait_for(supervisor.run(lambda _: None), 10) == 1
    assert "Cannot allocate memory" in supervisor.reason


async def test_a_worker_that_dies_is_started_again(tmp_path: Path) -> None:
    log = tmp_path / "starts"
    program = """if True:
        import pathlib, sys, time
        starts = pathlib.Path(sys.argv[1])
        with starts.open("a") as file:
            file.write("x")
        time.sleep(0.6 if len(starts.read_text()) < 3 else 600)
    """
    dying_twice = child("worker", [sys.executable, "-c", program, str(log)])
    supervisor = Supervisor([child("scheduler", SLEEP, True), dying_twice], ready_at_once)
    send_after(4.5, signal.SIGTERM)
    assert await supervisor.run(lambda _: None) == 0
    assert log.read_text() == "xxx"


async def test_a_worker_that_keeps_dying_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.shared.supervisor._FIRST_PAUSE_S", 0.01)
    dying = [sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit('no more')"]
    supervisor = Supervisor([child("scheduler", SLEEP, True), child("worker", dying)], ready_at_once)
    assert await supervisor.run(lambda _: None) == 1
    assert supervisor.reason == "the worker has ended with exit code 1: no more"


async def test_a_good_life_makes_up_for_all_earlier_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.shared.supervisor._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("octavo.shared.supervisor._GOOD_LIFE_S", 0.4)
    monkeypatch.setattr("octavo.shared.supervisor._MAX_RESTARTS", 1)
    log = tmp_path / "starts"
    living = [sys.executable, "-c", f"import time; open({str(log)!r}, 'a').write('x'); time.sleep(0.5)"]
    supervisor = Supervisor([child("scheduler", SLEEP, True), child("worker", living)], ready_at_once)
    running = asyncio.create_task(supervisor.run(lambda _: None))
    deadline = time.monotonic() + 20
    while not running.done() and (not log.exists() or len(log.read_text()) < 4):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert not running.done(), "it was given up"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_nothing_is_left_when_the_supervisor_is_killed() -> None:
    program = f"""
        import asyncio, os
        from octavo.shared.supervisor import Child, Supervisor
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
    _, alive = psutil.wait_procs(orphans, timeout=3)
    assert [p for p in alive if is_alive(p)] == []


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("octavo.shared.supervisor._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("octavo.shared.supervisor._MAX_RESTARTS", 1)
    dying = [sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit('no more')"]
    for front, worker, named in ((dying, SLEEP, "front"), (SLEEP, dying, "worker")):
        children = [child("scheduler", SLEEP, True), child("worker", worker), child("front", front)]
        children[2] = dataclasses.replace(children[2], is_front=True)
        supervisor = Supervisor(children, ready_at_once)
        assert await supervisor.run(lambda _: None) == 1
        assert supervisor.reason == f"the {named} has ended with exit code 1: no more"


async def test_a_front_is_ended_before_what_others_wait_for(tmp_path: Path) -> None:
    log = tmp_path / "ends"
    says = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(open({!r}, 'a').write({!r}) and 0))"
    commands = {
        name: [sys.executable, "-c", f"{says.format(str(log), name[0])}; time.sleep(600)"]
        for name in ("worker", "front", "scheduler")
    }
    children = [child(name, command, name == "scheduler") for name, command in commands.items()]
    children[1] = dataclasses.replace(children[1], is_front=True)
    supervisor = Supervisor(children, ready_at_once)
    send_after(1.5, signal.SIGTERM)
    assert await supervisor.run(lambda _: None) == 0
    assert sorted(log.read_text()[:2]) == ["f", "s"] and log.read_text()[2:] == "w"
