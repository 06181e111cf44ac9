"""A worker with a fake model as a process of its own: prints its port; SIGUSR1 holds its interpreter for HOLD_S."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import tempfile
import time
from pathlib import Path

from octavo.shared import log
from tests.tiny_models import write_byte_tokenizer
from tests.worker.fake_model import FakeModel, fake_config
from worker_svc.config import WorkerConfig
from worker_svc.server import WorkerServer
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.worker import Worker
from worker_svc.tokenizers.tokenizer_files import TokenizerFiles

HOLD_S = 5.0
MAX_MODEL_LEN = 2048


def hold_interpreter() -> None:
    """No other thread of this process runs Python meanwhile: `PyDLL` calls C without giving up the interpreter's lock,
    as a long match or a conversion of a long number does."""
    left_s, started_s = HOLD_S, time.monotonic()
    while left_s > 0:  # a signal may end a sleep early
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(left_s * 1e6)))
        left_s = HOLD_S - (time.monotonic() - started_s)


def main() -> None:
    """Serves until it is killed."""
    asyncio.run(_serve())


async def _serve() -> None:
    log.configure("info")  # on stderr
    config = WorkerConfig(port=0, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, kv_cache_memory=0.001)
    model = FakeModel(fake_config(MAX_MODEL_LEN))
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(folder, 400)
        files = TokenizerFiles.from_folder(Path(folder))
    server = WorkerServer(Worker(ModelRunner(model, model.config, config.block_size), config), model.config, files)
    await server.start()
    model.delay_s = 0.05
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, hold_interpreter)
    print(server.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
