"""Which pages may call, by what their browser says: where a page is from, and by which name it found this machine.

A page from elsewhere may point a name of its own at this machine (DNS rebinding). For its browser this server is then
the page's own, and nothing is asked in front of a call.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway_svc.errors import PERMISSION, HttpError
from gateway_svc.http.replies import send_error
from octavo.shared.ports import is_loopback


def check_caller(headers: Headers, is_local: bool) -> None:
    """Pages of elsewhere get nothing, whatever names they give this machine. Raises HttpError."""
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host", ""):
        raise HttpError(403, f"this is for the page of this server, not for one of {origin[:80]!r}", type=PERMISSION)
    name = _name_called(headers)
    if is_local and not is_loopback(name):
        raise HttpError(403, f"this is for the machine itself, which is not called {name[:80]!r}", type=PERMISSION)


class LocalPages:
    """In front of a server on loopback: pages call it by a name of this machine, or are of an origin that is allowed.

    Callers that are no pages say no origin, and may use any name: a proxy on this machine passes on its own.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a page, or leaves the request to the application."""
        headers = Headers(scope=scope)
        origin, name = headers.get("origin"), _name_called(headers)
        if origin is None or origin in self._allowed or is_loopback(name) or name.endswith(".localhost"):
            await self._app(scope, receive, send)
            return
        what = f"a page of {origin[:80]!r} called this machine {name[:80]!r}, which is no name of its own"
        await send_error(send, HttpError(403, f"{what}; --allow-origin lets pages of an origin call", type=PERMISSION))


def _name_called(headers: Headers) -> str:
    """The host that a request names, without its port."""
    host = headers.get("host", "")
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
