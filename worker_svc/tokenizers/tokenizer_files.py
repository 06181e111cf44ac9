"""The files of a model folder that a scheduler needs to speak to the model: tokenizer, template, generation config.

They are read once, at the start, so that their hash and what is sent stay one thing. A folder without tokenizer.json
gets one made of its other files here, so that no scheduler needs to know any other format. With `--tokenizer` the
tokenizer's files come from another folder; what describes the model itself stays its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from protos import worker_pb2
from worker_svc.models.errors import ModelError
from worker_svc.tokenizers.slow_tokenizer import make_tokenizer_json

_OF_MODEL = ("config.json", "generation_config.json")
_OF_TOKENIZER = ("chat_template.jinja", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")
CHUNK_BYTES = 1 << 20


class TokenizerFiles:
    """Contents by name, in sorted order, and the sha256 over all of them in that order."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self._contents = dict(sorted(contents.items()))
        self.sha256 = hashlib.sha256(b"".join(self._contents.values())).hexdigest()

    @classmethod
    def from_folder(
        cls, folder: Path, mode: str = "auto", trust_remote_code: bool = False, tokenizer_folder: Path | None = None
    ) -> TokenizerFiles:
        """The files that are there; `mode` is the option tokenizer_mode, `tokenizer_folder` the option tokenizer.

        Raises ModelError, also where `tokenizer_folder`, which was named explicitly, has no tokenizer.
        """
        source = tokenizer_folder or folder
        contents = _read(folder, _OF_MODEL) | _read(source, _OF_TOKENIZER)
        is_wanted = mode == "slow" or (mode == "auto" and "tokenizer.json" not in contents)
        if is_wanted and (made := make_tokenizer_json(source, trust_remote_code)) is not None:
            contents["tokenizer.json"] = made.encode()
        elif mode == "slow":
            raise ModelError(f"{source}: there are no files of a slow tokenizer; --tokenizer-mode auto takes others")
        if tokenizer_folder is not None and "tokenizer.json" not in contents:
            raise ModelError(f"{tokenizer_folder}: there is no tokenizer.json, nor anything to make one of")
        return cls(contents)

    @property
    def contents(self) -> dict[str, bytes]:
        """By name, in sorted order."""
        return self._contents

    def chunks(self) -> Iterator[worker_pb2.TokenizerChunk]:
        """All files in order, at most CHUNK_BYTES at a time; the last chunk carries the hash, and nothing else."""
        for name, data in self._contents.items():
            for start in range(0, max(len(data), 1), CHUNK_BYTES):
                yield worker_pb2.TokenizerChunk(file_name=name, data=data[start : start + CHUNK_BYTES])
        yield worker_pb2.TokenizerChunk(sha256=self.sha256)


def _read(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
