"""A GGUF file as a model folder: config and tokenizer are written as files, weights stay in the GGUF file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worker_svc.models.errors import ModelError


@contextmanager
def model_folder(path: Path) -> Iterator[Path]:
    """`path` where it is a folder; for a GGUF file a folder of the file's name that lives within the context.

    The folder holds config.json, the tokenizer's files and a link to the file. Raises ModelError.
    """
    if path.is_dir():
        yield path
        return
    from octavo.models.errors import GGUFError
    from octavo.models.gguf_convert import write_description

    with tempfile.TemporaryDirectory(prefix="octavo-gguf-") as parent:
        folder = Path(parent) / path.stem.lower()
        folder.mkdir()
        try:
            write_description(path, folder)
        except GGUFError as error:
            raise ModelError(f"{path}: {error}") from None
        (folder / path.name).symlink_to(path.absolute())
        yield folder
