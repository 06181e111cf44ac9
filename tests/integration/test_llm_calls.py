"""Conversations, adapters, priorities and what outputs tell, of `LLM` and `LLMEngine`."""

from __future__ import annotations

import argparse
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo import LLM, EngineArgs, LLMEngine, Logprob, LoRARequest, SamplingParams
from octavo.embedded import worker_process
from octavo.shared.options import OptionError
from protos import worker_pb2, worker_pb2_grpc
from scheduler_svc.text.chat_template import ChatTemplate
from tests.fakes import FakeWorker
from tests.scheduler.hashed_tokens import hashed_after
from tests.tiny_models import make_tiny_llama

pytestmark = pytest.mark.usefixtures("forked_workers")

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ONE_BY_ONE = {"max_num_seqs": 1, "scheduling_policy": "priority", "max_model_len": 256, "kv_cache_memory": 0.02}
ASKED = {"role": "user", "content": "Why?"}
ANSWERED = [ASKED, {"role": "assistant", "content": "Becau"}]
TEMPLATE = "{% for each in messages %}[{{ each.role }}] {{ each.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **ONE_BY_ONE) as it:
        yield it


def shown(llm: LLM, output: Any) -> str:
    return llm.get_tokenizer().decode(list(output.prompt_token_ids), skip_special_tokens=False)


def test_a_worker_wants_a_token_that_its_llm_alone_can_read(folder: Path) -> None:
    with LLM(str(folder), max_model_len=256, kv_cache_memory=0.02) as own:
        file = own._embedded.worker.token_file
        assert [stat.S_IMODE(each.stat().st_mode) for each in (file.parent, file)] == [0o700, 0o600]
        with grpc.insecure_channel(own._embedded.worker.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            for metadata in ((), (("authorization", "Bearer none-that-it-has-made"),)):
                with pytest.raises(grpc.RpcError) as refused:
                    stub.Initialize(worker_pb2.InitializeRequest(), metadata=metadata, timeout=30)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            stub.GetInfo(worker_pb2.GetInfoRequest(), metadata=(("authorization", f"Bearer {file.read_text()}"),))
        assert own.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].error is None
    assert not file.parent.exists()


def test_a_conversation_is_put_into_the_models_template(llm: LLM) -> None:
    (output,) = llm.chat([ASKED], GREEDY, use_tqdm=False)
    template = llm.get_tokenizer().chat_template
    assert template is not None and shown(llm, output) == template.render([ASKED], add_generation_prompt=True)
    (same,) = llm.generate({"prompt_token_ids": output.prompt_token_ids}, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == same.outputs[0].token_ids and len(output.outputs[0].token_ids) == 6
    (unbegun,) = llm.chat([ASKED], GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert shown(llm, unbegun) == template.render([ASKED], add_generation_prompt=False) != shown(llm, output)
    (continued,) = llm.chat(ANSWERED, GREEDY, use_tqdm=False, continue_final_message=True)
    assert shown(llm, continued).endswith("Becau")


def test_several_conversations_in_a_template_of_the_callers_own(llm: LLM) -> None:
    first, second = llm.chat([[ASKED], ANSWERED], [GREEDY, GREEDY.clone(max_tokens=2)], chat_template=TEMPLATE)
    assert shown(llm, first) == "[user] Why?\n" and shown(llm, second) == "[user] Why?\n[assistant] Becau\n"
    assert [len(each.outputs[0].token_ids) for each in (first, second)] == [6, 2]
    (same,) = llm.chat([ASKED], GREEDY, False, chat_template=ChatTemplate(TEMPLATE, {}))
    assert same.prompt_token_ids == first.prompt_token_ids
    raises = "{{ raise_exception('no such role') if messages[0].role == 'poet' else messages[0].content }}"
    served, refused = llm.chat([[ASKED], [ASKED | {"role": "poet"}]], GREEDY, chat_template=raises)
    assert served.outputs[0].error is None and refused.outputs[0].finish_reason == "error"
    assert "no such role" in (refused.outputs[0].error or "")
    (own,) = llm.chat([ASKED], GREEDY, use_tqdm=False)
    assert shown(llm, own) != shown(llm, first), "the model's template is as it was"


def test_a_template_has_variables_of_the_callers(llm: LLM) -> None:
    template = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %} briefly{% endif %}"
    variables = {"enable_thinking": False}
    (brief,) = llm.chat([ASKED], GREEDY, False, chat_template=template, chat_template_kwargs=variables)
    (own,) = llm.chat([ASKED], GREEDY, False, chat_template_kwargs=variables, chat_template_content_format="openai")
    (same,) = llm.chat([ASKED], GREEDY, False)
    assert shown(llm, brief) == "Why? briefly" and own.prompt_token_ids == same.prompt_token_ids


def test_the_tokenizer_puts_a_conversation_into_the_template(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    (said,) = llm.chat([ASKED], GREEDY, False)
    (same,) = llm.generate(str(prompt), GREEDY, use_tqdm=False)
    assert said.prompt_token_ids == same.prompt_token_ids
    assert tokenizer.apply_chat_template([ASKED], add_generation_prompt=True) == said.prompt_token_ids


def test_times_are_there_in_seconds_too(llm: LLM) -> None:
    (output,) = llm.generate("Why?", GREEDY, use_tqdm=False)
    times = output.metrics
    assert times.first_token_time is not None and times.finished_time is not None and times.time_in_queue is not None
    assert times.arrival_time + times.time_in_queue <= times.first_token_time <= times.finished_time


def test_arguments_come_in_the_order_that_scripts_give_them(llm: LLM) -> None:
    by_position = llm.generate(None, GREEDY, [[1, 2, 3]], False, None)
    by_name = llm.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY, use_tqdm=False)
    assert by_position[0].outputs[0].token_ids == by_name[0].outputs[0].token_ids


def test_what_an_llm_has_not_is_named_with_a_reason(llm: LLM) -> None:
    assert not hasattr(llm, "embed") and llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(AttributeError, match="an LLM has no encode: models here generate text"):
        getattr(llm, "encode")  # noqa: B009 - a name that a checker of types knows to be missing
    with pytest.raises(AttributeError, match=r"an LLM has no genrate$"):
        getattr(llm, "genrate")  # noqa: B009 - likewise


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([ASKED], {"tools": [{"type": "function"}]}, "tools: not supported"),
        ([ASKED], {"chat_template": "{% for"}, "chat template: "),
        ([ASKED], {"chat_template": Path("a.jinja")}, "chat_template is PosixPath.*; accepted: the text of a template"),
        ([ASKED], {"sampling_params": SamplingParams(guided={"choice": ["a"]})}, "there is no guided decoding yet"),
        ([ASKED], {"chat_template_kwargs": {"messages": []}}, "the chat template has 'messages' from elsewhere"),
        (ANSWERED, {"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ([[ASKED], [ASKED]], {"sampling_params": [GREEDY]}, "1 sampling_params for 2 prompts"),
        ([[ASKED], "x"], {}, r"messages\[1\] is 'x'"),
        ([[ASKED]], {"priority": ["high"]}, r"priority\[0\] is 'high' \(str\)"),
        ([[ASKED]], {"lora_request": "pirate"}, "lora_request is 'pirate'"),
        ([[ASKED]], {"lora_request": LoRARequest("pirate", 1, "/x")}, "lora_request 'pirate': .*adapters"),
    ],
)
def test_what_cannot_be_asked_for_is_named(llm: LLM, messages: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.chat(messages, **options)


def test_a_lower_priority_is_first(llm: LLM) -> None:
    """The first is running before the others are there; one has a place at a time."""
    outputs = llm.generate(["a", "b", "c", "d"], GREEDY, priority=[0, 30, 20, 10], use_tqdm=False)
    ends_ns = [output.metrics.finished_ns or 0 for output in outputs]
    assert sorted(range(4), key=lambda index: ends_ns[index]) == [0, 3, 2, 1]


def test_what_was_cached_and_how_likely_each_token_was(llm: LLM) -> None:
    params = GREEDY.clone(logprobs=2, prompt_logprobs=1)
    llm.reset_prefix_cache()
    first, again = (llm.generate("x" * 64, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0 and again.num_cached_tokens == again.metrics.num_cached_tokens >= 32
    (told,) = llm.generate("xyz", params, use_tqdm=False)
    written = told.outputs[0]
    assert written.logprobs is not None and len(written.logprobs) == 6 and written.finished()
    for token_id, position in zip(written.token_ids, written.logprobs, strict=True):
        assert next(iter(position)) == token_id and position[token_id].rank == 1, "greedy"
        assert [each.rank for each in position.values()] == [1, 2]
        assert all(isinstance(each, Logprob) and each.logprob < 0 for each in position.values())
        assert position[token_id].decoded_token == llm.get_tokenizer().token_text(token_id)
    first_one, *others = told.prompt_logprobs or []
    assert first_one is None and len(others) == 2
    assert all(token_id in (each or {}) for token_id, each in zip(told.prompt_token_ids[1:], others, strict=True))


class AdapterWorker(FakeWorker):
    """In the place of `WorkerProcess`: a fake one that takes adapters, in this process, and wants no token."""

    token_file = None

    def __init__(self, config: Any) -> None:
        super().__init__(max_loras=2)
        self.broken_paths.add("/nothing/here")
        self.__enter__()

    def check(self) -> None:
        pass

    def stop(self) -> None:
        self.__exit__(None)


def test_threads_take_turns_with_an_engine_or_are_told_why_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread is held within its step; what others call meanwhile says so and changes nothing."""
    monkeypatch.setattr(worker_process, "WorkerProcess", AdapterWorker)
    with LLMEngine.from_engine_args(EngineArgs(str(folder), max_waiting_requests=7)) as engine:
        engine.add_request("1", "x", GREEDY)
        within, goes_on, results = threading.Event(), threading.Event(), []
        take_turn = engine._embedded.take_turn

        def held() -> None:
            within.set()
            assert goes_on.wait(60)
            take_turn()

        monkeypatch.setattr(engine._embedded, "take_turn", held)
        thread = threading.Thread(target=lambda: results.append(engine.step()), daemon=True)
        thread.start()
        assert within.wait(60)
        for call in (lambda: engine.add_request("2", "x", GREEDY), engine.step, lambda: engine.abort_request("1")):
            with pytest.raises(RuntimeError, match="another thread is in a call of this LLMEngine"):
                call()
        goes_on.set()
        thread.join(60)
        assert [len(output.outputs[0].token_ids) for output in results[0]] == [1]
        assert engine.get_num_unfinished_requests() == 1
        assert len(engine.step()[0].outputs[0].token_ids) == 2, "another thread than before, after it"
        engine.add_request("2", prompt_token_ids=[5], sampling_params=GREEDY)
        engine.abort_request(["1", "2"])
        ended = {each.request_id: each.outputs[0].finish_reason for each in engine.step()}
        while engine.has_unfinished_requests():
            ended |= {each.request_id: each.outputs[0].finish_reason for each in engine.step()}
        assert ended == {"1": "abort", "2": "abort"}


def test_an_engine_wants_an_id_that_its_outputs_are_told_apart_by(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "WorkerProcess", AdapterWorker)
    with LLMEngine(str(folder)) as engine:
        for nobody in ("", None):
            with pytest.raises(ValueError, match="request_id is empty"):
                engine.add_request(nobody, "x", GREEDY)  # type: ignore[arg-type]  # as a script may
        assert not engine.has_unfinished_requests()


PIRATE, POET = LoRARequest("pirate", 1, "/adapters/pirate"), LoRARequest("poet", 2, "/adapters/poet")


@pytest.mark.parametrize("steps_itself", [False, True])
def test_adapters_are_loaded_and_used(folder: Path, monkeypatch: pytest.MonkeyPatch, steps_itself: bool) -> None:
    """A fake worker refuses a step with an adapter that it has not, and blocks that another one filled."""
    monkeypatch.setattr(worker_process, "WorkerProcess", AdapterWorker)
    prompt = "a prompt of several blocks|"
    params = SamplingParams(max_tokens=9)
    if steps_itself:
        with LLMEngine(str(folder)) as engine:
            engine.add_request("1", prompt, params, lora_request=PIRATE)
            while engine.has_unfinished_requests():
                (output,) = engine.step()
            assert output.outputs[0].token_ids == hashed_after(prompt, 9) and output.lora_request == PIRATE
            engine.add_request("2", prompt, params, lora_request=PIRATE)
            engine.step()
            engine.unload_adapter("pirate")
            (output,) = engine.step()
            assert output.finished and output.outputs[0].token_ids == hashed_after(prompt, 9)
            fake: Any = engine._embedded.worker
            assert fake.adapters == {} and not engine.has_unfinished_requests()
        return
    with LLM(str(folder)) as llm:
        worker: Any = llm._embedded.worker
        llm.generate([prompt] * 2, params, lora_request=POET, use_tqdm=False)
        for asked, cached in (([None, PIRATE, POET], [0, 0, 24]), (PIRATE, [24] * 3)):
            outputs = llm.generate([prompt] * 3, params, lora_request=asked, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == [hashed_after(prompt, 9)] * 3
            assert [output.num_cached_tokens for output in outputs] == cached
            assert [output.lora_request for output in outputs] == (asked if isinstance(asked, list) else [asked] * 3)
        assert worker.adapters == {"poet": 1, "pirate": 2}, "each loaded once"
        for lora, words in (
            (LoRARequest("poet", 2, "/elsewhere"), "'poet' is loaded from '/adapters/poet'"),
            (LoRARequest("lost", 3, "/nothing/here"), "no adapter at /nothing/here"),
        ):
            with pytest.raises(ValueError, match=words):
                llm.generate(prompt, lora_request=lora)
        llm.unload_adapter("poet")
        with pytest.raises(ValueError, match="adapter 'poet' is not here; loaded: 'pirate'"):
            llm.unload_adapter("poet")
        llm.generate(prompt, params, lora_request=LoRARequest("poet", 2, "/elsewhere"), use_tqdm=False)
        assert worker.adapters.keys() == {"poet", "pirate"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("", 1, "/x"), "lora_name"),
        (("x", 0, "/x"), "lora_int_id"),
        (("x", 1), "lora_path"),
        ((5, 1, "/"), "lora_name"),
    ],
)
def test_an_adapter_has_a_name_a_number_and_a_path(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoRARequest(*arguments)


def test_what_a_parser_has_read_may_be_given_as_it_is() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    given = vars(parser.parse_args(["--model", "a", "--max-num-seqs=8"]))
    assert vars(EngineArgs(**given)) == {"model": "a", "max_num_seqs": 8}
    read = EngineArgs.from_cli_args(parser.parse_args(["--model", "a", "--max-num-seqs=8"]))
    assert vars(read) == {"model": "a", "max_num_seqs": 8}


def test_engine_arguments_come_from_a_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    (tmp_path / "options.yaml").write_text("block_size: 8\n")
    monkeypatch.setenv("OCTAVO_SWAP_SPACE", "2")
    flags = ["--model", "a", "--max-num-seqs=8", "--seed", "0", "--no-enable-prefix-caching"]
    given = EngineArgs.from_cli_args(parser.parse_args([*flags, f"--config={tmp_path / 'options.yaml'}"]))
    assert (given.model, given.options) == (
        "a",
        {"max_num_seqs": 8, "seed": 0, "enable_prefix_caching": False, "swap_space": 2.0, "block_size": 8},
    )
    assert (given.model, given.max_num_seqs, given.block_size) == ("a", 8, 8)
    assert "model='a', " in repr(given) and "max_num_seqs=8" in repr(given)
    for refused in ({"max_num_sequences": 8}, {"port": 80}, {"block_size": "many"}):
        with pytest.raises(OptionError):
            EngineArgs("a", **refused)
