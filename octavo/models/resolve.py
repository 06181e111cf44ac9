"""How a name given by a user becomes a folder on this machine.

Models are folders under `models/` of the cache, in the layout of the Hugging Face hub; those of the hub lie in its own
cache, too (`octavo.models.hub_cache`). Nothing here writes or downloads.
"""

from __future__ import annotations

from pathlib import Path

from octavo.models.catalog import list_models
from octavo.models.hub_cache import find, hub_name_of
from octavo.shared.cache import models_dir
from octavo.shared.command_line import did_you_mean


class ModelNotFound(LookupError):
    """No folder for this name. The message is one line and says what to run."""


def resolve_model(name_or_dir: str | Path, download_dir: str | Path | None = None, load_format: str = "auto") -> Path:
    """The folder of a model, or its GGUF file.

    A path to a folder or to a GGUF file is taken as it is. A name is looked up in `download_dir` (where given), then in
    the cache, then in the hub's cache, where it counts if all that `load_format` needs is there. Raises
    `ModelNotFound`.
    """
    folder = Path(name_or_dir).expanduser()
    name = str(name_or_dir)
    if folder.is_dir() or (folder.suffix == ".gguf" and folder.is_file()):
        return folder
    # What looks like a path was meant as one; looking a path up as a name would only give a puzzling message.
    is_file = name.endswith(".gguf") and ":" not in name  # OWNER/NAME:FILE.gguf is on the hub
    missing = f"there is no {'file' if is_file else 'model folder'} {folder}"
    if folder.is_absolute() or name.startswith(("./", "../", "~")):
        raise ModelNotFound(missing)
    for parent in dict.fromkeys((models_dir(download_dir), models_dir())):
        if (parent / name / "config.json").is_file():
            return parent / name
    hub_name = hub_name_of(name)
    if hub_name and (found := find(hub_name, load_format, download_dir)):
        return found
    if is_file:
        raise ModelNotFound(missing)
    if hub_name:
        raise ModelNotFound(f"model {name!r} is not here: run `octavo model fetch {name}` first")
    raise ModelNotFound(
        f"model {name!r} is neither a folder nor in {models_dir(download_dir)}, and no OWNER/NAME of the hub"
        f"{_nearest(name, download_dir)}"
    )


def _nearest(name: str, download_dir: str | Path | None) -> str:
    """`; did you mean X?` for a model that is here or known."""
    return did_you_mean(name, [entry.name for entry in list_models(download_dir)])
