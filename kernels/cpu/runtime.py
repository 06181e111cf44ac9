"""How numba's kernels of sampling run and where they are kept: one pool of threads with torch, one cache a version of
the source.

Threads. Two pools on the same cores spin against each other at every barrier. numba's `omp` layer is linked against
libgomp, and as torch has loaded its own copy of that library for the whole process before, both end up in that copy: a
compiled loop that follows a product finds torch's threads awake. Measured on two Zen 5 cores, a product of 32 rows and
then a parallel loop, median: 92 + 3 us with `omp`, 91 + 62 us with numba's own `workqueue`.

Cache. numba recompiles a kernel whose own file has changed, but not when a file that it calls into has. So compiled
code is kept under a hash of all files of sampling. Where that folder cannot be written to, as one that containers
share, a process works on a copy of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path
from typing import Any

import numba
import torch

_settings: Any = numba.config  # filled at import, from defaults and variables
_told = threading.local()  # `num_threads`: what numba was told in this thread


def num_threads() -> int:
    """How many threads a kernel uses: as many as torch's operators in the calling thread, as far as numba has them."""
    wanted = min(torch.get_num_threads(), _settings.NUMBA_NUM_THREADS)
    # Remembered, as asking numba takes locks: 0.7 us, hundreds of times a step.
    if getattr(_told, "num_threads", 0) != wanted:
        numba.set_num_threads(wanted)
        _told.num_threads = wanted
    return wanted


def _configure() -> None:
    if importlib.util.find_spec("numba.np.ufunc.omppool"):
        _settings.THREADING_LAYER = "omp"
        # Starting the layer tells libgomp, and so torch, to use all cores: take that back.
        torch_threads = torch.get_num_threads()
        numba.get_num_threads()
        torch.set_num_threads(torch_threads)
    here = Path(__file__).parent
    files = [here / "runtime.py", *sorted((here / "sampling").glob("*.py"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    folder = Path(_settings.CACHE_DIR or here / "__pycache__")
    compiled = folder / f"kernels-{digest}"
    if os.access(folder if folder.exists() else folder.parent, os.W_OK):
        _settings.CACHE_DIR = str(compiled)
    elif compiled.is_dir():  # numba reads from no folder that it cannot write to; where there is none it finds another
        _settings.CACHE_DIR = str(_own_copy(compiled))


def _own_copy(compiled: Path) -> Path:
    """A copy of the folder that belongs to this user alone; of an earlier process where there is one."""
    own = Path(tempfile.gettempdir()) / f"octavo-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    status = own.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        own = Path(tempfile.mkdtemp(prefix="octavo-"))  # somebody else was there first
    copy = own / compiled.name
    if not copy.exists():
        part = Path(tempfile.mkdtemp(dir=own))
        shutil.copytree(compiled, part / compiled.name)
        with contextlib.suppress(OSError):  # another process was faster
            (part / compiled.name).rename(copy)
        shutil.rmtree(part)
    return copy


_configure()
