"""What the frontend makes of requests for several outputs, and what it refuses in whose words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from octavo.models.sentencepiece_tokenizer import tokenizer_json
from protos import inference_pb2 as pb
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.errors import InvalidRequest, Unsupported
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.requests.frames import decode_prepared, encode_prepared
from scheduler_svc.requests.frontend import MAX_LOGPROBS, MAX_PROMPT_LOGPROBS, Frontend
from scheduler_svc.requests.request_checks import TextSettings
from scheduler_svc.requests.request_text import RequestTexts
from scheduler_svc.text.tokenizer import Tokenizer
from tests.scheduler import tiny_tokenizers
from tests.scheduler.tiny_served_model import tiny_served_model
from tests.tiny_models import END_OF_TEXT, IM_END, IM_START
from tests.worker.sentencepiece_fixtures import FOLDER

THE = tiny_tokenizers.sentencepiece().get_vocab()["▁the"]
BEAMS: dict[str, Any] = {"use_beam_search": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return tiny_served_model(tmp_path_factory.mktemp("tokenizer"))


def _prepare(model: ServedModel, params: dict[str, Any], prompt: str = "abc", **fields: Any) -> SequenceGroup:
    frontend = Frontend(
        lambda: ServedModels.of(model),
        lambda _: None,
        TextSettings(scheduling_policy=fields.pop("scheduling_policy", "fcfs")),
        enable_chunked_prefill=False,
    )
    fields = {"request_id": "it", **fields}
    return frontend.prepare(pb.GenerateRequest(prompt=prompt, sampling_params=pb.SamplingParams(**params), **fields))


@pytest.mark.parametrize(
    ("params", "num_outputs", "best_of"), [({}, 1, 1), ({"n": 3}, 3, 3), ({"n": 2, "best_of": 8}, 2, 8)]
)
def test_several_outputs_are_sequences_of_their_own(
    model: ServedModel, params: dict[str, Any], num_outputs: int, best_of: int
) -> None:
    group = _prepare(model, params)
    assert (group.num_outputs, group.best_of, group.uses_beam_search) == (num_outputs, best_of, False)
    assert [sequence.index for sequence in group.sequences] == list(range(best_of))
    assert group.max_num_tokens == (48 * 4 + 1 if best_of == 1 else 48 // best_of * 4 + 1)


def test_the_end_of_a_prompt_is_what_is_left_of_a_truncated_one(model: ServedModel) -> None:
    group = _prepare(model, {}, prompt="abcdef", truncate_prompt_tokens=2)
    assert group.sequences[0].token_ids.tolist() == list(b"ef")
    assert _prepare(model, {}, prompt="abc", truncate_prompt_tokens=9).num_prompt_tokens == 3


@pytest.mark.parametrize("kind", ["prompt", "messages"])
def test_text_with_a_token_that_the_model_has_no_row_for_is_refused(model: ServedModel, kind: str) -> None:
    """As of a tokenizer with a token added behind the model's last one. Ids of a client's own are refused likewise."""
    small = dataclasses.replace(model, vocab_size=IM_END)
    messages = pb.Messages(messages=[pb.ChatMessage(role="user", content="abc")])
    given: dict[str, Any] = {"prompt": "abc<|im_end|>"} if kind == "prompt" else {"messages": messages}
    texts = RequestTexts(ServedModels.of(small), TextSettings())
    complaint = rf"^{kind}: got token 258 \('<\|im_end\|>'\); accepted: 0 to 257$"
    with pytest.raises(InvalidRequest, match=complaint):
        texts.prepare(pb.GenerateRequest(**given))
    ids = texts.tokenize(pb.TokenizeRequest(**given)).token_ids
    assert IM_END in ids, "which shows what it is"
    assert "abc" in texts.detokenize(pb.DetokenizeRequest(token_ids=ids)).text
    with pytest.raises(InvalidRequest, match=r"^token_ids: got 9999;"):
        texts.detokenize(pb.DetokenizeRequest(token_ids=[9999]))
    assert texts.prepare(pb.GenerateRequest(prompt="abc<|im_start|>")).token_ids == [*b"abc", IM_START]


def test_a_token_that_is_cut_away_needs_no_row(model: ServedModel) -> None:
    texts = RequestTexts(ServedModels.of(dataclasses.replace(model, vocab_size=IM_END)), TextSettings())
    given = pb.GenerateRequest(prompt="<|im_end|>abc", truncate_prompt_tokens=3)
    assert texts.prepare(given).token_ids == list(b"abc")


def test_a_bad_word_is_one_after_a_space_too_unless_it_begins_with_whitespace(model: ServedModel) -> None:
    words = ["cat", " dog", "\n", "\tx"]
    group = _prepare(model, {"bad_words": words})
    assert {bytes(list(word)) for word in group.bad_words} == {b"cat", b" cat", b" dog", b"\n", b"\tx"}


@pytest.mark.parametrize("legacy", [True, False])
def test_a_bad_word_is_found_where_texts_begin_with_a_space_of_the_tokenizers(model: ServedModel, legacy: bool) -> None:
    """As Llama 2 writes them: "fox" is one token at the begin and after a space, and another after a newline."""
    of_model = (FOLDER / "bpe.model").read_bytes()
    tokenizer = Tokenizer({"tokenizer.json": tokenizer_json(of_model, {"legacy": legacy}, {}).encode()})
    llama = dataclasses.replace(model, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)

    def tokens(text: str) -> str:
        return " ".join(str(tokenizer.token(index)) for index in tokenizer.encode(text, add_special_tokens=False))

    def forbidden(*words: str) -> set[str]:
        group = _prepare(llama, {"bad_words": words})
        return {" ".join(str(tokenizer.token(index)) for index in word) for word in group.bad_words}

    assert (tokens("the fox"), tokens("\nfox")) == ("▁the ▁fox", "▁ <0x0A> fox")
    assert forbidden("fox") == {"▁fox", "fox"}
    assert forbidden(" fox") == {"▁fox"}
    assert forbidden("\n") == {"<0x0A>"}
    assert forbidden("quick fox") == {"▁quick ▁fox", tokens("\nquick fox").removeprefix("▁ <0x0A> ")}


@pytest.mark.parametrize(("of_server", "of_model"), [(3, 20), (20, 3)])
def test_the_lower_limit_of_logprobs_counts(model: ServedModel, of_server: int, of_model: int) -> None:
    model = dataclasses.replace(model, max_logprobs=of_model)
    frontend = Frontend(lambda: ServedModels.of(model), lambda _: None, TextSettings(of_server))
    request = pb.GenerateRequest(prompt="abc", sampling_params=pb.SamplingParams(logprobs=3))
    assert frontend.prepare(request).wants_logprobs
    request.sampling_params.logprobs = 4
    with pytest.raises(InvalidRequest, match=r"sampling_params.logprobs: got 4"):
        frontend.prepare(request)


def test_beams_begin_as_one_sequence_and_end_at_every_end_token(model: ServedModel) -> None:
    group = _prepare(model, {**BEAMS, "n": 2, "best_of": 4, "stop_token_ids": [7, IM_END], "logprobs": 0})
    assert group.uses_beam_search and len(group.sequences) == 1
    assert group.beam_search is not None and group.beam_search.num_candidates == 4 + len({7, IM_END, END_OF_TEXT})
    ignoring = _prepare(model, {**BEAMS, "best_of": 4, "stop_token_ids": [7], "ignore_eos": True})
    assert ignoring.beam_search is not None and ignoring.beam_search.num_candidates == 4 + 1


def test_one_end_token_and_the_others_part_ways_for_all_but_beams(model: ServedModel) -> None:
    group = _prepare(model, {"stop_token_ids": [7, IM_END]})
    assert (group.eos_token_id, group.stop_token_ids) == (IM_END, {7, END_OF_TEXT})
    group = _prepare(model, {"stop_token_ids": [7], "ignore_eos": True})
    assert (group.eos_token_id, group.stop_token_ids) == (None, {7})


@pytest.mark.parametrize(
    ("settings", "num_steps"),
    [
        ({}, 2),  # the best live beam, -1.8 / 2, does not beat the worst hypothesis, -1.7 / 2
        ({"length_penalty": 2}, 8),  # -1.8 / 4 beats the hypothesis that ended in the first step, -0.8
        ({"length_penalty": 2, "early_stopping": pb.EARLY_STOPPING_YES}, 2),
        ({"early_stopping": pb.EARLY_STOPPING_NEVER}, 8),  # -1.8 / 8 could still beat it
    ],
)
def test_length_penalty_early_stopping_and_length_reach_the_search(
    model: ServedModel, settings: dict[str, Any], num_steps: int
) -> None:
    search = _prepare(model, {**BEAMS, "best_of": 2, "max_tokens": 8, **settings}).beam_search
    assert search is not None
    for step in range(1, num_steps + 1):
        assert not search.is_done, f"over before step {step}"
        search.advance([([IM_END, 1, 2, 3], [-0.8, -0.9, -3.0, -4.0])] * search.num_live)
    assert search.is_done


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "greedy outputs would be equal": ({"n": 2, "temperature": 0}, InvalidRequest, "n: got 2; accepted: 1 with temp"),
    "greedy best_of": ({"best_of": 2, "temperature": 0}, InvalidRequest, "best_of: got 2; accepted: 1 with temp"),
    "more than run at once": ({"n": 9}, InvalidRequest, "n: got 9; accepted: 1 to 8"),
    "best_of below n": ({"n": 3, "best_of": 2}, InvalidRequest, "best_of: got 2; accepted: n, which is 3, to 8"),
    "one beam": ({**BEAMS}, InvalidRequest, "best_of: got 1; accepted: at least 2"),
    "beams that draw": ({"use_beam_search": True, "n": 2}, InvalidRequest, "temperature: got 1; accepted: 0"),
    "a beam's length penalty": ({"length_penalty": 2}, InvalidRequest, "length_penalty: got 2; accepted: 1 without"),
    "a long stop string": (
        {"stop": ["a", "b" * 1025]},
        InvalidRequest,
        r"stop\[1\]: got '1025 characters'; accepted: at most 1024 \(the server's --max-stop-string-chars\)",
    ),
    "alternatives of beams": (
        {**BEAMS, "n": 2, "logprobs": 1},
        Unsupported,
        "logprobs: got 1; with use_beam_search .* 0 is accepted",
    ),
    "end tokens of beams": (
        {**BEAMS, "n": 2, "stop_token_ids": [5] * 1025},
        InvalidRequest,
        "stop_token_ids: got '1025 entries'; accepted: at most 1024",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(model: ServedModel, name: str) -> None:
    params, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        _prepare(model, params)


def test_more_beams_than_the_vocabulary_has_tokens_to_go_on_with(model: ServedModel) -> None:
    tiny = dataclasses.replace(model, vocab_size=300, max_num_seqs=128)
    assert _prepare(tiny, {**BEAMS, "n": 8, "stop_token_ids": range(292)}).uses_beam_search
    with pytest.raises(InvalidRequest, match="best_of: got 16; accepted: at most 8"):
        _prepare(tiny, {**BEAMS, "n": 16, "stop_token_ids": range(292)})


def test_what_can_never_fit_is_refused_with_both_numbers(model: ServedModel) -> None:
    with pytest.raises(InvalidRequest, match="need at least 49 blocks of 4: a worker's cache holds 48"):
        _prepare(model, {"n": 7}, prompt="x" * 170)
    with pytest.raises(InvalidRequest, match=r"181 tokens are too many: .* --enable-chunked-prefill .* takes 180"):
        _prepare(model, {}, prompt="x" * 181)


def test_priorities_only_where_they_are_heeded(model: ServedModel) -> None:
    assert _prepare(model, {}, priority=-3, scheduling_policy="priority").priority == -3
    assert _prepare(model, {}, priority=0, scheduling_policy="fair").priority == 0
    with pytest.raises(
        Unsupported, match=r"priority: got 3; .* --scheduling-policy fair, .*--scheduling-policy priority"
    ):
        _prepare(model, {}, priority=3, scheduling_policy="fair")


@pytest.mark.parametrize("request_id", ["\x1b]52;c;eA==\x07", "two\nlines", "\x9b2J", "turned \u202ednuora"])
def test_a_request_id_that_cannot_be_printed_is_refused(model: ServedModel, request_id: str) -> None:
    with pytest.raises(InvalidRequest, match=r"request_id: got '.*\\.*'; accepted: characters that can be printed"):
        _prepare(model, {}, request_id=request_id)


def test_a_request_id_may_be_in_any_language(model: ServedModel) -> None:
    for request_id in ("[/]", "[link=http://x]y", "größe 7", "問い合わせ", "שאלה", "🚀"):
        assert _prepare(model, {}, request_id=request_id).request_id == request_id


def test_a_cache_salt_reaches_the_group_and_is_bounded(model: ServedModel) -> None:
    plain, salted = _prepare(model, {}), _prepare(model, {}, cache_salt="s" * 256)
    assert salted.cache_salt == "s" * 256 and salted.hash_root != plain.hash_root
    with pytest.raises(InvalidRequest, match="cache_salt: got 257 characters; accepted: at most 256"):
        _prepare(model, {}, cache_salt="s" * 257)


def test_logprobs_of_so_many_outputs_that_each_step_has_too_many_are_refused(model: ServedModel) -> None:
    vocab_size, most = 151_936, 27
    served = dataclasses.replace(model, vocab_size=vocab_size, max_logprobs=vocab_size)
    served = dataclasses.replace(served, max_num_seqs=256, max_cached_tokens=10_000)
    frontend = Frontend(lambda: ServedModels.of(served), lambda sequence: None, TextSettings(max_logprobs=-1))

    def prepare(num_outputs: int, num_top: int) -> SequenceGroup:
        params = pb.SamplingParams(logprobs=num_top, n=num_outputs, temperature=1, max_tokens=1)
        request = pb.GenerateRequest(sampling_params=params)
        request.prompt_token_ids.ids.append(65)
        return frontend.prepare(request)

    assert prepare(most, -1).num_outputs == most and prepare(128, 20).num_outputs == 128
    got = (most + 1) * (1 + vocab_size)
    with pytest.raises(
        InvalidRequest, match=f"logprobs: {got} logprobs of 28 outputs for each token; accepted: at most {MAX_LOGPROBS}"
    ):
        prepare(most + 1, -1)


def test_prompt_logprobs_that_no_message_can_bring_are_refused(model: ServedModel) -> None:
    def prepare(num_prompt_tokens: int, num_top: int) -> SequenceGroup:
        request = pb.GenerateRequest(sampling_params=pb.SamplingParams(prompt_logprobs=num_top, max_tokens=1))
        request.prompt_token_ids.ids.extend([65] * num_prompt_tokens)
        served = dataclasses.replace(model, max_model_len=10_000, max_cached_tokens=10_000)
        return Frontend(lambda: ServedModels.of(served), lambda sequence: None).prepare(request)

    assert prepare(MAX_PROMPT_LOGPROBS // 21, 20).awaits_prompt_logprobs
    with pytest.raises(
        InvalidRequest, match="prompt_logprobs: 131082 logprobs of 6242 tokens; accepted: at most 131072"
    ):
        prepare(MAX_PROMPT_LOGPROBS // 21 + 1, 20)


MESSAGES = [pb.ChatMessage(role="user", content="the")]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"prompt": "the"}, " the"),
        ({"prompt_token_ids": pb.TokenIds(ids=[THE])}, " the"),
        ({"messages": pb.Messages(messages=MESSAGES, continue_final_message=True)}, " the"),
        ({"messages": pb.Messages(messages=MESSAGES)}, "the"),
        ({"prompt": "[user] the [assistant]", "is_answer": True}, "the"),
        ({"prompt": "the</s>"}, "the"),
        ({"prompt_token_ids": pb.TokenIds(ids=[1])}, "the"),
    ],
)
def test_the_first_word_has_its_space_where_the_output_continues_a_text(
    model: ServedModel, asked: dict[str, Any], text: str
) -> None:
    """With a tokenizer as Llama 2's, whose `decode` takes it off; also when a text process has taken the prompt out."""
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    tokenizer = Tokenizer(tiny_tokenizers.files_of(tiny_tokenizers.sentencepiece(), chat_template=template))
    models = ServedModels.of(dataclasses.replace(model, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size))
    prepared = RequestTexts(models, TextSettings()).prepare(pb.GenerateRequest(request_id="it", stream=False, **asked))
    group = Frontend(lambda: models, lambda _: None).new_group(decode_prepared(encode_prepared(prepared)), arrival_ns=0)
    group.output.take(group.sequences[0], THE, FinishReason.LENGTH, came_ns=1)
    assert group.output.next_message().outputs[0].text == text


@pytest.mark.parametrize("is_answer", [True, False])
def test_a_resumed_answer_has_the_text_that_it_had(model: ServedModel, is_answer: bool) -> None:
    """As tokens of its prompt do not tell that messages were rendered to them: one more space would complete `stop`."""
    tokenizer = Tokenizer(tiny_tokenizers.files_of(tiny_tokenizers.sentencepiece()))
    models = ServedModels.of(dataclasses.replace(model, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size))
    resumed = pb.ResumedOutput(token_ids=[THE], is_answer=is_answer)
    request = pb.GenerateRequest(
        request_id="it",
        prompt_token_ids=pb.TokenIds(ids=[THE]),
        resume=[resumed],
        sampling_params=pb.SamplingParams(stop=[" the"], temperature=0),
    )
    group = Frontend(lambda: models, lambda _: None).new_group(
        RequestTexts(models, TextSettings()).prepare(request), arrival_ns=0
    )
    list(group.output.catch_up())
    assert group.output.is_finished == (not is_answer)
