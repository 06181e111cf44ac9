"""Lines of `octavo chat` that are for the terminal and not for the model. The server gives known answers."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import Client, SamplingParams
from octavo.chat.chat_commands import HELP, ChatCommands
from octavo.chat.conversation import Conversation
from octavo.chat.line_reader import LineReader
from protos import inference_pb2 as pb
from tests.integration.fake_inference import FakeServer, expected_tokens, text_of
from tests.processes import started
from tests.terminal import Terminal

ROOT = Path(__file__).parents[2]
ANSWER = text_of(expected_tokens(9, 0, 2))


class Chat:
    """A conversation as the command holds it; what was sent for each question."""

    def __init__(self, server: FakeServer, client: Client) -> None:
        self.server = server
        self.conversation = Conversation(client, SamplingParams(max_tokens=2, seed=9), "s")
        self.commands = ChatCommands(self.conversation, client)

    def type(self, *lines: str) -> list[list[str]]:
        self.server.inference.requests.clear()
        for line in lines:
            if question := self.commands.take(line):
                self.conversation.ask(question)
        return [[each.content for each in request.messages.messages] for request in self.server.inference.requests]


@pytest.fixture
def chat() -> Iterator[Chat]:
    with FakeServer() as server, Client(server.address) as client:
        yield Chat(server, client)


def test_help_names_every_command(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.type("/help") == []
    said = capsys.readouterr().err
    assert said == f"{HELP}\n"
    assert [name for name in chat.commands.names if name != "/?" and name not in said] == []


def test_the_last_question_is_forgotten_or_asked_again(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.type("/again", "/undo") == []
    assert capsys.readouterr().err == "nothing was asked yet\n" * 2
    assert chat.type("one", "two", "/again", "/undo", "three") == [
        ["s", "one"],
        ["s", "one", ANSWER, "two"],
        ["s", "one", ANSWER, "two"],
        ["s", "one", ANSWER, "three"],
    ]
    assert "forgotten: two" in capsys.readouterr().err
    assert chat.type("/clear", "four") == [["s", "four"]]


def test_the_system_message_is_shown_set_and_left_out(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.type("/system", "/system Be brief.", "one", "/clear", "/system off", "two") == [
        ["Be brief.", "one"],
        ["two"],
    ]
    assert [line for line in capsys.readouterr().err.splitlines() if line != "forgotten"] == [
        "s",
        "Be brief.",
        "(no system message)",
    ]


def test_parameters_are_changed_for_what_comes_after(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.type("/set temperature 0.5", "/set top-k=7", '/set stop ["a", "b"]', "one", "/set temperature off", "two")
    first, second = (request.sampling_params for request in chat.server.inference.requests)
    assert (first.temperature, first.top_k, list(first.stop)) == (0.5, 7, ["a", "b"])
    assert not second.HasField("temperature") and second.top_k == 7 and second.seed == 9
    assert chat.type("/set stop a=b", "three", "/set stop = c", "four", "/set stop =", "five")
    stops = [list(request.sampling_params.stop) for request in chat.server.inference.requests]
    assert stops == [["a=b"], ["c"], ["="]]
    capsys.readouterr()
    assert chat.type("/set temperature 3", "/set temperature warm", "/set loudness 3", "/set") == []
    *refused, shown = capsys.readouterr().err.splitlines()
    assert refused[0].startswith("error: temperature: got 3")
    assert refused[1].startswith("error: temperature: got 'warm'") and refused[2].startswith("loudness is none of")
    assert "top_k 7" in shown and "temperature 1.0" in shown


def test_a_conversation_is_saved_and_gone_on_with(
    chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "said.json"
    chat.type("one", f"/save {file}", "/clear", "/system other", "two", f"/load {file}")
    assert [each["role"] for each in json.loads(file.read_text())] == ["system", "user", "assistant"]
    assert file.stat().st_mode & 0o077 == 0, "what people ask is theirs"
    assert chat.type("three") == [["s", "one", ANSWER, "three"]]
    capsys.readouterr()

    file.write_text('[{"role": "assistant", "content": "x"}]')
    broken = tmp_path / "broken.json"
    broken.write_text('{"role": "user"}')
    assert chat.type(f"/load {file}", f"/load {broken}", f"/load {tmp_path}/none", "/save", f"/save {tmp_path}") == []
    said = capsys.readouterr().err.splitlines()
    assert "do not take turns" in said[0] and "is no list of messages" in said[1]
    assert said[2].startswith("error: No such file") and said[3] == "error: which file?"
    assert said[4].startswith("error: Is a directory")
    assert chat.type("four")[0][:2] == ["s", "one"], "what was said stays"


def test_models_are_listed_and_chosen(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.type("/model other", "one") == [["s", "one"]]
    assert chat.server.inference.requests[0].model == "other" and chat.conversation.max_model_len == 2048
    assert "2048 tokens at most" in capsys.readouterr().err


def test_what_is_no_command_is_a_question(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["/etc/hosts", "/help me", "/undo it", "what is /set?"]
    assert [contents[-1] for contents in chat.type(*asked)] == asked
    assert chat.type("/syste") == []
    assert "did you mean /system?" in capsys.readouterr().err


def test_figures_are_switched(chat: Chat) -> None:
    chat.type("/stats")
    assert chat.commands.with_figures
    chat.type("/stats")
    assert not chat.commands.with_figures


HOSTILE = "\x1b]52;c;eA==\x07\x1b[8mhidden\x9b2J\r\n\tGrüße\n"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_answer_steers_no_terminal_and_reaches_a_pipe_as_it_is(command: str) -> None:
    with FakeServer() as server, Terminal() as terminal:
        usage = pb.GenerateResponse(usage=pb.Usage(completion_tokens=1), timings=pb.Timings())
        delta = pb.OutputDelta(text=HOSTILE, token_ids=[1], finish_reason=pb.FINISH_REASON_STOP)
        admission = pb.GenerateResponse(admission=pb.Admission(num_prompt_tokens=1), model="fake")
        server.inference.script = [admission, pb.GenerateResponse(outputs=[delta]), usage]
        line = [sys.executable, "-m", "octavo", command, "Hi", "--address", server.address]
        piped = subprocess.run(line, cwd=ROOT, capture_output=True, timeout=60)
        assert piped.stdout == HOSTILE.encode()
        with started(line, cwd=ROOT, stdin=terminal.inside, stdout=terminal.inside) as process:
            shown = terminal.wait_for("Grüße\r\n".encode())
            assert process.wait(20) == 0
    assert shown == (rb"\u001b]52;c;eA==\u0007\u001b[8mhidden\u009b2J" + "\r\n\tGrüße\r\n".encode()), (
        "the terminal itself ends lines with two characters"
    )


def test_an_answer_is_remembered_as_the_model_gave_it(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    delta = pb.OutputDelta(text=HOSTILE, token_ids=[1], finish_reason=pb.FINISH_REASON_STOP)
    chat.server.inference.script = [pb.GenerateResponse(admission=pb.Admission()), pb.GenerateResponse(outputs=[delta])]
    chat.server.inference.script += [pb.GenerateResponse(usage=pb.Usage(), timings=pb.Timings())]
    assert chat.type("one", "two")[1] == ["s", "one", HOSTILE, "two"]


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """`^C` is Ctrl-C."""
    left = iter(lines)

    def read(prompt: str) -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        if line == "^C":
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", read)


def test_several_lines_are_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, ' """one ', "  two ", 'three"""', '""" alone """', " next ", '"""never ended')
    with LineReader([], keeps_history=False) as reader:
        found = [reader.read() for _ in range(4)]
    assert found == ["one\n  two \nthree", "alone", "next", None]


def test_pasted_code_keeps_its_indentation(monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, '"""', "    if wet:", "        swim()", '    """ ', '"""Why?', "\tgo", '"""')
    with LineReader([], keeps_history=False) as reader:
        assert reader.read() == "    if wet:\n        swim()"
        assert reader.read() == "Why?\n\tgo"


def test_ctrl_c_gives_up_all_lines_of_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, '"""one', "two", "^C", "next", "^C", "last")
    with LineReader([], keeps_history=False) as reader:
        assert [reader.read() for _ in range(5)] == ["", "next", "", "last", None]


@pytest.mark.parametrize("keeps_history", [True, False])
def test_at_a_terminal_tab_completes_and_the_next_chat_has_the_history(tmp_path: Path, keeps_history: bool) -> None:
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    asked: list[str] = []
    for keys in (b"Hi there\n", b"\x1b[A\x1b[A\n"):  # the second: two lines up, beyond /bye
        with FakeServer() as server, Terminal() as terminal:
            command = [sys.executable, "-m", "octavo", "chat", "--address", server.address, "--max-tokens=2"]
            command += [] if keeps_history else ["--no-history"]
            inside = terminal.inside
            with started(command, cwd=ROOT, env=environ, stdin=inside, stdout=inside) as process:
                terminal.wait_for(b"> ")
                terminal.press(keys)
                if keys.startswith(b"Hi") or keeps_history:
                    terminal.wait_for(b"t")  # the answer
                terminal.wait_for(b"> ")
                terminal.press(b"/by\t\n")
                assert process.wait(20) == 0, "the word was completed"
            asked += [request.messages.messages[-1].content for request in server.inference.requests]
    assert asked == (["Hi there", "Hi there"] if keeps_history else ["Hi there"])
    file = tmp_path / "octavo" / "chat_history"
    assert file.exists() == keeps_history
    if keeps_history:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, "what people ask is theirs"
