"""Which models are here already, beside those that are known by name. Reads folders, never the network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.models.hub_cache import CachedRepo, HubName, find, list_repos
from octavo.models.known_models import KNOWN_MODELS, KnownModel
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
    """Every model that is known by name, lies in the models folder, or in the hub's cache; sorted by name. One that is
    known by name and came from the hub is there by both its names."""
    parent = models_dir(download_dir)
    here = {path.parent.name: path.parent for path in parent.glob("*/config.json") if path.parent.name[0] != "."}
    repos = {repo.repo: repo for repo in list_repos(download_dir)}
    own = [_entry(name, path) for name, path in here.items()]
    known = [
        _known(model, repos.get(model.hub_repo), download_dir)
        for name, model in KNOWN_MODELS.items()
        if name not in here
    ]
    fetched = [ModelEntry(repo.repo, "", repo.path, "hub", repo.size_bytes, repo.revisions) for repo in repos.values()]
    return sorted(own + known + fetched, key=lambda entry: entry.name.lower())


def _entry(name: str, path: Path) -> ModelEntry:
    known = KNOWN_MODELS.get(name)
    description = known.description if known else ""
    return ModelEntry(name, description, path, read_source(path).get("source"), _size_bytes(path))


def _known(model: KnownModel, repo: CachedRepo | None, download_dir: str | Path | None) -> ModelEntry:
    """One that is not in the models folder: it may be in the hub's cache, whole and at its revision."""
    name = HubName(model.hub_repo, model.hub_revision)
    revisions = tuple(each for each in (repo.revisions if repo else ()) if each[0] == model.hub_revision)
    if repo is None or not revisions or find(name, download_dir=download_dir) is None:
        return ModelEntry(model.name, model.description, None, None, 0)
    path = repo.path / "snapshots" / model.hub_revision
    return ModelEntry(model.name, model.description, path, "hub", _size_bytes(path), revisions)


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def read_source(folder: Path) -> dict[str, Any]:
    """What the fetch recorded about a folder; empty for a folder that was put there by hand."""
    try:
        record = json.loads((folder / SOURCE_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
