"""Every row of the SamplingParams table: what is accepted, what is refused, and that both forms say the same."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from octavo.sampling_params import SamplingLimits, SamplingParams, Violation, validate
from protos import inference_pb2 as pb

LIMITS = SamplingLimits(vocab_size=1000, max_num_seqs=64, max_model_len=2048, max_logprobs=20)
NAN, INF = math.nan, math.inf

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"n": 1, "best_of": 64},
    {"n": 64},
    {"temperature": 0},
    {"temperature": 2, "top_p": 1, "top_k": -1, "min_p": 1},
    {"top_p": 1e-6, "top_k": 0},
    {"top_k": 10**6},
    {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.01},
    {"seed": 0},
    {"seed": 2**64 - 1},
    {"stop": ["a"] * 16},
    {"stop_token_ids": [0, 999]},
    {"max_tokens": 1, "min_tokens": 1},
    {"min_tokens": 2048},
    {"max_tokens": 10**6},
    {"logprobs": 0, "prompt_logprobs": 20},
    {"logit_bias": {999: 100, 0: -100}},
    {"logit_bias": {i: 1 for i in range(1000)}},
    {"allowed_token_ids": list(range(1000)), "bad_words": ["no"]},
    {"bad_words": ["é" * 1024] * 32},
    {"bad_words": ["x" * 64] * 1024},
    {"stop_token_ids": [1] * 1024},
    {"use_beam_search": True, "best_of": 2, "temperature": 0, "length_penalty": 0, "early_stopping": 2},
    {"use_beam_search": True, "n": 4, "temperature": 0},
    {"guided": pb.GuidedDecoding(json_object=True)},
    {"guided": pb.GuidedDecoding(choice=pb.GuidedDecoding.Choice(choices=["yes", "no"]))},
    {"detokenize": False},
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 65}, "best_of"),
    ({"best_of": 2, "temperature": 0}, "best_of"),
    ({"n": 2, "temperature": 0}, "n"),
    *(({"temperature": value}, "temperature") for value in (-0.01, 2.01, NAN, INF, -INF)),
    *(({"top_p": value}, "top_p") for value in (0, -1, 1.01, NAN)),
    ({"top_k": -2}, "top_k"),
    *(({"min_p": value}, "min_p") for value in (-0.01, 1.01, NAN)),
    *(({"presence_penalty": value}, "presence_penalty") for value in (-2.01, 2.01, NAN)),
    *(({"frequency_penalty": value}, "frequency_penalty") for value in (-2.01, 2.01, NAN)),
    *(({"repetition_penalty": value}, "repetition_penalty") for value in (0, -1, 0.0099, 101)),
    *(({"stop_token_ids": [1] * count}, "stop_token_ids") for count in (1025,)),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"], "detokenize": False}, "stop"),
    ({"stop_token_ids": [1000]}, "stop_token_ids"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ({"min_tokens": 2049}, "min_tokens"),
    *(({name: value}, name) for name in ("logprobs", "prompt_logprobs") for value in (-2, -1, 21)),
    ({"logit_bias": {1000: 1}}, "logit_bias"),
    *(({"logit_bias": {7: value}}, "logit_bias[7]") for value in (100.1, -100.1, NAN, INF)),
    ({"allowed_token_ids": [1000]}, "allowed_token_ids"),
    ({"bad_words": ["x", ""]}, "bad_words[1]"),
    ({"bad_words": ["x"] * 1025}, "bad_words"),
    ({"bad_words": ["x", "é" * 1025]}, "bad_words[1]"),
    ({"bad_words": ["é" * 1000] * 33}, "bad_words"),
    ({"use_beam_search": True, "temperature": 0}, "best_of"),
    ({"use_beam_search": True, "best_of": 2}, "temperature"),
    ({"use_beam_search": True, "best_of": 2, "temperature": 0, "early_stopping": 3}, "early_stopping"),
    ({"use_beam_search": True, "best_of": 2, "temperature": 0, "length_penalty": NAN}, "length_penalty"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"early_stopping": pb.EARLY_STOPPING_YES}, "early_stopping"),
    ({"guided": pb.GuidedDecoding()}, "guided"),
    ({"guided": pb.GuidedDecoding(regex="")}, "guided.regex"),
    ({"guided": pb.GuidedDecoding(json_object=False)}, "guided.json_object"),
    ({"guided": pb.GuidedDecoding(choice=pb.GuidedDecoding.Choice())}, "guided.choice"),
    ({"guided": pb.GuidedDecoding(choice=pb.GuidedDecoding.Choice(choices=["a", ""]))}, "guided.choice"),
]


FLOATS = [field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.cpp_type == field.CPPTYPE_FLOAT]
OF_BEAMS = {"use_beam_search": True, "best_of": 2, "temperature": 0}


@pytest.mark.parametrize("value", [1e-45, -1e-45, 1e-38, 1e38, -1e38, INF, -INF, NAN, -0.0], ids=str)
@pytest.mark.parametrize("field", [*FLOATS, "logit_bias[7]"])
def test_numbers_at_the_edges_of_float32(field: str, value: float) -> None:
    """Refused wherever they are neither 0 nor a normal number of the field's range; what is left harms nobody."""
    fields: dict[str, Any] = dict(OF_BEAMS) if field == "length_penalty" else {}
    fields |= {"logit_bias": {7: value}} if field == "logit_bias[7]" else {field: value}
    is_harmless = (abs(value) < 1e-30 and field in HARMLESS) or (value == 0 and field in ("temperature", "min_p"))
    violations = validate(pb.SamplingParams(**fields), LIMITS)
    assert [violation.field for violation in violations] == ([] if is_harmless else [field])


HARMLESS = ("presence_penalty", "frequency_penalty", "length_penalty", "logit_bias[7]")  # added, or an exponent


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_accepted(fields: dict[str, Any]) -> None:
    assert validate(pb.SamplingParams(**fields), LIMITS) == []


@pytest.mark.parametrize(("fields", "field"), REFUSED, ids=str)
def test_refused_naming_field_value_and_what_is_accepted(fields: dict[str, Any], field: str) -> None:
    violations = validate(pb.SamplingParams(**fields), LIMITS)
    assert [violation.field for violation in violations] == [field]
    assert violations[0].accepted


def test_all_violations_are_reported_at_once() -> None:
    params = pb.SamplingParams(temperature=3, top_p=0, stop=[""], max_tokens=0)
    assert [v.field for v in validate(params, LIMITS)] == ["temperature", "top_p", "max_tokens", "stop[0]"]


def test_too_many_token_entries() -> None:
    limits = SamplingLimits(vocab_size=5000)
    params = pb.SamplingParams(logit_bias={i: 0 for i in range(1025)}, allowed_token_ids=range(1025))
    assert [v.field for v in validate(params, limits)] == ["logit_bias", "allowed_token_ids"]


def test_whole_vocabulary_logprobs_where_the_server_allows_them() -> None:
    limits = SamplingLimits(vocab_size=1000, max_logprobs=-1)
    assert validate(pb.SamplingParams(logprobs=-1, prompt_logprobs=1000), limits) == []
    assert [v.field for v in validate(pb.SamplingParams(logprobs=1001), limits)] == ["logprobs"]


def test_violation_reads_as_one_line() -> None:
    assert str(Violation("top_k", -2, "0 or more")) == "top_k: got -2; accepted: 0 or more"


def test_unset_fields_stay_unset_and_zero_is_sent() -> None:
    assert SamplingParams().to_proto() == pb.SamplingParams()
    message = SamplingParams(temperature=0, min_tokens=0, logprobs=0, seed=0).to_proto()
    assert message.HasField("temperature") and message.HasField("logprobs") and message.HasField("seed")
    assert not message.HasField("min_tokens")


def test_the_wire_form_has_every_field() -> None:
    given: dict[str, Any] = dict(
        n=2, best_of=3, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, seed=2**63, stop_token_ids=[1, 2], ignore_eos=True, include_stop_str_in_output=True,
        skip_special_tokens=False, spaces_between_special_tokens=False, max_tokens=9, min_tokens=2, logprobs=3,
        prompt_logprobs=0, logit_bias={4: -0.5}, allowed_token_ids=[5], bad_words=["x"],
    )  # fmt: skip
    guide = pb.GuidedDecoding(choice=pb.GuidedDecoding.Choice(choices=["a", "b"]))
    expected = pb.SamplingParams(stop=["end"], guided=guide, **given)
    assert SamplingParams(stop="end", guided={"choice": ("a", "b")}, **given).to_proto() == expected
    of_beams: dict[str, Any] = dict(n=2, temperature=0, use_beam_search=True, length_penalty=2, detokenize=False)
    expected_of_beams = pb.SamplingParams(early_stopping=pb.EARLY_STOPPING_NEVER, **of_beams)
    assert SamplingParams(early_stopping="never", **of_beams).to_proto() == expected_of_beams
    sent = {field.name for message in (expected, expected_of_beams) for field, _ in message.ListFields()}
    assert sent == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("given", "kept"),
    [(True, "YES"), (False, "NO"), (None, "NO"), ("never", "NEVER"), ("YES", "YES"), ("no", "NO")],
)
def test_early_stopping_is_what_transformers_calls_it_as_well(given: Any, kept: str) -> None:
    params = SamplingParams(use_beam_search=True, best_of=2, temperature=0, early_stopping=given)
    assert params.early_stopping == kept
    assert pb.EarlyStopping.Name(params.to_proto().early_stopping) == f"EARLY_STOPPING_{kept}"


def test_none_is_the_default_of_every_field() -> None:
    unset: dict[str, Any] = dict.fromkeys(SamplingParams.__dataclass_fields__)
    assert SamplingParams(**unset) == SamplingParams()


def test_one_text_is_a_list_of_it() -> None:
    params = SamplingParams(stop="end", bad_words="never")
    assert (params.stop, params.bad_words) == (("end",), ("never",))


def test_every_field_of_the_wire_form_has_its_name_in_python() -> None:
    names = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert names == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 3}, "temperature: got 3"),
        ({"n": -1}, "n: got -1"),
        ({"n": "two"}, "n: got 'two'"),
        ({"seed": 2**64}, "seed: got"),
        ({"early_stopping": "MAYBE"}, "NO, YES, NEVER"),
        ({"guided": {}}, "one of json_schema"),
        ({"guided": {"rhyme": "x"}}, "one of json_schema"),
        ({"guided": {"regex": 3}}, "guided: got"),
        ({"stop": [3]}, "stop: got"),
        ({"stop": 3}, "stop: got 3; accepted: a list"),
        ({"stop_token_ids": 3}, "stop_token_ids: got 3; accepted: a list"),
        ({"stop_token_ids": "3"}, "stop_token_ids: got '3'; accepted: a list"),
        ({"allowed_token_ids": []}, r"allowed_token_ids: got \[\]; accepted: at least one"),
        ({"allowed_token_ids": ()}, r"allowed_token_ids: got \[\]; accepted: at least one"),
        ({"early_stopping": 2}, "NO, YES, NEVER, True, False"),
    ],
    ids=str,
)
def test_python_form_refuses_what_no_server_accepts(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**fields)


def test_whoever_changes_one_is_told_of_clone() -> None:
    params = SamplingParams()
    with pytest.raises(AttributeError, match=r"cannot be changed; params.clone\(max_tokens=8\) is a changed copy"):
        setattr(params, "max_tokens", 8)  # noqa: B010 - a checker of types knows that it cannot be
    assert params == SamplingParams() and hash(params) == hash(SamplingParams())


def test_a_clone_differs_where_it_is_told_to_and_is_checked() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={3: 1.0}, early_stopping=False, seed=7)
    assert params.clone() == params and params.clone().to_proto() == params.to_proto()
    changed = params.clone(temperature=0, stop="b", seed=None)
    assert (changed.temperature, changed.stop, changed.seed, changed.logit_bias) == (0, ("b",), None, {3: 1.0})
    assert params.temperature == 0.5, "it is as it was"
    with pytest.raises(ValueError, match="top_p: got 2"):
        params.clone(top_p=2)
    with pytest.raises(TypeError, match="topp"):
        params.clone(topp=1)
