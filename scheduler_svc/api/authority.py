"""Who may call which method: by the key that a call brings, where the server has a keys file.

octavo.v1.Inference     role inference
octavo.v1.Control       role control; GetLoad, which an autoscaler asks, also metrics
reflection              any key
health                  everybody: probes have no key
anything else           role control: channelz tells who is connected
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from octavo.shared.keys import CONTROL, INFERENCE, METRICS, ROLES, Caller, Keys, KeysFileError
from octavo.shared.options import OptionError
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.errors import NotAllowed, Unauthenticated

log = structlog.get_logger()

Metadata = Iterable[tuple[str, str | bytes]]

_OPEN = "/grpc.health.v1.Health/"
_BY_PREFIX = {"/octavo.v1.Inference/": (INFERENCE,), "/octavo.v1.Control/": (CONTROL,), "/grpc.reflection.": ROLES}
_BY_METHOD = {"/octavo.v1.Control/GetLoad": (CONTROL, METRICS)}
# Of Control: on the record, as is whoever takes a record along.
_CHANGES = ("Drain", "DumpFlightRecord", "FlushPrefixCache", "LoadAdapter", "UnloadAdapter", "WithholdBlocks")


class Authority:
    """Over one keys file."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    @classmethod
    def of(cls, config: SchedulerConfig) -> Authority | None:
        """None: everybody may do everything. Raises OptionError."""
        if config.keys_file is None:
            return None
        try:
            return cls(Keys(config.keys_file))
        except KeysFileError as error:
            raise OptionError(f"--keys-file: {error}") from None

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
        if (caller := self.keys.of_metadata(metadata)) is None:
            raise Unauthenticated("no known key: metadata `authorization: Bearer KEY` is wanted")
        return caller


def _roles_for(method: str) -> tuple[str, ...]:
    if method in _BY_METHOD:
        return _BY_METHOD[method]
    return next((roles for prefix, roles in _BY_PREFIX.items() if method.startswith(prefix)), (CONTROL,))
