"""Whose a call is: what its key says, or what a proxy in front of this server wrote into its metadata, or else what the
client says.

Metadata are pairs of a lower-case name and a value, as HTTP's headers are, so this serves every way in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from scheduler_svc.errors import FieldViolation, InvalidRequest, NotAllowed, Unauthenticated

if TYPE_CHECKING:  # a command line is read without it
    from octavo.shared.access.callers import Callers
    from octavo.shared.access.keys import Caller

MAX_TENANT_CHARS = 256

Metadata = Iterable[tuple[str, str | bytes]]


class Tenants:
    """`field` is the name of the metadata that brings the tenant; empty: clients are believed, unless `callers` are
    known, each of whom has a tenant."""

    def __init__(self, field: str = "", callers: Callers | None = None) -> None:
        self._field, self._callers = field, callers

    def of_call(self, metadata: Metadata | None) -> str | None:
        """None: whatever the request says. A call without the field is of the unnamed tenant. Raises InvalidRequest,
        and Unauthenticated for a call whose key is not known, or not any more."""
        if self._callers is not None:
            return self._caller(self._callers, metadata).tenant
        if not self._field:
            return None
        found = {str(value) for name, value in metadata or () if name == self._field}
        if len(found) > 1:  # whoever wrote the second one, only one of them is to be believed
            raise InvalidRequest(
                FieldViolation("tenant", f"metadata {self._field!r} has {len(found)} different values")
            )
        tenant = found.pop() if found else ""
        if len(tenant) > MAX_TENANT_CHARS:
            what = f"metadata {self._field!r} has {len(tenant)} characters; accepted: at most {MAX_TENANT_CHARS}"
            raise InvalidRequest(FieldViolation("tenant", what))
        return tenant

    def check(self, of_call: str | None, claimed: str) -> str:
        """The tenant of a request that says `claimed`. Raises InvalidRequest where the call is of another one."""
        if of_call is None:
            return claimed
        if claimed and claimed != of_call:
            brings = "the key" if self._callers is not None else f"metadata {self._field!r}"
            what = f"got {claimed[:MAX_TENANT_CHARS]!r}; accepted here: none, as {brings} brings it"
            raise InvalidRequest(FieldViolation("tenant", what))
        return of_call

    def prefixes(self, metadata: Metadata | None, asked: str) -> tuple[str, bool]:
        """The `cache_salt` of a request, and whether its client is not told how many tokens were cached.

        Prefixes are shared within a tenant, or with keys that name the same `prefixes`; with all where clients are
        believed. Who found another's prompt in the cache would know it from how soon the first token comes, and from
        that number for certain.
        """
        if self._callers is not None:
            caller = self._caller(self._callers, metadata)
            return f"{caller.prefixes} {asked}", caller.shares_prefixes
        tenant = self.of_call(metadata)
        # The length: a tenant of metadata may have spaces, which no `prefixes` of a key has.
        return (asked if tenant is None else f"{len(tenant)} {tenant} {asked}"), False

    @staticmethod
    def _caller(callers: Callers, metadata: Metadata | None) -> Caller:
        """Looked up for each request: a call of many may be older than what the file says now, or than its token."""
        from octavo.shared.access.callers import UnknownCaller

        try:
            caller = callers.of_metadata(metadata)
        except UnknownCaller as unknown:
            raise Unauthenticated(str(unknown)) from None
        if "inference" not in caller.roles:
            raise NotAllowed(f"key {caller.name!r} is not for requests any more")
        return caller


def check_metadata_field(name: str) -> None:
    """Raises ValueError for a name that no metadata of text can have."""
    if name and (not re.fullmatch(r"[a-z0-9_.-]+", name) or name.startswith("grpc-") or name.endswith("-bin")):
        raise ValueError(
            f"tenant_metadata is {name!r}; lower-case letters, digits, _ . and - are accepted, no grpc-, -bin"
        )
