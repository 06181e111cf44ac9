"""Who may call which method: by the key or token that a call brings, where the server knows any.

octavo.v1.Inference     role inference
octavo.v1.Control       role control; GetLoad, which an autoscaler asks, also metrics
reflection              any key
health                  everybody: probes have no key
anything else           role control: channelz tells who is connected
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from octavo.shared.access.callers import Callers, UnknownCaller
from octavo.shared.access.keys import CONTROL, INFERENCE, METRICS, ROLES, Caller, Keys, KeysFileError
from octavo.shared.options import OptionError
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.errors import NotAllowed, Unauthenticated

if TYPE_CHECKING:  # tokens are an option, and so are their libraries
    from octavo.shared.access.jwks import KeySource
    from octavo.shared.access.jwt_callers import JwtCallers

log = structlog.get_logger()

Metadata = Iterable[tuple[str, str | bytes]]

_OPEN = "/grpc.health.v1.Health/"
_BY_PREFIX = {"/octavo.v1.Inference/": (INFERENCE,), "/octavo.v1.Control/": (CONTROL,), "/grpc.reflection.": ROLES}
_BY_METHOD = {"/octavo.v1.Control/GetLoad": (CONTROL, METRICS)}
# Of Control: on the record, as is whoever takes a record along.
_CHANGES = ("Drain", "DumpFlightRecord", "FlushPrefixCache", "LoadAdapter", "UnloadAdapter", "WithholdBlocks")


class Authority:
    """Over those whom the server knows."""

    def __init__(self, callers: Callers) -> None:
        self.callers = callers

    @classmethod
    def of(cls, config: SchedulerConfig) -> Authority | None:
        """None: everybody may do everything. Raises OptionError."""
        if not config.knows_callers:
            return None
        try:
            keys = None if config.keys_file is None else Keys(config.keys_file)
        except KeysFileError as error:
            raise OptionError(f"--keys-file: {error}") from None
        return cls(Callers(keys, _tokens(config) if config.takes_tokens else None))

    def check(self, method: str, metadata: Metadata | None) -> None:
        """Raises Unauthenticated for no key, or one that is not known, and NotAllowed for one without the role."""
        if method.startswith(_OPEN):
            return
        caller = self.caller(metadata)
        roles = _roles_for(method)
        if not caller.roles & set(roles):
            raise NotAllowed(f"key {caller.name!r} is not for this call; it takes role {' or '.join(roles)}")
        service, _, name = method.rpartition("/")
        if name in _CHANGES and service.endswith("Control"):
            log.info("control", call=name, key=caller.name, tenant=caller.tenant)

    def caller(self, metadata: Metadata | None) -> Caller:
        """Raises Unauthenticated."""
        try:
            return self.callers.of_metadata(metadata)
        except UnknownCaller as unknown:
            raise Unauthenticated(str(unknown)) from None


def _tokens(config: SchedulerConfig) -> JwtCallers:
    """Raises OptionError."""
    try:
        import jwt  # noqa: F401  # looked for before anything needs it
        from cryptography.exceptions import InvalidSignature  # noqa: F401  # likewise
    except ImportError:
        where = "pip install '.[jwt]' in a clone of Octavo"
        raise OptionError(f"tokens need a library that is not installed: {where} brings it") from None
    from octavo.shared.access.jwt_callers import JwtCallers, TokenRules

    rules = TokenRules(config.jwt_issuer, config.jwt_audience, config.jwt_tenant_claim, config.jwt_roles_claim)
    return JwtCallers(_source(config.jwt_jwks_file, config.jwt_jwks_url), rules)


@lru_cache(maxsize=4)
def _source(path: Path | None, url: str) -> KeySource:
    """One for all servers of this process, as each asks the URL by a thread of its own. Raises OptionError."""
    from octavo.shared.access.jwks import JwksError, KeySource

    try:
        return KeySource(path, url)
    except JwksError as error:
        raise OptionError(f"--jwt-jwks-file: {error}") from None


def _roles_for(method: str) -> tuple[str, ...]:
    if method in _BY_METHOD:
        return _BY_METHOD[method]
    return next((roles for prefix, roles in _BY_PREFIX.items() if method.startswith(prefix)), (CONTROL,))
