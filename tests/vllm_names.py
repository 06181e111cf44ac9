"""Names of arguments that scripts for vLLM use, separated by spaces, and what some of them are by default."""

from __future__ import annotations

from typing import Any

OF_LLM = """
    model enable_return_routed_experts return_sampling_mask model_weights served_model_name tokenizer hf_config_path
    runner convert skip_tokenizer_init enable_prompt_embeds tokenizer_mode trust_remote_code
    allowed_local_media_path allowed_media_domains download_dir safetensors_load_strategy
    safetensors_prefetch_num_threads safetensors_prefetch_block_size load_format config_format dtype kv_cache_dtype
    seed max_model_len cudagraph_capture_sizes max_cudagraph_capture_size ir_op_priority
    distributed_executor_backend pipeline_parallel_size master_addr master_port nnodes node_rank
    distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids
    tensor_parallel_size prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend dcp_q_replicate
    dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_size data_parallel_rank
    data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
    data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend
    enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter moe_backend
    linear_backend sparse_indexer_topk_backend all2all_backend enable_elastic_ep elastic_ep_max_dp_size enable_dbo
    ubatch_size dbo_decode_token_threshold dp_sync_interval dbo_prefill_token_threshold
    disable_nccl_for_dp_synchronization eplb_config enable_eplb expert_placement_strategy _api_process_count
    _api_process_rank max_parallel_loading_workers block_size enable_prefix_caching prefix_caching_hash_algo
    prefix_cache_retention_interval disable_sliding_window disable_cascade_attn offload_backend cpu_offload_gb
    cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step offload_params
    gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens max_num_scheduled_tokens
    long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_seqs max_num_active_seqs
    max_num_queued_reqs max_num_queued_tokens max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay
    disable_log_stats aggregate_engine_logging revision code_revision hf_token hf_overrides model_class_overrides
    tokenizer_revision quantization quantization_config allow_deprecated_quantization enforce_eager
    disable_custom_all_reduce enable_shm_tensor_arena language_model_only limit_mm_per_prompt enable_mm_embeds
    interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type
    mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
    mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
    io_processor_plugin renderer_num_workers skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc
    mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize enable_lora max_loras max_lora_rank
    default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules enable_tower_connector_lora
    specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels
    ray_workers_use_nsight num_gpu_blocks_override model_loader_extra_config ignore_patterns enable_chunked_prefill
    disable_chunked_mm_input scheduler_reserve_full_isl prefill_schedule_interval watermark
    disable_hybrid_kv_cache_manager structured_outputs_config aux_output_config reasoning_parser
    reasoning_parser_plugin speculative_config spec_method spec_model spec_tokens watermark_config diffusion_config
    show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics
    kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics
    enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode
    jit_monitor_verbose enable_mm_processor_stats scheduling_policy scheduler_cls pooler_config compilation_config
    attention_config engram_config mamba_config kernel_config enable_flashinfer_autotune monokernel worker_cls
    worker_extension_cls profiler_config logging_config log_level log_config_file kv_transfer_config
    kv_events_config ec_transfer_config ec_manager_config reasoning_config generation_config enable_sleep_mode
    sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator
    enable_nccl_comm_suspend override_generation_config model_impl attention_backend kv_cache_dtype_skip_layers
    mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size prefix_match_unit mamba_cache_mode
    enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_backend mamba_ssu_algorithm
    enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds additional_config use_tqdm_on_load
    pt_load_map_location logits_processors async_scheduling stream_interval kv_sharing_fast_prefill
    swa_bounded_replay optimization_level performance_mode fault_tolerance_config enable_fault_tolerance
    kv_offloading_size kv_offloading_backend tokens_only shutdown_timeout watchdog_config weight_transfer_config
    fail_on_environ_validation gdn_prefill_backend kda_prefill_backend kda_decode_backend
"""  # of `EngineArgs`, 0.33.0
OF_EARLY_LLM = """
    task use_v2_block_manager swap_space rope_scaling rope_theta max_seq_len_to_capture tokenizer_pool_size
    tokenizer_pool_type tokenizer_pool_extra_config disable_mm_preprocessor_cache enable_lora_bias
    enable_prompt_adapter max_prompt_adapters max_prompt_adapter_token lora_extra_vocab_size
    long_lora_scaling_factors device num_scheduler_steps multi_step_stream_outputs num_lookahead_slots
    preemption_mode scheduler_delay_factor guided_decoding_backend logits_processor_pattern speculative_model
    speculative_model_quantization speculative_draft_tensor_parallel_size num_speculative_tokens
    speculative_disable_mqa_scorer speculative_max_model_len speculative_disable_by_batch_size
    ngram_prompt_lookup_max ngram_prompt_lookup_min spec_decoding_acceptance_method
    typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha
    qlora_adapter_name_or_path disable_logprobs_during_spec_decoding disable_async_output_proc
    override_pooler_config worker_use_ray engine_use_ray max_context_len_to_capture max_num_partial_prefills
    max_long_partial_prefills
"""  # that are gone

# What `LLM.__init__` of 0.33.0 passes on where a script gives nothing else.
DEFAULTS: dict[str, Any] = {
    "runner": "auto",
    "convert": "auto",
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "allowed_local_media_path": "",
    "allowed_media_domains": None,
    "tensor_parallel_size": 1,
    "dtype": "auto",
    "quantization": None,
    "revision": None,
    "tokenizer_revision": None,
    "chat_template": None,
    "cpu_offload_gb": 0,
    "offload_group_size": 0,
    "offload_params": None,
    "enforce_eager": False,
    "enable_return_routed_experts": False,
    "return_sampling_mask": False,
    "disable_custom_all_reduce": False,
    "hf_token": None,
    "hf_overrides": None,
    "mm_processor_kwargs": None,
    "pooler_config": None,
    "structured_outputs_config": None,
    "profiler_config": None,
    "attention_config": None,
    "kv_cache_memory_bytes": None,
    "compilation_config": None,
    "quantization_config": None,
    "logits_processors": None,
    "spec_method": None,
}

OF_SAMPLING = """
    n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids
    prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
    include_stop_str_in_output output_kind stream_interval skip_clone output_text_buffer_length structured_outputs
    logit_bias allowed_token_ids extra_args bad_words skip_reading_prefix_cache thinking_token_budget
    repetition_detection routed_experts_prompt_start trace_decode_token_ids
"""  # 0.33.0
OF_EARLY_SAMPLING = """
    best_of use_beam_search length_penalty early_stopping logits_processors truncate_prompt_tokens guided_decoding
"""
