from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_NO: _ClassVar[EarlyStopping]
    EARLY_STOPPING_YES: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class WorkerHealth(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_HEALTH_UNSPECIFIED: _ClassVar[WorkerHealth]
    WORKER_HEALTH_CONNECTING: _ClassVar[WorkerHealth]
    WORKER_HEALTH_INITIALIZING: _ClassVar[WorkerHealth]
    WORKER_HEALTH_SERVING: _ClassVar[WorkerHealth]
    WORKER_HEALTH_DRAINING: _ClassVar[WorkerHealth]
    WORKER_HEALTH_LOST: _ClassVar[WorkerHealth]
    WORKER_HEALTH_REFUSED: _ClassVar[WorkerHealth]

class RequestPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_PHASE_UNSPECIFIED: _ClassVar[RequestPhase]
    REQUEST_PHASE_WAITING: _ClassVar[RequestPhase]
    REQUEST_PHASE_RUNNING: _ClassVar[RequestPhase]
    REQUEST_PHASE_PREEMPTED: _ClassVar[RequestPhase]
    REQUEST_PHASE_SWAPPED: _ClassVar[RequestPhase]
    REQUEST_PHASE_FINISHED: _ClassVar[RequestPhase]
EARLY_STOPPING_NO: EarlyStopping
EARLY_STOPPING_YES: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
WORKER_HEALTH_UNSPECIFIED: WorkerHealth
WORKER_HEALTH_CONNECTING: WorkerHealth
WORKER_HEALTH_INITIALIZING: WorkerHealth
WORKER_HEALTH_SERVING: WorkerHealth
WORKER_HEALTH_DRAINING: WorkerHealth
WORKER_HEALTH_LOST: WorkerHealth
WORKER_HEALTH_REFUSED: WorkerHealth
REQUEST_PHASE_UNSPECIFIED: RequestPhase
REQUEST_PHASE_WAITING: RequestPhase
REQUEST_PHASE_RUNNING: RequestPhase
REQUEST_PHASE_PREEMPTED: RequestPhase
REQUEST_PHASE_SWAPPED: RequestPhase
REQUEST_PHASE_FINISHED: RequestPhase

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "prompt", "prompt_token_ids", "messages", "add_special_tokens", "truncate_prompt_tokens", "sampling_params", "stream", "adapter", "priority", "tenant", "cache_salt", "resume", "attempt", "return_prompt_token_ids", "model_fingerprint", "is_answer")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    IS_ANSWER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt: str
    prompt_token_ids: TokenIds
    messages: Messages
    add_special_tokens: bool
    truncate_prompt_tokens: int
    sampling_params: SamplingParams
    stream: bool
    adapter: str
    priority: int
    tenant: str
    cache_salt: str
    resume: _containers.RepeatedCompositeFieldContainer[ResumedOutput]
    attempt: int
    return_prompt_token_ids: bool
    model_fingerprint: str
    is_answer: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt: _Optional[str] = ..., prompt_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., messages: _Optional[_Union[Messages, _Mapping]] = ..., add_special_tokens: bool = ..., truncate_prompt_tokens: _Optional[int] = ..., sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., stream: bool = ..., adapter: _Optional[str] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., resume: _Optional[_Iterable[_Union[ResumedOutput, _Mapping]]] = ..., attempt: _Optional[int] = ..., return_prompt_token_ids: bool = ..., model_fingerprint: _Optional[str] = ..., is_answer: bool = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Messages(_message.Message):
    __slots__ = ("messages", "add_generation_prompt", "continue_final_message")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    continue_final_message: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: bool = ..., continue_final_message: bool = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "reasoning_content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    reasoning_content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., reasoning_content: _Optional[str] = ...) -> None: ...

class ResumedOutput(_message.Message):
    __slots__ = ("index", "token_ids", "finish_reason", "is_answer")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    IS_ANSWER_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    is_answer: bool
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., is_answer: bool = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("n", "best_of", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words", "use_beam_search", "length_penalty", "early_stopping", "guided", "detokenize")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPACES_BETWEEN_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    USE_BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    GUIDED_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_FIELD_NUMBER: _ClassVar[int]
    n: int
    best_of: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    max_tokens: int
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    use_beam_search: bool
    length_penalty: float
    early_stopping: EarlyStopping
    guided: GuidedDecoding
    detokenize: bool
    def __init__(self, n: _Optional[int] = ..., best_of: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., include_stop_str_in_output: bool = ..., skip_special_tokens: bool = ..., spaces_between_special_tokens: bool = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., use_beam_search: bool = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ..., guided: _Optional[_Union[GuidedDecoding, _Mapping]] = ..., detokenize: bool = ...) -> None: ...

class GuidedDecoding(_message.Message):
    __slots__ = ("json_schema", "regex", "choice", "grammar", "json_object")
    class Choice(_message.Message):
        __slots__ = ("choices",)
        CHOICES_FIELD_NUMBER: _ClassVar[int]
        choices: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, choices: _Optional[_Iterable[str]] = ...) -> None: ...
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    choice: GuidedDecoding.Choice
    grammar: str
    json_object: bool
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[GuidedDecoding.Choice, _Mapping]] = ..., grammar: _Optional[str] = ..., json_object: bool = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("admission", "outputs", "prompt_logprobs", "usage", "timings", "request_id", "seed", "model", "prompt_token_ids", "model_fingerprint")
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    admission: Admission
    outputs: _containers.RepeatedCompositeFieldContainer[OutputDelta]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    usage: Usage
    timings: Timings
    request_id: str
    seed: int
    model: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    model_fingerprint: str
    def __init__(self, admission: _Optional[_Union[Admission, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[OutputDelta, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., request_id: _Optional[str] = ..., seed: _Optional[int] = ..., model: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("num_prompt_tokens",)
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ...) -> None: ...

class OutputDelta(_message.Message):
    __slots__ = ("index", "text", "token_ids", "logprobs", "finish_reason", "matched_stop", "cumulative_logprob", "score", "error")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: FinishReason
    matched_stop: MatchedStop
    cumulative_logprob: float
    score: float
    error: OutputError
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., matched_stop: _Optional[_Union[MatchedStop, _Mapping]] = ..., cumulative_logprob: _Optional[float] = ..., score: _Optional[float] = ..., error: _Optional[_Union[OutputError, _Mapping]] = ...) -> None: ...

class MatchedStop(_message.Message):
    __slots__ = ("token_id", "text")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class OutputError(_message.Message):
    __slots__ = ("code", "message", "retryable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retryable: bool
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: bool = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token", "top")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token: Logprob
    top: _containers.RepeatedCompositeFieldContainer[Logprob]
    def __init__(self, token: _Optional[_Union[Logprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ...) -> None: ...

class Logprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "text")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    text: str
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ns", "first_token_ns", "total_ns", "times_preempted", "times_moved")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    TIMES_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    TIMES_MOVED_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    first_token_ns: int
    total_ns: int
    times_preempted: int
    times_moved: int
    def __init__(self, queue_ns: _Optional[int] = ..., first_token_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., times_preempted: _Optional[int] = ..., times_moved: _Optional[int] = ...) -> None: ...

class GenerateManyRequest(_message.Message):
    __slots__ = ("key", "request", "hold", "cancel", "traceparent", "tracestate")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    key: int
    request: bytes
    hold: bool
    cancel: bool
    traceparent: str
    tracestate: str
    def __init__(self, key: _Optional[int] = ..., request: _Optional[bytes] = ..., hold: bool = ..., cancel: bool = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class GenerateManyResponse(_message.Message):
    __slots__ = ("parts",)
    class Part(_message.Message):
        __slots__ = ("key", "response", "ending")
        KEY_FIELD_NUMBER: _ClassVar[int]
        RESPONSE_FIELD_NUMBER: _ClassVar[int]
        ENDING_FIELD_NUMBER: _ClassVar[int]
        key: int
        response: GenerateResponse
        ending: Ending
        def __init__(self, key: _Optional[int] = ..., response: _Optional[_Union[GenerateResponse, _Mapping]] = ..., ending: _Optional[_Union[Ending, _Mapping]] = ...) -> None: ...
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[GenerateManyResponse.Part]
    def __init__(self, parts: _Optional[_Iterable[_Union[GenerateManyResponse.Part, _Mapping]]] = ...) -> None: ...

class Ending(_message.Message):
    __slots__ = ("code", "message", "details")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    details: bytes
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., details: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model", "architecture", "vocab_size", "max_model_len", "dtype", "model_hash", "eos_token_ids", "has_chat_template", "adapters", "kv_cache_dtype", "quantization", "model_fingerprint")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    model_hash: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_chat_template: bool
    adapters: _containers.RepeatedScalarFieldContainer[str]
    kv_cache_dtype: str
    quantization: str
    model_fingerprint: str
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., dtype: _Optional[str] = ..., model_hash: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_chat_template: bool = ..., adapters: _Optional[_Iterable[str]] = ..., kv_cache_dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelState]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelState, _Mapping]]] = ...) -> None: ...

class ModelState(_message.Message):
    __slots__ = ("name", "fingerprint", "architecture", "dtype", "kv_cache_dtype", "quantization", "max_model_len", "num_workers_serving", "num_workers_draining", "is_default", "is_current")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_SERVING_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    IS_DEFAULT_FIELD_NUMBER: _ClassVar[int]
    IS_CURRENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    architecture: str
    dtype: str
    kv_cache_dtype: str
    quantization: str
    max_model_len: int
    num_workers_serving: int
    num_workers_draining: int
    is_default: bool
    is_current: bool
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., max_model_len: _Optional[int] = ..., num_workers_serving: _Optional[int] = ..., num_workers_draining: _Optional[int] = ..., is_default: bool = ..., is_current: bool = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "prompt", "messages", "add_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    messages: Messages
    add_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., messages: _Optional[_Union[Messages, _Mapping]] = ..., add_special_tokens: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "tokens", "max_model_len")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[str]
    max_model_len: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[str]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: bool = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "schema_revision", "model", "uptime_ns", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UPTIME_NS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    version: str
    schema_revision: int
    model: str
    uptime_ns: int
    settings: _containers.ScalarMap[str, str]
    def __init__(self, version: _Optional[str] = ..., schema_revision: _Optional[int] = ..., model: _Optional[str] = ..., uptime_ns: _Optional[int] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_requests_running", "num_requests_waiting", "num_tokens_waiting", "workers", "models")
    NUM_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_WAITING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    num_requests_running: int
    num_requests_waiting: int
    num_tokens_waiting: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    models: _containers.RepeatedCompositeFieldContainer[ModelLoad]
    def __init__(self, num_requests_running: _Optional[int] = ..., num_requests_waiting: _Optional[int] = ..., num_tokens_waiting: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[ModelLoad, _Mapping]]] = ...) -> None: ...

class ModelLoad(_message.Message):
    __slots__ = ("name", "fingerprint", "num_requests_running", "num_requests_waiting", "num_workers_serving", "num_workers_draining")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_SERVING_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    num_requests_running: int
    num_requests_waiting: int
    num_workers_serving: int
    num_workers_draining: int
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., num_requests_running: _Optional[int] = ..., num_requests_waiting: _Optional[int] = ..., num_workers_serving: _Optional[int] = ..., num_workers_draining: _Optional[int] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("address", "instance_id", "epoch", "health", "num_running", "num_preempted", "num_device_blocks", "num_free_device_blocks", "num_host_blocks", "num_free_host_blocks", "num_steps", "last_heard_ns", "model", "problem", "adapters", "model_fingerprint", "block_size_tokens", "tensor_parallel_size", "pipeline_parallel_size")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARD_NS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    address: str
    instance_id: str
    epoch: int
    health: WorkerHealth
    num_running: int
    num_preempted: int
    num_device_blocks: int
    num_free_device_blocks: int
    num_host_blocks: int
    num_free_host_blocks: int
    num_steps: int
    last_heard_ns: int
    model: str
    problem: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    model_fingerprint: str
    block_size_tokens: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    def __init__(self, address: _Optional[str] = ..., instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., health: _Optional[_Union[WorkerHealth, str]] = ..., num_running: _Optional[int] = ..., num_preempted: _Optional[int] = ..., num_device_blocks: _Optional[int] = ..., num_free_device_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_free_host_blocks: _Optional[int] = ..., num_steps: _Optional[int] = ..., last_heard_ns: _Optional[int] = ..., model: _Optional[str] = ..., problem: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., model_fingerprint: _Optional[str] = ..., block_size_tokens: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "next_page_token")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestState]
    next_page_token: str
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestState, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class RequestState(_message.Message):
    __slots__ = ("request_id", "phase", "worker", "num_prompt_tokens", "sequences", "times_preempted", "times_moved", "age_ns", "tenant", "priority", "model", "model_fingerprint")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TIMES_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    TIMES_MOVED_FIELD_NUMBER: _ClassVar[int]
    AGE_NS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    phase: RequestPhase
    worker: str
    num_prompt_tokens: int
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceState]
    times_preempted: int
    times_moved: int
    age_ns: int
    tenant: str
    priority: int
    model: str
    model_fingerprint: str
    def __init__(self, request_id: _Optional[str] = ..., phase: _Optional[_Union[RequestPhase, str]] = ..., worker: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[SequenceState, _Mapping]]] = ..., times_preempted: _Optional[int] = ..., times_moved: _Optional[int] = ..., age_ns: _Optional[int] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class SequenceState(_message.Message):
    __slots__ = ("index", "num_tokens", "num_computed_tokens", "num_cached_tokens", "block_table", "host_block_table")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    index: int
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    block_table: _containers.RepeatedScalarFieldContainer[int]
    host_block_table: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., block_table: _Optional[_Iterable[int]] = ..., host_block_table: _Optional[_Iterable[int]] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ...) -> None: ...

class GetBlocksRequest(_message.Message):
    __slots__ = ("worker", "page_size", "page_token")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    worker: str
    page_size: int
    page_token: str
    def __init__(self, worker: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class GetBlocksResponse(_message.Message):
    __slots__ = ("blocks", "next_page_token")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockState]
    next_page_token: str
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockState, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class BlockState(_message.Message):
    __slots__ = ("worker", "block_id", "on_host", "ref_count", "cached")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    ON_HOST_FIELD_NUMBER: _ClassVar[int]
    REF_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    block_id: int
    on_host: bool
    ref_count: int
    cached: bool
    def __init__(self, worker: _Optional[str] = ..., block_id: _Optional[int] = ..., on_host: bool = ..., ref_count: _Optional[int] = ..., cached: bool = ...) -> None: ...

class WatchStepsRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class StepSummary(_message.Message):
    __slots__ = ("worker", "epoch", "step_id", "num_rows", "num_prefill_tokens", "num_decode_tokens", "blocks_copied", "blocks_swapped_in", "blocks_swapped_out", "phase_ns", "copies", "num_preempted", "num_swapped_out")
    class PhaseNsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_COPIED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SWAPPED_IN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SWAPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    PHASE_NS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    epoch: int
    step_id: int
    num_rows: int
    num_prefill_tokens: int
    num_decode_tokens: int
    blocks_copied: int
    blocks_swapped_in: int
    blocks_swapped_out: int
    phase_ns: _containers.ScalarMap[str, int]
    copies: _containers.RepeatedCompositeFieldContainer[BlockCopy]
    num_preempted: int
    num_swapped_out: int
    def __init__(self, worker: _Optional[str] = ..., epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., blocks_copied: _Optional[int] = ..., blocks_swapped_in: _Optional[int] = ..., blocks_swapped_out: _Optional[int] = ..., phase_ns: _Optional[_Mapping[str, int]] = ..., copies: _Optional[_Iterable[_Union[BlockCopy, _Mapping]]] = ..., num_preempted: _Optional[int] = ..., num_swapped_out: _Optional[int] = ...) -> None: ...

class BlockCopy(_message.Message):
    __slots__ = ("source", "destination")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    source: int
    destination: int
    def __init__(self, source: _Optional[int] = ..., destination: _Optional[int] = ...) -> None: ...

class GetViewRequest(_message.Message):
    __slots__ = ("max_requests", "max_blocks")
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    max_requests: int
    max_blocks: int
    def __init__(self, max_requests: _Optional[int] = ..., max_blocks: _Optional[int] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("load", "requests", "has_more_requests", "pools")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    load: Load
    requests: _containers.RepeatedCompositeFieldContainer[RequestState]
    has_more_requests: bool
    pools: _containers.RepeatedCompositeFieldContainer[BlockPool]
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ..., requests: _Optional[_Iterable[_Union[RequestState, _Mapping]]] = ..., has_more_requests: bool = ..., pools: _Optional[_Iterable[_Union[BlockPool, _Mapping]]] = ...) -> None: ...

class BlockPool(_message.Message):
    __slots__ = ("worker", "on_host", "num_blocks", "ref_counts", "cached_blocks", "withheld_blocks", "num_to_withhold", "max_withheld")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ON_HOST_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REF_COUNTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TO_WITHHOLD_FIELD_NUMBER: _ClassVar[int]
    MAX_WITHHELD_FIELD_NUMBER: _ClassVar[int]
    worker: str
    on_host: bool
    num_blocks: int
    ref_counts: _containers.RepeatedScalarFieldContainer[int]
    cached_blocks: _containers.RepeatedScalarFieldContainer[int]
    withheld_blocks: _containers.RepeatedScalarFieldContainer[int]
    num_to_withhold: int
    max_withheld: int
    def __init__(self, worker: _Optional[str] = ..., on_host: bool = ..., num_blocks: _Optional[int] = ..., ref_counts: _Optional[_Iterable[int]] = ..., cached_blocks: _Optional[_Iterable[int]] = ..., withheld_blocks: _Optional[_Iterable[int]] = ..., num_to_withhold: _Optional[int] = ..., max_withheld: _Optional[int] = ...) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("num_blocks_flushed",)
    NUM_BLOCKS_FLUSHED_FIELD_NUMBER: _ClassVar[int]
    num_blocks_flushed: int
    def __init__(self, num_blocks_flushed: _Optional[int] = ...) -> None: ...

class WithholdBlocksRequest(_message.Message):
    __slots__ = ("worker", "num_blocks")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    num_blocks: int
    def __init__(self, worker: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class WithholdBlocksResponse(_message.Message):
    __slots__ = ("num_withheld",)
    NUM_WITHHELD_FIELD_NUMBER: _ClassVar[int]
    num_withheld: int
    def __init__(self, num_withheld: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_requests_left",)
    NUM_REQUESTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    num_requests_left: int
    def __init__(self, num_requests_left: _Optional[int] = ...) -> None: ...

class DumpFlightRecordRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlightRecordPiece(_message.Message):
    __slots__ = ("data", "shard")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    shard: int
    def __init__(self, data: _Optional[bytes] = ..., shard: _Optional[int] = ...) -> None: ...

class ControlLoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class ControlLoadAdapterResponse(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class ControlUnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ControlUnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
