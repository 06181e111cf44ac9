"""The files of a model folder that a scheduler needs to speak to the model: tokenizer, template, generation config.

They are read once, at the start, so that their hash and what is sent stay one thing. Parses nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from protos import worker_pb2

FILE_NAMES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
CHUNK_BYTES = 1 << 20


class TokenizerFiles:
    """Contents by name, in sorted order, and the sha256 over all of them in that order."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self._contents = dict(sorted(contents.items()))
        self.sha256 = hashlib.sha256(b"".join(self._contents.values())).hexdigest()

    @classmethod
    def from_folder(cls, folder: Path) -> TokenizerFiles:
        """Those of FILE_NAMES that are there."""
        return cls({name: (folder / name).read_bytes() for name in FILE_NAMES if (folder / name).is_file()})

    def chunks(self) -> Iterator[worker_pb2.TokenizerChunk]:
        """All files in order, at most CHUNK_BYTES at a time; the last chunk carries the hash, and nothing else."""
        for name, data in self._contents.items():
            for start in range(0, max(len(data), 1), CHUNK_BYTES):
                yield worker_pb2.TokenizerChunk(file_name=name, data=data[start : start + CHUNK_BYTES])
        yield worker_pb2.TokenizerChunk(sha256=self.sha256)
