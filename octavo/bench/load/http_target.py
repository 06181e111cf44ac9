"""Any server of OpenAI's API: completions or chats, streamed as server-sent events."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from octavo.bench.load.record import Record
from octavo.bench.load.requests import PlannedRequest
from octavo.bench.load.runner import Clock, RequestError

CONNECT_TIMEOUT_S = 30.0
MAX_REASON = 4096  # bytes of an error's body that are read


class HttpTarget:
    """`url` is the base with its version, `http://127.0.0.1:8000/v1`. To be made within an event loop.

    Prompts are ids where `takes_ids`, and text for chats. `ignore_eos` is sent as vLLM and Octavo take it. `context` is
    of https; None: the system's authorities are trusted.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str | None = None,
        chat: bool = False,
        takes_ids: bool = False,
        ignore_eos: bool = True,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._url = f"{url.rstrip('/')}/{'chat/completions' if chat else 'completions'}"
        self._chat, self._takes_ids = chat, takes_ids
        self._body: dict[str, Any] = {"model": model, "temperature": 0, "stream": True}
        self._body["stream_options"] = {"include_usage": True}
        if ignore_eos:
            self._body["ignore_eos"] = True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=context or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
        )

    async def prepare(self) -> None:
        """Nothing: OpenAI's API has no call that empties a prefix cache."""

    async def send(self, request: PlannedRequest, record: Record, clock: Clock) -> None:
        """See `Target`."""
        body = {**self._body, "max_tokens": request.max_tokens}
        if self._chat:
            body["messages"] = [{"role": "user", "content": request.as_text()}]
        else:
            has_ids = self._takes_ids and request.prompt_token_ids
            body["prompt"] = list(request.prompt_token_ids) if has_ids else request.as_text()
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    raise RequestError(f"HTTP {response.status}", _reason_in(await response.content.read(MAX_REASON)))
                is_done = False
                async for data in _events(response.content):
                    if data == b"[DONE]":
                        is_done = True
                        break
                    self._take(data, record, clock)
                if not is_done:
                    raise RequestError("the stream broke off")
        except aiohttp.ClientSSLError as error:
            raise RequestError("no connection", " ".join(str(error).split())) from None
        except aiohttp.ClientConnectorError:
            raise RequestError("no connection") from None
        except aiohttp.ClientError as error:
            raise RequestError(type(error).__name__) from None

    def _take(self, data: bytes, record: Record, clock: Clock) -> None:
        try:
            event = json.loads(data)
            if "error" in event:
                raise RequestError("ended with an error")
            for choice in event.get("choices", ()):
                said = choice.get("delta", {}) if self._chat else choice
                if said.get("content" if self._chat else "text") or said.get("reasoning_content"):
                    record.times_s.append(clock())
                    record.output_tokens += 1  # until `usage` says how many they were
            if usage := event.get("usage"):
                record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RequestError("an event that cannot be read") from None

    async def close(self) -> None:
        """Closes all connections."""
        await self._session.close()


def _reason_in(body: bytes) -> str:
    """The message of an error as OpenAI's API writes it; empty where there is none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each event, as soon as it is whole; comments and other fields are left out."""
    rest = b""
    async for part in content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
