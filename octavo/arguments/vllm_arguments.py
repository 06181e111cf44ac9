"""Arguments that vLLM's `LLM` and `SamplingParams` have and Octavo has not: why, and what there is instead.

One that asks for nothing (None, False, 0, "", "auto", an empty list, or what its entry says) may be given; it changes
nothing. Any other is refused by name, so that nothing is ignored which would have changed an answer.
docs/offline-batches.md is made from these tables, and tests/test_vllm_arguments.py holds them to vLLM's own names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

VERSION = "0.33"  # of vLLM; names of its first versions are here, too


# Arguments of `LLM` that both have under one name.
SAME_NAMES = (
    "model tokenizer tokenizer_mode trust_remote_code download_dir load_format dtype quantization kv_cache_dtype seed "
    "max_model_len max_num_seqs max_num_batched_tokens max_logprobs block_size enable_prefix_caching "
    "enable_chunked_prefill gpu_memory_utilization swap_space enforce_eager scheduling_policy scheduler_delay_factor "
    "preemption_mode served_model_name model_impl device max_loras log_level disable_log_stats tensor_parallel_size "
    "pipeline_parallel_size enable_expert_parallel enable_lora max_lora_rank max_cpu_loras"
)
# And what stands for one that Octavo has not.
INSTEAD = {
    "revision": '`model="OWNER/NAME@REVISION"`, of the hub',
    "kv_cache_memory_bytes": "`kv_cache_memory`, in GiB",
}
SECRETS = frozenset({"hf_token"})  # never quoted
# What says the same in other words, by option.
SAME_VALUES: dict[str, dict[Any, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": {"hf": "auto", "pt": "bin"},
    "max_model_len": {-1: "auto"},
    "quantization": dict.fromkeys(  # a checkpoint says itself how it is quantised
        ("gguf", "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors"), "none"
    ),
    "tokenizer_mode": {"hf": "auto"},
}


class Elsewhere(NamedTuple):
    """Names with one reason between them; one that ends in * stands for all that begin so."""

    names: str  # separated by spaces
    reason: str  # what is missing here, and what to do instead
    asks_for_nothing: tuple[Any, ...] = ()  # beside what does so under any name
    any_value: bool = False  # whether each value asks for nothing that could change an answer

    def holds(self, name: str) -> bool:
        """Whether it speaks of this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.names.split())


OF_LLM = (
    Elsewhere(
        "data_parallel_size nnodes prefill_context_parallel_size decode_context_parallel_size",
        "the ranks of a worker share one copy of the model; `octavo serve --workers N` serves from several",
        asks_for_nothing=(1, "1"),
    ),
    Elsewhere(
        "data_parallel_* node_rank master_* device_ids numa_bind* "
        "enable_eplb eplb_config enable_elastic_ep elastic_ep_* enable_dbo ubatch_size dbo_* "
        "enable_batch_sharded_sampling enable_hc_sp enable_ep_weight_filter expert_placement_strategy dcp_* cp_* "
        "dp_sync_interval disable_nccl_for_dp_synchronization enable_fault_tolerance fault_tolerance_config",
        "a worker's ranks are of one machine here; `octavo serve --workers N` serves from several; taskset and "
        "numactl choose cores",
    ),
    Elsewhere(
        "distributed_executor_backend worker_use_ray engine_use_ray",
        "the worker is one process of this machine, or one for each rank",
        asks_for_nothing=("mp", "uni"),
    ),
    Elsewhere(
        "lora_* default_mm_loras fully_sharded_loras enable_lora_bias "
        "long_lora_scaling_factors enable_prompt_adapter max_prompt_adapter* qlora_adapter_name_or_path "
        "enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras "
        "max_lora_cls_labels",
        "adapters are LoRA's, of attention and MLP, in the model's type or float32",
        asks_for_nothing=(256,),
    ),
    Elsewhere(
        "speculative_* spec_* num_speculative_tokens ngram_prompt_lookup_* typical_acceptance_sampler_* "
        "disable_logprobs_during_spec_decoding per_request_spec_decode_metrics",
        "there is no speculative decoding; outputs are the same without it",
        asks_for_nothing=("rejection_sampler",),
    ),
    Elsewhere(
        "guided_decoding_backend structured_outputs_config",
        "there is no guided decoding yet: a request for it is refused",
        any_value=True,
    ),
    Elsewhere("reasoning_*", "what a model thinks is a part of its text"),
    Elsewhere(
        "runner convert task pooler_config override_pooler_config",
        "models here generate text, and give no embeddings or classes",
        asks_for_nothing=("generate", "none"),
    ),
    Elsewhere(
        "hf_overrides hf_config_path config_format model_class_overrides rope_scaling rope_theta "
        "disable_sliding_window",
        "a model is what its config.json says: change it in a copy of the folder",
        asks_for_nothing=("hf",),
    ),
    Elsewhere(
        "generation_config override_generation_config",
        "defaults are Octavo's own, whatever the model suggests: give SamplingParams",
        asks_for_nothing=("vllm",),
    ),
    Elsewhere("chat_template", "give it to `LLM.chat`, as chat_template"),
    Elsewhere(
        "hf_token",
        "set the variable HF_TOKEN, or log in with `hf auth login`",
        asks_for_nothing=(True,),
    ),
    Elsewhere("tokenizer_revision code_revision", "name it in `tokenizer` or `model`: OWNER/NAME@REVISION"),
    Elsewhere("skip_tokenizer_init tokens_only", "the tokenizer is always loaded; `detokenize=False` saves its work"),
    Elsewhere("enable_prompt_embeds", "models here begin with token ids"),
    Elsewhere("quantization_config", "weights are as the checkpoint has them; quantization takes int8, int4 and fp8"),
    Elsewhere("cpu_offload_gb cpu_offload_params offload_*", "weights stay on one device: use a smaller model or type"),
    Elsewhere(
        "kv_offloading_* kv_transfer_config kv_events_config ec_transfer_config ec_manager_config",
        "blocks of the cache move to this machine's memory alone: swap_space says how much",
        asks_for_nothing=("native",),
    ),
    Elsewhere("num_gpu_blocks_override", "kv_cache_memory says how large the cache is, in GiB"),
    Elsewhere(
        "logits_processors logits_processor_pattern", "logit_bias, allowed_token_ids and bad_words are what there is"
    ),
    Elsewhere("logprobs_mode", "logprobs are of the model's own logits", asks_for_nothing=("raw_logprobs",)),
    Elsewhere("scheduler_cls worker_cls worker_extension_cls", "classes of vLLM have no place here"),
    Elsewhere(
        "collect_detailed_traces profiler_config show_hidden_metrics_for_version "
        "kv_cache_metrics* cudagraph_metrics custom_histogram_buckets enable_layerwise_nvtx_tracing enable_mfu_metrics "
        "enable_mm_processor_stats",
        "`LLM.statistics` and each output's `metrics` are what is measured",
    ),
    Elsewhere("otlp_traces_endpoint", "requests of a server are traced: `octavo serve` has the option"),
    Elsewhere("enable_sleep_mode", "shut the LLM down, and make another"),
    Elsewhere("max_num_active_seqs max_num_scheduled_tokens", "max_num_seqs and max_num_batched_tokens bound a step"),
    Elsewhere("max_num_queued_*", "max_waiting_requests and max_waiting_tokens bound the queue"),
    Elsewhere("logging_config log_config_file", "log_level and disable_log_stats say what is logged"),
    Elsewhere(
        "enable_return_routed_experts return_sampling_mask enable_trace_replay model_weights weight_transfer_config "
        "aux_output_config watermark_config diffusion_config engram_config additional_config "
        "kv_cache_dtype_skip_layers kv_sharing_fast_prefill enable_cumem_allocator sleep_*",
        "there is nothing of the kind here",
    ),
    Elsewhere(
        "allowed_local_media_path allowed_media_domains limit_mm_per_prompt mm_* media_io_kwargs interleave_mm_strings "
        "language_model_only enable_mm_embeds video_pruning_* skip_mm_profiling disable_mm_preprocessor_cache "
        "disable_chunked_mm_input io_processor_plugin",
        "models here read text alone",
        any_value=True,
    ),
    Elsewhere(
        "disable_custom_all_reduce disable_async_output_proc async_scheduling use_v2_block_manager num_lookahead_slots "
        "max_seq_len_to_capture max_context_len_to_capture max_parallel_loading_workers ray_workers_use_nsight "
        "compilation_config cudagraph_capture_sizes max_cudagraph_capture_size optimization_level performance_mode "
        "attention_config kernel_config use_tqdm_on_load num_scheduler_steps "
        "multi_step_stream_outputs tokenizer_pool_* renderer_num_workers disable_cascade_attn "
        "disable_hybrid_kv_cache_manager prefix_caching_hash_algo stream_interval max_num_partial_prefills "
        "max_long_partial_prefills long_prefill_token_threshold safetensors_* model_loader_extra_config "
        "ignore_patterns enable_flashinfer_autotune *_backend ir_op_priority monokernel use_fp64_gumbel watermark "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds dcp_comm_backend enable_shm_tensor_arena "
        "aggregate_engine_logging allow_deprecated_quantization scheduler_reserve_full_isl prefill_schedule_interval "
        "prefix_cache_retention_interval prefix_match_unit long_prefill_token_threshold_adaptive jit_monitor_* "
        "enable_logging_iteration_details enable_nccl_comm_suspend *mamba_* *replayssm* swa_bounded_replay "
        "pt_load_map_location shutdown_timeout watchdog_config fail_on_environ_validation _api_process_*",
        "how vLLM computes; here the device decides",
        any_value=True,
    ),
)  # fmt: skip

OF_SAMPLING = (
    Elsewhere(
        "structured_outputs guided_decoding",
        "there is no guided decoding yet: allowed_token_ids and bad_words are what there is; check what comes, and ask "
        "again",
    ),
    Elsewhere("logits_processors extra_args", "logit_bias, allowed_token_ids and bad_words are what there is"),
    Elsewhere("truncate_prompt_tokens", "give prompt_token_ids of that length"),
    Elsewhere(
        "logprob_token_ids prompt_logprob_token_ids prompt_logprob_start flat_logprobs",
        "logprobs and prompt_logprobs are of the likeliest tokens, in dicts",
    ),
    Elsewhere("output_kind", "`LLM` gives whole outputs, `LLMEngine.step` what there is so far, `Client` what is new"),
    Elsewhere("skip_reading_prefix_cache", 'a prompt with a `cache_salt` of its own shares nothing'),
    Elsewhere("thinking_token_budget repetition_detection", "max_tokens and stop are what ends an output"),
    Elsewhere("watermarking routed_experts_prompt_start trace_decode_token_ids", "it is not here"),
    Elsewhere("stream_interval skip_clone output_text_buffer_length", "how vLLM works inside", any_value=True),
)  # fmt: skip


METHODS = (
    Elsewhere("embed encode score classify reward", "models here generate text, and give no embeddings or classes"),
    Elsewhere("llm_engine model_config", "`LLMEngine` steps by itself; `get_tokenizer` has the tokenizer"),
    Elsewhere("sleep wake_up", "shut it down, and make another"),
    Elsewhere("get_metrics start_profile stop_profile", "`statistics` and `metrics` of outputs say what is measured"),
    Elsewhere("collective_rpc apply_model", "the model is in a process of its own"),
    Elsewhere("enqueue enqueue_chat wait_for_completion", "`generate` takes many prompts, from many threads"),
)  # fmt: skip


def why_missing(name: str) -> str:
    """The end of a sentence that says what vLLM's `LLM` has by this name and Octavo's has not."""
    return next((f": {each.reason}" for each in METHODS if each.holds(name)), "")


def in_own_words(model: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The model and the options of an `LLM`, with Octavo's names and values where vLLM's say the same.

    Raises ValueError for what nothing here stands for.

    >>> in_own_words("OWNER/NAME", {"revision": "main", "kv_cache_memory_bytes": 1 << 30, "dtype": "half"})
    ('OWNER/NAME@main', {'dtype': 'float16', 'kv_cache_memory': 1.0})
    """
    own = {}
    for name, value in options.items():
        same = SAME_VALUES.get(name, {})
        try:
            if reason := refused(name, value, OF_LLM):
                raise ValueError(reason)
        except KeyError:
            own[name] = same.get(value, value) if isinstance(value, (str, int)) else value
    if (revision := own.pop("revision", None)) is not None:
        model = _with_revision(model, revision)
    if (num_bytes := own.pop("kv_cache_memory_bytes", None)) is not None:
        if isinstance(num_bytes, bool) or not isinstance(num_bytes, int):
            raise ValueError(f"kv_cache_memory_bytes: got {num_bytes!r}; accepted: a whole number")
        own["kv_cache_memory"] = num_bytes / (1 << 30)
    if (quantization := own.get("quantization")) not in (None, "", "none", "int8", "int4", "int4-128", "fp8"):
        instead = "'int8' and 'int4' are for CPUs, 'fp8' is for GPUs; what a checkpoint is quantised as needs no option"
        raise ValueError(f"quantization: got {quantization!r}; {instead}")
    return model, own


def _with_revision(model: str, revision: Any) -> str:
    from octavo.models.hub_cache import HubName

    name = None if Path(model).exists() else HubName.parse(model)
    if isinstance(revision, str) and name is not None and name.revision is None:
        named = dataclasses.replace(name, revision=revision)
        if HubName.parse(str(named)) == named:
            return str(named)
    raise ValueError(f"revision: got {revision!r}; accepted: text, where the model is OWNER/NAME of the hub")


def refused(name: str, value: Any, table: tuple[Elsewhere, ...]) -> str | None:
    """Why this argument is not taken, in one line; None where it asks for nothing.

    Raises KeyError for a name that no entry speaks of.

    >>> refused("enable_lora_bias", False, OF_LLM)
    >>> refused("enable_lora_bias", True, OF_LLM)
    "enable_lora_bias: got True; adapters are LoRA's, of attention and MLP, in the model's type or float32"
    """
    found = next((each for each in table if each.holds(name)), None)
    if found is None:
        raise KeyError(name)
    if found.any_value or _is_nothing(value) or _is_one_of(value, found.asks_for_nothing):
        return None
    text = repr(value)
    shows = len(text) <= 60 and name not in SECRETS
    return f"{name}: got {text if shows else f'a {type(value).__name__}'}; {found.reason}"


def takes_arguments_of_vllm(cls: type[T]) -> type[T]:
    """A class decorator: the names of `OF_SAMPLING` may be given, and are refused where they ask for anything."""
    takes: Callable[..., None] = cls.__init__

    @functools.wraps(takes)
    def __init__(self: Any, *arguments: Any, **fields: Any) -> None:
        takes(self, *arguments, **_without_those_of_vllm(fields))

    cls.__init__ = __init__  # type: ignore[method-assign]  # the same arguments, and some more
    return cls


def _without_those_of_vllm(fields: Mapping[str, Any]) -> dict[str, Any]:
    own = {}
    for name, value in fields.items():
        try:
            reason = refused(name, value, OF_SAMPLING)
        except KeyError:
            own[name] = value
            continue
        if reason:
            raise ValueError(reason)
    return own


def _is_nothing(value: Any) -> bool:
    return (
        value is None
        or value == "auto"
        or (isinstance(value, (bool, int, float, str, list, tuple, dict)) and not value)
    )


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(each) and value == each for each in values)
