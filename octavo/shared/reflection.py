"""Server reflection v1 and v1alpha over one servicer, for `grpcurl` and its like, which ask for either.

grpcio-reflection serves v1alpha alone, but the messages of v1 are the same under another package name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1ALPHA = reflection.SERVICE_NAME
V1 = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Adds both versions to a server that is not started yet; `service_names` are full names."""
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer([*service_names, V1, V1ALPHA], pool=_Pool())
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": handler}),))


class _Pool:
    """The default descriptor pool, finding methods too: protobuf's own search by symbol overlooks them.

    Without it `grpcurl describe octavo.v1.Inference.Generate` is answered with "symbol not found".
    """

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def _describe_v1() -> None:
    """Puts v1's descriptor into the default pool, so that what `list` shows can also be described."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileContainingSymbol(V1)
    except KeyError:
        alpha = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
        pool.Add(text_format.Parse(text_format.MessageToString(alpha).replace("v1alpha", "v1"), type(alpha)()))
