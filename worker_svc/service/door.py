"""Who may call a worker: schedulers that bring its token, or show a certificate with a name that it knows.

Checked before anything is read, with and without a lease. Health is told to everybody: probes bring nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path

import grpc

from octavo.shared.access.tls import check_name
from worker_svc.errors import StartupError

HEALTH = "/grpc.health.v1.Health/"
_FIELD = "authorization"


class Door:
    """`token` None: none is wanted; `names` empty: whoever shows a certificate that the authorities have signed."""

    def __init__(self, token: str | None = None, names: Iterable[str] = ()) -> None:
        self._token, self._names = token, tuple(names)

    @classmethod
    def of(cls, token_file: Path | None, names: Iterable[str]) -> Door:
        """Raises StartupError."""
        return cls(None if token_file is None else read_token(token_file), names)

    def refusal(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
        """Why a call is not taken, by what it brings; empty: it is."""
        if self._token is None or method.startswith(HEALTH):
            return ""
        brought = [value for name, value in metadata or () if name == _FIELD]
        wanted = f"Bearer {self._token}".encode()
        is_right = len(brought) == 1 and hmac.compare_digest(_bytes(brought[0]), wanted)
        return "" if is_right else "this worker's token is wanted (--worker-token-file of a scheduler)"

    def refusal_of_peer(self, context: grpc.aio.ServicerContext) -> str:
        """Likewise, by the certificate that the connection came with."""
        if not self._names or check_name(context.auth_context(), self._names) is not None:
            return ""
        return "the certificate of this connection has no name that this worker knows (--tls-client-name)"


def read_token(path: Path) -> str:
    """Raises StartupError."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"token_file {path}: {getattr(error, 'strerror', None) or 'it is no plain text'}") from None
    if len(token) < 16:
        raise StartupError(f"token_file {path} has {len(token)} characters; 16 at least are accepted")
    return token


def _bytes(value: str | bytes) -> bytes:
    return value.encode(errors="replace") if isinstance(value, str) else value
