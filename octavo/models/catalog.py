"""Which models are here already, beside those that are known by name. Reads folders, never the network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.models.hub_cache import list_repos
from octavo.models.known_models import KNOWN_MODELS
from octavo.shared.cache import models_dir

SOURCE_FILE = "octavo_source.json"  # in each fetched folder: where its files came from


@dataclass(frozen=True)
class ModelEntry:
    """One line of `octavo model list`."""

    name: str
    description: str
    path: Path | None  # None: known, but not fetched
    source: str | None  # "hub", "pypi", "gguf"; None: not fetched, or a folder that was put there by hand
    size_bytes: int  # on disk; 0 when not fetched
    revisions: tuple[tuple[str, tuple[str, ...]], ...] = ()  # in the hub's cache: commits, and their branches


def list_models(download_dir: str | Path | None = None) -> list[ModelEntry]:
    """Every model that is known by name, lies in the models folder, or in the hub's cache; sorted by name."""
    parent = models_dir(download_dir)
    here = {path.parent.name: path.parent for path in parent.glob("*/config.json") if path.parent.name[0] != "."}
    own = [_entry(name, here.get(name)) for name in sorted(here.keys() | KNOWN_MODELS.keys())]
    fetched = [
        ModelEntry(repo.repo, "", repo.path, "hub", repo.size_bytes, repo.revisions)
        for repo in list_repos(download_dir)
    ]
    return sorted(own + fetched, key=lambda entry: entry.name.lower())


def _entry(name: str, path: Path | None) -> ModelEntry:
    known = KNOWN_MODELS.get(name)
    description = known.description if known else ""
    if path is None:
        return ModelEntry(name, description, None, None, 0)
    size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return ModelEntry(name, description, path, read_source(path).get("source"), size_bytes)


def read_source(folder: Path) -> dict[str, Any]:
    """What the fetch recorded about a folder; empty for a folder that was put there by hand."""
    try:
        record = json.loads((folder / SOURCE_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
