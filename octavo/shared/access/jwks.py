"""Public keys of whoever issues tokens (JSON Web Key Sets, RFC 7517), from a file, a URL, or both.

A file is read again when it changes. A URL is asked by a thread: at the start, every REFRESH_S, and soon after a token
has named a key that is not known, though not more often than every PAUSE_S. What was read last stays in force while
nothing better can be had. A server whose URL does not answer at its start starts all the same, and knows no token until
it does: whoever has a key of the keys file is not to wait for another service.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import structlog
from jwt import PyJWK

from octavo.shared.watched_files import WatchedFiles

log = structlog.get_logger()

REFRESH_S = 300.0
PAUSE_S = 10.0  # between two attempts, at least
TIMEOUT_S = 5.0  # for each step of one attempt
FIRST_S = 3.0  # that a server waits for the first attempt before it starts
MAX_BYTES = 1_048_576
MAX_KEYS = 256
MIN_RSA_BITS = 2048
_BY_CURVE = {"P-256": ("ES256",), "P-384": ("ES384",), "P-521": ("ES512",), "Ed25519": ("EdDSA",)}
_OF_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
ALGORITHMS = frozenset([*_OF_RSA, *(name for names in _BY_CURVE.values() for name in names)])  # asymmetric ones alone


class JwksError(ValueError):
    """A set that cannot be used; one line that says which and why."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """One key, and what signatures by it are accepted."""

    key: Any  # of `cryptography`
    algorithms: tuple[str, ...]


Keys = Mapping[str, PublicKey]  # by id, "" of one without


def read_set(text: bytes | str, where: str) -> Keys:
    """Keys that signatures can be checked with; others are left out. Raises JwksError where there is none."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise JwksError(f"{where}: it is no JSON") from None
    entries = data.get("keys") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise JwksError(f"{where}: a JSON Web Key Set is wanted, an object with a list of `keys`")
    found = {}
    for entry in entries[:MAX_KEYS]:
        if (key := _read_key(entry)) is not None:
            found[str(entry.get("kid", ""))] = key
    if entries and not found:  # an empty set is one: an issuer takes all of its keys back
        raise JwksError(f"{where}: it has no public key for signatures ({', '.join(sorted(ALGORITHMS))})")
    return found


def _read_key(entry: Mapping[str, Any]) -> PublicKey | None:
    by_type = _OF_RSA if entry.get("kty") == "RSA" else _BY_CURVE.get(str(entry.get("crv")), ())
    said = entry.get("alg")
    algorithms = by_type if said is None else tuple(name for name in by_type if name == said)
    if not algorithms or entry.get("use", "sig") != "sig" or entry.get("kty") not in ("RSA", "EC", "OKP"):
        return None
    try:
        key = PyJWK({name: value for name, value in entry.items() if name != "d"}, algorithms[0]).key
    except Exception:  # whatever libraries make of a key that is none
        return None
    if entry["kty"] == "RSA" and key.key_size < MIN_RSA_BITS:
        return None
    return PublicKey(key, algorithms)


class KeySource:
    """The keys that are in force. Thread-safe.

    Attributes:
        version: changes whenever they do.
    """

    def __init__(
        self,
        path: Path | None,
        url: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        refresh_s: float = REFRESH_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        """Raises JwksError for a file that cannot be used."""
        self._file = None if path is None else WatchedFiles("jwks", [path], lambda: _read_file(path), clock)
        self._url, self._refresh_s, self._pause_s = url, refresh_s, pause_s
        self._fetched: Keys = {}
        self._num_fetch_failures, self._is_failing = 0, False
        self.version: object = object()
        self._seen = None if self._file is None else self._file.content
        self._wanted, self._is_stopped = threading.Event(), threading.Event()
        if url:
            has_tried = threading.Event()
            threading.Thread(target=self._follow, args=(has_tried,), name="jwks", daemon=True).start()
            has_tried.wait(FIRST_S)

    @property
    def num_failures(self) -> int:
        """Of reading the file again, and of asking the URL."""
        return self._num_fetch_failures + (0 if self._file is None else self._file.num_failures)

    def look_again(self) -> None:
        """Reads the file where it has changed."""
        if self._file is not None:
            self._file.look_again()
            if self._file.content is not self._seen:
                self._seen, self.version = self._file.content, object()

    def find(self, kid: str) -> PublicKey | None:
        """The key of an id; for "", the only one that there is. Has the URL asked again where none is known."""
        self.look_again()
        own: Keys = {} if self._file is None else self._file.content
        for keys in (self._fetched, own):
            if (key := keys.get(kid)) is not None:
                return key
        if not kid and len({**self._fetched, **own}) == 1:
            return next(iter({**self._fetched, **own}.values()))
        self._wanted.set()
        return None

    def stop(self) -> None:
        """Asks the URL no more."""
        self._is_stopped.set()
        self._wanted.set()

    def _follow(self, has_tried: threading.Event) -> None:
        while not self._is_stopped.is_set():
            self._fetch()
            has_tried.set()
            self._is_stopped.wait(self._pause_s)
            if not self._is_failing:
                self._wanted.wait(max(0.0, self._refresh_s - self._pause_s))
            self._wanted.clear()

    def _fetch(self) -> None:
        try:
            found = _fetch(self._url)
        except Exception as error:  # whatever it is, what is known stays known
            self._num_fetch_failures += 1
            why = str(error) if isinstance(error, JwksError) else f"{self._url}: {type(error).__name__}"
            if not self._is_failing:
                log.error("jwks stay as they were", why=why)
            self._is_failing = True
            return
        if self._is_failing or not self._fetched:
            log.info("jwks were read", url=self._url, keys=len(found))
        self._is_failing = False
        if _shape(found) != _shape(self._fetched):
            self._fetched, self.version = found, object()


def _shape(keys: Keys) -> dict[str, tuple[Any, tuple[str, ...]]]:
    return {kid: (key.key, key.algorithms) for kid, key in keys.items()}  # keys of `cryptography` compare by value


def _read_file(path: Path) -> Keys:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise JwksError(f"{path}: {error.strerror}") from None
    return read_set(text, str(path))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could lead away from TLS, or to whom nobody named."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        """None: it is not followed."""
        return


def _fetch(url: str) -> Keys:
    # What is not encrypted is asked for on this machine alone, and goes through no proxy.
    direct = [urllib.request.ProxyHandler({})] if url.startswith("http://") else []
    opener = urllib.request.build_opener(_NoRedirect, *direct)
    try:
        with opener.open(
            urllib.request.Request(url, headers={"accept": "application/json"}), timeout=TIMEOUT_S
        ) as said:
            text = said.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise JwksError(f"{url}: HTTP {error.code}") from None
    except (OSError, ValueError) as error:
        raise JwksError(f"{url}: {getattr(error, 'reason', None) or error}") from None
    if len(text) > MAX_BYTES:
        raise JwksError(f"{url}: more than {MAX_BYTES} bytes")
    return read_set(text, url)
