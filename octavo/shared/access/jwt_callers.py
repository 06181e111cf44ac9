"""Callers by JSON Web Tokens (RFC 7519) that somebody else issues, checked with the public keys of that issuer.

A token is accepted when its signature is by one of the keys and asymmetric, its issuer and audience are the configured
ones, and its time has come and has not passed. It is checked once and remembered until it expires, or keys change.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from octavo.shared.access.jwks import ALGORITHMS, KeySource
from octavo.shared.access.keys import INFERENCE, ROLES, Caller
from octavo.shared.access.tenant_limits import NAME

MAX_CHARS = 6144  # of a token: gRPC takes 8 KiB of metadata in all
LEEWAY_S = 30.0  # that the clocks of issuer and server may differ
MAX_REMEMBERED = 4096
LAST_S = 1e11  # of a time that is one, which NaN is not: some three thousand years
MAX_NAME_CHARS = 64


class TokenRefused(ValueError):
    """Why a token is none; tells nothing that its bearer does not know."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a token has to say, and where it says whose it is."""

    issuer: str
    audience: str
    tenant_claim: str = "sub"
    roles_claim: str = "roles"


def looks_like_one(token: str) -> bool:
    """Whether it is written as tokens are, and no key is."""
    return token.startswith("ey") and token.count(".") == 2


class JwtCallers:
    """Thread-safe. `now`: seconds since 1970, as tokens have them."""

    def __init__(self, source: KeySource, rules: TokenRules, now: Callable[[], float] = time.time) -> None:
        self.source = source
        self._rules, self._now = rules, now
        self._lock = threading.Lock()
        self._remembered: dict[bytes, tuple[Caller, float]] = {}  # by the token's hash: until when it is good
        self._version = source.version

    def find(self, token: str) -> Caller:
        """Whose token this is. Raises TokenRefused."""
        if len(token) > MAX_CHARS:
            raise TokenRefused(f"its token has more than {MAX_CHARS} characters")
        self.source.look_again()
        digest = hashlib.sha256(token.encode()).digest()
        with self._lock:
            if self._version is not (version := self.source.version):
                self._version = version
                self._remembered.clear()
            found = self._remembered.get(digest)
        if found is not None and self._now() < found[1]:
            return found[0]
        caller, until_s = self._check(token)
        with self._lock:
            if self._version is version:  # or its key may have gone meanwhile
                if len(self._remembered) >= MAX_REMEMBERED:
                    self._forget_some()
                self._remembered[digest] = caller, until_s
        return caller

    def _forget_some(self) -> None:
        """The expired ones, and where there are too many others, those that were checked first."""
        now_s = self._now()
        left = [(digest, found) for digest, found in self._remembered.items() if found[1] > now_s]
        self._remembered = dict(left[len(left) - min(len(left), MAX_REMEMBERED // 2) :])

    def _check(self, token: str) -> tuple[Caller, float]:
        claims = self._read(token)
        now_s, expires_s, begins_s = self._now(), claims["exp"], claims.get("nbf", 0)
        if not all(type(time_s) in (int, float) and -LAST_S < time_s < LAST_S for time_s in (expires_s, begins_s)):
            raise TokenRefused("its token has no readable times")
        if now_s >= expires_s + LEEWAY_S:
            raise TokenRefused("its token has expired")
        if now_s < begins_s - LEEWAY_S:
            raise TokenRefused("its token is not valid yet")
        return self._caller(claims), expires_s + LEEWAY_S

    def _read(self, token: str) -> Mapping[str, Any]:
        """The claims, once signature, issuer and audience are checked. Times are not."""
        try:
            header = jwt.get_unverified_header(token)
        except Exception:  # whatever libraries make of bytes that a stranger chose; likewise below
            raise TokenRefused("its token cannot be read") from None
        algorithm = header.get("alg")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise TokenRefused("its token is not signed by an accepted algorithm")
        kid = header.get("kid", "")
        key = self.source.find(kid) if isinstance(kid, str) else None
        if key is None:
            raise TokenRefused("the key of its token is not known")
        checks = {"require": ["exp", "iss", "aud"], "verify_exp": False, "verify_nbf": False, "verify_iat": False}
        try:
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=list(key.algorithms),
                audience=self._rules.audience,
                issuer=self._rules.issuer,
                options=checks,  # type: ignore[arg-type]  # a TypedDict there
            )
        except jwt.InvalidIssuerError:
            raise TokenRefused("its token is of another issuer") from None
        except jwt.InvalidAudienceError:
            raise TokenRefused("its token is for another audience") from None
        except jwt.MissingRequiredClaimError as error:
            raise TokenRefused(f"its token has no claim {error.claim!r}") from None
        except Exception:  # of the signature above all
            raise TokenRefused("its token is not signed by its issuer") from None
        return claims

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        rules = self._rules
        tenant = _claim(claims, rules.tenant_claim)
        if not (isinstance(tenant, str) and NAME.fullmatch(tenant)):
            raise TokenRefused(f"claim {rules.tenant_claim!r} of its token names no tenant")
        roles = _claim(claims, rules.roles_claim)
        if roles is None:
            roles = [INFERENCE]
        elif isinstance(roles, str):  # as `scope` has them
            roles = roles.split()
        known = frozenset(role for role in ROLES if isinstance(roles, list) and role in roles)
        subject = str(claims.get("sub", tenant))
        name = "".join(each for each in subject[:MAX_NAME_CHARS] if each.isprintable())
        return Caller(f"jwt:{name}", tenant, known, prefixes=tenant)


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """A claim of that name, or of claims within claims: `realm_access.roles`. None: it is not there."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
