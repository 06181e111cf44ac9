"""Who calls: by a key of the keys file, or by a token of an issuer (JWT), whichever a server takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.shared.access.keys import Caller, Keys

if TYPE_CHECKING:  # a server without tokens does without their library
    from octavo.shared.access.jwt_callers import JwtCallers

_BEARER = "bearer "
_WANTED = "no known key: metadata `authorization: Bearer KEY` is wanted"


class UnknownCaller(ValueError):
    """Nobody knows who calls; the reason is for the caller."""


@dataclass(frozen=True, slots=True)
class Callers:
    """At least one of the two is there."""

    keys: Keys | None = None
    tokens: JwtCallers | None = None

    def of_metadata(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
        """Who brings `authorization: Bearer KEY`, with a key or a token. Raises UnknownCaller."""
        values = [value for name, value in metadata or () if name == "authorization"]
        return self.of_header(values[0] if len(values) == 1 else "")

    def of_header(self, value: str | bytes) -> Caller:
        """Whom the value of such a header names. Raises UnknownCaller."""
        text = value if isinstance(value, str) else value.decode("latin-1")
        if text[: len(_BEARER)].lower() != _BEARER:
            raise UnknownCaller(_WANTED)
        token = text[len(_BEARER) :].strip()
        if self.tokens is not None and (caller := self._by_token(token)) is not None:
            return caller
        if self.keys is not None and (caller := self.keys.find(token)) is not None:
            # A token may bring any tenant's name, so a group that is not named after this one may have others.
            may_share = self.tokens is not None and caller.prefixes != caller.tenant
            return replace(caller, shares_prefixes=True) if may_share and not caller.shares_prefixes else caller
        raise UnknownCaller(_WANTED)

    def look_again(self) -> None:
        """Reads files again that have changed."""
        if self.keys is not None:
            self.keys.look_again()
        if self.tokens is not None:
            self.tokens.source.look_again()

    def _by_token(self, token: str) -> Caller | None:
        from octavo.shared.access.jwt_callers import TokenRefused, looks_like_one

        assert self.tokens is not None
        if not looks_like_one(token):
            return None
        try:
            caller = self.tokens.find(token)
        except TokenRefused as refused:
            raise UnknownCaller(f"{_WANTED}; {refused}") from None
        except Exception:  # whatever else libraries make of bytes that a stranger chose
            raise UnknownCaller(f"{_WANTED}; its token cannot be read") from None
        if self.keys is not None and self.keys.others_in(caller.prefixes, caller.tenant):
            return replace(caller, shares_prefixes=True)
        return caller
