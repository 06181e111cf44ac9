from protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerLifecycle(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_LIFECYCLE_UNSPECIFIED: _ClassVar[WorkerLifecycle]
    WORKER_LIFECYCLE_LOADED: _ClassVar[WorkerLifecycle]
    WORKER_LIFECYCLE_INITIALIZED: _ClassVar[WorkerLifecycle]
    WORKER_LIFECYCLE_LEASED: _ClassVar[WorkerLifecycle]
    WORKER_LIFECYCLE_DRAINING: _ClassVar[WorkerLifecycle]

class RowInput(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_INPUT_KNOWN_TOKENS: _ClassVar[RowInput]
    ROW_INPUT_LAST_SAMPLED: _ClassVar[RowInput]
    ROW_INPUT_GIVEN_TOKENS: _ClassVar[RowInput]

class StepStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_STATUS_OK: _ClassVar[StepStatus]
    STEP_STATUS_FAILED: _ClassVar[StepStatus]
    STEP_STATUS_SKIPPED: _ClassVar[StepStatus]

class StepErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_ERROR_CODE_INTERNAL: _ClassVar[StepErrorCode]
    STEP_ERROR_CODE_OUT_OF_MEMORY: _ClassVar[StepErrorCode]
    STEP_ERROR_CODE_PROTOCOL: _ClassVar[StepErrorCode]

class RowErrorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_ERROR_KIND_MODEL: _ClassVar[RowErrorKind]
    ROW_ERROR_KIND_SAMPLING: _ClassVar[RowErrorKind]
WORKER_LIFECYCLE_UNSPECIFIED: WorkerLifecycle
WORKER_LIFECYCLE_LOADED: WorkerLifecycle
WORKER_LIFECYCLE_INITIALIZED: WorkerLifecycle
WORKER_LIFECYCLE_LEASED: WorkerLifecycle
WORKER_LIFECYCLE_DRAINING: WorkerLifecycle
ROW_INPUT_KNOWN_TOKENS: RowInput
ROW_INPUT_LAST_SAMPLED: RowInput
ROW_INPUT_GIVEN_TOKENS: RowInput
STEP_STATUS_OK: StepStatus
STEP_STATUS_FAILED: StepStatus
STEP_STATUS_SKIPPED: StepStatus
STEP_ERROR_CODE_INTERNAL: StepErrorCode
STEP_ERROR_CODE_OUT_OF_MEMORY: StepErrorCode
STEP_ERROR_CODE_PROTOCOL: StepErrorCode
ROW_ERROR_KIND_MODEL: RowErrorKind
ROW_ERROR_KIND_SAMPLING: RowErrorKind

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("instance_id", "schema_revision", "model", "model_hash", "architecture", "dtype", "device", "vocab_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "parallel", "adapters", "lifecycle", "tokenizer_sha256", "eos_token_ids", "max_logprobs", "max_loras", "kv_cache_dtype", "quantization", "instructions", "traces_steps")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LIFECYCLE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    TRACES_STEPS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    schema_revision: int
    model: str
    model_hash: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    parallel: ParallelLayout
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterState]
    lifecycle: WorkerLifecycle
    tokenizer_sha256: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_logprobs: int
    max_loras: int
    kv_cache_dtype: str
    quantization: str
    instructions: str
    traces_steps: bool
    def __init__(self, instance_id: _Optional[str] = ..., schema_revision: _Optional[int] = ..., model: _Optional[str] = ..., model_hash: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., block_size: _Optional[int] = ..., parallel: _Optional[_Union[ParallelLayout, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[AdapterState, _Mapping]]] = ..., lifecycle: _Optional[_Union[WorkerLifecycle, str]] = ..., tokenizer_sha256: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_logprobs: _Optional[int] = ..., max_loras: _Optional[int] = ..., kv_cache_dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., instructions: _Optional[str] = ..., traces_steps: bool = ...) -> None: ...

class ParallelLayout(_message.Message):
    __slots__ = ("tensor_parallel_size", "pipeline_parallel_size")
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    def __init__(self, tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizerChunk(_message.Message):
    __slots__ = ("file_name", "data", "sha256")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    data: bytes
    sha256: str
    def __init__(self, file_name: _Optional[str] = ..., data: _Optional[bytes] = ..., sha256: _Optional[str] = ...) -> None: ...

class InitializeRequest(_message.Message):
    __slots__ = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    def __init__(self, max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class InitializeResponse(_message.Message):
    __slots__ = ("num_device_blocks", "num_host_blocks", "prefill_tokens_per_s", "swap_bytes_per_s", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_bytes", "settings_id")
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SWAP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_ID_FIELD_NUMBER: _ClassVar[int]
    num_device_blocks: int
    num_host_blocks: int
    prefill_tokens_per_s: float
    swap_bytes_per_s: float
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_bytes: int
    settings_id: str
    def __init__(self, num_device_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., swap_bytes_per_s: _Optional[float] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., block_bytes: _Optional[int] = ..., settings_id: _Optional[str] = ...) -> None: ...

class AdapterState(_message.Message):
    __slots__ = ("name", "generation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    generation: int
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "generation", "epoch")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    generation: int
    epoch: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., generation: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "epoch")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("epoch", "open", "keepalive", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    KEEPALIVE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    open: OpenLease
    keepalive: Keepalive
    step: Step
    def __init__(self, epoch: _Optional[int] = ..., open: _Optional[_Union[OpenLease, _Mapping]] = ..., keepalive: _Optional[_Union[Keepalive, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ...) -> None: ...

class OpenLease(_message.Message):
    __slots__ = ("settings_id", "is_wanted")
    SETTINGS_ID_FIELD_NUMBER: _ClassVar[int]
    IS_WANTED_FIELD_NUMBER: _ClassVar[int]
    settings_id: str
    is_wanted: bool
    def __init__(self, settings_id: _Optional[str] = ..., is_wanted: bool = ...) -> None: ...

class Keepalive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Step(_message.Message):
    __slots__ = ("step_id", "resume_after", "released_slots_u16", "forks_u16", "fork_indices_u16", "groups", "swap_out", "swap_in", "copies", "block_tables", "rows", "forgotten_blocks_u32", "forgets_all_blocks", "cached_blocks", "trace")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_AFTER_FIELD_NUMBER: _ClassVar[int]
    RELEASED_SLOTS_U16_FIELD_NUMBER: _ClassVar[int]
    FORKS_U16_FIELD_NUMBER: _ClassVar[int]
    FORK_INDICES_U16_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_BLOCKS_U32_FIELD_NUMBER: _ClassVar[int]
    FORGETS_ALL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    resume_after: int
    released_slots_u16: bytes
    forks_u16: bytes
    fork_indices_u16: bytes
    groups: _containers.RepeatedCompositeFieldContainer[SequenceGroupMetadata]
    swap_out: BlockPairs
    swap_in: BlockPairs
    copies: BlockPairs
    block_tables: _containers.RepeatedCompositeFieldContainer[BlockTableUpdate]
    rows: Rows
    forgotten_blocks_u32: bytes
    forgets_all_blocks: bool
    cached_blocks: CachedBlocks
    trace: StepTrace
    def __init__(self, step_id: _Optional[int] = ..., resume_after: _Optional[int] = ..., released_slots_u16: _Optional[bytes] = ..., forks_u16: _Optional[bytes] = ..., fork_indices_u16: _Optional[bytes] = ..., groups: _Optional[_Iterable[_Union[SequenceGroupMetadata, _Mapping]]] = ..., swap_out: _Optional[_Union[BlockPairs, _Mapping]] = ..., swap_in: _Optional[_Union[BlockPairs, _Mapping]] = ..., copies: _Optional[_Union[BlockPairs, _Mapping]] = ..., block_tables: _Optional[_Iterable[_Union[BlockTableUpdate, _Mapping]]] = ..., rows: _Optional[_Union[Rows, _Mapping]] = ..., forgotten_blocks_u32: _Optional[bytes] = ..., forgets_all_blocks: bool = ..., cached_blocks: _Optional[_Union[CachedBlocks, _Mapping]] = ..., trace: _Optional[_Union[StepTrace, _Mapping]] = ...) -> None: ...

class StepTrace(_message.Message):
    __slots__ = ("context", "requests")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    context: bytes
    requests: bytes
    def __init__(self, context: _Optional[bytes] = ..., requests: _Optional[bytes] = ...) -> None: ...

class CachedBlocks(_message.Message):
    __slots__ = ("block_ids_u32", "hashes")
    BLOCK_IDS_U32_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    block_ids_u32: bytes
    hashes: bytes
    def __init__(self, block_ids_u32: _Optional[bytes] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class BlockPairs(_message.Message):
    __slots__ = ("pairs_u32",)
    PAIRS_U32_FIELD_NUMBER: _ClassVar[int]
    pairs_u32: bytes
    def __init__(self, pairs_u32: _Optional[bytes] = ...) -> None: ...

class BlockTableUpdate(_message.Message):
    __slots__ = ("append", "replace")
    APPEND_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    append: BlockTables
    replace: BlockTables
    def __init__(self, append: _Optional[_Union[BlockTables, _Mapping]] = ..., replace: _Optional[_Union[BlockTables, _Mapping]] = ...) -> None: ...

class BlockTables(_message.Message):
    __slots__ = ("slots_u16", "counts_u16", "block_ids_u32")
    SLOTS_U16_FIELD_NUMBER: _ClassVar[int]
    COUNTS_U16_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_U32_FIELD_NUMBER: _ClassVar[int]
    slots_u16: bytes
    counts_u16: bytes
    block_ids_u32: bytes
    def __init__(self, slots_u16: _Optional[bytes] = ..., counts_u16: _Optional[bytes] = ..., block_ids_u32: _Optional[bytes] = ...) -> None: ...

class SequenceGroupMetadata(_message.Message):
    __slots__ = ("request_id", "num_prompt_tokens", "sampling_params", "adapter", "sequences", "stop_token_ids_u32", "bad_words")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_U32_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_prompt_tokens: int
    sampling_params: _inference_pb2.SamplingParams
    adapter: str
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceData]
    stop_token_ids_u32: bytes
    bad_words: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenIds]
    def __init__(self, request_id: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., sampling_params: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., adapter: _Optional[str] = ..., sequences: _Optional[_Iterable[_Union[SequenceData, _Mapping]]] = ..., stop_token_ids_u32: _Optional[bytes] = ..., bad_words: _Optional[_Iterable[_Union[_inference_pb2.TokenIds, _Mapping]]] = ...) -> None: ...

class SequenceData(_message.Message):
    __slots__ = ("slot", "index", "token_ids", "num_computed_tokens", "block_table", "same_as_slot")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    SAME_AS_SLOT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_computed_tokens: int
    block_table: _containers.RepeatedScalarFieldContainer[int]
    same_as_slot: int
    def __init__(self, slot: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_computed_tokens: _Optional[int] = ..., block_table: _Optional[_Iterable[int]] = ..., same_as_slot: _Optional[int] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("slots_u16", "num_decode_rows", "query_lens_u32", "num_samples_u16", "inputs_u8", "given_token_ids_i32", "child_slots_u16")
    SLOTS_U16_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    QUERY_LENS_U32_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_U16_FIELD_NUMBER: _ClassVar[int]
    INPUTS_U8_FIELD_NUMBER: _ClassVar[int]
    GIVEN_TOKEN_IDS_I32_FIELD_NUMBER: _ClassVar[int]
    CHILD_SLOTS_U16_FIELD_NUMBER: _ClassVar[int]
    slots_u16: bytes
    num_decode_rows: int
    query_lens_u32: bytes
    num_samples_u16: bytes
    inputs_u8: bytes
    given_token_ids_i32: bytes
    child_slots_u16: bytes
    def __init__(self, slots_u16: _Optional[bytes] = ..., num_decode_rows: _Optional[int] = ..., query_lens_u32: _Optional[bytes] = ..., num_samples_u16: _Optional[bytes] = ..., inputs_u8: _Optional[bytes] = ..., given_token_ids_i32: _Optional[bytes] = ..., child_slots_u16: _Optional[bytes] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("epoch", "result", "heartbeat", "notice")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    result: StepResult
    heartbeat: Heartbeat
    notice: Notice
    def __init__(self, epoch: _Optional[int] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_id", "status", "outputs", "timings", "error")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    status: StepStatus
    outputs: SequenceOutputs
    timings: StepTimings
    error: StepError
    def __init__(self, step_id: _Optional[int] = ..., status: _Optional[_Union[StepStatus, str]] = ..., outputs: _Optional[_Union[SequenceOutputs, _Mapping]] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ..., error: _Optional[_Union[StepError, _Mapping]] = ...) -> None: ...

class StepError(_message.Message):
    __slots__ = ("code", "message", "block_operations_applied")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_OPERATIONS_APPLIED_FIELD_NUMBER: _ClassVar[int]
    code: StepErrorCode
    message: str
    block_operations_applied: bool
    def __init__(self, code: _Optional[_Union[StepErrorCode, str]] = ..., message: _Optional[str] = ..., block_operations_applied: bool = ...) -> None: ...

class SequenceOutputs(_message.Message):
    __slots__ = ("token_ids_i32", "num_tokens_u16", "logprobs_f32", "ranks_u32", "top_counts_u32", "top_token_ids_i32", "top_logprobs_f32", "row_errors", "prompt_logprobs")
    TOKEN_IDS_I32_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_U16_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_F32_FIELD_NUMBER: _ClassVar[int]
    RANKS_U32_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_U32_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_I32_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_F32_FIELD_NUMBER: _ClassVar[int]
    ROW_ERRORS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids_i32: bytes
    num_tokens_u16: bytes
    logprobs_f32: bytes
    ranks_u32: bytes
    top_counts_u32: bytes
    top_token_ids_i32: bytes
    top_logprobs_f32: bytes
    row_errors: _containers.RepeatedCompositeFieldContainer[RowError]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    def __init__(self, token_ids_i32: _Optional[bytes] = ..., num_tokens_u16: _Optional[bytes] = ..., logprobs_f32: _Optional[bytes] = ..., ranks_u32: _Optional[bytes] = ..., top_counts_u32: _Optional[bytes] = ..., top_token_ids_i32: _Optional[bytes] = ..., top_logprobs_f32: _Optional[bytes] = ..., row_errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("row", "first_position", "logprobs")
    ROW_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    row: int
    first_position: int
    logprobs: SequenceOutputs
    def __init__(self, row: _Optional[int] = ..., first_position: _Optional[int] = ..., logprobs: _Optional[_Union[SequenceOutputs, _Mapping]] = ...) -> None: ...

class RowError(_message.Message):
    __slots__ = ("row", "message", "kind")
    ROW_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    row: int
    message: str
    kind: RowErrorKind
    def __init__(self, row: _Optional[int] = ..., message: _Optional[str] = ..., kind: _Optional[_Union[RowErrorKind, str]] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("queue_ns", "cache_ops_ns", "prepare_ns", "forward_ns", "sample_ns", "total_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    CACHE_OPS_NS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    cache_ops_ns: int
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    total_ns: int
    def __init__(self, queue_ns: _Optional[int] = ..., cache_ops_ns: _Optional[int] = ..., prepare_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., sample_ns: _Optional[int] = ..., total_ns: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("running_step_id", "running_ns")
    RUNNING_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_NS_FIELD_NUMBER: _ClassVar[int]
    running_step_id: int
    running_ns: int
    def __init__(self, running_step_id: _Optional[int] = ..., running_ns: _Optional[int] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("lease", "draining", "adapter_loaded", "budget", "wanted")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOADED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseGranted
    draining: Draining
    adapter_loaded: AdapterState
    budget: BudgetChanged
    wanted: LeaseWanted
    def __init__(self, lease: _Optional[_Union[LeaseGranted, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., adapter_loaded: _Optional[_Union[AdapterState, _Mapping]] = ..., budget: _Optional[_Union[BudgetChanged, _Mapping]] = ..., wanted: _Optional[_Union[LeaseWanted, _Mapping]] = ...) -> None: ...

class LeaseGranted(_message.Message):
    __slots__ = ("instance_id", "epoch", "cached_blocks", "request_ids")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    epoch: int
    cached_blocks: CachedBlocks
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., cached_blocks: _Optional[_Union[CachedBlocks, _Mapping]] = ..., request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("finishes_within_ms",)
    FINISHES_WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    finishes_within_ms: int
    def __init__(self, finishes_within_ms: _Optional[int] = ...) -> None: ...

class LeaseWanted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BudgetChanged(_message.Message):
    __slots__ = ("max_num_batched_tokens",)
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_num_batched_tokens: int
    def __init__(self, max_num_batched_tokens: _Optional[int] = ...) -> None: ...
