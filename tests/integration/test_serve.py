"""`octavo serve` as it is typed: it says how to call it, survives its workers, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from octavo import Client, SamplingParams
from octavo.cli import main
from octavo.shared.ports import free_port
from tests.forkserver import ForkedCommand
from tests.processes import processes_of
from tests.tiny_models import make_tiny_llama

ROOT = Path(__file__).parents[2]
READY_WITHIN_S = 120.0  # beside other tests on a slow machine; none is about the time that it takes
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


class Served:
    """A running `octavo serve`, with what it has said so far. As it is typed, unless it `is_forked`."""

    def __init__(self, *flags: str, is_forked: bool) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        arguments = ["serve", "--port", str(self.port), *flags]
        reader, writer = os.pipe()
        self.process: ForkedCommand | subprocess.Popen[bytes]
        try:
            if is_forked:  # with one thread: two that wait for one another take twice the processor time
                self.process = ForkedCommand([*arguments, "--num-threads", "1"], writer, stdout=writer)
            else:
                command = [sys.executable, "-m", "octavo", *arguments]
                self.process = subprocess.Popen(command, cwd=ROOT, stdout=writer, stderr=writer, start_new_session=True)
        finally:
            os.close(writer)
        self.said = ""
        self._reader = threading.Thread(target=self._read, args=[reader], daemon=True)
        self._reader.start()

    def _read(self, reader: int) -> None:
        with open(reader, encoding="utf-8") as lines:
            for line in lines:
                self.said += line

    def wait_for(self, what: Callable[[], object], seconds: float = READY_WITHIN_S) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"not within {seconds} s; said:\n{self.said}"
            time.sleep(0.02)

    def wait_until_ready(self) -> None:
        last = "octavo.v1.Inference/Generate\n"
        self.wait_for(lambda: last in self.said or self.process.poll() is not None)
        assert self.process.poll() is None, self.said

    @property
    def http_port(self) -> int:
        """Of its gateway, which it has said once it is ready."""
        found = re.search(r"^ *OpenAI's API: http://127\.0\.0\.1:(\d+)/v1$", self.said, re.MULTILINE)
        assert found is not None, self.said
        return int(found[1])

    def children(self, command: str = "") -> list[psutil.Process]:
        """Those that run; only those of one command, if named."""
        if isinstance(self.process, ForkedCommand):
            return processes_of(self.process.children(command))
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if not command or command in child.cmdline()]

    def family(self) -> list[psutil.Process]:
        """And what those have started."""
        children = self.children()
        return [*children, *(each for child in children for each in child.children(recursive=True))]

    def worker(self) -> psutil.Process:
        return self.children("worker")[0]

    def end(self, number: int) -> tuple[int, float]:
        """Exit code and seconds after a signal; asserts that no process is left."""
        family = self.family()
        started = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        seconds = time.monotonic() - started
        _, alive = psutil.wait_procs(family, timeout=20)
        assert alive == [], f"left behind: {alive}"
        self._reader.join(5)
        return code, seconds


@contextmanager
def serving(*flags: str, is_forked: bool = True) -> Iterator[Served]:
    served = Served(*flags, is_forked=is_forked)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()


def tokens(address: str, prompt: str) -> list[int]:
    with Client(address) as client:
        return [t for output in client.generate(prompt, GREEDY) for part in output.outputs for t in part.token_ids]


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Served]:
    """For tests that leave it as it was."""
    with serving("--model", str(model), "--workers", "2", is_forked=False) as served:
        served.wait_until_ready()
        yield served
        code, seconds = served.end(signal.SIGTERM)
    assert code == 0 and seconds < 15
    assert "Traceback" not in served.said


def test_says_how_to_call_it_and_answers(running: Served, model: Path) -> None:
    assert f"tiny ({model}) at {running.address}, 2 workers" in running.said
    assert "grpcurl -plaintext" in running.said
    assert len(tokens(running.address, "hello")) == 40


def test_every_command_against_it(running: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt_token_ids": [5, 6, 7], "max_tokens": 4}\n' * 5)
    address = ["--address", running.address]
    assert main(["health", running.address]) == 0
    assert main(["generate", "Once", *address, "--max-tokens", "9", "--ignore-eos", "--stats"]) == 0
    assert "4 tokens in, 9 out" in capsys.readouterr().err
    assert main(["chat", "Who are you?", *address, "--max-tokens", "9"]) == 0
    capsys.readouterr()
    assert main(["bench", "serve", *address, "--requests-file", str(requests), "--streams", "3", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["output_tokens"] == 20


def test_a_dead_worker_is_named_and_replaced_and_ctrl_c_does_not_wait_for_long_requests(model: Path) -> None:
    with serving("--model", str(model)) as served, Client(served.address) as client:
        served.wait_until_ready()
        assert f"tiny ({model}) at {served.address}, 1 worker." in served.said
        expected = tokens(served.address, "hello")
        worker = served.worker()
        worker.kill()
        served.wait_for(lambda: "a child has ended" in served.said and str(worker.pid) in served.said)
        assert "SIGKILL" in served.said
        served.wait_for(lambda: served.children("worker"))
        assert tokens(served.address, "hello") == expected
        endless = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
        streams = [client.generate(f"story {i}", endless) for i in range(4)]
        for stream in streams:
            next(stream)
        code, seconds = served.end(signal.SIGINT)
        for stream in streams:
            stream.close()
    assert code == 130 and seconds < 15
    assert "Traceback" not in served.said


def test_sigterm_lets_requests_finish_and_a_script_reads_where_the_server_is(model: Path) -> None:
    named = ["--model", str(model), "--served-model-name", "short=tiny"]
    with serving(*named, "--json") as served, Client(served.address) as client:
        served.wait_for(lambda: '"http": null' in served.said and served.said.endswith("\n"))
        said = json.loads(next(line for line in served.said.splitlines() if '"http": null' in line))
        assert said["seconds"] > 0
        assert said == {**said, "address": served.address, "http": None, "model": "short", "workers": 1}
        params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
        stream = client.generate("story", params, model=said["model"])
        outputs = [next(stream)]
        served.process.send_signal(signal.SIGTERM)
        outputs += stream
        assert outputs[-1].metrics is not None and outputs[-1].metrics.num_output_tokens == 300
        assert served.process.wait(60) == 0


def test_the_scheduler_s_death_ends_all(model: Path) -> None:
    with serving("--model", str(model)) as served:
        served.wait_until_ready()
        family = served.family()
        served.children("scheduler")[0].kill()
        assert served.process.wait(timeout=60) == 1
        _, alive = psutil.wait_procs(family, timeout=20)
        assert alive == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_no_orphans_when_it_is_killed(model: Path) -> None:
    with serving("--model", str(model), "--workers", "2", is_forked=False) as served:
        served.wait_for(lambda: len(served.family()) == 3)
        time.sleep(0.5)  # past exec
        code, _ = served.end(signal.SIGKILL)
    assert code == -signal.SIGKILL


def test_a_worker_that_cannot_start_ends_all_with_its_reason(tmp_path: Path) -> None:
    with serving("--model", str(tmp_path), "--workers", "2") as served:
        assert served.process.wait(timeout=60) == 1
        served._reader.join(5)
        assert "Traceback" not in served.said and '"child": "worker' in served.said
        last = served.said.splitlines()[-1]
        assert re.match(r"octavo serve: error: the worker [01] has ended with exit code 1: .*config\.json", last)
        assert str(tmp_path) in last


def test_a_worker_finds_its_port_taken_before_it_loads(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "octavo", "worker", str(model), "--port", port]
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [  # not even "weights loaded"
        f"octavo worker: error: port {port} on 127.0.0.1 is in use by another process; --port chooses another"
    ]


def test_a_port_in_use_is_one_line_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "octavo", "serve", "--port", port]
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"octavo serve: error: port {port} on 127.0.0.1 is in use by another process; --port chooses another"
    ]


@pytest.mark.parametrize(
    "flags", [["--workers", "0"], ["--worker", "127.0.0.1:1"], ["--max-num-seqs", "0"], ["--dtype", "fp16"], ["--x"]]
)
def test_bad_usage(flags: list[str]) -> None:
    command = [sys.executable, "-m", "octavo", "serve", *flags]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=30)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
