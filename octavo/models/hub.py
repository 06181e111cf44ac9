"""Fetches models from the Hugging Face hub into its cache, by `huggingface_hub`: resumed where it broke off, with its
progress bar on a terminal. HF_TOKEN or a login, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to that library.

Of a repository's files only those are taken that the model is loaded from, and pickles only with `--load-format bin`.
The library compares sizes of what it downloads; the sums of large files are compared here, once, when all have come.
"""

from __future__ import annotations

import glob
import hashlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from octavo.models.errors import FetchError, SourceUnavailable
from octavo.models.hub_cache import HubName, before_the_weights, cache_folder, find, wanted_files
from octavo.shared.command_line import did_you_mean

T = TypeVar("T")

_REACH_TIMEOUT_S = 10.0
_NAMES_LOOKED_AT = 500  # of an owner's models, to find a similar name
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")  # so a large file is called in the cache; small ones by their hash in git


def fetch_from_hub(
    name: HubName,
    load_format: str = "auto",
    download_dir: str | Path | None = None,
    report: Callable[[str], None] = lambda line: None,
    reach_timeout_s: float | None = None,
) -> Path:
    """The folder of the model's files, or its GGUF file, newest where no revision is named; what is there stays.

    Without a hub that answers it is the one in the cache. Raises SourceUnavailable where there is none either, within
    about `reach_timeout_s` where given, and FetchError.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars, tqdm

    if not (hasattr(sys.stderr, "isatty") and sys.stderr.isatty()):  # None without a console
        disable_progress_bars()
    with _one_line_errors(name):
        try:
            info = _within(
                reach_timeout_s,
                lambda: HfApi().model_info(name.repo, revision=name.revision, timeout=_REACH_TIMEOUT_S),
            )
        except Exception as error:
            here = find(name, load_format, download_dir)
            if here is None or not _is_unreachable(error):
                raise
            report(f"The hub cannot be reached; {name} is taken from the cache")
            return here
        if _COMMIT.fullmatch(name.revision or "") and info.sha != name.revision:
            raise SourceUnavailable(f"{_endpoint()} answers with {info.sha} for {name}")
        files = wanted_files([each.rfilename for each in info.siblings or []], name, load_format)
        folder = cache_folder(download_dir)
        before = _files_of(find(name, load_format, download_dir, needs_tokenizer=False))
        report(f"Fetching {name.repo} at {(info.sha or '')[:12]} from the Hugging Face hub")

        def download(revision: str | None, part: list[str]) -> Path:
            patterns = [glob.escape(file) for file in part]
            path = snapshot_download(name.repo, revision=revision, cache_dir=folder, allow_patterns=patterns)
            for bar in list(getattr(tqdm, "_instances", ())):  # or they are drawn once more over what is said next
                bar.close()
            return Path(path)

        revision = name.revision
        if first := before_the_weights(files):
            revision = download(revision, first).name  # the commit: the rest is to be of the same
        snapshot = download(revision, files)
    if damaged := [file for file in files if not _has_its_sum(snapshot / file, before)]:
        raise FetchError(f"{', '.join(damaged)}: the sha256 sum is not what the hub says")
    return snapshot / files[0] if files[0].endswith(".gguf") else snapshot


def _files_of(model: Path | None) -> set[Path]:
    """Where the files of a model lie that is here whole: of one that is not, no sum has been looked at."""
    if model is None:
        return set()
    return {path.resolve() for path in (model.rglob("*") if model.is_dir() else [model])}


def _has_its_sum(path: Path, before: set[Path]) -> bool:
    """Whether a large file that was not here before has the sum that the hub says; leaves nothing of another."""
    blob = path.resolve()
    if blob in before or not _SHA256.fullmatch(blob.name):
        return True
    with blob.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() == blob.name:
            return True
    blob.unlink()
    path.unlink(missing_ok=True)
    return False


@contextmanager
def _one_line_errors(name: HubName) -> Iterator[None]:
    """What the library raises, as a FetchError with one line that says what to do."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except FetchError:
        raise
    except errors.GatedRepoError:
        raise FetchError(
            f"{name.repo} is gated: accept its terms on {_endpoint()}/{name.repo}, then set HF_TOKEN to a token of "
            f"that account, or log in with `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise FetchError(f"{name.repo} has no revision {name.revision or 'main'!r}") from None
    except errors.RepositoryNotFoundError:
        raise FetchError(
            f"the hub has no model {name.repo}, or shows it only with an HF_TOKEN that may read it{_nearest(name.repo)}"
        ) from None
    except errors.HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else 0
        if code in (401, 403):
            raise FetchError(f"the hub refuses {name.repo} with status {code}: HF_TOKEN is missing or wrong") from None
        raise SourceUnavailable(f"{_endpoint()} answers with status {code} for {name.repo}") from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, _TookTooLong) as error:
        raise SourceUnavailable(f"{name} is not in the cache, and {_why_unreachable(error)}") from None
    except (httpx2.HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.strerror and not isinstance(error, ConnectionError):
            raise FetchError(f"cannot write {error.filename or cache_folder()}: {error.strerror}") from None
        if _is_unreachable(error):
            raise SourceUnavailable(f"{name} is not in the cache, and {_why_unreachable(error)}") from None
        raise FetchError(
            f"fetching {name.repo} broke off: {_one_line(error)}; run it again, and it goes on from there"
        ) from None
    except ValueError as error:  # a name that the hub can have nothing under
        raise FetchError(f"{name}: {_one_line(error)}") from None


class _TookTooLong(Exception):
    """The hub has not answered in time."""


def _is_unreachable(error: Exception) -> bool:
    import httpx2
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response is not None and error.response.status_code >= 500
    offline = (errors.OfflineModeIsEnabled, _TookTooLong, httpx2.ConnectError, httpx2.TimeoutException)
    return isinstance(error, offline)


def _why_unreachable(error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return f"{_endpoint()} cannot be reached: {_one_line(error)}"


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _nearest(repo: str) -> str:
    """`; did you mean X?` for a model of the same owner, or of the same name; nothing where the hub does not say."""
    owner, _, name = repo.partition("/")
    for query in (partial(_ids, author=owner), partial(_ids, search=name)):
        try:
            ids = _within(_REACH_TIMEOUT_S, query)
        except Exception:  # only a hint hangs on it
            return ""
        if hint := did_you_mean(repo, ids):
            return hint
    return ""


def _ids(author: str | None = None, search: str | None = None) -> list[str]:
    from huggingface_hub import HfApi

    return [model.id for model in HfApi().list_models(limit=_NAMES_LOOKED_AT, author=author, search=search)]


def _within(timeout_s: float | None, call: Callable[[], T]) -> T:
    """`call()`; raises `_TookTooLong`. In a thread of its own: looking a host name up knows no timeout."""
    if timeout_s is None:
        return call()
    outcome: list[T] = []
    failure: list[Exception] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if outcome:
        return outcome[0]
    raise failure[0] if failure else _TookTooLong(f"no answer within {timeout_s:g} s")
