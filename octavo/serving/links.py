"""The links inside `octavo serve` and to the worker of an `LLM`, which other users of the machine can reach: who may
use them.

Workers want a token, which is made for each start. It goes from hand to hand in a file of a folder that nobody else can
enter, as a command line can be read by all. The gateway reaches a scheduler with certificates by a socket in the same
folder: no certificate has to have a name for this machine, none has to be shown, and new ones change nothing.
"""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.serving.plan import PlanError
from octavo.shared.signals import terminating

if TYPE_CHECKING:
    from scheduler_svc.config import SchedulerConfig
    from worker_svc.config import WorkerConfig

TOKEN_BYTES = 32
# Options of the parts that mean others here: of the scheduler alone, or of links that have their own lock.
OF_THE_SCHEDULER = ("insecure", "tls_cert_file", "tls_key_file", "tls_client_ca_file")
NOT_FOR_SERVE = ("tls_client_name", "worker_tls_ca_file", "worker_tls_name")


@contextmanager
def private_folder() -> Iterator[Path]:
    """For this user alone, and gone at the end, also when SIGTERM or SIGHUP comes before whoever is to hear it."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-serve-"))

    def end(number: int, _: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(number, before[number])
        signal.raise_signal(number)

    before = {int(number): signal.signal(number, end) for number in terminating()}
    try:
        yield folder
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        shutil.rmtree(folder, ignore_errors=True)


def locked_links(
    scheduler: SchedulerConfig, worker: WorkerConfig, folder: Path
) -> tuple[SchedulerConfig, WorkerConfig]:
    """Options with which the parts know each other; writes to `folder`. Raises PlanError."""
    for name in NOT_FOR_SERVE:
        if getattr(scheduler, name, None) or getattr(worker, name, None):
            raise PlanError(
                f"{name} is for workers with certificates, and those of octavo serve have a token: octavo scheduler "
                "and octavo worker take it"
            )
    given = {file for file in (scheduler.worker_token_file, worker.token_file) if file is not None}
    if len(given) > 1:
        raise PlanError("token_file and worker_token_file are two files, and of one token: one of them is enough")
    token_file = given.pop() if given else new_token(folder)
    has_tls = scheduler.tls_cert_file is not None
    scheduler = dataclasses.replace(scheduler, worker_token_file=token_file, socket_folder=folder if has_tls else None)
    worker = dataclasses.replace(
        worker, token_file=token_file, tls_cert_file=None, tls_key_file=None, tls_client_ca_file=None
    )
    return scheduler, worker


def new_token(folder: Path) -> Path:
    """A file in `folder` with a token for the workers of one start, readable for this user alone."""
    file = folder / "worker-token"
    file.touch(mode=0o600)
    file.write_text(secrets.token_urlsafe(TOKEN_BYTES), encoding="ascii")
    return file
