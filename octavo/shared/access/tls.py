"""TLS of what listens and what connects: PEM files, read again when they change.

New files are tried on each other before they count: a certificate that is expired, has another key or cannot be read
leaves the old one in force, with one line in the log. TLS 1.2 is the least, as gRPC and Python have it.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from octavo.shared.options import OptionError
from octavo.shared.watched_files import WatchedFiles


class TlsError(ValueError):
    """Files that cannot be used; one line that names them."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Of one side, in PEM. `client_ca`: authorities of those who connect, who then have to show a certificate."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @property
    def all(self) -> list[Path]:
        """Those that are there."""
        return [path for path in (self.cert, self.key, self.client_ca) if path is not None]


@dataclass(frozen=True, slots=True)
class _Read:
    """Certificate, key and authorities, which fit each other, and a context with them."""

    cert: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext
    trusted_since_s: float = 0.0  # since 1970, as sessions have it: since when `client_ca` is what it is

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """The same for gRPC."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.client_ca)


class ServerTls:
    """What a server shows. Thread-safe."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises TlsError."""
        self._files = files
        self._last: _Read | None = None
        self._read_files = WatchedFiles("certificates", files.all, self._read, clock)

    @property
    def num_failures(self) -> int:
        """Of reading them again."""
        return self._read_files.num_failures

    def credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server; each connection gets the newest certificate."""
        shown = self._read_files.content

        def newest() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            self.look_again()
            if self._read_files.content is shown:
                return None
            shown = self._read_files.content
            return shown.configuration()

        return grpc.dynamic_ssl_server_credentials(shown.configuration(), newest, self._files.client_ca is not None)

    def _read(self) -> _Read:
        """The first authorities have no time: keys of sessions from before this process are gone."""
        read, last = _read(self._files), self._last
        if last is not None:
            is_same = read.client_ca == last.client_ca
            read = replace(read, trusted_since_s=last.trusted_since_s if is_same else time.time())
        self._last = read
        return read

    def context(self) -> ssl.SSLContext:
        """For any other server; after `look_again` it shows new certificates, and asks for those of new authorities."""
        context = _context(self._files)

        def take_newest(
            connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, first: ssl.SSLContext
        ) -> int | None:
            newest = self._read_files.content
            connection.context = newest.context
            session = connection.session if newest.client_ca is not None and connection.session_reused else None
            if session is not None and session.time <= newest.trusted_since_s:  # nobody looks at its certificate again
                return ssl.ALERT_DESCRIPTION_CERTIFICATE_UNKNOWN
            return None

        context.sni_callback = take_newest  # called for clients that send no name, too
        return context

    def look_again(self) -> None:
        """Reads the files where they have changed; once a second at most."""
        self._read_files.look_again()


def client_credentials(
    ca: Path | None = None, cert: Path | None = None, key: Path | None = None
) -> grpc.ChannelCredentials:
    """For a channel that is opened now: authorities to trust (None: the system's), and what this side shows. Raises
    TlsError."""
    trusted, shown_cert, shown_key = _read_for_a_client(ca, cert, key)
    return grpc.ssl_channel_credentials(trusted, shown_key, shown_cert)


def client_context(ca: Path | None = None, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """The same for what does not use gRPC. Raises TlsError."""
    _read_for_a_client(ca, cert, key)
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key, password=str)
    except (ssl.SSLError, OSError) as error:
        raise TlsError(_why(error, [path for path in (ca, cert, key) if path is not None])) from None
    return context


def _read_for_a_client(*files: Path | None) -> list[bytes | None]:
    """Authorities, certificate and key. gRPC's C core aborts the process over a certificate or a key without the other,
    so it must not see half a pair, or the empty file that is there while one is written. Raises TlsError."""
    _, cert, key = files
    if (cert is None) != (key is None):
        raise TlsError(f"{cert or key}: a certificate and its key are needed together")
    return [None if path is None else _bytes_of(path) for path in files]


def check_name(auth_context: Mapping[str, Iterable[bytes]], allowed: Iterable[str]) -> str | None:
    """Of the names in a peer's certificate (DNS names, URIs as SPIFFE has them) one that is allowed; None: none is. The
    common name counts where there is no other: authorities look less at it."""
    fields = ("x509_subject_alternative_name", "x509_common_name")
    shown = next((found for field in fields if (found := list(auth_context.get(field, ())))), [])
    names = [name.decode(errors="replace") for name in shown]
    known = set(allowed)
    return next((name for name in names if name in known), None)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a certificate says of itself. `names`: DNS names and addresses, in its order; `is_own_authority`: who trusts
    it needs no other."""

    names: tuple[str, ...]
    is_own_authority: bool


def shown_by(cert: Path, key: Path) -> Shown:
    """Raises TlsError for files that a server could not use."""
    found = _try_on_each_other(TlsFiles(cert, key))[1]
    names = [value for kind, value in found.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    return Shown(tuple(names), found.get("issuer") == found.get("subject"))


def _read(files: TlsFiles) -> _Read:
    """Raises TlsError."""
    cert, key = _bytes_of(files.cert), _bytes_of(files.key)
    client_ca = None if files.client_ca is None else _bytes_of(files.client_ca)
    return _Read(cert, key, client_ca, _try_on_each_other(files)[0])


def _bytes_of(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TlsError(f"{path}: {error.strerror}") from None
    if not content:
        raise TlsError(f"{path} is empty")
    return content


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.cert, files.key, password=str)  # none: OpenSSL would ask for it on the terminal
    if files.client_ca is not None:
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # of TLS 1.3: who comes with one is let in whatever the authorities are by then
    return context


def _try_on_each_other(files: TlsFiles) -> tuple[ssl.SSLContext, dict[str, Any]]:
    """A handshake in memory with a client that trusts this very certificate: it fails over another key, and over a time
    that is past or has not begun. The context, and what the client has seen. Raises TlsError."""
    try:
        context = _context(files)  # authorities that are none
        server_side = _context(TlsFiles(files.cert, files.key))
        client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client_side.check_hostname = False
        client_side.load_verify_locations(files.cert)
        client_side.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = client_side.wrap_bio(back, there)
        ends = [client, server_side.wrap_bio(there, back, server_side=True)]
        while ends:
            for end in list(ends):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
                    ends.remove(end)
        return context, client.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        raise TlsError(f"{files.cert}: {error.verify_message}") from None
    except (ssl.SSLError, OSError) as error:
        raise TlsError(_why(error, files.all)) from None


def _why(error: OSError, files: Iterable[Path]) -> str:
    """In one line that names the files: OpenSSL's reason, where it has one."""
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return f"{', '.join(map(str, files))}: {str(reason).replace('_', ' ').lower()}"


def server_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> ServerTls | None:
    """Of the options of a service; None: it has no TLS. Raises OptionError."""
    if cert is None or key is None:
        return None
    try:
        return ServerTls(TlsFiles(cert, key, client_ca))
    except TlsError as error:
        raise OptionError(f"TLS: {error}") from None
