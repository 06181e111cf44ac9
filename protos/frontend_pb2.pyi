from protos import inference_pb2 as _inference_pb2
from protos import shards_pb2 as _shards_pb2
from protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CheckRoomRequest(_message.Message):
    __slots__ = ("tenant", "request_id", "num_preparing", "num_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PREPARING_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    request_id: str
    num_preparing: int
    num_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., num_preparing: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class CheckRoomResponse(_message.Message):
    __slots__ = ("refused",)
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    refused: Refused
    def __init__(self, refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class FrontendMessage(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[FrontendEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[FrontendEvent, _Mapping]]] = ...) -> None: ...

class FrontendEvent(_message.Message):
    __slots__ = ("listening", "group", "sequence_end", "closed", "refused", "echo", "aborted")
    LISTENING_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_END_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    listening: Listening
    group: PreparedGroup
    sequence_end: SequenceEnd
    closed: GroupClosed
    refused: Refused
    echo: bool
    aborted: GroupAborted
    def __init__(self, listening: _Optional[_Union[Listening, _Mapping]] = ..., group: _Optional[_Union[PreparedGroup, _Mapping]] = ..., sequence_end: _Optional[_Union[SequenceEnd, _Mapping]] = ..., closed: _Optional[_Union[GroupClosed, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., echo: bool = ..., aborted: _Optional[_Union[GroupAborted, _Mapping]] = ...) -> None: ...

class Listening(_message.Message):
    __slots__ = ("pid",)
    PID_FIELD_NUMBER: _ClassVar[int]
    pid: int
    def __init__(self, pid: _Optional[int] = ...) -> None: ...

class PreparedGroup(_message.Message):
    __slots__ = ("number", "request_id", "tenant", "sampling_params", "prompt_token_ids_i32", "resumed", "max_num_tokens", "arrival_ns", "eos_token_id", "stop_token_ids", "priority", "adapter", "cache_salt", "reads_logprobs", "replaces", "bad_words", "model_fingerprint", "num_bytes", "traceparent", "tracestate", "earlier_life")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_I32_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_NS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    READS_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    EARLIER_LIFE_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_id: str
    tenant: str
    sampling_params: _inference_pb2.SamplingParams
    prompt_token_ids_i32: bytes
    resumed: _containers.RepeatedCompositeFieldContainer[ResumedSequence]
    max_num_tokens: int
    arrival_ns: int
    eos_token_id: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    adapter: str
    cache_salt: str
    reads_logprobs: bool
    replaces: bool
    bad_words: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenIds]
    model_fingerprint: str
    num_bytes: int
    traceparent: str
    tracestate: str
    earlier_life: GroupCounters
    def __init__(self, number: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., sampling_params: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., prompt_token_ids_i32: _Optional[bytes] = ..., resumed: _Optional[_Iterable[_Union[ResumedSequence, _Mapping]]] = ..., max_num_tokens: _Optional[int] = ..., arrival_ns: _Optional[int] = ..., eos_token_id: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., reads_logprobs: bool = ..., replaces: bool = ..., bad_words: _Optional[_Iterable[_Union[_inference_pb2.TokenIds, _Mapping]]] = ..., model_fingerprint: _Optional[str] = ..., num_bytes: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., earlier_life: _Optional[_Union[GroupCounters, _Mapping]] = ...) -> None: ...

class ResumedSequence(_message.Message):
    __slots__ = ("token_ids_i32", "is_finished")
    TOKEN_IDS_I32_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    token_ids_i32: bytes
    is_finished: bool
    def __init__(self, token_ids_i32: _Optional[bytes] = ..., is_finished: bool = ...) -> None: ...

class SequenceEnd(_message.Message):
    __slots__ = ("number", "index")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    number: int
    index: int
    def __init__(self, number: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class GroupAborted(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class GroupClosed(_message.Message):
    __slots__ = ("number", "is_moved")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IS_MOVED_FIELD_NUMBER: _ClassVar[int]
    number: int
    is_moved: bool
    def __init__(self, number: _Optional[int] = ..., is_moved: bool = ...) -> None: ...

class CoreMessage(_message.Message):
    __slots__ = ("events", "is_queue_full")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    IS_QUEUE_FULL_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[CoreEvent]
    is_queue_full: bool
    def __init__(self, events: _Optional[_Iterable[_Union[CoreEvent, _Mapping]]] = ..., is_queue_full: bool = ...) -> None: ...

class CoreEvent(_message.Message):
    __slots__ = ("state", "admitted", "refused", "tokens", "beams", "end", "prompt_logprobs", "report", "echo")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    state: CoreState
    admitted: Admitted
    refused: Refused
    tokens: TokenColumns
    beams: Beams
    end: GroupEnd
    prompt_logprobs: GroupPromptLogprobs
    report: _shards_pb2.ShardReport
    echo: bool
    def __init__(self, state: _Optional[_Union[CoreState, _Mapping]] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., tokens: _Optional[_Union[TokenColumns, _Mapping]] = ..., beams: _Optional[_Union[Beams, _Mapping]] = ..., end: _Optional[_Union[GroupEnd, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[GroupPromptLogprobs, _Mapping]] = ..., report: _Optional[_Union[_shards_pb2.ShardReport, _Mapping]] = ..., echo: bool = ...) -> None: ...

class CoreState(_message.Message):
    __slots__ = ("is_ready", "is_draining", "is_broken_off", "models")
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    IS_BROKEN_OFF_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    is_ready: bool
    is_draining: bool
    is_broken_off: bool
    models: ServedModels
    def __init__(self, is_ready: bool = ..., is_draining: bool = ..., is_broken_off: bool = ..., models: _Optional[_Union[ServedModels, _Mapping]] = ...) -> None: ...

class ServedModels(_message.Message):
    __slots__ = ("models", "default_name", "awaited")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_NAME_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[KnownModel]
    default_name: str
    awaited: _containers.RepeatedCompositeFieldContainer[AwaitedModel]
    def __init__(self, models: _Optional[_Iterable[_Union[KnownModel, _Mapping]]] = ..., default_name: _Optional[str] = ..., awaited: _Optional[_Iterable[_Union[AwaitedModel, _Mapping]]] = ...) -> None: ...

class AwaitedModel(_message.Message):
    __slots__ = ("name", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class KnownModel(_message.Message):
    __slots__ = ("model", "num_workers_serving", "num_workers_draining")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_SERVING_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    model: ModelDescription
    num_workers_serving: int
    num_workers_draining: int
    def __init__(self, model: _Optional[_Union[ModelDescription, _Mapping]] = ..., num_workers_serving: _Optional[int] = ..., num_workers_draining: _Optional[int] = ...) -> None: ...

class ModelDescription(_message.Message):
    __slots__ = ("name", "model_hash", "architecture", "dtype", "vocab_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_cached_tokens", "block_size", "max_logprobs", "eos_token_ids", "tokenizer_sha256", "tokenizer_folder", "kv_cache_dtype", "quantization", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FOLDER_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    model_hash: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_cached_tokens: int
    block_size: int
    max_logprobs: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokenizer_sha256: str
    tokenizer_folder: str
    kv_cache_dtype: str
    quantization: str
    fingerprint: str
    def __init__(self, name: _Optional[str] = ..., model_hash: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_cached_tokens: _Optional[int] = ..., block_size: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., tokenizer_sha256: _Optional[str] = ..., tokenizer_folder: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("number", "kind", "message", "retry_after_s", "violations", "is_too_long", "over_limit")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    IS_TOO_LONG_FIELD_NUMBER: _ClassVar[int]
    OVER_LIMIT_FIELD_NUMBER: _ClassVar[int]
    number: int
    kind: str
    message: str
    retry_after_s: float
    violations: _containers.RepeatedCompositeFieldContainer[RefusedField]
    is_too_long: bool
    over_limit: _shards_pb2.OverLimit
    def __init__(self, number: _Optional[int] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., violations: _Optional[_Iterable[_Union[RefusedField, _Mapping]]] = ..., is_too_long: bool = ..., over_limit: _Optional[_Union[_shards_pb2.OverLimit, _Mapping]] = ...) -> None: ...

class RefusedField(_message.Message):
    __slots__ = ("field", "description")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    field: str
    description: str
    def __init__(self, field: _Optional[str] = ..., description: _Optional[str] = ...) -> None: ...

class TokenColumns(_message.Message):
    __slots__ = ("numbers_u32", "indices_u16", "token_ids_i32", "finish_reasons_u8", "logprobs", "counters")
    NUMBERS_U32_FIELD_NUMBER: _ClassVar[int]
    INDICES_U16_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_I32_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_U8_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    numbers_u32: bytes
    indices_u16: bytes
    token_ids_i32: bytes
    finish_reasons_u8: bytes
    logprobs: _worker_pb2.SequenceOutputs
    counters: _containers.RepeatedCompositeFieldContainer[GroupCounters]
    def __init__(self, numbers_u32: _Optional[bytes] = ..., indices_u16: _Optional[bytes] = ..., token_ids_i32: _Optional[bytes] = ..., finish_reasons_u8: _Optional[bytes] = ..., logprobs: _Optional[_Union[_worker_pb2.SequenceOutputs, _Mapping]] = ..., counters: _Optional[_Iterable[_Union[GroupCounters, _Mapping]]] = ...) -> None: ...

class GroupCounters(_message.Message):
    __slots__ = ("number", "first_scheduled_ns", "num_cached_tokens", "num_preemptions", "num_moves")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_SCHEDULED_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVES_FIELD_NUMBER: _ClassVar[int]
    number: int
    first_scheduled_ns: int
    num_cached_tokens: int
    num_preemptions: int
    num_moves: int
    def __init__(self, number: _Optional[int] = ..., first_scheduled_ns: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_moves: _Optional[int] = ...) -> None: ...

class GroupPromptLogprobs(_message.Message):
    __slots__ = ("number", "logprobs")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    number: int
    logprobs: _worker_pb2.SequenceOutputs
    def __init__(self, number: _Optional[int] = ..., logprobs: _Optional[_Union[_worker_pb2.SequenceOutputs, _Mapping]] = ...) -> None: ...

class Beams(_message.Message):
    __slots__ = ("hypotheses", "counters")
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    hypotheses: _containers.RepeatedCompositeFieldContainer[Hypothesis]
    counters: GroupCounters
    def __init__(self, hypotheses: _Optional[_Iterable[_Union[Hypothesis, _Mapping]]] = ..., counters: _Optional[_Union[GroupCounters, _Mapping]] = ...) -> None: ...

class Hypothesis(_message.Message):
    __slots__ = ("token_ids_i32", "score", "cumulative_logprob", "finish_reason", "logprobs_f64", "ranks_u32")
    TOKEN_IDS_I32_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_F64_FIELD_NUMBER: _ClassVar[int]
    RANKS_U32_FIELD_NUMBER: _ClassVar[int]
    token_ids_i32: bytes
    score: float
    cumulative_logprob: float
    finish_reason: _inference_pb2.FinishReason
    logprobs_f64: bytes
    ranks_u32: bytes
    def __init__(self, token_ids_i32: _Optional[bytes] = ..., score: _Optional[float] = ..., cumulative_logprob: _Optional[float] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., logprobs_f64: _Optional[bytes] = ..., ranks_u32: _Optional[bytes] = ...) -> None: ...

class GroupEnd(_message.Message):
    __slots__ = ("finish_reason", "message", "counters", "is_invalid")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    IS_INVALID_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _inference_pb2.FinishReason
    message: str
    counters: GroupCounters
    is_invalid: bool
    def __init__(self, finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., message: _Optional[str] = ..., counters: _Optional[_Union[GroupCounters, _Mapping]] = ..., is_invalid: bool = ...) -> None: ...
