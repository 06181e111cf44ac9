"""What `benchmarks.step_cpu` reads from Linux, and what it makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from benchmarks.step_cpu import ThreadUse, decode_steps, least, table, threads_of


def test_a_thread_that_computes_is_told_from_one_that_waits() -> None:
    stopped = threading.Event()

    def wait() -> None:
        while not stopped.wait(0.001):
            pass

    waits = threading.Thread(target=wait, name="waits")
    waits.start()
    before = threads_of(os.getpid())
    finished_s = time.thread_time() + 0.05
    while time.thread_time() < finished_s:
        pass
    time.sleep(0.05)
    after = threads_of(os.getpid())
    stopped.set()
    waits.join()
    own = after[threading.get_native_id()].since(before[threading.get_native_id()])
    assert own.name == threading.current_thread().name and own.cpu_ns >= 49_000_000
    other = after[waits.native_id or 0]
    assert other.name == "waits" and other.num_waits >= 20 and other.since(before[waits.native_id or 0]).cpu_ns < 4e7


def test_the_child_is_found() -> None:
    """In a process that has no other: this one may have."""
    code = (
        "import subprocess, sys\n"
        "from benchmarks.step_cpu import child_of_this_process, threads_of\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(child.pid, child_of_this_process(), threads_of(child.pid)[child.pid].name)\n"
        "child.communicate(b'\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid, found, name = done.stdout.split()
    assert pid == found and name == "main"


def test_what_a_thread_had_used_before_does_not_count() -> None:
    assert ThreadUse("model", 900, 7).since(ThreadUse("model", 500, 3)) == ThreadUse("model", 400, 4)
    assert ThreadUse("new", 900, 7).since(None) == ThreadUse("new", 900, 7)


def test_the_least_run_is_shown_by_process_and_use() -> None:
    quiet = {("worker", "main"): (100.0, 5.0), ("scheduler", "idle"): (0.1, 0.0), ("worker", "model"): (900.4, 1.0)}
    disturbed = {("worker", "main"): (90.0, 5.0), ("worker", "model"): (2000.0, 1.0)}
    assert table(least([disturbed, quiet])).splitlines()[2:] == [
        "| worker | model | 900 | 1.00 |",
        "| worker | main | 100 | 5.00 |",
    ]


def test_requests_have_prompts_of_their_own() -> None:
    requests = decode_steps(32, 128, 49152).requests
    assert len({request.prompt_token_ids for request in requests}) == 32
    assert {(len(request.prompt_token_ids), request.max_tokens) for request in requests} == {(16, 128)}
