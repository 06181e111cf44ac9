"""How a channel to a worker is opened: over TLS, with a token, or plainly.

Files are read at each attempt, so that new certificates and tokens count from the next connection on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from octavo.shared.access.tls import client_credentials


@dataclass(frozen=True, slots=True)
class WorkerChannels:
    """See `Connect`.

    Args:
        ca_file: authorities of workers' certificates; None: without TLS.
        cert_file, key_file: what is shown to them.
        name: that their certificates have to have; empty: the host of the address.
        token_file: brought with each call.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    name: str = ""
    token_file: Path | None = None

    def __call__(self, address: str, *, options: Sequence[tuple[str, int]]) -> grpc.Channel:
        """See `Connect`."""
        if self.ca_file is None:
            channel = grpc.insecure_channel(address, options=options)
        else:
            credentials = client_credentials(self.ca_file, self.cert_file, self.key_file)
            name = [("grpc.ssl_target_name_override", self.name)] if self.name else []
            channel = grpc.secure_channel(address, credentials, options=[*options, *name])
        if self.token_file is None:
            return channel
        return grpc.intercept_channel(channel, _WithToken(self.token_file.read_text(encoding="ascii").strip()))


class _Details(NamedTuple):
    """What gRPC asks of `ClientCallDetails`."""

    method: str
    timeout: float | None
    metadata: list[tuple[str, str | bytes]]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any


class _WithToken(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]  # grpc ships no types
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]  # likewise
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]  # likewise
):
    """Adds the token to each call."""

    def __init__(self, token: str) -> None:
        self._metadata = ("authorization", f"Bearer {token}")

    def _with_token(self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: Any) -> Any:
        metadata = [*(details.metadata or ()), self._metadata]
        others = details.credentials, details.wait_for_ready, details.compression
        return continuation(_Details(details.method, details.timeout, metadata, *others), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_stream = _with_token
