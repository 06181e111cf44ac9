"""llama.cpp: its server with a slot for each request of a workload, asked for token ids over HTTP on loopback."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from line_protocol import Request, serve

SLOTS = 64
TOKENS_A_SLOT = 640


def main() -> None:
    """Starts the server and answers workloads over this process's pipes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--binary", required=True, help="llama-server")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [arguments.binary, "-m", arguments.model, "--port", str(port), "--host", "127.0.0.1"]
    command += ["-t", str(arguments.threads), "-np", str(SLOTS), "-c", str(SLOTS * TOKENS_A_SLOT), "-cb", "--no-webui"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url, server)
            serve(f"llama.cpp {arguments.model.rpartition('/')[2]}", lambda requests: _generate(url, requests))
        finally:
            server.terminate()


def _generate(url: str, requests: Sequence[Request]) -> list[list[int]]:
    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(lambda request: _complete(url, *request), requests))


def _complete(url: str, prompt: list[int], num_tokens: int) -> list[int]:
    wanted = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "ignore_eos": True}
    wanted |= {"return_tokens": True, "cache_prompt": True, "samplers": ["top_k"], "top_k": 1}
    body = json.dumps(wanted).encode()
    asked = urllib.request.Request(f"{url}/completion", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=1200) as answer:
        return list(json.load(answer)["tokens"])


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    raise SystemExit(f"llama-server ended with {server.returncode}")


if __name__ == "__main__":
    main()
