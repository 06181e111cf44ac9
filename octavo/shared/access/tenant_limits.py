"""What each tenant may have at once and a minute: the sections `tenants` and `default` of a keys file.

    tenants:
      - name: shop                   # as `tenant` of its keys says
        weight: 3                    # under `fair`; 1 where none is given
        requests_per_minute: 600
        tokens_per_minute: 200000    # of prompts and answers
        running_sequences: 16        # more wait, and others pass them
        waiting_requests: 64         # that may wait so
        bytes: 4194304               # of requests that have not ended
    default:                         # for each tenant that is not named; the same fields without name and weight
      requests_per_minute: 60

What is left out has no limit. A tenant that is named has what its entry says, and nothing of `default`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

REQUESTS, TOKENS, RUNNING, WAITING, BYTES = LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "running_sequences",
    "waiting_requests",
    "bytes",
)
NAME = re.compile(r"[\x21-\x7e]{1,256}")  # of keys and tenants
MOST = 10**12  # of any limit: beyond, a number is a mistake


class TenantLimitsError(ValueError):
    """One line that names entry and field."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Of one tenant. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    running_sequences: int | None = None
    waiting_requests: int | None = None
    bytes: int | None = None


UNLIMITED = TenantLimits()


@dataclass(frozen=True, slots=True)
class TenantTable:
    """Of all tenants.

    Attributes:
        named: limits of tenants that the file names.
        default: of each of the others.
        weights: under `fair`, of those that have one.
    """

    named: Mapping[str, TenantLimits] = field(default_factory=lambda: MappingProxyType({}))
    default: TenantLimits = UNLIMITED
    weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, tenant: str) -> TenantLimits:
        """Those of one tenant."""
        return self.named.get(tenant, self.default)


def read_table(tenants: Any, default: Any) -> TenantTable:
    """From the two sections as YAML gives them. Raises TenantLimitsError."""
    if not (isinstance(tenants, list) and all(isinstance(entry, dict) for entry in tenants)):
        raise TenantLimitsError("tenants: a list of entries is accepted")
    if not isinstance(default, dict):
        raise TenantLimitsError(f"default: fields are accepted: {', '.join(LIMITS)}")
    named: dict[str, TenantLimits] = {}
    weights: dict[str, float] = {}
    for number, entry in enumerate(tenants):
        where, name = f"tenants[{number}]", entry.get("name")
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise TenantLimitsError(
                f"{where}: name is {name!r}; 1 to 256 printable characters without spaces are accepted"
            )
        if name in named:
            raise TenantLimitsError(f"{where}: tenant {name!r} is there twice")
        named[name] = _limits(entry, where, ("name", "weight"))
        if "weight" in entry:
            weights[name] = _weight(entry["weight"], where)
    return TenantTable(named, _limits(default, "default", ()), weights)


def _limits(entry: Mapping[str, Any], where: str, beside: tuple[str, ...]) -> TenantLimits:
    known = (*beside, *LIMITS)
    if unknown := sorted(map(str, set(entry) - set(known))):
        raise TenantLimitsError(f"{where} has {unknown[0]!r}; known: {', '.join(known)}")
    for name in LIMITS:
        value = entry.get(name)
        if name in entry and not (type(value) is int and 1 <= value <= MOST):
            raise TenantLimitsError(f"{where}: {name} is {value!r}; a whole number from 1 on is accepted")
    if WAITING in entry and RUNNING not in entry:
        raise TenantLimitsError(f"{where}: {WAITING} bounds what waits for {RUNNING}, which is not there")
    found = {name: entry[name] for name in LIMITS if name in entry}
    return TenantLimits(**found) if found else UNLIMITED  # the one object, by which who has no limit is known fast


def _weight(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise TenantLimitsError(f"{where}: weight is {value!r}; a positive number is accepted")
    return float(value)
