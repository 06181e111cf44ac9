"""Downloads a model's files from the Hugging Face hub over plain HTTPS.

Only safetensors, JSON and Jinja files are taken: no pickles, no code. Sizes and, where the hub gives them, sha256 sums
are checked. `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean what they mean to the hub's own library.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from octavo.models.errors import FetchError, SourceUnavailable

REACH_TIMEOUT_S = 3.0  # for name, connection and listing together: a machine without the hub must not wait
_READ_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 20
_SUFFIXES = (".safetensors", ".json", ".jinja")
_ONLINE_WORDS = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class HubFile:
    name: str
    size_bytes: int | None
    sha256: str | None


@dataclass(frozen=True)
class Snapshot:
    """One revision of a repository and the files of it that are wanted."""

    repo: str
    revision: str
    files: tuple[HubFile, ...]


def find_snapshot(repo: str, revision: str, timeout_s: float = REACH_TIMEOUT_S) -> Snapshot:
    """This commit of `repo`. Raises `SourceUnavailable` within about `timeout_s` when the hub is not there, and where
    it answers with another commit."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() not in _ONLINE_WORDS:
        raise SourceUnavailable("HF_HUB_OFFLINE is set")
    url = f"{_endpoint()}/api/models/{repo}/revision/{revision}?blobs=true"
    listing = _within(timeout_s, lambda: json.load(_open(url, timeout_s)))
    if listing["sha"] != revision:
        raise SourceUnavailable(f"{url} answers with {listing['sha']}")
    # Files in folders of a repository are other formats of the same model (onnx/, runs/).
    files = tuple(
        HubFile(file["rfilename"], file.get("size"), (file.get("lfs") or {}).get("sha256"))
        for file in listing["siblings"]
        if file["rfilename"].endswith(_SUFFIXES) and "/" not in file["rfilename"]
    )
    return Snapshot(repo, revision, files)


def download(snapshot: Snapshot, folder: Path, report: Callable[[str], None]) -> None:
    """All files of `snapshot` into `folder`. Raises `FetchError`."""
    for file in snapshot.files:
        size = f" ({file.size_bytes / 1e6:.1f} MB)" if file.size_bytes else ""
        report(f"  {file.name}{size}")
        url = f"{_endpoint()}/{snapshot.repo}/resolve/{snapshot.revision}/{file.name}"
        try:
            _download_file(url, folder / file.name, file)
        except (OSError, ValueError) as error:
            raise FetchError(f"{url}: {error}") from error


def _download_file(url: str, path: Path, file: HubFile) -> None:
    digest, size_bytes = hashlib.sha256(), 0
    with _open(url, _READ_TIMEOUT_S) as response, path.open("wb") as out:
        while chunk := response.read(_CHUNK_BYTES):
            out.write(chunk)
            digest.update(chunk)
            size_bytes += len(chunk)
    if file.size_bytes is not None and size_bytes != file.size_bytes:
        raise ValueError(f"got {size_bytes} bytes of {file.size_bytes}")
    if file.sha256 is not None and digest.hexdigest() != file.sha256:
        raise ValueError("the sha256 sum is not what the hub says")


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _open(url: str, timeout_s: float) -> HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "octavo"})
    if token := os.environ.get("HF_TOKEN"):
        # Unredirected: large files are redirected to another host, which must not see the token.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    response: HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s)
    return response


def _within(timeout_s: float, call: Callable[[], Any]) -> Any:
    """`call()`, or `SourceUnavailable`. In a thread of its own: looking a host name up knows no timeout."""
    outcome: list[Any] = []
    failure: list[Exception] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    started = time.monotonic()
    thread.start()
    thread.join(timeout_s)
    if outcome:
        return outcome[0]
    if not failure:
        raise SourceUnavailable(f"{_endpoint()} did not answer within {timeout_s:g} s")
    reason = getattr(failure[0], "reason", failure[0])
    raise SourceUnavailable(f"{_endpoint()}: {reason} (after {time.monotonic() - started:.1f} s)") from failure[0]
