"""Where the compiled code of sampling is kept, when that is a folder that others share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kernels.cpu import runtime


def test_compiled_kernels_that_cannot_be_written_to_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = tmp_path / "shared" / "kernels-0"
    compiled.mkdir(parents=True)
    (compiled / "index").write_text("machine code")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    copy = runtime._own_copy(compiled)
    assert copy == runtime._own_copy(compiled) == tmp_path / f"octavo-{os.getuid()}" / "kernels-0"
    assert (copy / "index").read_text() == "machine code" and [*copy.parent.iterdir()] == [copy]

    (copy / "index").write_text("somebody else's")
    copy.parent.chmod(0o777)  # as a folder that others may write to
    other = runtime._own_copy(compiled)
    assert other != copy and (other / "index").read_text() == "machine code"
