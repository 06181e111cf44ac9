"""What is left of an `LLM`'s processes, however the one that has it ends: nothing. In a fork it does no harm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.tiny_models import make_tiny_llama
from tests.waiting import wait_until

WITHIN_S = 60.0
# Generates without end, with a worker that has no model to load; what it reads says how it is to end.
SCRIPT = """
import contextlib, os, sys, threading
from octavo import LLM, SamplingParams
from octavo.embedded import worker_process

ends_with_parent = worker_process.ends_with_parent

def simulated(command):
    (port,) = [each for each in command if each.startswith("--port=")]
    return ends_with_parent([sys.executable, "-m", "octavo.bench.simulated_worker", port])

worker_process.ends_with_parent = simulated

ways = []
begun = threading.Event()

class Bar:
    total = 0

    def __init__(self, **settings):
        if not begun.is_set():
            print("generating", flush=True)
        begun.set()

    def set_postfix_str(self, text, refresh):
        if "raise" in ways:
            ways.remove("raise")
            raise ValueError("of the caller's own")

    def update(self, count): pass

    def close(self): pass

def read(returns):
    for line in sys.stdin:
        ways.append(line.strip())
        if "exit" in ways:
            os._exit(3)
        if "return" in ways:
            returns.set()

def generate():
    with contextlib.suppress(RuntimeError):  # on a thread of its own: it was shut down
        generate_for_ever()

def generate_for_ever():
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    while True:
        llm.generate(["x"] * 64, params, use_tqdm=Bar)

llm = LLM(sys.argv[1], max_model_len=256, kv_cache_memory=0.02)
returns = threading.Event()
threading.Thread(target=read, args=[returns], daemon=True).start()
if sys.argv[2] == "return":
    threading.Thread(target=generate, daemon=True).start()
    returns.wait()
else:
    generate()
"""
# Its worker says nothing and loads without end, deaf to Ctrl-C.
NEVER_READY = """
import sys
from octavo import LLM
from octavo.embedded import worker_process

ends_with_parent = worker_process.ends_with_parent

def never_ready(command):
    wait = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    return ends_with_parent([sys.executable, "-c", wait])

worker_process.ends_with_parent = never_ready
LLM(sys.argv[1], max_model_len=256, kv_cache_memory=0.02)
"""
# How it ends -> its exit code, and what it says.
WAYS = {
    "raise": (1, "ValueError: of the caller's own"),
    "exit": (3, ""),
    "return": (0, ""),
    "ctrl-c": (-signal.SIGINT, "KeyboardInterrupt"),
    "kill": (-signal.SIGKILL, ""),
}
FORKS = """
import multiprocessing, os, sys, threading
from octavo import LLM, Client, SamplingParams

def square(x):
    return x * x

def hold(llm, is_held, goes_on):
    with llm._embedded._lock:
        is_held.set()
        goes_on.wait()

def main():
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    with LLM(sys.argv[1], max_model_len=256, kv_cache_memory=0.02) as llm:
        busy = threading.Thread(target=lambda: llm.generate(["x"] * 40, params, use_tqdm=False))
        is_held, goes_on = threading.Event(), threading.Event()
        threading.Thread(target=hold, args=[llm, is_held, goes_on]).start()
        is_held.wait()
        if not os.fork():
            for use in (lambda: llm.generate("x"), lambda: LLM(sys.argv[1]), Client):
                try:
                    use()
                except RuntimeError as error:
                    print("forked:", error, flush=True)
            sys.exit(7)
        goes_on.set()
        busy.start()
        print("the fork ended with", os.waitstatus_to_exitcode(os.wait()[1]))
        for kind in ("fork", "spawn"):
            with multiprocessing.get_context(kind).Pool(1) as pool:
                print(kind, pool.map(square, range(3)))
        busy.join()
        print("generated", len(llm.generate("x", params, use_tqdm=False)[0].outputs[0].token_ids))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@contextmanager
def started(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A Python process at the head of a session, as a shell in a terminal starts it. None of it outlives the block."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_ctrl_c_while_the_worker_starts_ends_both(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NEVER_READY)
    with started(script, folder) as process:
        starts = psutil.Process(process.pid)
        wait_until(starts.children, "a worker starts", WITHIN_S)
        (worker,) = starts.children()
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=WITHIN_S)
    assert process.returncode == -signal.SIGINT and said.endswith("KeyboardInterrupt\n"), said
    wait_until(
        lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "the worker has ended", WITHIN_S
    )


def test_whoever_ends_takes_the_worker_along(folder: Path, tmp_path: Path) -> None:
    """All at once, since each takes a moment to begin; each in the middle of `generate`."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with ExitStack() as stack:
        processes = {way: stack.enter_context(started(script, folder, way)) for way in WAYS}
        children = {}
        for way, process in processes.items():
            assert process.stdout is not None and process.stdout.readline() == "generating\n"
            children[way] = psutil.Process(process.pid).children(recursive=True)
            assert len(children[way]) == 1, "its worker"
        for way, process in processes.items():
            if way == "ctrl-c":
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the foreground
            elif way == "kill":
                process.kill()
            else:
                assert process.stdin is not None
                process.stdin.write(f"{way}\n")
                process.stdin.flush()
        for way, (exit_code, words) in WAYS.items():
            _, said = processes[way].communicate(timeout=WITHIN_S)
            assert processes[way].returncode == exit_code and words in said, f"{way}: {said}"
            told = said.count("Traceback") - said.count("During handling of")  # of what was handled in that moment
            assert told == (1 if words else 0), f"{way}: {said}"
            _, alive = psutil.wait_procs(children[way], timeout=WITHIN_S)
            assert alive == [], way


def test_a_fork_does_no_harm_and_says_what_it_cannot(folder: Path, tmp_path: Path) -> None:
    """Forked while a thread holds a lock and others generate; then two kinds of pools beside a busy `LLM`."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    with started(script, folder) as process:
        said, errors = process.communicate(timeout=WITHIN_S)
    lines = said.splitlines()
    # A machine with other work may starve a process for some seconds, which it says then; a lock that a fork took with
    # it would stop it for good.
    starved = re.compile(r'\{"seconds": [1-4]\.\d, "event": "this process was stopped or starved", .*\n')
    assert process.returncode == 0 and starved.sub("", errors) == "", errors
    assert lines[0].startswith("forked: it was made in another process")
    assert [line.partition(": ")[2][:45] for line in lines[1:3]] == [
        "this process was forked from one that has had"
    ] * 2
    assert lines[3:] == ["the fork ended with 7", "fork [0, 1, 4]", "spawn [0, 1, 4]", "generated 200"]
