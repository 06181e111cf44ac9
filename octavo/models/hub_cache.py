"""Names of models of the Hugging Face hub, and those that lie in its cache on this machine. Never the network.

    OWNER/NAME[@REVISION][:QUANTISATION or FILE.gguf]

The cache is that of `huggingface_hub` itself (HF_HUB_CACHE, HF_HOME), shared with every other program that uses it, or
a folder of the same layout: models--OWNER--NAME/refs/REVISION holds a commit, snapshots/COMMIT its files. That library
downloads, lists and removes. Finding is our own: it takes a new process 25 ms, where `snapshot_download` with
`local_files_only` takes 190 ms and does not say whether all is there (`python -m benchmarks.beside_libraries`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.models.errors import FetchError
from octavo.models.known_models import KNOWN_MODELS
from octavo.shared.command_line import did_you_mean

if TYPE_CHECKING:
    from huggingface_hub import DeleteCacheStrategy

TOKENIZER = "tokenizer"  # in place of a load format: no weights are wanted
ADAPTER = "adapter"  # likewise: a low-rank adapter in PEFT's form
_ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"]

_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([^:\s]+))?(?::(\S+))?")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")
_DESCRIPTION = re.compile(r"[^/]+\.(json|jinja|model|tiktoken)|merges\.txt|vocab\.txt")
_WEIGHTS = {"safetensors": re.compile(r"model[^/]*\.safetensors"), "bin": re.compile(r"pytorch_model[^/]*\.bin")}
_USUAL_QUANTISATION = "Q4_K_M"  # taken where none is named, as by other programs


@dataclass(frozen=True)
class HubName:
    """One revision of a repository; of a repository of GGUF files one of them, by quantisation or name."""

    repo: str
    revision: str | None = None  # None: the newest of the main branch
    gguf: str = ""

    @staticmethod
    def parse(text: str) -> HubName | None:
        """None for what is no such name."""
        found = _NAME.fullmatch(text)
        return HubName(found[1], found[2], found[3] or "") if found and ".." not in found[1] else None

    @property
    def served_name(self) -> str:
        """The clients' name for the model, the same for every revision."""
        return self.repo + (f":{self.gguf}" if self.gguf else "")

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f":{self.gguf}" if self.gguf else "")


def hub_name_of(text: str) -> HubName | None:
    """The hub's name of a model that Octavo knows by a name of its own, or that is called by its name there."""
    known = KNOWN_MODELS.get(text)
    return HubName(known.hub_repo, known.hub_revision) if known else HubName.parse(text)


def served_name(text: str, path: Path) -> str:
    """The clients' name for the model that was named `text` and lies at `path`: its folder's, links followed, or its
    GGUF file's in lower case. In the hub's cache, where folders are called by commits: OWNER/NAME, or `text`."""
    if "snapshots" not in path.parts:
        return path.resolve().name if path.is_dir() else path.stem.lower()
    found = HubName.parse(text)
    return found.served_name if found else text


def cache_folder(download_dir: str | Path | None = None) -> Path:
    """`download_dir` where given, else the hub's own cache."""
    if download_dir:
        return Path(download_dir).expanduser()
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def find(
    name: HubName,
    load_format: str = "auto",
    download_dir: str | Path | None = None,
    *,
    needs_tokenizer: bool = True,
) -> Path | None:
    """The folder or GGUF file of a model that is here whole, as far as `load_format` needs it; else None."""
    for parent in dict.fromkeys((cache_folder(download_dir), cache_folder())):
        folder = _snapshot(parent, name)
        if folder is None:
            continue
        files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        try:
            wanted = wanted_files(files, name, load_format)
        except FetchError:  # nothing of it that could be loaded
            continue
        if len(wanted) == 1 and wanted[0].endswith(".gguf"):
            return folder / wanted[0]
        if load_format == ADAPTER:
            return folder
        has_tokenizer = not needs_tokenizer or any((folder / file).is_file() for file in _TOKENIZERS)
        is_described = "config.json" in wanted or load_format == TOKENIZER
        if is_described and has_tokenizer and _has_all_shards(folder, wanted):
            return folder
    return None


def wanted_files(files: list[str], name: HubName, load_format: str) -> list[str]:
    """The files of a repository to load the model from, in one format. Raises FetchError where there are none."""
    if load_format == ADAPTER:
        if missing := [file for file in _ADAPTER_FILES if file not in files]:
            raise FetchError(f"{name.repo} is no adapter: it has no {missing[0]}")
        return _ADAPTER_FILES
    described = [file for file in files if _DESCRIPTION.fullmatch(file)]
    if name.gguf or load_format == "gguf":
        return [_gguf_file(files, name)]
    if load_format in (TOKENIZER, "dummy"):
        return described
    weights = {kind: [file for file in files if pattern.fullmatch(file)] for kind, pattern in _WEIGHTS.items()}
    kind = "safetensors" if load_format == "auto" else load_format
    if "model.safetensors" in weights["safetensors"]:
        weights["safetensors"] = ["model.safetensors"]
    if weights[kind]:
        return described + weights[kind]
    if load_format == "auto" and any(file.endswith(".gguf") for file in files):
        return [_gguf_file(files, name)]
    if load_format == "auto" and weights["bin"]:
        raise FetchError(
            f"{name.repo} has its weights as pickles alone: --load-format bin reads them, and runs nothing in them"
        )
    raise FetchError(f"{name.repo} has no weights as {'safetensors or GGUF' if load_format == 'auto' else kind}")


def before_the_weights(files: list[str]) -> list[str]:
    """Those of `wanted_files` to fetch first: a download may break off, and what comes last is what `find` tells by
    that all is here. These are weights, or where none are wanted the tokenizer: of one in several files any will do for
    `find`."""
    described = [file for file in files if _DESCRIPTION.fullmatch(file)]
    return described if len(described) < len(files) else [file for file in files if file not in _TOKENIZERS]


def _gguf_file(files: list[str], name: HubName) -> str:
    """Raises FetchError where the choice is not clear."""
    found = sorted(file for file in files if file.endswith(".gguf") and "mmproj" not in file.lower())
    if not found:
        raise FetchError(f"{name.repo} holds no GGUF file")
    asked = name.gguf or (_USUAL_QUANTISATION if len(found) > 1 else "")
    if asked.endswith(".gguf"):
        fitting = [file for file in found if file == asked or file.rpartition("/")[2] == asked]
    else:  # a quantisation, as a word of the file's name
        word = re.compile(rf"(^|[^a-z0-9]){re.escape(asked)}([^a-z0-9_]|$)", re.IGNORECASE)
        fitting = [file for file in found if word.search(file)] if asked else found
    shown = ", ".join(found[:12]) + (", ..." if len(found) > 12 else "")
    if not fitting:
        what = f"none for {asked!r}{did_you_mean(asked, found)}" if name.gguf else "several"
        raise FetchError(f"of the GGUF files of {name.repo} there is {what}: {name.repo}:FILE names one of {shown}")
    if any(re.search(r"-\d{5}-of-\d{5}", file) for file in fitting):
        raise FetchError(f"{name.repo} has {asked or 'its GGUF file'} in parts, which are not read: {fitting[0]}")
    if len(fitting) > 1:
        raise FetchError(f"{asked!r} fits several files of {name.repo}: {', '.join(fitting)}")
    return fitting[0]


def _snapshot(parent: Path, name: HubName) -> Path | None:
    home = parent / f"models--{name.repo.replace('/', '--')}"
    revision = name.revision or "main"
    try:
        commit = (home / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    folder = home / "snapshots" / commit
    return folder if commit not in ("", ".", "..") and folder.is_dir() else None


def _has_all_shards(folder: Path, wanted: list[str]) -> bool:
    """Whether the files that an index names are there, all of them: a download may have broken off."""
    for index in (file for file in wanted if file.endswith((".safetensors.index.json", ".bin.index.json"))):
        whole = index.removesuffix(".index.json")
        if whole in wanted or not any(file.endswith(Path(whole).suffix) for file in wanted):
            continue
        try:
            shards = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return False
        if not shards <= set(wanted):
            return False
    return True


@dataclass(frozen=True)
class CachedRepo:
    """One model of the hub's cache."""

    repo: str
    path: Path
    size_bytes: int  # on disk; a file that revisions share counts once
    revisions: tuple[tuple[str, tuple[str, ...]], ...]  # a commit, and the branches and tags that point to it


def list_repos(download_dir: str | Path | None = None) -> list[CachedRepo]:
    """Every model in the cache, by name."""
    parent = cache_folder(download_dir)
    if not any(parent.glob("models--*--*")):
        return []
    from huggingface_hub import scan_cache_dir

    return sorted(
        (
            CachedRepo(
                repo.repo_id,
                repo.repo_path,
                repo.size_on_disk,
                tuple(
                    (each.commit_hash, tuple(sorted(each.refs)))
                    for each in sorted(repo.revisions, key=lambda each: each.last_modified, reverse=True)
                ),
            )
            for repo in scan_cache_dir(parent).repos
            if repo.repo_type == "model"
        ),
        key=lambda each: each.repo,
    )


def remove(name: HubName, download_dir: str | Path | None = None) -> int:
    """Takes a model out of the cache, or the one revision that is named; bytes freed. Raises FetchError."""
    deletion = _deletion(name, download_dir)
    deletion.execute()
    return deletion.expected_freed_size


def size_of(name: HubName, download_dir: str | Path | None = None) -> int:
    """Bytes that `remove` would free. Raises FetchError."""
    return _deletion(name, download_dir).expected_freed_size


def _deletion(name: HubName, download_dir: str | Path | None) -> DeleteCacheStrategy:
    from huggingface_hub import scan_cache_dir

    found = next((each for each in list_repos(download_dir) if each.repo == name.repo), None)
    commits = [
        commit
        for commit, refs in (found.revisions if found else ())
        if name.revision is None or name.revision in refs or commit == name.revision
    ]
    if not commits:
        raise FetchError(f"{replace(name, gguf='')} is not in {cache_folder(download_dir)}")
    return scan_cache_dir(cache_folder(download_dir)).delete_revisions(*commits)
