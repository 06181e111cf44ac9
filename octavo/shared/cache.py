"""Where models and what is made of them live on this machine.

`OCTAVO_CACHE` names the cache; without it the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`) + `/octavo`.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder; it may not exist yet."""
    if given := os.environ.get("OCTAVO_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo"


def models_dir(download_dir: str | Path | None = None) -> Path:
    """The folder that holds a folder a model: `download_dir` where given, else `models/` in the cache."""
    return Path(download_dir).expanduser() if download_dir else cache_dir() / "models"
