"""Arguments as scripts for vLLM give them: each is taken, or refused by name with a reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo import BeamSearchParams, SamplingParams
from octavo.arguments.vllm_arguments import INSTEAD, OF_LLM, OF_SAMPLING, SAME_NAMES, Elsewhere
from octavo.embedded.options import NOT_EMBEDDED, read_options
from octavo.shared.options import OptionError
from scheduler_svc.config import SchedulerConfig
from tests import vllm_names
from worker_svc.config import WorkerConfig

OWN = {field.name for cls in (WorkerConfig, SchedulerConfig) for field in dataclasses.fields(cls)} - NOT_EMBEDDED
FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}


LLM_NAMES = {*vllm_names.OF_LLM.split(), *vllm_names.OF_EARLY_LLM.split(), *vllm_names.DEFAULTS}
SAMPLING_NAMES = {*vllm_names.OF_SAMPLING.split(), *vllm_names.OF_EARLY_SAMPLING.split()}


def holders(name: str, table: tuple[Elsewhere, ...]) -> list[Elsewhere]:
    return [each for each in table if each.holds(name)]


def test_every_argument_of_vllms_llm_is_the_same_or_translated_or_has_a_reason() -> None:
    same = set(SAME_NAMES.split())
    assert same == LLM_NAMES & OWN and INSTEAD.keys() <= LLM_NAMES
    assert [name for name in LLM_NAMES - OWN - INSTEAD.keys() if not holders(name, OF_LLM)] == []
    assert [name for name in LLM_NAMES & OWN | INSTEAD.keys() if holders(name, OF_LLM)] == []


def test_every_field_of_vllms_sampling_is_the_same_or_has_a_reason() -> None:
    assert [name for name in SAMPLING_NAMES - FIELDS if not holders(name, OF_SAMPLING)] == []
    assert [name for name in FIELDS if holders(name, OF_SAMPLING)] == []


@pytest.mark.parametrize(
    ("table", "names"), [(OF_LLM, LLM_NAMES), (OF_SAMPLING, SAMPLING_NAMES)], ids=["LLM", "sampling"]
)
def test_no_name_is_made_up(table: tuple[Elsewhere, ...], names: set[str]) -> None:
    patterns = [Elsewhere(pattern, "") for each in table for pattern in each.names.split()]
    assert [each.names for each in patterns if not any(map(each.holds, names))] == []


def test_what_vllm_gives_where_a_script_gives_nothing_is_taken() -> None:
    assert read_options("tiny", vllm_names.DEFAULTS) == read_options("tiny", {})


def test_a_part_of_vllms_own_works_is_taken_and_changes_nothing() -> None:
    taken = {"max_seq_len_to_capture": 4096, "compilation_config": {"level": 3}, "limit_mm_per_prompt": {"image": 2}}
    assert read_options("tiny", taken | {"distributed_executor_backend": "mp"}) == read_options("tiny", {})


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}),
        ({"max_model_len": -1}, {"max_model_len": "auto"}),
        ({"quantization": "gguf", "load_format": "hf"}, {}),
        ({"quantization": "awq_marlin"}, {}),
        ({"kv_cache_memory_bytes": 1 << 29}, {"kv_cache_memory": 0.5}),
        ({"hf_token": True, "runner": "generate"}, {}),
    ],
    ids=str,
)
def test_what_says_the_same_is_read_so(given: dict[str, Any], same: dict[str, Any]) -> None:
    assert read_options("tiny", given) == read_options("tiny", same)


def test_a_revision_is_a_part_of_the_models_name(tmp_path: Path) -> None:
    assert read_options("OWNER/NAME", {"revision": "v1"}).worker.model == "OWNER/NAME@v1"
    assert read_options("OWNER/NAME:Q4_K_M", {"revision": "v1"}).worker.model == "OWNER/NAME@v1:Q4_K_M"
    for revision in ("a:b", "a b", "", 1):
        with pytest.raises(OptionError, match=r"revision: got .*; accepted: text"):
            read_options("OWNER/NAME", {"revision": revision})
    for model in (str(tmp_path), "tiny", "OWNER/NAME@v2"):
        with pytest.raises(OptionError, match=r"revision: got 'v1'; accepted: text, where the model is OWNER/NAME"):
            read_options(model, {"revision": "v1"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora_bias": True}, "enable_lora_bias: got True; adapters are LoRA's, of attention and MLP"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config: got {'method': 'ngram'}; there is no spec"),
        ({"quantization": "bitsandbytes"}, "quantization: got 'bitsandbytes'; 'int8' and 'int4' are for CPUs"),
        ({"hf_token": "secret"}, "hf_token: got a str; set the variable HF_TOKEN"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb: got 4; weights stay on one device"),
        ({"task": "embed"}, "task: got 'embed'; models here generate text"),
        ({"data_parallel_size": 2}, "data_parallel_size: got 2; the ranks of a worker share one copy"),
        ({"hf_overrides": {"a": "b" * 80}}, "hf_overrides: got a dict; a model is what its config.json says"),
        ({"kv_cache_memory_bytes": "4G"}, "kv_cache_memory_bytes: got '4G'; accepted: a whole number"),
    ],
    ids=str,
)
def test_what_is_not_here_is_named_with_a_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        read_options("tiny", options)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


def test_fields_of_vllms_sampling_that_ask_for_nothing_are_taken() -> None:
    nothing: dict[str, Any] = {
        "guided_decoding": None,
        "structured_outputs": None,
        "extra_args": {},
        "skip_clone": True,
    }
    assert SamplingParams(temperature=0.5, **nothing) == SamplingParams(temperature=0.5)
    assert SamplingParams(temperature=0.5, **nothing).clone(top_k=3) == SamplingParams(temperature=0.5, top_k=3)
    assert BeamSearchParams(2, 8, **nothing) == BeamSearchParams(2, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"structured_outputs": SimpleNamespace(json={})},
            "structured_outputs: got namespace(json={}); there is no guid",
        ),
        ({"guided_decoding": {"choice": ["a"]}}, "guided_decoding: got {'choice': ['a']}; there is no guided decoding"),
        ({"logits_processors": [abs]}, "logits_processors: got [<built-in function abs>]; logit_bias, allowed_token"),
        ({"thinking_token_budget": 5}, "thinking_token_budget: got 5; max_tokens and stop"),
    ],
    ids=["structured_outputs", "guided_decoding", "logits_processors", "thinking_token_budget"],
)
def test_fields_that_ask_for_what_is_not_here_are_named_with_a_reason(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        SamplingParams(**fields)
    assert str(raised.value).startswith(message)


def test_a_field_that_nobody_has_is_still_an_error() -> None:
    unknown: dict[str, Any] = {"temprature": 1}
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(**unknown)
