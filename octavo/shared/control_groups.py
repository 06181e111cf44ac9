"""Control groups around this process, and the small files in which they say what they allow. Linux, versions 2 and 1.

Knows where the files are, not what their numbers mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """The version and the folder of each group that may limit what `controller` ("cpu", "memory") divides: the
    process's own, then those above it, as far as they are visible. `root` is where /proc and /sys are looked for."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0":
            yield from ((2, folder) for folder in _upwards(root / "sys/fs/cgroup", path))
        elif controller in controllers.split(","):
            yield from ((1, folder) for folder in _upwards(root / "sys/fs/cgroup" / controller, path))


def text_of(path: Path) -> str:
    """What the file says, without blanks around it; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()  # a group's name may be any bytes
    except OSError:
        return ""


def _upwards(top: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above it; a container sees its own as the top."""
    own = top / path.strip("/")
    for folder in (own, *own.parents):
        yield folder
        if folder == top:
            return
