from protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FrontRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[FrontRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[FrontRequest, _Mapping]]] = ...) -> None: ...

class FrontRequest(_message.Message):
    __slots__ = ("claim", "released", "listening", "refused", "used", "abort", "echo", "check", "aborted")
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    LISTENING_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    claim: IdClaim
    released: int
    listening: int
    refused: int
    used: ClaimUse
    abort: IdAbort
    echo: int
    check: IdClaim
    aborted: bool
    def __init__(self, claim: _Optional[_Union[IdClaim, _Mapping]] = ..., released: _Optional[int] = ..., listening: _Optional[int] = ..., refused: _Optional[int] = ..., used: _Optional[_Union[ClaimUse, _Mapping]] = ..., abort: _Optional[_Union[IdAbort, _Mapping]] = ..., echo: _Optional[int] = ..., check: _Optional[_Union[IdClaim, _Mapping]] = ..., aborted: bool = ...) -> None: ...

class IdClaim(_message.Message):
    __slots__ = ("number", "tenant", "request_id", "num_prompt_tokens", "num_sequences", "num_bytes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    number: int
    tenant: str
    request_id: str
    num_prompt_tokens: int
    num_sequences: int
    num_bytes: int
    def __init__(self, number: _Optional[int] = ..., tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class IdAbort(_message.Message):
    __slots__ = ("number", "request_id", "tenant")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_id: str
    tenant: str
    def __init__(self, number: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ClaimUse(_message.Message):
    __slots__ = ("number", "num_tokens")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    number: int
    num_tokens: int
    def __init__(self, number: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class FrontAnswers(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[FrontAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[FrontAnswer, _Mapping]]] = ...) -> None: ...

class FrontAnswer(_message.Message):
    __slots__ = ("state", "id", "aborted", "echo", "abort_claim")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    ABORT_CLAIM_FIELD_NUMBER: _ClassVar[int]
    state: FrontState
    id: IdAnswer
    aborted: IdAborted
    echo: int
    abort_claim: int
    def __init__(self, state: _Optional[_Union[FrontState, _Mapping]] = ..., id: _Optional[_Union[IdAnswer, _Mapping]] = ..., aborted: _Optional[_Union[IdAborted, _Mapping]] = ..., echo: _Optional[int] = ..., abort_claim: _Optional[int] = ...) -> None: ...

class IdAborted(_message.Message):
    __slots__ = ("number", "found")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    number: int
    found: bool
    def __init__(self, number: _Optional[int] = ..., found: bool = ...) -> None: ...

class IdAnswer(_message.Message):
    __slots__ = ("number", "is_taken", "over_limit", "is_aborted", "too_many_sequences")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    OVER_LIMIT_FIELD_NUMBER: _ClassVar[int]
    IS_ABORTED_FIELD_NUMBER: _ClassVar[int]
    TOO_MANY_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    number: int
    is_taken: bool
    over_limit: OverLimit
    is_aborted: bool
    too_many_sequences: str
    def __init__(self, number: _Optional[int] = ..., is_taken: bool = ..., over_limit: _Optional[_Union[OverLimit, _Mapping]] = ..., is_aborted: bool = ..., too_many_sequences: _Optional[str] = ...) -> None: ...

class OverLimit(_message.Message):
    __slots__ = ("message", "retry_after_s", "tenant", "limit", "most", "left", "label")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    message: str
    retry_after_s: float
    tenant: str
    limit: str
    most: int
    left: int
    label: str
    def __init__(self, message: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., tenant: _Optional[str] = ..., limit: _Optional[str] = ..., most: _Optional[int] = ..., left: _Optional[int] = ..., label: _Optional[str] = ...) -> None: ...

class FrontState(_message.Message):
    __slots__ = ("shards", "is_draining", "is_broken_off")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    IS_BROKEN_OFF_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardAddress]
    is_draining: bool
    is_broken_off: bool
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardAddress, _Mapping]]] = ..., is_draining: bool = ..., is_broken_off: bool = ...) -> None: ...

class ShardAddress(_message.Message):
    __slots__ = ("index", "socket")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    index: int
    socket: str
    def __init__(self, index: _Optional[int] = ..., socket: _Optional[str] = ...) -> None: ...

class WorkerShare(_message.Message):
    __slots__ = ("addresses", "drained")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    drained: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., drained: _Optional[_Iterable[str]] = ...) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("is_ready", "serving", "model", "drained")
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    is_ready: bool
    serving: _containers.RepeatedScalarFieldContainer[str]
    model: str
    drained: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, is_ready: bool = ..., serving: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., drained: _Optional[_Iterable[str]] = ...) -> None: ...

class ListNumberedRequests(_message.Message):
    __slots__ = ("after", "limit")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    after: int
    limit: int
    def __init__(self, after: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class NumberedRequests(_message.Message):
    __slots__ = ("requests", "numbers", "is_last")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[_inference_pb2.RequestState]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    is_last: bool
    def __init__(self, requests: _Optional[_Iterable[_Union[_inference_pb2.RequestState, _Mapping]]] = ..., numbers: _Optional[_Iterable[int]] = ..., is_last: bool = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MetricsText(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    def __init__(self, text: _Optional[bytes] = ...) -> None: ...

class ShardReport(_message.Message):
    __slots__ = ("last_number", "workers", "adapters", "waiting_u32", "process")
    LAST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_U32_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    last_number: int
    workers: _containers.RepeatedCompositeFieldContainer[ReportedWorker]
    adapters: _containers.RepeatedCompositeFieldContainer[ReportedAdapter]
    waiting_u32: bytes
    process: str
    def __init__(self, last_number: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[ReportedWorker, _Mapping]]] = ..., adapters: _Optional[_Iterable[_Union[ReportedAdapter, _Mapping]]] = ..., waiting_u32: _Optional[bytes] = ..., process: _Optional[str] = ...) -> None: ...

class ReportedWorker(_message.Message):
    __slots__ = ("number", "description", "load", "num_ahead_tokens", "num_ahead_slots", "num_cached_blocks", "num_outputs", "set_bits_u32", "cleared_bits_u32")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    SET_BITS_U32_FIELD_NUMBER: _ClassVar[int]
    CLEARED_BITS_U32_FIELD_NUMBER: _ClassVar[int]
    number: int
    description: WorkerDescription
    load: RoutingLoad
    num_ahead_tokens: float
    num_ahead_slots: float
    num_cached_blocks: int
    num_outputs: float
    set_bits_u32: bytes
    cleared_bits_u32: bytes
    def __init__(self, number: _Optional[int] = ..., description: _Optional[_Union[WorkerDescription, _Mapping]] = ..., load: _Optional[_Union[RoutingLoad, _Mapping]] = ..., num_ahead_tokens: _Optional[float] = ..., num_ahead_slots: _Optional[float] = ..., num_cached_blocks: _Optional[int] = ..., num_outputs: _Optional[float] = ..., set_bits_u32: _Optional[bytes] = ..., cleared_bits_u32: _Optional[bytes] = ...) -> None: ...

class RoutingLoad(_message.Message):
    __slots__ = ("tokens_per_s", "late_s", "num_uncomputed", "base_s", "token_s", "turnover_s", "num_slots", "num_taken_slots", "num_blocks", "num_taken_blocks", "block_size")
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCOMPUTED_FIELD_NUMBER: _ClassVar[int]
    BASE_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TURNOVER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TAKEN_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TAKEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    tokens_per_s: float
    late_s: float
    num_uncomputed: float
    base_s: float
    token_s: float
    turnover_s: float
    num_slots: float
    num_taken_slots: float
    num_blocks: float
    num_taken_blocks: float
    block_size: float
    def __init__(self, tokens_per_s: _Optional[float] = ..., late_s: _Optional[float] = ..., num_uncomputed: _Optional[float] = ..., base_s: _Optional[float] = ..., token_s: _Optional[float] = ..., turnover_s: _Optional[float] = ..., num_slots: _Optional[float] = ..., num_taken_slots: _Optional[float] = ..., num_blocks: _Optional[float] = ..., num_taken_blocks: _Optional[float] = ..., block_size: _Optional[float] = ...) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("model_fingerprint", "block_size", "max_model_len", "max_cached_tokens", "num_bits", "bits", "takes_adapters")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BITS_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    TAKES_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    block_size: int
    max_model_len: int
    max_cached_tokens: int
    num_bits: int
    bits: bytes
    takes_adapters: bool
    def __init__(self, model_fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_cached_tokens: _Optional[int] = ..., num_bits: _Optional[int] = ..., bits: _Optional[bytes] = ..., takes_adapters: bool = ...) -> None: ...

class ReportedAdapter(_message.Message):
    __slots__ = ("name", "generation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    generation: int
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...
