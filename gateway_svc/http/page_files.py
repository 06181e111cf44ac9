"""The page: its files from memory, under a policy that lets a browser load nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked again each time, and answered by 304 while it is the same
}


def page_routes(**switches: bool) -> list[BaseRoute]:
    """`/` and the files beside it. `switches`: what `index.html` says of this server, as `data-NAME="off"`."""
    routes: list[BaseRoute] = []
    for file in files("gateway_svc.page").iterdir():
        name, dot, kind = file.name.rpartition(".")
        if (content_type := _KINDS.get(dot + kind)) is None:
            continue
        content = file.read_text(encoding="utf-8")
        if name == "index":
            for switch, is_on in switches.items():
                off = f'data-{switch.replace("_", "-")}="off"'
                assert off in content
                content = content.replace(off, off.replace("off", "on")) if is_on else content
        path = "/" if name == "index" else f"/page/{file.name}"
        routes.append(Route(path, _serving(content.encode(), f"{content_type}; charset=utf-8"), methods=["GET"]))
    return routes


def _serving(content: bytes, content_type: str) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**_HEADERS, "etag": tag, "content-type": content_type}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return serve
