"""Sends bytes that are no message to every method of a server, and checks its answers and its log."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

INTROSPECTION: tuple[ServiceDescriptor, ...] = (
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    channelz_pb2.DESCRIPTOR.services_by_name["Channelz"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
REFLECTION_V1 = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
NO_MESSAGE = b"\xff\xff secret"  # a tag that goes on for ever


def methods(services: Iterable[ServiceDescriptor]) -> list[tuple[str, MethodDescriptor]]:
    """Paths and descriptors of all methods, those of every server included."""
    found = [(f"/{s.full_name}/{m.name}", m) for s in (*services, *INTROSPECTION) for m in s.methods]
    (reflection,) = INTROSPECTION[-1].methods
    return [*found, (REFLECTION_V1, reflection)]


async def statuses(address: str, services: Iterable[ServiceDescriptor]) -> dict[str, tuple[grpc.StatusCode, str]]:
    """What each method answers to bytes that are no message; where it reads a stream, also after an empty message."""
    answers: dict[str, tuple[grpc.StatusCode, str]] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        for path, method in methods(services):
            if method.client_streaming:
                answers[path] = await _ask(channel.stream_stream(path)(iter([NO_MESSAGE]), timeout=10))
                if "Reflection" in path:  # goes on after an empty one
                    answers[f"{path} later"] = await _ask(channel.stream_stream(path)(iter([b"", NO_MESSAGE])))
            else:
                answers[path] = await _ask(channel.unary_stream(path)(NO_MESSAGE, timeout=10))
    return answers


async def _ask(call: grpc.aio.StreamStreamCall | grpc.aio.UnaryStreamCall) -> tuple[grpc.StatusCode, str]:
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()


def check(answers: dict[str, tuple[grpc.StatusCode, str]], log: str) -> None:
    """Each is refused with INVALID_ARGUMENT, and has one line in the log, without a traceback and the bytes."""
    for path, (code, details) in answers.items():
        name = path.removesuffix(" later")
        assert code == grpc.StatusCode.INVALID_ARGUMENT, f"{path}: {code} {details}"
        assert f"these {len(NO_MESSAGE)} bytes are no request of {name}" in details
    # What else runs in this process may say something, too.
    refusals = ("bytes that are no message", "request refused")
    lines = [line for line in map(json.loads, log.splitlines()) if line["event"] in refusals]
    assert len(lines) == len(answers), log
    assert all(line["level"] == "info" and "exception" not in line for line in lines), log
    assert "Traceback" not in log and "secret" not in log
