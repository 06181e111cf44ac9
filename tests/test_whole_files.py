"""Files that are there whole or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from octavo.shared.whole_files import replacing


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_that_is_not_written_to_its_end_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with replacing(path) as file:
        file.write("one")
    assert path.read_text() == "one" and mode(path) == 0o600
    with pytest.raises(OSError, match="full"), replacing(path) as file:
        file.write("two")
        raise OSError("full")
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


def test_links_modes_and_what_is_no_file_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "link"
    path.touch()
    path.chmod(0o640)
    link.symlink_to(path)
    with replacing(link) as file:
        file.write("one")
    assert link.is_symlink() and path.read_text() == "one" and mode(path) == 0o640
    with pytest.raises(IsADirectoryError), replacing(tmp_path):
        pass
    with pytest.raises(FileExistsError), replacing(Path("/dev/null")):
        pass
    assert not Path("/dev/null").is_file()
