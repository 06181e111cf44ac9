"""The `octavo` command as it is typed: output, exit codes, signals and pipes. The server gives known answers."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.cli import COMMANDS, main
from octavo.client import Client
from octavo.commands import completion
from octavo.commands.flags import connection
from octavo.retrying import Waiting
from octavo.shared.ports import free_port
from protos import inference_pb2 as pb
from tests.integration.fake_inference import FakeInference, FakeServer, expected_tokens, text_of
from tests.processes import started
from tests.terminal import Terminal

ROOT = Path(__file__).parents[2]
NOWHERE = "127.0.0.1:1"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture(autouse=True)
def state_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What commands keep for their user, away from who runs the tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def octavo(*arguments: str, **kwargs: object) -> AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "octavo", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    options: dict[str, Any] = {**pipes, **kwargs}
    return started(command, cwd=ROOT, text=True, **options)


def test_help_lists_the_commands_and_imports_nothing_slow() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "octavo", "--help"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0 and all(name in done.stdout for name in COMMANDS)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "octavo" in imported and not imported & {"torch", "grpc", "numpy", "google", "transformers", "tokenizers"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"octavo {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["sing"],
        ["--loud"],
        ["generate", "hi", "--loud"],
        ["generate", "hi", "--max-tokens", "many"],
        ["generate", "hi", "--max-tokens", "0"],
        ["generate", "hi", "--temperature", "3"],
        ["generate", "hi", "--use-beam-search"],
        ["generate", ""],
        ["model"],
        ["model", "fetch"],
        ["bench"],
        ["bench", "offline", "--workload", "W9"],
        ["generate", "hi", "--address", "localhost"],
        ["generate", "hi", "--address", "localhost:1,localhost"],
        ["generate", "hi", "--retry-window", "soon"],
        ["generate", "hi", "--json", "--stats"],
        ["chat", "hi", "--json", "--stats"],
        ["chat", "hi", "--address", "localhost:x"],
        ["health", "localhost"],
        ["health", "--address", ":50051"],
        ["bench", "serve", "--address", "127.0.0.1:500510"],
        ["model", "rm", "smollm2-135m-instruct", "--ye"],
        ["top", "--interval", "-1"],
        ["top", "--requests", "abc"],
        ["health", "--timeout", "nan"],
        ["health", "http://127.0.0.1:1", "--timeout", "-1"],
        ["bench", "steps", "--steps", "0"],
        ["bench", "steps", "--workers", "0"],
        ["bench", "steps", "--sequences", "x"],
        ["bench", "serve", "--simulated-worker", "--seconds", "0"],
        ["bench", "serve", "--simulated-worker", "--frontends", "0"],
        ["bench", "serve", "--repeat", "0"],
        ["bench", "serve", "--out", "/nowhere/at/all/x.json"],
        ["bench", "serve", "--out", "/tmp"],
        ["bench", "serve", "--url", "http://127.0.0.1:1/v1", "--address", "127.0.0.1:2"],
        ["bench", "kernels", "--jobs", "x"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    shown = capsys.readouterr()
    assert code == 2
    assert len(shown.err.splitlines()) == 1 and shown.out == ""
    assert "invalid _" not in shown.err, "the name of a function says nothing"


@pytest.mark.parametrize("name", ["serve", "scheduler", "worker"])
def test_help_of_a_service_is_grouped_short_and_true(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No option is explained in more than two lines, none has no group, and what is called the default is it."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert "common:" in shown and "\nother:" not in shown
    for entry in re.split(r"\n  (?=-)", shown)[1:]:
        lines = entry.partition("\n\n")[0].splitlines()
        explained = [line for line in lines if line.startswith(" " * 34) or re.search(r"\S {2,}\S", line)]
        assert 1 <= len(explained) <= 2, entry
    flat = " ".join(shown.split())
    if name == "serve":
        assert "--max-num-seqs N most sequences that run at once on a worker (default: 256)" in flat
        assert "--worker " not in flat
    if name == "scheduler":
        assert "--max-num-seqs N sequences that run at once on a worker (default: the worker's)" in flat


@pytest.mark.parametrize("command", [["serve"], ["worker"], ["bench", "offline"]])
def test_help_says_what_a_model_may_be_called(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--model MODEL folder, GGUF file, known name, or OWNER/NAME on the hub (default: smollm2" in shown


@pytest.mark.parametrize(("name", "is_there"), [("chat", False), ("generate", True)])
def test_help_speaks_of_beam_search_where_there_is_one(
    name: str, is_there: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert ("beam search" in " ".join(capsys.readouterr().out.split())) is is_there


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["srve"], "serve"),
        (["modle", "list"], "model"),
        (["model", "lst"], "list"),
        (["bench", "ofline"], "offline"),
        (["serve", "--max-num-seq", "3"], "--max-num-seqs"),
        (["serve", "--worker", "a:1"], "--workers"),
        (["worker", "--quantisation", "int8"], "--quantization"),
        (["scheduler", "--max_worker", "3"], "--max-workers"),
        (["generate", "hi", "--max-token", "3"], "--max-tokens"),
        (["bench", "serve", "--adress", NOWHERE], "--address"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_name(
    arguments: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert f"did you mean {nearest}?" in capsys.readouterr().err


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "serve" in capsys.readouterr().err


def test_generate_prints_the_text(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--seed", "3", "--max-tokens", "5", "--stop", "x", "--stop", "y", "--top-k", "7", "--stats"]
    assert main(["generate", "Once", "--address", server.address, *flags]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == text_of(expected_tokens(3, 0, 5)).strip()
    assert "3 tokens in, 5 out" in shown.err
    (request,) = server.inference.requests
    assert request.prompt == "Once"
    sampling = request.sampling_params
    assert (sampling.seed, sampling.max_tokens, sampling.top_k, list(sampling.stop)) == (3, 5, 7, ["x", "y"])


def test_several_outputs_are_shown_one_after_the_other(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--seed", "3", "--max-tokens", "4", "--n", "2", "--priority", "-1", "--cache-salt", "mine"]
    assert main(["generate", "Once", "--address", server.address, *flags]) == 0
    first, second = (text_of(expected_tokens(3, index, 4)) for index in range(2))
    assert capsys.readouterr().out == f"[1]\n{first}\n\n[2]\n{second}\n"
    (request,) = server.inference.requests
    assert (request.priority, request.cache_salt, request.sampling_params.n) == (-1, "mine", 2)
    assert request.sampling_params.temperature == pytest.approx(0.2)


def test_beams_come_with_their_scores_and_are_greedy_by_default(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    end = pb.FINISH_REASON_STOP
    server.inference.script = [
        pb.GenerateResponse(admission=pb.Admission(num_prompt_tokens=1)),
        pb.GenerateResponse(outputs=[pb.OutputDelta(index=1, text="so so", score=-0.75, finish_reason=end)]),
        pb.GenerateResponse(outputs=[pb.OutputDelta(index=0, text="good\n", score=-0.5, finish_reason=end)]),
        pb.GenerateResponse(usage=pb.Usage(prompt_tokens=1)),
    ]
    flags = ["--n", "2", "--best-of", "4", "--use-beam-search", "--length-penalty", "2", "--early-stopping", "never"]
    assert main(["generate", "hi", "--address", server.address, *flags]) == 0
    assert capsys.readouterr().out == "[1] score -0.5000\ngood\n\n[2] score -0.7500\nso so\n"
    sampling = server.inference.requests[0].sampling_params
    assert (sampling.best_of, sampling.temperature, sampling.length_penalty) == (4, 0, 2)
    assert sampling.use_beam_search and sampling.early_stopping == pb.EARLY_STOPPING_NEVER


def test_figures_of_what_comes_at_once_tell_no_first_token(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    end = pb.FINISH_REASON_STOP
    server.inference.script = [
        pb.GenerateResponse(admission=pb.Admission(num_prompt_tokens=1)),
        pb.GenerateResponse(outputs=[pb.OutputDelta(token_ids=[1, 2], text="so so", finish_reason=end)]),
        pb.GenerateResponse(usage=pb.Usage(prompt_tokens=1, completion_tokens=8)),
    ]
    assert main(["generate", "hi", "--address", server.address, "--best-of", "4", "--stats"]) == 0
    told = re.fullmatch(r"1 tokens in, 8 out after (\d+\.\d\d) s, (\d+\.\d) tokens/s\n", capsys.readouterr().err)
    assert told is not None and 8 / float(told[2]) == pytest.approx(float(told[1]), abs=0.006)
    del server.inference.script[1]
    server.inference.script[-1].usage.completion_tokens = 0
    assert main(["generate", "hi", "--address", server.address, "--stats"]) == 0
    assert re.fullmatch(r"1 tokens in, 0 out after \d+\.\d\d s\n", capsys.readouterr().err)


def test_generate_streams_as_tokens_come(server: FakeServer) -> None:
    is_read = threading.Event()

    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(admission=pb.Admission(num_prompt_tokens=1))
        yield pb.GenerateResponse(outputs=[pb.OutputDelta(text="first ")])
        assert is_read.wait(60)
        yield pb.GenerateResponse(outputs=[pb.OutputDelta(text="second", finish_reason=pb.FINISH_REASON_LENGTH)])
        yield pb.GenerateResponse(usage=pb.Usage(prompt_tokens=1))

    server.inference.answer = answer
    with octavo("generate", "Once", "--address", server.address) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 4096) == b"first "
        is_read.set()
        assert process.stdout.read() == "second\n"
    assert process.returncode == 0


def test_generate_as_chat_and_through_a_pipe(server: FakeServer) -> None:
    with octavo("generate", "--chat", "--address", server.address, stdin=subprocess.PIPE) as process:
        out, _ = process.communicate("What is a scheduler?\n")
    assert process.returncode == 0 and out.endswith("\n")
    assert server.inference.requests[0].messages.messages[0].content == "What is a scheduler?"


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape"])
def test_a_prompt_that_is_no_text_is_one_line(server: FakeServer, encoding: str) -> None:
    """Python reads it with an error, or, as in a container, without one."""
    environ = {**os.environ, "PYTHONIOENCODING": encoding}
    for prompt, piped in (("-", b"caf\xe9"), (os.fsdecode(b"caf\xe9"), b"")):
        command = [sys.executable, "-m", "octavo", "generate", prompt, "--address", server.address]
        done = subprocess.run(command, input=piped, capture_output=True, cwd=ROOT, env=environ)
        assert done.returncode == 2 and not server.inference.requests
        assert done.stderr.startswith(b"octavo generate: error: the prompt is no text in UTF-8")
        assert done.stderr.count(b"\n") == 1


def test_json_goes_where_not_every_character_does(server: FakeServer) -> None:
    end = pb.FINISH_REASON_STOP
    server.inference.script = [
        pb.GenerateResponse(admission=pb.Admission(num_prompt_tokens=1)),
        pb.GenerateResponse(outputs=[pb.OutputDelta(token_ids=[1], text="3 \u20ac", finish_reason=end)]),
        pb.GenerateResponse(usage=pb.Usage(prompt_tokens=1, completion_tokens=1)),
    ]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with octavo("generate", "hi", "--json", "--address", server.address, env=environ) as process:
        out, _ = process.communicate()
    assert process.returncode == 0 and json.loads(out)["outputs"][0]["text"] == "3 \u20ac"


def test_chat_once(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "Hi", "--system", "Be brief.", "--address", server.address, "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("t")
    roles = [(message.role, message.content) for message in server.inference.requests[0].messages.messages]
    assert roles == [("system", "Be brief."), ("user", "Hi")]


def test_chat_remembers_the_conversation(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["Hi", "", "And you?"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or _end_of_input(lines))
    assert main(["chat", "--address", server.address, "--max-tokens", "2", "--seed", "9"]) == 0
    first, second = server.inference.requests
    assert [message.role for message in first.messages.messages] == ["user"]
    assert [message.role for message in second.messages.messages] == ["user", "assistant", "user"]
    assert second.messages.messages[1].content == text_of(expected_tokens(9, 0, 2))
    assert "fake at" in capsys.readouterr().err


def converse(monkeypatch: pytest.MonkeyPatch, server: FakeServer, *lines: str) -> list[list[str]]:
    """Types the lines, then Ctrl-D; what of the conversation each answered question brought along."""
    left = iter(lines)

    def read(prompt: str) -> str:
        for line in left:
            return line
        raise EOFError

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", read)
    assert main(["chat", "--address", server.address, "--system", "s", "--max-tokens", "2", "--seed", "9"]) == 0
    return [[message.content for message in request.messages.messages] for request in server.inference.requests]


def test_a_conversation_that_reaches_the_models_length_forgets_the_oldest_and_says_so(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = text_of(expected_tokens(9, 0, 2))
    server.inference.max_model_len = 100  # a token a byte
    first, second, third, too_long = "a" * 30, "b" * 30, "c" * 60, "d" * 101
    assert converse(monkeypatch, server, first, second, third, too_long) == [
        ["s", first],
        ["s", first, answer, second],
        ["s", third],
        ["s", third, answer, too_long],  # which a server refuses: nothing is forgotten for it
    ]
    said = capsys.readouterr().err
    assert "(the 2 oldest questions are forgotten, with the answer: the model takes 100 tokens)" in said


def test_a_long_conversation_that_was_loaded_is_not_counted_turn_by_turn(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[int] = []
    tokenize = Client.tokenize

    def counted(client: Client, *arguments: Any, **options: Any) -> list[int]:
        asked.append(1)
        return tokenize(client, *arguments, **options)

    monkeypatch.setattr(Client, "tokenize", counted)
    server.inference.max_model_len = 100  # a token a byte
    turns = [{"role": role, "content": f"{turn:03}"} for turn in range(300) for role in ("user", "assistant")]
    (tmp_path / "said.json").write_text(json.dumps(turns))
    (found,) = converse(monkeypatch, server, f"/load {tmp_path / 'said.json'}", "c" * 60)
    assert found[:-1] == [f"{turn:03}" for turn in range(294, 300) for _ in range(2)]
    assert "the 294 oldest questions are forgotten" in capsys.readouterr().err
    assert len(asked) < 15


def test_words_that_are_for_the_terminal(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converse(monkeypatch, server, "/help", "/nonsense", "/etc/hosts", "/help me", "exit", "not read") == [
        ["s", "/etc/hosts"],
        ["s", "/etc/hosts", text_of(expected_tokens(9, 0, 2)), "/help me"],
    ]
    said = capsys.readouterr().err
    assert "/bye" in said and "/nonsense is not known here" in said
    server.inference.requests.clear()
    assert converse(monkeypatch, server, "/bye", "not read") == []


def test_a_conversation_goes_on_after_a_refusal(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Question(str):
        def strip(self, *_: str | None) -> str:  # as it is read, the server has changed its mind
            server.inference.refusal = None
            return "two"

    server.inference.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "too long", ())
    assert converse(monkeypatch, server, "one", Question()) == [["s", "one"], ["s", "two"]]
    assert "error: INVALID_ARGUMENT: too long" in capsys.readouterr().err


def test_ctrl_c_cuts_an_answer_short_and_ctrl_d_leaves(server: FakeServer) -> None:
    server.inference.token_delay_s = 0.02
    flags = ["--address", server.address, "--seed", "1", "--max-tokens", "500"]
    with Terminal() as terminal, octavo("chat", *flags, stdin=terminal.inside, stdout=terminal.inside) as process:
        terminal.wait_for(b"> ")
        terminal.press(b"Hi\n")
        terminal.wait_for(text_of(expected_tokens(1, 0, 3)).encode())
        process.send_signal(signal.SIGINT)
        terminal.wait_for(b"> ")
        assert server.inference.cancelled.wait(20)
        server.inference.token_delay_s = 0.0
        terminal.press(b"Again\n")
        terminal.wait_for(b"> ")
        terminal.press(b"\x04")
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in err
    question, cut_short, again = server.inference.requests[1].messages.messages
    assert (question.content, again.content) == ("Hi", "Again")
    assert cut_short.content.startswith(text_of(expected_tokens(1, 0, 3)))


def _end_of_input(lines: Iterator[str]) -> str:
    """An empty line while there are more, then Ctrl-D."""
    if line := next(lines, None):
        return line
    raise EOFError


def test_every_client_takes_an_address_in_the_same_words() -> None:
    from importlib import import_module

    from octavo.shared.command_line import Parser

    said = set()
    for name, argv in (("generate", ["hi"]), ("chat", ["hi"]), ("health", []), ("bench", ["serve"])):
        parser = Parser(prog=name)
        import_module(f"octavo.commands.{name}").add_arguments(parser)
        assert parser.parse_args(argv).address == "127.0.0.1:50051"
        shown = parser.parse_args([*argv, "--address", "[::1]:9"])
        said.add(shown.address)
    assert said == {"[::1]:9"}


@pytest.mark.parametrize("arguments", [["generate", "hi"], ["chat", "hi"], ["bench", "serve"]], ids=" ".join)
def test_no_server_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--address", NOWHERE]) == 1
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 1 and NOWHERE in shown.err and shown.out == ""


def test_a_refusal_is_one_line(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.inference.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "prompt: got 9000 tokens\naccepted: 2047", ())
    assert main(["generate", "hi", "--address", server.address]) == 1
    err = capsys.readouterr().err
    assert err == "octavo generate: error: INVALID_ARGUMENT: prompt: got 9000 tokens accepted: 2047\n"


def test_a_lost_server_is_waited_for(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.inference.losses = [(2, grpc.StatusCode.UNAVAILABLE)]
    assert main(["generate", "hi", "--address", server.address, "--seed", "3", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.strip() == text_of(expected_tokens(3, 0, 5)).strip()


def test_a_server_that_is_not_there_yet_is_waited_for_when_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, tell = free_port(), connection._tell
    with ExitStack() as stack:

        def tell_and_come(waiting: Waiting) -> None:
            tell(waiting)
            if waiting.is_first:
                stack.enter_context(FakeServer(port))

        monkeypatch.setattr(connection, "_tell", tell_and_come)
        address = ["--address", f"127.0.0.1:{port}"]
        assert main(["generate", "hi", "--max-tokens", "3", "--retry-window", "30", *address]) == 0
    assert "(waiting for the server, for up to 30 s: UNAVAILABLE" in capsys.readouterr().err


def test_the_window_may_come_from_the_environment(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_RETRY_WINDOW", "0")
    server.inference.losses = [(1, grpc.StatusCode.UNAVAILABLE)]
    assert main(["generate", "hi", "--address", server.address]) == 1
    assert "lost on purpose" in capsys.readouterr().err and len(server.inference.requests) == 1
    monkeypatch.setenv("OCTAVO_RETRY_WINDOW", "soon")
    assert main(["generate", "hi", "--address", server.address]) == 2
    assert "OCTAVO_RETRY_WINDOW: 'soon' is no number of seconds" in capsys.readouterr().err


def test_a_command_takes_several_addresses(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    window = ["--retry-window", "20"]
    assert main(["generate", "hi", "--max-tokens", "2", *window, "--address", f"{NOWHERE},{server.address}"]) == 0
    assert len(server.inference.requests) == 1 and capsys.readouterr().out


def test_ctrl_c_is_clean_and_cancels(server: FakeServer) -> None:
    server.inference.token_delay_s = 0.02
    with octavo("generate", "hi", "--address", server.address, "--max-tokens", "10000") as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == ""
    assert server.inference.cancelled.wait(20)


def test_a_reader_that_leaves_is_no_traceback(server: FakeServer) -> None:
    server.inference.token_delay_s = 0.002
    with octavo("generate", "hi", "--address", server.address, "--max-tokens", "10000") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=20)
    assert process.returncode == 141 and err == ""
    assert server.inference.cancelled.wait(20)


def test_what_a_server_says_steers_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x1b]52;c;eA==\x07\x9b2J"
    info = pb.ModelInfo(model=hostile, adapters=[hostile])
    models = pb.ListModelsResponse(models=[pb.ModelState(name=hostile, fingerprint=hostile)])
    monkeypatch.setattr(FakeInference, "GetModelInfo", lambda *_: info)
    monkeypatch.setattr(FakeInference, "ListModels", lambda *_: models)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    lines = {("adapter", "list"): 0, ("model", "list"): 0, ("generate", "hi"): 1, ("chat", "hi"): 1}
    with FakeServer() as server:
        server.inference.refusal = (grpc.StatusCode.INVALID_ARGUMENT, hostile, ())
        for line, code in lines.items():
            assert main([*line, "--address", server.address]) == code
            said = "".join(capsys.readouterr())
            assert r"\u001b]52;c;eA==\u0007" in said and not set(said) & {"\x1b", "\x07", "\x9b"}, line


def test_health_exit_codes(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", server.address]) == 0
    assert "SERVING" in capsys.readouterr().out
    server.set_ready(False)
    assert main(["health", server.address]) == 1
    assert main(["health", server.address, "--service", "no.such.Service"]) == 1
    assert main(["health", server.address, "--service", ""]) == 0
    assert main(["health", NOWHERE]) == 3
    assert main(["health", "--address", NOWHERE]) == 3
    server.set_ready(True)
    assert main(["health", "--address", server.address]) == 0
    assert main(["health", NOWHERE, "--address", server.address]) == 2


def test_what_scripts_read_is_json(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--seed=3", "--max-tokens=5", "--n=2", "--json", "--address", server.address]
    assert main(["generate", "hi", *flags]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [each["text"] for each in answer["outputs"]] == [text_of(expected_tokens(3, index, 5)) for index in (0, 1)]
    assert answer["outputs"][0]["token_ids"] == expected_tokens(3, 0, 5) and answer["seed"] == 3
    assert main(["generate", "hi", "--chat", *flags]) == 0
    assert server.inference.requests[-1].messages.messages[0].content == "hi" and capsys.readouterr().out

    flags = ["--seed=3", "--max-tokens=5", "--json", "--address", server.address]
    assert main(["chat", "hi", "--system", "Be brief.", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["text"] == text_of(expected_tokens(3, 0, 5))
    assert [each.content for each in server.inference.requests[-1].messages.messages] == ["Be brief.", "hi"]

    assert main(["health", server.address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"address": server.address, "status": "SERVING", "details": ""}
    assert main(["health", NOWHERE, "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == "UNAVAILABLE" and told["details"].startswith(f"no server answers at {NOWHERE} (")

    assert main(["model", "list", "--json"]) == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert listed["smollm2-135m-instruct"]["description"]


def test_a_conversation_is_no_json(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["chat", "--json", "--address", server.address]) == 2
    assert "--json wants a question" in capsys.readouterr().err


def commands_of(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that does something, by its words."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield name, parser
    for action in below:
        for word, each in action._name_parser_map.items():
            yield from commands_of(each, f"{name} {word}".strip())


def test_every_command_has_json_but_those_that_answer_nothing() -> None:
    silent = {"scheduler", "worker", "gateway", "completion"}  # their logs are JSON; a script for a shell is its own
    found = {name: "--json" in parser.format_help() for name, parser in commands_of(completion._whole_parser())}
    assert {name for name, has_json in found.items() if not has_json} == silent and len(found) > 12


def test_model_list_and_an_unknown_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert main(["model", "list"]) == 0
    assert "smollm2-135m-instruct" in capsys.readouterr().out
    assert main(["model", "fetch", "no-such-model"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_error_inside_a_request(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    error = pb.OutputError(code="INTERNAL", message="the step could not run", retryable=True)
    server.inference.script = [
        pb.GenerateResponse(admission=pb.Admission(num_prompt_tokens=1)),
        pb.GenerateResponse(outputs=[pb.OutputDelta(text="Well", finish_reason=pb.FINISH_REASON_ERROR, error=error)]),
        pb.GenerateResponse(usage=pb.Usage(prompt_tokens=1)),
    ]
    assert main(["generate", "hi", "--address", server.address]) == 1
    assert capsys.readouterr() == ("Well\n", "octavo generate: error: the step could not run\n")


def test_an_error_of_ours_ends_with_its_reason_after_where_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise KeyError("a\nb")

    monkeypatch.setattr("octavo.models.catalog.list_models", fail)
    assert main(["model", "list"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and lines[-1].startswith("octavo model: error: unexpected KeyError: ")


def test_what_the_system_refuses_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["model", "fetch", "x.gguf", "--download-dir", str(tmp_path / "file" / "models")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["scheduler"]) == 2
    assert capsys.readouterr().err == "octavo scheduler: error: no --worker is given: HOST:PORT or dns:///NAME:PORT\n"


def test_a_fetched_flight_record_replaces_none_of_any_shard(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.control.flight_record = [(0, b"a"), (0, b"b"), (1, b"c")]
    first, second = tmp_path / "record-0.jsonl.gz", tmp_path / "record-1.jsonl.gz"
    fetch = ["replay", str(tmp_path / "record.jsonl.gz"), "--address", server.address]
    second.write_bytes(b"of last week")
    assert main(fetch) == 1
    assert capsys.readouterr().err.endswith(f"{second} is there already: another name is wanted for what is fetched\n")
    assert second.read_bytes() == b"of last week" and not first.exists()
    second.unlink()
    assert main(fetch) == 0
    assert (first.read_bytes(), second.read_bytes()) == (b"ab", b"c")


def test_a_flight_record_that_cannot_be_written_leaves_its_names_free(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.control.flight_record = [(0, b"a"), (1, b"c")]
    open_file = Path.open

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        file = open_file(path, *arguments, **options)
        return open("/dev/full", "wb", buffering=0) if path.name == "record-1.jsonl.gz" else file

    monkeypatch.setattr(Path, "open", full)
    assert main(["replay", str(tmp_path / "record.jsonl.gz"), "--address", server.address]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_is_not_installed_is_one_line() -> None:
    code = "import sys; sys.modules['torch'] = None; from octavo.cli import main; sys.exit(main(['worker']))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    where = "pip install '.[all]' in a clone of Octavo"
    assert ended.stderr == f"octavo worker: error: torch is missing; {where} brings it\n"


@pytest.mark.parametrize(
    ("command", "package", "part"),
    [
        (["serve"], "scheduler_svc", "scheduler"),
        (["worker"], "worker_svc", "worker"),
        (["gateway"], "gateway_svc", "gateway"),
        (["model", "calibrate", "tiny", "--text", "x"], "scheduler_svc", "scheduler"),
    ],
)
def test_a_part_that_an_image_does_not_have_is_one_line_with_the_image_that_has_it(
    command: list[str], package: str, part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)

    class Absent:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
    assert main(command) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and f"there is no {part} here: the image octavo-{part} has it" in said[0]


def test_serve_takes_options_that_both_services_have() -> None:
    from octavo.commands import serve
    from octavo.shared.command_line import Parser
    from octavo.shared.options import from_namespace
    from scheduler_svc.config import SchedulerConfig
    from worker_svc.config import WorkerConfig

    parser = Parser()
    serve.add_arguments(parser)
    namespace = parser.parse_args(["--max-model-len", "auto", "--max-num-seqs", "7"])
    scheduler = from_namespace(SchedulerConfig, namespace, environ={})
    worker = from_namespace(WorkerConfig, namespace, environ={})
    assert (scheduler.max_model_len, scheduler.max_num_seqs) == ("auto", 7)
    assert (worker.max_model_len, worker.max_num_seqs) == ("auto", 7)


def test_the_first_process_of_a_container_ends_on_sigterm_before_it_serves(tmp_path: Path) -> None:
    """A pipe that nobody fills holds the command where it reads its options; the kernel's part is not tried here."""
    pipe = tmp_path / "options.yaml"
    os.mkfifo(pipe)
    code = f"import os; os.getpid = lambda: 1; from octavo.cli import main; main(['worker', '--config', {str(pipe)!r}])"
    with started([sys.executable, "-c", code], cwd=ROOT) as process:
        deadline = time.monotonic() + 60
        while True:
            try:
                writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                break
            except OSError:  # nobody reads yet
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        os.close(writer)  # a signal that came just before the process reads is handled when it has read
        assert process.wait(timeout=60) == 128 + signal.SIGTERM  # -SIGTERM without a handler
