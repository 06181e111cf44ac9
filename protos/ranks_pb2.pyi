from protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankCommand(_message.Message):
    __slots__ = ("initialize", "begin_lease", "step", "end_group", "load_adapter", "unload_adapter", "read_adapter")
    INITIALIZE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_LEASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    END_GROUP_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    READ_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    initialize: _worker_pb2.InitializeRequest
    begin_lease: BeginLease
    step: _worker_pb2.Step
    end_group: EndGroup
    load_adapter: _worker_pb2.LoadAdapterRequest
    unload_adapter: _worker_pb2.UnloadAdapterRequest
    read_adapter: _worker_pb2.LoadAdapterRequest
    def __init__(self, initialize: _Optional[_Union[_worker_pb2.InitializeRequest, _Mapping]] = ..., begin_lease: _Optional[_Union[BeginLease, _Mapping]] = ..., step: _Optional[_Union[_worker_pb2.Step, _Mapping]] = ..., end_group: _Optional[_Union[EndGroup, _Mapping]] = ..., load_adapter: _Optional[_Union[_worker_pb2.LoadAdapterRequest, _Mapping]] = ..., unload_adapter: _Optional[_Union[_worker_pb2.UnloadAdapterRequest, _Mapping]] = ..., read_adapter: _Optional[_Union[_worker_pb2.LoadAdapterRequest, _Mapping]] = ...) -> None: ...

class BeginLease(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndGroup(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageAnswer(_message.Message):
    __slots__ = ("token_ids_i32", "outputs")
    TOKEN_IDS_I32_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    token_ids_i32: bytes
    outputs: _worker_pb2.SequenceOutputs
    def __init__(self, token_ids_i32: _Optional[bytes] = ..., outputs: _Optional[_Union[_worker_pb2.SequenceOutputs, _Mapping]] = ...) -> None: ...

class RankIdentity(_message.Message):
    __slots__ = ("octavo_version", "torch_version", "model_hash", "settings", "processor")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    OCTAVO_VERSION_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_FIELD_NUMBER: _ClassVar[int]
    octavo_version: str
    torch_version: str
    model_hash: str
    settings: _containers.ScalarMap[str, str]
    processor: str
    def __init__(self, octavo_version: _Optional[str] = ..., torch_version: _Optional[str] = ..., model_hash: _Optional[str] = ..., settings: _Optional[_Mapping[str, str]] = ..., processor: _Optional[str] = ...) -> None: ...

class RankSizes(_message.Message):
    __slots__ = ("num_device_blocks", "num_host_blocks", "max_model_len", "error")
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    num_device_blocks: int
    num_host_blocks: int
    max_model_len: int
    error: str
    def __init__(self, num_device_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class RankAdapter(_message.Message):
    __slots__ = ("error", "digest")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    error: str
    digest: bytes
    def __init__(self, error: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class RankGraphs(_message.Message):
    __slots__ = ("batch_sizes", "token_counts")
    BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    batch_sizes: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, batch_sizes: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ...) -> None: ...
