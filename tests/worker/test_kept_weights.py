"""Quantised weights are kept for later starts: of these very weights, once, and not at the price of serving."""

from __future__ import annotations

import errno
import fcntl
import json
import pwd
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tests.worker.families import make_family
from tests.worker.kept import wait_until_kept
from tests.worker.model_cases import Stepper
from tests.worker.quantised_checkpoints import FORMATS, write_quantised
from worker_svc.models import config as config_module
from worker_svc.models.checkpoint.stored_tensor import OpenFile
from worker_svc.models.config import ModelConfig
from worker_svc.models.loader import Model, load_model
from worker_svc.models.products.kept_file import KeptFile

MADE, KEPT = "weights quantised to int8", "quantised weights are kept for later starts"
LEFT_TO_ANOTHER = "quantised weights are kept by another process"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Octavo's cache of this test alone."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quantized"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_family("qwen2", tmp_path / "model")


def load(folder: Path, quantization: str = "int8") -> tuple[Model, list[MutableMapping[str, Any]]]:
    """A model, and what the log has of its weights once they are written."""
    with capture_logs() as lines:
        model = load_model(folder, ModelConfig.from_folder(folder, "float32", quantization=quantization), "cpu")
        wait_until_kept()
    return model, lines


def start(folder: Path, quantization: str = "int8") -> tuple[torch.Tensor, list[str]]:
    """A model's logits, and what the log has of its weights."""
    model, lines = load(folder, quantization)
    said = [f"{line['event']}: {line['error']}" if "error" in line else str(line["event"]) for line in lines]
    return Stepper(model, [[1, 2, 3]]).step({0: (0, 3)})[0], said


def names_in(cache: Path) -> list[str]:
    return sorted(path.suffix for path in cache.iterdir())


def test_a_tensor_that_the_models_hash_has_no_sample_of_is_edited_in_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "_NUM_SAMPLES", 1)
    before, _ = start(folder)
    path, hash_before = folder / "model.safetensors", ModelConfig.from_folder(folder).model_hash
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        first, last = json.loads(file.read(size))["model.layers.1.mlp.down_proj.weight"]["data_offsets"]
        file.seek(8 + size + first)
        file.write(bytes(last - first))
    assert ModelConfig.from_folder(folder).model_hash == hash_before
    after, said = start(folder)
    assert not torch.equal(after, before) and said == [MADE, KEPT]
    assert start(folder)[1] == []


@pytest.mark.parametrize("plain", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"])
def test_parts_of_a_product_that_are_kept_by_themselves_are_found(plain: str, tmp_path: Path) -> None:
    """The first part's name is that of the whole product, too."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}
    model = make_family("llama-gelu", tmp_path / "model", **sizes)
    quantised, _ = write_quantised(model, tmp_path, FORMATS["awq-32"], plain=(plain,))
    made, said = start(quantised, "int4")
    assert said[-2:] == ["weights quantised to int4", KEPT]
    found, said = start(quantised, "int4")
    assert said == [] and torch.equal(found, made)


@contextmanager
def full_after(num_bytes: int) -> Iterator[None]:
    """A disk on which no file may become longer: writing fails in the midst, with EFBIG in place of ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_becomes_full_is_left_as_it_was(folder: Path, cache: Path) -> None:
    with full_after(20_000):
        logits, said = start(folder)
    assert said == [MADE, "quantised weights are not kept: File too large"] and names_in(cache) == []
    found, said = start(folder)
    assert said == [MADE, KEPT] and torch.equal(found, logits)


def test_a_disk_with_too_little_space_is_not_filled(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=20_000))
    assert start(folder)[1] == [MADE, "quantised weights are not kept: No space left on device"]
    assert names_in(cache) == []


def test_a_cache_that_cannot_even_be_looked_at_is_done_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", "x" * 300)  # as one of another user's, but so for root as well
    _, said = start(folder)
    assert [line.partition(":")[0] for line in said] == [
        "quantised weights cannot be read, and are made again",
        MADE,
        "quantised weights are not kept",
    ]


def test_a_user_without_a_home_is_done_without(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, _ = start(folder)
    for name in ("OCTAVO_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", dict[int, Any]().__getitem__)  # a container's user, unknown to its image
    logits, said = start(folder)
    assert torch.equal(logits, kept)
    assert said == ["quantised weights are not kept: this user has no home: set OCTAVO_CACHE"]


def test_a_disk_that_does_not_read_is_done_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = start(folder)
    read_into = OpenFile.read_into

    def fail(self: OpenFile, out: memoryview, offset: int) -> None:
        if "quantized" in str(self._path):
            raise OSError(errno.EIO, "Input/output error")
        read_into(self, out, offset)

    monkeypatch.setattr(OpenFile, "read_into", fail)
    found, said = start(folder)
    assert "a kept product is damaged, and is made again: [Errno 5] Input/output error" in said
    assert torch.equal(found, made)


def test_who_finds_another_process_writing_leaves_it_to_that(folder: Path, cache: Path) -> None:
    start(folder)
    (path,) = cache.iterdir()
    path.unlink()
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(b"half")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert start(folder)[1] == [MADE, LEFT_TO_ANOTHER]
        assert [each.name for each in cache.iterdir()] == [partial.name] and partial.read_bytes() == b"half"
    # Its writer was killed: it is removed, and what a start with another model left behind as well.
    (cache / "of another model.safetensors.partial").write_bytes(b"half")
    assert start(folder)[1] == [MADE, KEPT]
    assert [each.name for each in cache.iterdir()] == [path.name]


def filled(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


@pytest.mark.parametrize(
    ("part", "quantization"), [("packed", "int8"), ("scale", "int8"), ("bias", "int8"), ("packed", "int4")]
)
def test_numbers_that_have_changed_on_the_disk_are_found(
    part: str, quantization: str, folder: Path, cache: Path
) -> None:
    """As a disk or a copy may lose a block in the midst: the header is whole, and all sizes are right."""
    made, _ = start(folder, quantization)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    damaged = bytearray(whole)
    first, last = json.loads(whole[8 : 8 + size])[f"model.layers.1.self_attn.q_proj.{part}"]["data_offsets"]
    damaged[8 + size + (first + last) // 2] ^= 1
    path.write_bytes(damaged)
    found, said = start(folder, quantization)
    assert torch.equal(found, made)
    assert said[0].startswith("a kept product is damaged, and is made again: ") and said[-1] == KEPT
    assert path.read_bytes() == whole and start(folder, quantization)[1] == []


def test_what_stands_in_the_way_is_named(folder: Path, cache: Path) -> None:
    start(folder)
    (path,) = cache.iterdir()
    path.unlink()
    path.with_name(f"{path.name}.partial").mkdir()  # as a file of another user, but so for root as well
    assert load(folder)[1][-1] == {
        "event": "quantised weights are not kept",
        "path": f"{path}.partial",
        "error": "Is a directory",
        "log_level": "warning",
    }


def test_what_another_process_has_kept_meanwhile_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "kept"
    one, other = KeptFile(path), KeptFile(path)
    assert one.write(3, filled(b"one"))
    assert not other.write(5, lambda at: pytest.fail("is written again"))
    assert path.read_bytes() == b"one" and list(path.parent.iterdir()) == [path]
    assert KeptFile(path).write(6, filled(b"better"))  # who has found it damaged
    assert path.read_bytes() == b"better"


def test_an_error_of_who_writes_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        KeptFile(tmp_path / "kept").write(4, fail)
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys, time
from pathlib import Path
from worker_svc.models.products.kept_file import KeptFile

def write(path):
    path.write_bytes(b"half")
    print("writes", flush=True)
    time.sleep(60)

KeptFile(Path(sys.argv[1])).write(4, write)
"""


def test_a_process_that_is_killed_while_it_writes_is_waited_for_by_nobody(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writes\n"
        assert not KeptFile(path).write(5, lambda at: pytest.fail("is written twice"))
        process.kill()
        process.wait()
    assert names_in(tmp_path) == [".partial"]
    assert KeptFile(path).write(5, filled(b"whole"))
    assert path.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [path]


ENDING = """
import os, sys, threading, time
from worker_svc.models.config import ModelConfig
from worker_svc.models.loader import load_model

fsync = os.fsync
os.fsync = lambda descriptor: (time.sleep(0.5), fsync(descriptor))
config = ModelConfig.from_folder(sys.argv[1], "float32", quantization="int8")
model_thread = threading.Thread(target=load_model, args=(sys.argv[1], config, "cpu"), daemon=True)  # as a worker's is
model_thread.start()
model_thread.join()
"""


def test_the_end_of_a_process_waits_for_a_slow_disk(folder: Path, cache: Path) -> None:
    subprocess.run([sys.executable, "-c", ENDING, str(folder)], check=True, capture_output=True)
    assert names_in(cache) == [".safetensors"]
    assert start(folder)[1] == []
