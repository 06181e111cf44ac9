"""`LLM` and `LLMEngine`: the scheduler core in the caller's process."""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, LLMEngine, SamplingParams
from octavo.embedded import worker_process
from octavo.embedded.embedded import Closed
from octavo.outputs import CompletionOutput
from octavo.shared.options import OptionError
from scheduler_svc.engine import statistics
from tests.tiny_models import make_tiny_llama
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_workers")  # `test_llm_processes` starts them as users do

PROMPTS = ["One", "A second prompt", "3", "And the last, which is the longest of the four"]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
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
        assert output.prompt_token_ids == llm.get_tokenizer().encode(prompt)
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
    "shape",
    [
        lambda text, ids: text,
        lambda text, ids: [text],
        lambda text, ids: {"prompt": text},
        lambda text, ids: [{"prompt": text}],
        lambda text, ids: ids,
        lambda text, ids: [ids],
        lambda text, ids: np.array(ids),
        lambda text, ids: {"prompt_token_ids": ids},
        lambda text, ids: [{"prompt_token_ids": ids}],
    ],
)
def test_a_prompt_is_the_same_in_every_shape(llm, shape: Callable[[str, list[int]], Any]):
    ids = llm.get_tokenizer().encode(PROMPTS[1])
    (expected,) = llm.generate(prompt_token_ids=ids, sampling_params=GREEDY, use_tqdm=False)
    (output,) = llm.generate(shape(PROMPTS[1], ids), GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.prompt_token_ids == expected.prompt_token_ids == ids
    assert output.prompt == (PROMPTS[1] if PROMPTS[1] in str(shape(PROMPTS[1], ids)) else None)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([5], SamplingParams(logprobs=21), "logprobs"),
        (["x" * 256, "x"], SamplingParams(logprobs=21), "logprobs"),
        (["x", "y"], [GREEDY], "1 sampling_params for 2 prompts"),
        ("x", {"temperature": 0}, r"sampling_params is .* \(dict\); accepted: one SamplingParams"),
        (["x", "y"], [GREEDY, 5], r"sampling_params\[1\] is 5 \(int\); accepted: SamplingParams"),
        (["x", "y"], [GREEDY, SamplingParams(logprobs=21)], r"prompts\[1\]: sampling_params\.logprobs: got 21"),
        ([3.5], GREEDY, r"prompts\[0\] is 3.5"),
    ],
)
def test_what_no_prompt_can_have_is_refused_before_anything_runs(llm, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params, use_tqdm=False)


def test_a_prompt_that_cannot_be_served_ends_alone(llm):
    prompts = ["x" * 256, PROMPTS[0], "", [5000], "x" * 100_000]
    long, served, empty, outside, longest = llm.generate(prompts, [GREEDY] * 5, use_tqdm=False)
    (alone,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert served.outputs[0].token_ids == alone.outputs[0].token_ids and served.outputs[0].error is None
    said = {
        "256 tokens and 1 to generate are too many": (long, "length"),
        "100000 characters are too many": (longest, "length"),
        "no tokens": (empty, "error"),
        "got 5000; accepted: 0 to 1030": (outside, "error"),
    }
    for words, (output, reason) in said.items():
        (part,) = output.outputs
        assert output.finished and (part.finish_reason, part.text, part.token_ids) == (reason, "", [])
        assert part.error is not None and words in part.error


def test_a_refused_prompt_has_as_many_outputs_as_were_asked_for(llm):
    (refused,) = llm.generate(["x" * 300], SamplingParams(n=2, max_tokens=2), use_tqdm=False)
    assert [(part.index, part.finish_reason) for part in refused.outputs] == [(0, "length"), (1, "length")]


def kept(bars: list[Bar], **settings: Any) -> Bar:
    """In place of tqdm: a bar that can be looked at afterwards."""
    bars.append(Bar(**settings))
    return bars[-1]


class Bar:
    """As much of tqdm as is used, with what was shown; `on_update` is called with each update."""

    def __init__(self, on_update: Callable[[], None] = lambda: None, **settings: Any) -> None:
        self.total, self.settings, self.shown, self.postfix = settings["total"], settings, 0, ""
        self.updates: list[int] = []
        self.is_closed, self._on_update = False, on_update

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.postfix = text

    def update(self, count: int) -> None:
        self.shown += count
        self.updates.append(count)
        self._on_update()

    def close(self) -> None:
        self.is_closed = True


def test_progress_is_shown_by_token(llm, monkeypatch):
    monkeypatch.setattr("octavo.embedded.progress.INTERVAL_S", 0.001)
    bars: list[Bar] = []
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, stop="not to be found")
    llm.generate(["x"] * 2, params, use_tqdm=partial(kept, bars))
    (bar,) = bars
    assert bar.settings["unit"] == " tokens" and bar.shown == bar.total == 400 and bar.is_closed
    assert any(0 < count < 400 for count in bar.updates), "before the first request has ended"
    assert bar.postfix.startswith("2/2 requests, in ") and bar.postfix.endswith(" tokens/s")


def test_a_request_that_ends_early_takes_its_rest_out_of_the_bar(llm):
    text = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].text
    params = SamplingParams(temperature=0, stop=text[3:6])
    bars: list[Bar] = []
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=partial(kept, bars))
    assert bars[0].settings["total"] == 256 - len(PROMPTS[0]), "without max_tokens: all that fits"
    assert bars[0].shown == bars[0].total == output.metrics.num_output_tokens < 20


def test_threads_share_a_model_and_one_that_fails_leaves_the_others_alone(llm, monkeypatch):
    monkeypatch.setattr("octavo.embedded.progress.INTERVAL_S", 0.001)
    expected = {text: llm.generate(text, LONG, use_tqdm=False)[0].outputs[0].token_ids for text in PROMPTS}
    begun = threading.Event()
    right: dict[str, bool] = {}
    raised: list[BaseException] = []

    def generate(text: str) -> None:
        outputs = [output for _ in range(3) for output in llm.generate([text, text], LONG, use_tqdm=False)]
        right[text] = all(output.outputs[0].token_ids == expected[text] for output in outputs)

    def fail() -> None:
        def on_update() -> None:
            raise OSError("the terminal is gone")

        try:
            llm.generate("failing", LONG, use_tqdm=lambda **settings: Bar(on_update, **settings))
        except OSError as error:
            raised.append(error)

    threads = [threading.Thread(target=generate, args=[text], daemon=True) for text in PROMPTS]
    threads += [threading.Thread(target=fail, daemon=True)]

    def press_ctrl_c() -> None:
        if begun.wait(60):
            os.kill(os.getpid(), signal.SIGINT)

    interrupt = threading.Thread(target=press_ctrl_c, daemon=True)
    for thread in [*threads, interrupt]:
        thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["interrupted"] * 40, LONG, use_tqdm=lambda **settings: Bar(begun.set, **settings))
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert right == dict.fromkeys(PROMPTS, True) and len(raised) == 1
    wait_until(lambda: not llm._embedded.engine.live_groups(), seconds=30)
    assert llm.generate(PROMPTS[0], LONG, use_tqdm=False)[0].outputs[0].token_ids == expected[PROMPTS[0]]


def test_ctrl_c_within_a_queue_of_the_scheduler_leaves_no_half_of_a_request(llm, monkeypatch):
    """In the caller's thread a request goes through several of its tables."""
    queue = llm._embedded.engine._live._in_order
    add = type(queue).add

    def interrupted(self: Any, entry: Any) -> None:
        monkeypatch.undo()
        add(self, entry)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(type(queue), "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["interrupted"] * 3, LONG, use_tqdm=False)
    assert type(queue).add is add, "it came to that"
    wait_until(lambda: not llm._embedded.engine.live_groups() and not queue, seconds=30)
    wait_until(lambda: not llm._embedded.engine._live._num_by_model, seconds=30)
    assert llm.generate(PROMPTS[0], LONG, use_tqdm=False)[0].outputs[0].token_ids


def test_a_tokenizer_may_be_a_folder_and_nothing_unknown(llm, folder):
    before = llm.get_tokenizer()
    llm.set_tokenizer(folder)
    assert llm.get_tokenizer().encode("hi") == before.encode("hi")
    with pytest.raises(ValueError, match="got int; accepted: one of Octavo or of transformers, or a folder"):
        llm.set_tokenizer(5)


def test_it_cannot_be_pickled_and_says_so(llm):
    with pytest.raises(TypeError, match="make it where it is used"):
        pickle.dumps(llm)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_num_sequences": 3}, "max_num_sequences; did you mean max_num_seqs"),
        ({"log_level": "nonsense"}, "log_level: 'nonsense' is none of"),
        ({"quantization": "nonsense"}, "quantization: got 'nonsense'; 'int8' and 'int4' are for CPUs"),
        ({"tenant_weights": ["x"]}, "tenant_weights has 'x'"),
    ],
    ids=str,
)
def test_impossible_options_are_errors_before_a_worker_is_started(folder, option, message, monkeypatch):
    monkeypatch.setattr(worker_process, "WorkerProcess", None)
    with pytest.raises(OptionError, match=message):
        LLM(str(folder), **option)


def test_a_worker_that_cannot_start_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"exit code 1: .* has no config\.json"):
        LLM(str(tmp_path))


def test_runs_with_one_seed_are_equal_and_their_requests_are_not(folder, monkeypatch, capsys):
    """One run is of an `LLM` whose owner lets go of it, the other of an `LLMEngine`; both log their throughput."""
    monkeypatch.setattr(statistics, "INTERVAL_S", 0.01)
    options = {"seed": 7, "max_num_seqs": "8", "disable_log_stats": False, **SIZES}
    params = [SamplingParams(max_tokens=100, ignore_eos=True)] * 3 + [SamplingParams(max_tokens=100, seed=5)]
    llm = LLM(str(folder), **options)
    outputs = llm.generate(["x"] * 4, params, use_tqdm=False)
    seeds = [int.from_bytes(hashlib.sha256(f"7/{k}".encode()).digest()[:8], "little") for k in range(3)]
    assert [output.seed for output in outputs] == [*seeds, 5]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4
    worker = llm._embedded.worker._process
    assert worker is not None and '"throughput"' in capsys.readouterr().err
    del llm
    gc.collect()
    wait_until(lambda: worker.poll() is not None, seconds=30)
    with LLMEngine(str(folder), **options) as engine:
        for number, each in enumerate(params):
            engine.add_request(str(number), {"prompt": "x"}, each)
        again = {output.request_id: output for output in all_steps(engine) if output.finished}
    assert [again[str(k)].outputs[0].token_ids for k in range(4)] == [output.outputs[0].token_ids for output in outputs]
    assert '"throughput"' in capsys.readouterr().err


def all_steps(engine: LLMEngine) -> Iterator[Any]:
    while engine.has_unfinished_requests():
        yield from engine.step()


def test_after_its_end_it_says_so(folder):
    with LLM(str(folder), **SIZES) as llm:
        pass
    llm.shutdown()
    for use in (partial(llm.generate, "x"), llm.get_tokenizer, llm.statistics, llm.reset_prefix_cache):
        with pytest.raises(Closed, match="shut down"):
            use()


SCRIPT = """
import os, sys
from octavo import LLM, SamplingParams

llm = LLM(sys.argv[1], max_model_len=64, kv_cache_memory=0.02)
params = SamplingParams(max_tokens=4)
print(len(llm.generate("x", params, use_tqdm=False)))
if not (child := os.fork()):
    try:
        llm.generate("x", params, use_tqdm=False)
    except RuntimeError as error:
        print(error, flush=True)
    del llm
    os._exit(0)
os.waitpid(child, 0)
print(len(llm.generate(["x", "y"], params)))
print(llm._embedded.worker._process.pid)
"""


def test_a_script_needs_no_main_guard_nor_an_end_and_a_fork_does_no_harm(folder, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=120)
    first, forked, second, worker = done.stdout.splitlines()
    assert (first, second, done.returncode) == ("1", "2", 0) and "made in another process" in forked
    assert "Traceback" not in done.stderr and "tokens/s" in done.stderr
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), seconds=30)


def test_ctrl_c_within_a_step_of_the_engine_breaks_no_request(folder, llm, monkeypatch):
    expected = {prompt: llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0] for prompt in PROMPTS}
    with LLMEngine(str(folder), **SIZES) as engine:
        for prompt in PROMPTS:
            engine.add_request(prompt, prompt, GREEDY)
        queue = engine._embedded.engine._live._in_order
        remove = type(queue).remove

        interrupts: list[str] = []

        def interrupted(self: Any, entry: Any) -> None:
            if not interrupts:
                interrupts.append("sent")
                signal.raise_signal(signal.SIGINT)
            remove(self, entry)

        finished: dict[str, CompletionOutput] = {}
        monkeypatch.setattr(type(queue), "remove", interrupted)
        for _ in range(200):  # of which some thirty are needed
            try:
                outputs = engine.step()
            except KeyboardInterrupt:
                interrupts.append("heard")
                continue
            finished |= {output.request_id: output.outputs[0] for output in outputs if output.finished}
        assert interrupts == ["sent", "heard"] and not queue
    assert {prompt: output.token_ids for prompt, output in finished.items()} == {
        prompt: output.token_ids for prompt, output in expected.items()
    }


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
        given = [(output, copy.deepcopy(output)) for output in first]
        while engine.has_unfinished_requests():
            assert engine.get_num_unfinished_requests() == 4 - len(finished)
            for output in engine.step():
                given.append((output, copy.deepcopy(output)))
                if output.finished:
                    finished[output.request_id] = output.outputs[0]
        assert engine.step() == []
        with pytest.raises(ValueError, match="1 to generate are too many"):
            engine.add_request("long", "x" * 256, GREEDY)
    assert all(output == as_it_was for output, as_it_was in given), "no step changes what another returned"
    assert {len(output.outputs[0].token_ids) for output, _ in given} == set(range(1, 21))
    assert finished.pop(PROMPTS[1]).finish_reason == "abort"
    assert {prompt: output.token_ids for prompt, output in finished.items()} == {
        prompt: expected[prompt].token_ids for prompt in finished
    }
    assert len(finished) == 3
