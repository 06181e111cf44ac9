"""Keys of those who may call a service: a file with the hash of each, read again when it changes.

    keys:
      - name: web            # in logs, and the tenant where none is given
        sha256: 5e88...      # of the key
        tenant: shop
        roles: [inference]   # of ROLES; this one where none is given
        prefixes: common     # shares cached prefixes with keys that say the same (default: the tenant)
    tenants: [...]           # and default: what tenants may have (`tenant_limits.py`); these may be there without keys

Keys are drawn at random (`new_key`), so one hash without salt is enough: nobody tries 2^256 of them. What was read last
stays in force while the file cannot be read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
import yaml

from octavo.shared.access.tenant_limits import NAME, TenantLimitsError, TenantTable, read_table
from octavo.shared.watched_files import WatchedFiles
from octavo.shared.whole_files import replacing

log = structlog.get_logger()

INFERENCE, CONTROL, METRICS = ROLES = ("inference", "control", "metrics")
MAX_TOKEN_CHARS = 512
_FIELDS = frozenset({"name", "sha256", "tenant", "roles", "prefixes"})
_SECTIONS = ("keys", "tenants", "default")
_MAX_DEPTH = 8  # keys, their list, an entry, its roles
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a tenth of the time, in which no call is answered


class KeysFileError(ValueError):
    """A keys file that cannot be used; one line that names file and entry."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a key stands for.

    Attributes:
        prefixes: who says the same finds what this one has cached, and this one theirs.
        shares_prefixes: other tenants do.
    """

    name: str
    tenant: str
    roles: frozenset[str]
    prefixes: str
    shares_prefixes: bool = False


@dataclass(frozen=True, slots=True)
class KeysFile:
    """What stands in one.

    Attributes:
        callers: by the hash of their key.
        groups: tenants whose keys name the same `prefixes`, by that.
        tenants: what they may have.
    """

    callers: Mapping[str, Caller]
    groups: Mapping[str, frozenset[str]]
    tenants: TenantTable


class Keys:
    """Those of one file; thread-safe."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises KeysFileError."""
        self._file = WatchedFiles("keys", [path], lambda: read_file(path), clock)

    @property
    def num_failures(self) -> int:
        """Of reading the file again."""
        return self._file.num_failures

    def find(self, token: str) -> Caller | None:
        """Whose key this is. How long it takes tells nothing of a key: it is its hash that is looked up, and nobody can
        choose that byte by byte."""
        self.look_again()
        return self._file.content.callers.get(hash_of(token[:MAX_TOKEN_CHARS]))

    def others_in(self, prefixes: str, tenant: str) -> bool:
        """Whether keys of other tenants than this one share those prefixes."""
        return not self._file.content.groups.get(prefixes, frozenset()) <= {tenant}

    def look_again(self) -> None:
        """Reads the file where it has changed; once a second at most."""
        before = self._file.content.callers
        self._file.look_again()
        if (now := self._file.content.callers) is not before:
            came, went = sorted(_names(now) - _names(before)), sorted(_names(before) - _names(now))
            if came or went:
                log.info("keys came and went", new=came, gone=went)


class TenantsOfFile:
    """What tenants may have by the keys file, read again when that changes. For those who know no keys; thread-safe."""

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, *, starts_without: bool = False
    ) -> None:
        """`starts_without`: while the file cannot be read nobody has anything said of him; otherwise raises
        KeysFileError."""
        self._starts_without = starts_without
        self._file = WatchedFiles("tenants", [path], lambda: self._read(path), clock)
        self._starts_without = False

    def _read(self, path: Path) -> TenantTable:
        try:
            return read_file(path).tenants
        except KeysFileError as error:
            if not self._starts_without:
                raise
            log.error("tenants are not known", why=str(error))
            return TenantTable()

    def table(self) -> TenantTable:
        """What is in force now; the same object as long as the file stays as it is."""
        self._file.look_again()
        return self._file.content


def _names(callers: Mapping[str, Caller]) -> set[str]:
    return {caller.name for caller in callers.values()}


def new_key() -> str:
    """256 random bits, with letters before them by which a key is known where it was left by mistake."""
    return f"octavo-{secrets.token_urlsafe(32)}"


def hash_of(key: str) -> str:
    """What stands in the file."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_file(path: Path) -> KeysFile:
    """All of it, checked. Raises KeysFileError."""
    return check_sections(read_sections(path), str(path))


def check_sections(sections: Mapping[str, Any], file: str) -> KeysFile:
    """What they mean. Raises KeysFileError, which names the `file`."""
    callers: dict[str, Caller] = {}
    names: set[str] = set()
    groups: dict[str, set[str]] = {}
    for number, entry in enumerate(sections["keys"]):
        where = f"{file}: keys[{number}]"
        digest, caller = _caller(entry, where)
        if digest in callers:
            raise KeysFileError(f"{where} has the key of {callers[digest].name!r}")
        if caller.name in names:
            raise KeysFileError(f"{where}: name {caller.name!r} is there twice")
        names.add(caller.name)
        callers[digest] = caller
        groups.setdefault(caller.prefixes, set()).add(caller.tenant)
    for digest, caller in callers.items():
        if groups[caller.prefixes] != {caller.tenant}:
            callers[digest] = replace(caller, shares_prefixes=True)
    try:
        table = read_table(sections.get("tenants", []), sections.get("default", {}))
    except TenantLimitsError as error:
        raise KeysFileError(f"{file}: {error}") from None
    return KeysFile(callers, {name: frozenset(tenants) for name, tenants in groups.items()}, table)


def read_sections(path: Path) -> dict[str, Any]:
    """As they stand in the file, `keys` a list of entries. Raises KeysFileError."""
    try:
        text = path.read_text(encoding="utf-8")
        _check_depth(text)
        data = yaml.load(text, Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise KeysFileError(f"{path}: {getattr(error, 'strerror', None) or 'it is no text in UTF-8'}") from None
    except (yaml.YAMLError, ValueError) as error:  # also a date that is none
        raise KeysFileError(f"{path} is no YAML: {' '.join(str(error).split())[:200]}") from None
    is_known = isinstance(data, dict) and data and set(data) <= set(_SECTIONS)
    sections = {"keys": [], **data} if is_known else {}
    entries = sections.get("keys")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        accepted = "a list of entries under `keys` is accepted, beside it or alone `tenants` and `default`"
        raise KeysFileError(f"{path}: {accepted}, and nothing else")
    return sections


def _check_depth(text: str) -> None:
    """Raises YAMLError for lists within lists without an end, which crash libyaml."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise yaml.YAMLError(f"more than {_MAX_DEPTH} lists within each other")


def write_sections(path: Path, sections: Mapping[str, Any]) -> None:
    """Replaces the file at once; comments in it are lost. A new one is readable by this user alone; one that was there
    stays whose it was: a server that could not read it would go on with keys that are gone. Raises OSError."""
    with replacing(path) as file:
        file.write(yaml.safe_dump(dict(sections), sort_keys=False))


@contextlib.contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """While nobody else changes files of that folder by `octavo keys`: of two changes one would be lost. Raises
    OSError."""
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _caller(entry: dict[str, Any], where: str) -> tuple[str, Caller]:
    if unknown := sorted(map(str, set(entry) - _FIELDS)):
        raise KeysFileError(f"{where} has {unknown[0]!r}; known: {', '.join(sorted(_FIELDS))}")
    digest = entry.get("sha256")
    if not (isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{64}", digest)):
        raise KeysFileError(f"{where}: sha256 is to be 64 hexadecimal digits in quotes; `octavo keys add` writes them")
    roles = entry.get("roles", [INFERENCE])
    if not (isinstance(roles, list) and roles and set(map(str, roles)) <= set(ROLES)):
        raise KeysFileError(f"{where}: roles is {roles!r}; a list of {', '.join(ROLES)} is accepted")
    name = _text(entry, "name", None, where)
    tenant = _text(entry, "tenant", name, where)
    return digest, Caller(name, tenant, frozenset(roles), _text(entry, "prefixes", tenant, where))


def _text(entry: dict[str, Any], field: str, default: str | None, where: str) -> str:
    text = entry.get(field, default)
    if not (isinstance(text, str) and NAME.fullmatch(text)):
        raise KeysFileError(f"{where}: {field} is {text!r}; 1 to 256 printable characters without spaces are accepted")
    return text
