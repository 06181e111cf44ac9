"""What parts of our own save beside the libraries that do the same: `python -m benchmarks.beside_libraries` (seconds).

Each row is a part that would be the library's if it cost nothing: the docstrings of these modules name the figures. The
least of several rounds on one core, but for threads, which are counted.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client import Histogram as LibraryHistogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from tokenizers.decoders import DecodeStream

from octavo.models.gguf_file import GgufFile
from octavo.models.resolve import resolve_model
from scheduler_svc.api.metrics_server import MAX_CONNECTIONS, MetricsServer
from scheduler_svc.engine.metrics.histogram import Histogram
from scheduler_svc.engine.metrics.metrics import _BETWEEN_TOKENS_S
from scheduler_svc.text.tokenizer import Tokenizer

VALUES = 256  # of a column: a step of so many sequences
GGUF_TOKENS = 128_256  # as Llama 3 has them
ROUNDS = 7
TEXT = "Once there was a ship that left the harbour in a storm, and nobody has ever seen it come back. 😀 " * 12


def main() -> None:
    """Prints a row a part: ours, the library's, and of what unit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "model", nargs="?", default="smollm2-135m-instruct", help="whose tokenizer; a name, or a folder"
    )
    tokenizer = Tokenizer.from_folder(resolve_model(parser.parse_args().model))
    print("| part | ours | the library's | |\n| --- | --- | --- | --- |")
    for name, unit, (ours, library) in (
        (f"a column of {VALUES} values into a histogram (prometheus_client)", "us", histogram_us()),
        (f"text of {VALUES} tokens that come one by one (tokenizers)", "us", text_us(tokenizer, 1)),
        (f"text of {VALUES} tokens that come together (tokenizers)", "us", text_us(tokenizer, VALUES)),
        ("a model of the hub's cache found by a new process (huggingface_hub)", "ms", cache_ms()),
        ("what reads options, imported by a new process (pydantic)", "ms", options_ms()),
        (f"header of a GGUF file with {GGUF_TOKENS:,} tokens and as many merges (gguf)", "ms", gguf_ms()),
        (f"{2 * MAX_CONNECTIONS} clients that connect and say nothing (prometheus_client)", "threads", idle_threads()),
    ):
        print(f"| {name} | {ours:.3g} | {library:.3g} | {unit} |")


def histogram_us() -> tuple[float, float]:
    """Times between tokens of one step, of which no two are the same."""
    values = np.random.default_rng(0).exponential(0.05, VALUES)
    own = Histogram(_BETWEEN_TOKENS_S)
    library = LibraryHistogram("x", "x", buckets=_BETWEEN_TOKENS_S, registry=CollectorRegistry())

    def observe() -> None:
        for value in values.tolist():
            library.observe(value)

    return _least_us(lambda: own.observe_all(values)), _least_us(observe)


def text_us(tokenizer: Tokenizer, at_once: int) -> tuple[float, float]:
    """`at_once`: how many tokens a message brings."""
    token_ids = tokenizer.encode(TEXT)[:VALUES]
    parts = [token_ids[start : start + at_once] for start in range(0, len(token_ids), at_once)]

    def own() -> None:
        stream = tokenizer.stream()
        for part in parts:
            stream.push(part)
        stream.finish()

    def library() -> None:
        stream = DecodeStream(skip_special_tokens=True)
        for part in parts:
            for token_id in part:
                stream.step(tokenizer._tokenizer, token_id)

    return _least_us(own), _least_us(library)


def cache_ms() -> tuple[float, float]:
    """Imports included: a command looks for one model."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "models--tiny--model"
        snapshot = home / "snapshots" / "0123"
        snapshot.mkdir(parents=True)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text("0123")
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (snapshot / name).write_text("{}")
        own = (
            f"from octavo.models.hub_cache import HubName, find; assert find(HubName('tiny/model'), 'auto', {folder!r})"
        )
        library = (
            "from huggingface_hub import snapshot_download as s;"
            f"assert s('tiny/model', cache_dir={folder!r}, local_files_only=True)"
        )
        return _process_ms(own), _process_ms(library)


def options_ms() -> tuple[float, float]:
    """Before a field of options is declared; what reads files and variables comes on top of pydantic."""
    return _process_ms("import octavo.shared.options"), _process_ms("import pydantic; pydantic.BaseModel")


def gguf_ms() -> tuple[float, float]:
    """Read, and its values as Python has them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = GGUFWriter(path, "llama")
        tokens = [f"token{number}" for number in range(GGUF_TOKENS)]
        writer.add_token_list(tokens)
        writer.add_token_types([1] * GGUF_TOKENS)
        writer.add_token_merges([f"{token} {token}" for token in tokens])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()

        def library() -> list[object]:
            return [field.contents() for field in GGUFReader(path).fields.values()]

        return _least_us(lambda: GgufFile(path), 1, 2) / 1000, _least_us(library, 1, 2) / 1000


def idle_threads() -> tuple[float, float]:
    """Threads that are there beside those that were before."""
    registry = CollectorRegistry()
    before = threading.active_count()
    own = MetricsServer(_Nothing(), "127.0.0.1", 0)
    num_own = _threads_while_connected(own.port, before)
    own.stop()
    before = threading.active_count()
    server, thread = start_http_server(0, "127.0.0.1", registry)
    num_library = _threads_while_connected(server.server_port, before)
    server.shutdown()
    thread.join()
    return num_own, num_library


class _Nothing(Collector):
    def collect(self) -> Iterable[Metric]:
        return ()


def _threads_while_connected(port: int, before: int) -> int:
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * MAX_CONNECTIONS)]
    time.sleep(0.5)
    count = threading.active_count() - before
    for client in clients:
        client.close()
    return count


def _process_ms(program: str) -> float:
    """Beside a process that does nothing."""
    return (_program_us(program) - _program_us("")) / 1e3


def _program_us(program: str) -> float:
    return _least_us(lambda: subprocess.run([sys.executable, "-c", program], check=True), times=1)


def _least_us(call: Callable[[], object], times: int = 50, num_rounds: int = ROUNDS) -> float:
    rounds = []
    for _ in range(num_rounds):
        started_ns = time.perf_counter_ns()
        for _ in range(times):
            call()
        rounds.append((time.perf_counter_ns() - started_ns) / times / 1e3)
    return min(rounds)


if __name__ == "__main__":
    main()
