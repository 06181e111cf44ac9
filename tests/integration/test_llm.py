"""`LLM` and `LLMEngine`: the scheduler core in the caller's process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import LLM, LLMEngine, SamplingParams, worker_process
from octavo.options import OptionError
from octavo.outputs import CompletionOutput
from tests.tiny_models import make_tiny_llama

PROMPTS = ["One", "A second prompt", "3", "And the last, which is the longest of the four"]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SIZES = {"max_model_len": 256, "kv_cache_memory": 0.02}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SIZES) as it:
        yield it


def test_outputs_come_in_the_order_of_the_prompts(llm, capsys):
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in outputs] == PROMPTS
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        (alone,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert output.finished and output.outputs[0].finish_reason in ("length", "stop")
        assert output.metrics.num_prompt_tokens == len(prompt)
        shown = llm.get_tokenizer().decode(list(output.outputs[0].token_ids))
        assert output.outputs[0].text == shown
        times_ns = output.metrics.token_times_ns
        assert len(times_ns) == len(output.outputs[0].token_ids), "one by one, though they were handed over at the end"
        assert output.metrics.arrival_ns < times_ns[0] == output.metrics.first_token_ns and times_ns == sorted(times_ns)
        assert times_ns[-1] < output.metrics.finished_ns
    assert "tokens/s" in capsys.readouterr().err


def test_the_worker_has_taken_memory_of_its_own(llm):
    assert 50 << 20 < llm.worker_peak_bytes() < 16 << 30


def test_each_prompt_may_have_parameters_of_its_own(llm):
    params = [SamplingParams(temperature=0, max_tokens=number + 1, ignore_eos=True) for number in range(4)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4]


def test_a_stop_string_ends_one_output_and_no_other(llm):
    whole, other = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    text = whole.outputs[0].text
    stopping = SamplingParams(temperature=0, max_tokens=20, stop=[text[3:6]])
    stopped, beside = llm.generate(PROMPTS[:2], [stopping, GREEDY], use_tqdm=False)
    assert stopped.outputs[0].text == text[: text.index(text[3:6])]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", text[3:6])
    assert len(stopped.outputs[0].token_ids) < 20 and beside.outputs[0].token_ids == other.outputs[0].token_ids


def test_more_prompts_than_may_wait_are_fed_in_turn(folder):
    with LLM(str(folder), max_waiting_requests=2, max_num_seqs=2, **SIZES) as llm:
        outputs = llm.generate(["x"] * 12, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1 and len(outputs) == 12


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("x" * 256, GREEDY, "256 tokens and 1 to generate are too many"),
        ("", GREEDY, "no tokens"),
        ("x", SamplingParams(logprobs=21), "logprobs"),
        (["x", "y"], [GREEDY], "1 sampling_params for 2 prompts"),
    ],
)
def test_what_the_model_does_not_take_is_refused_before_anything_runs(llm, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params, use_tqdm=False)


def test_unknown_options_are_errors(folder):
    with pytest.raises(OptionError, match="max_num_sequences"):
        LLM(str(folder), max_num_sequences=3)


@pytest.mark.parametrize("option", ["log_level", "preemption_mode", "quantization"])
def test_impossible_options_are_errors_before_a_worker_is_started(folder, option, monkeypatch):
    monkeypatch.setattr(worker_process, "WorkerProcess", None)
    with pytest.raises(OptionError, match=f"{option} is 'nonsense', not one of: "):
        LLM(str(folder), **{option: "nonsense"})


def test_a_worker_that_cannot_start_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"config\.json"):
        LLM(str(tmp_path))


def test_the_engine_steps_only_when_it_is_told_to(folder, llm):
    expected = {prompt: llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0] for prompt in PROMPTS}
    with LLMEngine(str(folder), **SIZES) as engine:
        assert engine.get_model_config().vocab_size == 1031
        for prompt in PROMPTS[:3]:
            engine.add_request(prompt, prompt, GREEDY)
        with pytest.raises(ValueError, match="live already"):
            engine.add_request(PROMPTS[0], PROMPTS[0], GREEDY)
        first = engine.step()
        assert {output.request_id: len(output.outputs[0].token_ids) for output in first} == dict.fromkeys(
            PROMPTS[:3], 1
        )
        engine.add_request(PROMPTS[3], PROMPTS[3], GREEDY)
        engine.abort_request(PROMPTS[1])
        finished: dict[str, CompletionOutput] = {}
        while engine.has_unfinished_requests():
            assert engine.get_num_unfinished_requests() == 4 - len(finished)
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = output.outputs[0]
        assert engine.step() == []
    assert finished.pop(PROMPTS[1]).finish_reason == "abort"
    assert {prompt: output.token_ids for prompt, output in finished.items()} == {
        prompt: expected[prompt].token_ids for prompt in finished
    }
    assert len(finished) == 3
