"""A Hugging Face hub on a local port, as its library needs it: models, trees, files with their ETags and commits."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_right"  # an account that does not exist
_LARGE = (".safetensors", ".gguf", ".bin")  # kept apart from git, and known by their sha256


class FakeHub:
    """`add` repositories; calls are listed in `requests`: method, path, Range header.

    `breaks_off`: file names of which the connection is lost halfway, once each. `damaged`: come with wrong bytes.
    `unavailable`: are refused with status 503. `gated`: repositories for those with TOKEN. `may_answer`: cleared,
    nobody gets an answer.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}  # repo -> commit -> files
        self.refs: dict[str, dict[str, str]] = {}  # repo -> branch -> commit
        self.breaks_off: set[str] = set()
        self.damaged: set[str] = set()
        self.unavailable: set[str] = set()
        self.gated: set[str] = set()
        self.requests: list[tuple[str, str, str]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, repo: str, files: dict[str, bytes], branch: str = "main") -> str:
        """A new commit of a branch; its hash."""
        commit = hashlib.sha1(json.dumps([repo, branch, sorted(files)]).encode() + b"".join(files.values())).hexdigest()
        self.repos.setdefault(repo, {})[commit] = files
        self.refs.setdefault(repo, {})[branch] = commit
        return commit

    def close(self) -> None:
        self.may_answer.set()
        self.server.shutdown()
        self.server.server_close()

    def files_asked_for(self) -> set[str]:
        return {path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path}

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        url = urlsplit(handler.path)
        path = unquote(url.path)
        self.requests.append((handler.command, path, handler.headers.get("Range", "")))
        self.may_answer.wait(60)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if path == "/api/models":
                query = {key: values[0] for key, values in parse_qs(url.query).items()}
                owner, search = query.get("author"), query.get("search", "")
                names = [name for name in self.repos if (name.split("/")[0] == owner if owner else search in name)]
                return _send_json(handler, [{"id": name, "modelId": name} for name in names])
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                repo, what, rest = "/".join(parts[2:4]), parts[4:5], parts[5:]
            else:
                repo, what, rest = "/".join(parts[:2]), parts[2:3], parts[3:]
            if repo not in self.repos:
                return _refuse(handler, 401, "RepoNotFound", "Repository not found")
            revision = rest[0] if rest else "main"
            commit = self.refs[repo].get(revision, revision)
            if commit not in self.repos[repo]:
                return _refuse(handler, 404, "RevisionNotFound", "Invalid rev id")
            files = self.repos[repo][commit]
            if what in ([], ["revision"]):
                siblings = [{"rfilename": name} for name in files]
                return _send_json(handler, {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings})
            if what == ["tree"]:
                return _send_json(handler, [_tree_entry(name, data) for name, data in files.items()])
            if repo in self.gated and handler.headers.get("Authorization") != f"Bearer {TOKEN}":
                return _refuse(handler, 401, "GatedRepo", "Access is restricted")
            name = "/".join(rest[1:])
            if name not in files:
                return _refuse(handler, 404, "EntryNotFound", "Entry not found")
            if name in self.unavailable and handler.command == "GET":
                return _refuse(handler, 503, "", "Service Unavailable")
            self._send_file(handler, name, files[name], commit)

    def _send_file(self, handler: BaseHTTPRequestHandler, name: str, data: bytes, commit: str) -> None:
        start = int((handler.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        etag = _tree_entry(name, data)
        handler.send_response(206 if start else 200)
        handler.send_header("X-Repo-Commit", commit)
        handler.send_header("Accept-Ranges", "bytes")
        handler.send_header("ETag", f'"{etag["lfs"]["oid"] if "lfs" in etag else etag["oid"]}"')
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        body = data[start:]
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command == "HEAD":
            return
        if name in self.damaged:
            body = bytes(len(body))
        if name in self.breaks_off:
            self.breaks_off.remove(name)
            handler.wfile.write(body[: len(body) // 2])
            handler.close_connection = True
            return
        handler.wfile.write(body)


def _tree_entry(name: str, data: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": oid}
    if name.endswith(_LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 100}
    return entry


def _send_json(handler: BaseHTTPRequestHandler, value: Any) -> None:
    body = json.dumps(value).encode()
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def _refuse(handler: BaseHTTPRequestHandler, status: int, code: str, message: str) -> None:
    handler.send_response(status)
    handler.send_header("X-Error-Code", code)
    handler.send_header("X-Error-Message", message)
    handler.send_header("Content-Length", "0")
    handler.end_headers()
