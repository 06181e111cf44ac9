"""Text processes: real ones, which hang, die and are killed, while others are served."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import psutil
import pytest

from protos import inference_pb2 as pb
from scheduler_svc.errors import InvalidRequest, NotReady, UnknownName
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.requests import frames, killable_process, text_processes
from scheduler_svc.requests.admission import SMALL_BYTES
from scheduler_svc.requests.frames import Answer, Ask
from scheduler_svc.requests.request_checks import TextSettings
from scheduler_svc.requests.request_text import RequestText
from scheduler_svc.requests.text_processes import FIRST_PAUSE_S, TextProcesses
from scheduler_svc.text.tokenizer import Tokenizer
from tests.processes import is_alive, started
from tests.scheduler.tiny_served_model import tiny_served_model
from tests.tiny_models import write_byte_tokenizer
from tests.waiting import until

# Does not end for a content that says so: some 10^10 turns.
ENDLESS = (
    "{% for m in messages %}{{ m.content }}{% if m.content.endswith('endless') %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """Its chat template may hang."""
    model = tiny_served_model(tmp_path_factory.mktemp("tokenizer"))
    config = json.loads(model.tokenizer.files["tokenizer_config.json"]) | {"chat_template": ENDLESS}
    files = {**model.tokenizer.files, "tokenizer_config.json": json.dumps(config).encode()}
    return dataclasses.replace(model, tokenizer=Tokenizer(files), max_model_len=5000)


@asynccontextmanager
async def _processes(model: ServedModel, count: int = 1, time_limit_s: float = 60.0) -> AsyncIterator[TextProcesses]:
    processes = TextProcesses(lambda: ServedModels.of(model), TextSettings(), count, time_limit_s)
    processes.start()
    try:
        yield processes
    finally:
        pids = processes.pids
        await processes.stop()
        assert not [pid for pid in pids if psutil.pid_exists(pid)]


def _chat(content: str) -> bytes:
    messages = pb.Messages(messages=[pb.ChatMessage(role="user", content=content)])
    return pb.GenerateRequest(
        messages=messages, sampling_params=pb.SamplingParams(bad_words=["a b"])
    ).SerializeToString()


def _has_another(processes: TextProcesses, pid: int) -> bool:
    return bool(processes.pids) and processes.pids != [pid]


async def test_answers_are_those_of_this_process(model: ServedModel) -> None:
    here = RequestText(model, TextSettings())
    async with _processes(model, count=2) as processes:
        for data in (_chat("hi"), pb.GenerateRequest(prompt="x" * 3000, request_id="a").SerializeToString()):
            there = await processes.prepare(data)
            expected = here.prepare(pb.GenerateRequest.FromString(data))
            assert list(there.token_ids) == list(expected.token_ids)
            assert [tuple(word) for word in there.bad_words] == [tuple(word) for word in expected.bad_words]
            expected.request.ClearField("prompt_kind")
            assert there.request == expected.request
        tokens = await processes.tokenize(pb.TokenizeRequest(prompt="hey").SerializeToString())
        assert pb.TokenizeResponse.FromString(tokens) == here.tokenize(pb.TokenizeRequest(prompt="hey"))
        text = await processes.detokenize(pb.DetokenizeRequest(token_ids=b"hey").SerializeToString())
        assert pb.DetokenizeResponse.FromString(text).text == "hey"
        with pytest.raises(InvalidRequest, match=r"prompt: 6000 tokens and 1 to generate .*5000") as refused:
            await processes.prepare(pb.GenerateRequest(prompt="x" * 6000).SerializeToString())
        assert refused.value.violations[0].field == "prompt"
        with pytest.raises(UnknownName):
            await processes.tokenize(pb.TokenizeRequest(prompt="hey", model="other").SerializeToString())
        with pytest.raises(InvalidRequest, match="2 bytes are no request of /octavo"):
            await processes.detokenize(b"\xff\xff")
        with pytest.raises(InvalidRequest, match="got none or several"):
            await processes.prepare(_chat("hi") + pb.GenerateRequest(prompt="hi").SerializeToString())


async def test_each_request_is_prepared_for_its_own_model_and_models_come_and_go(
    model: ServedModel, tmp_path: Path
) -> None:
    write_byte_tokenizer(tmp_path, 400, seed=1)
    files = Tokenizer.from_folder(tmp_path).files
    other = dataclasses.replace(
        model, name="other", fingerprint="f" * 32, tokenizer=Tokenizer(files), max_model_len=3000, vocab_size=500
    )
    known = [model]
    models = ServedModels.of(model)
    processes = TextProcesses(lambda: models, TextSettings(), 2)
    processes.start()

    def loaded() -> list[int]:
        return [len(slot.process.loaded.known) for slot in processes._slots if slot.process and slot.process.loaded]

    try:
        for name in ("tiny", "other", "tiny", "other"):
            if name == "other" and len(known) == 1:
                with pytest.raises(UnknownName, match="model 'other' is not served here; 'tiny' is"):
                    await processes.tokenize(pb.TokenizeRequest(prompt="hey", model="other").SerializeToString())
                known.append(other)
                models = ServedModels.of(*known)  # of which no process has been told
            data = pb.GenerateRequest(prompt="x" * 2000, model=name).SerializeToString()
            prepared = await processes.prepare(data)
            assert prepared.request.model_fingerprint == (other if name == "other" else model).fingerprint
            tokens = pb.TokenizeResponse.FromString(
                await processes.tokenize(pb.TokenizeRequest(prompt="hey", model=name).SerializeToString())
            )
            assert tokens.max_model_len == (3000 if name == "other" else 5000)
        await until(lambda: loaded() == [2, 2], seconds=30)
        pids = processes.pids
        models = ServedModels.of(model)
        processes.expect(models)
        await until(lambda: loaded() == [1, 1], seconds=30)
        with pytest.raises(UnknownName, match="'tiny' is"):
            await processes.tokenize(pb.TokenizeRequest(prompt="hey", model="other").SerializeToString())
        assert processes.pids == pids, "none was started anew"
    finally:
        await processes.stop()


async def test_what_takes_too_long_is_killed_and_said_and_others_go_on(model: ServedModel) -> None:
    async with _processes(model) as processes:
        await processes.prepare(_chat("hi"))
        (pid,) = processes.pids
        processes._time_limit_s = 0.5
        endless = asyncio.create_task(processes.prepare(_chat("endless")))
        behind = asyncio.create_task(processes.prepare(_chat("hi")))
        with pytest.raises(InvalidRequest, match=r"not rendered and tokenised within 0.5 s \(--text-timeout\)"):
            await endless
        processes._time_limit_s = 60.0  # the next one will be the first of its process, which takes longer
        assert (await behind).token_ids == list(b"hi")
        assert not psutil.pid_exists(pid) and processes.pids != [pid]


async def test_a_process_that_dies_costs_its_request_one_more_try(model: ServedModel) -> None:
    async with _processes(model) as processes:
        await processes.prepare(_chat("hi"))
        for sent, dies in ((_chat("hi"), True), (_chat("hi" * 1000), False)):  # it is idle when it dies, or is not
            (pid,) = processes.pids
            if not dies:
                os.kill(pid, signal.SIGSTOP)  # so that it dies with the request in it
            asked = asyncio.create_task(processes.prepare(sent))
            await asyncio.sleep(0 if dies else 0.05)
            os.kill(pid, signal.SIGKILL)
            assert len((await asked).token_ids) == len(pb.GenerateRequest.FromString(sent).messages.messages[0].content)


async def test_all_of_them_may_die_at_once(model: ServedModel) -> None:
    """Whoever was sent to one that was dead already has lost nothing by it."""
    async with _processes(model, count=3) as processes:
        await processes.prepare(_chat("hi"))
        for _ in range(5):
            for pid in processes.pids:
                os.kill(pid, signal.SIGKILL)
            assert (await processes.prepare(_chat("hi"))).token_ids == list(b"hi")


async def test_a_request_over_which_two_processes_die_fails_alone(model: ServedModel) -> None:
    async with _processes(model) as processes:
        asked = asyncio.create_task(processes.prepare(_chat("endless")))
        behind = asyncio.create_task(processes.prepare(_chat("hi")))
        for _ in range(2):
            await until(lambda: processes.pids and psutil.Process(processes.pids[0]).cpu_times().user > 0.5, seconds=30)
            (pid,) = processes.pids
            os.kill(pid, signal.SIGKILL)
            await until(partial(_has_another, processes, pid), seconds=30)
        with pytest.raises(RuntimeError, match="2 text processes have died over this request"):
            await asked
        assert (await behind).token_ids == list(b"hi")


async def test_small_requests_pass_large_ones_and_the_first_large_one_is_served_first(model: ServedModel) -> None:
    async with _processes(model, count=2) as processes:
        await processes.prepare(_chat("hi"))
        large = ("x" * 2000 + " ") * (SMALL_BYTES // 2000 + 1)
        asked = [_chat(f"{large}{number} endless") for number in range(3)]
        endless = [asyncio.create_task(processes.prepare(data)) for data in asked]
        await until(lambda: processes._running, seconds=30)
        for _ in range(5):
            assert (await processes.prepare(_chat("hi"))).token_ids == list(b"hi")
            assert [job.data for job in processes._running] == asked[:1]
        assert not any(each.done() for each in endless)
        for each in endless:
            each.cancel()


async def test_work_for_a_client_that_has_gone_is_dropped_and_closing_refuses_all_others(model: ServedModel) -> None:
    async with _processes(model) as processes:
        await processes.prepare(_chat("hi"))
        (pid,) = processes.pids
        os.kill(pid, signal.SIGSTOP)
        first = asyncio.create_task(processes.prepare(_chat("hi")))
        gone = [asyncio.create_task(processes.prepare(_chat("endless"))) for _ in range(3)]
        behind = asyncio.create_task(processes.prepare(_chat("hi")))
        await until(lambda: processes._running, seconds=30)
        for each in gone:
            each.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        assert len(processes._small) + len(processes._large) == 1, "what nobody waits for takes memory"
        os.kill(pid, signal.SIGCONT)
        for each in (first, behind):
            assert (await each).token_ids == list(b"hi")
        endless = asyncio.create_task(processes.prepare(_chat("endless")))
        waits = asyncio.create_task(processes.prepare(_chat("hi")))
        await until(lambda: processes._running, seconds=30)
        processes.close(NotReady("this server is draining"))
        for each in (endless, waits):
            with pytest.raises(NotReady, match="draining"):
                await each
        with pytest.raises(NotReady, match="draining"):
            await processes.prepare(_chat("hi"))


async def test_one_that_is_killed_while_it_answers_at_length_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipe is full, and nobody wants to read it any more."""
    header = frames.HEADER.pack(1 << 40, Answer.OK)
    answers_for_ever = f"import os\nos.write(1, {header!r})\nwhile True: os.write(1, bytes(65536))"
    monkeypatch.setattr(killable_process, "COMMAND", (sys.executable, "-c", answers_for_ever))
    process = await killable_process.KillableProcess.start(lambda: None)
    asked = asyncio.create_task(process.ask(Ask.PREPARE, b""))
    await until(lambda: len(process._stdout._buffer) > 1 << 18, seconds=30)  # type: ignore[attr-defined]  # of asyncio
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await until(lambda: process._stdout._paused, seconds=30)  # type: ignore[attr-defined]  # of asyncio
    async with asyncio.timeout(10):
        await process.kill()
    assert process.has_ended


async def test_one_that_dies_between_a_look_and_its_kill_has_ended_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system lets go of its number as soon as a thread of asyncio's has asked how it ended."""
    process = await _started()
    os.kill(process.pid, signal.SIGKILL)
    await process._ended
    monkeypatch.setattr(killable_process.KillableProcess, "has_ended", False)
    await process.kill()
    assert not psutil.pid_exists(process.pid)


async def test_whoever_waits_is_refused_where_no_process_can_be_started(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = AsyncMock(side_effect=[OSError("no more processes"), await _started()])
    monkeypatch.setattr(killable_process.KillableProcess, "start", start)
    async with _processes(model) as processes:
        with pytest.raises(NotReady, match="no process can be started"):
            await processes.prepare(_chat("hi"))
        assert (await processes.prepare(_chat("hi"))).token_ids == list(b"hi")


async def _started() -> killable_process.KillableProcess:
    return await killable_process.KillableProcess.start(lambda: None)


async def test_processes_that_cannot_load_a_model_are_started_ever_less_often(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            await asyncio.Event().wait()

    broken = SimpleNamespace(**{**vars(model.tokenizer), "files": {"tokenizer.json": b"{"}, "chat_template": None})
    wrong = dataclasses.replace(model, tokenizer=cast(Tokenizer, broken))
    async with _processes(wrong) as processes:
        monkeypatch.setattr(text_processes, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": pause}))
        with pytest.raises(RuntimeError, match="could not load the tokenizer"):
            await processes.prepare(_chat("hi"))
        await until(lambda: len(pauses) == 3, seconds=30)
    assert pauses == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]


def test_a_text_process_imports_nothing_heavy() -> None:
    program = "import sys, scheduler_svc.requests.text_process; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not {"grpc", "numpy", "asyncio", "structlog", "torch", "transformers"} & set(ended.stdout.split())


def _ignores(process: psutil.Process, number: signal.Signals) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text()
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> (number - 1) & 1)


async def test_it_ends_with_its_parent_and_does_not_hear_its_signals(model: ServedModel, tmp_path: Path) -> None:
    program = """
import asyncio, sys, time
from pathlib import Path
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.requests.request_checks import TextSettings
from scheduler_svc.requests.text_processes import TextProcesses
async def main():
    processes = TextProcesses(ServedModels, TextSettings(), 1)
    processes.start()
    while not processes.pids:
        await asyncio.sleep(0.01)
    print(*processes.pids, flush=True)
    time.sleep(60)
asyncio.run(main())
"""
    with started([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        async with asyncio.timeout(30):
            while not _ignores(child, signal.SIGTERM):  # its interpreter is still being started
                await asyncio.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGINT)
        await asyncio.sleep(0.2)
        assert is_alive(child)
        files = [each.fd for each in child.open_files()] + [each.fd for each in child.net_connections()]
        assert not [number for number in files if number > 2], "files of the parent have leaked"
        parent.kill()
        async with asyncio.timeout(10):
            while is_alive(child):
                await asyncio.sleep(0.01)
