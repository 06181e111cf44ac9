"""Which device is chosen and how much of it may be taken, on machines other than this: torch's answers are fakes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from worker_svc.errors import StartupError
from worker_svc.host.device_memory import CudaMemory, HostMemory, memory_of
from worker_svc.host.memory import GIB
from worker_svc.service.devices import cache_dtype, choose_device


class FakeGpus:
    """So many cards of one kind, in place of `torch.cuda`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, capability: tuple[int, int] = (9, 0)) -> None:
        self.current: int | None = None
        self.reserved, self.peak, self.free = 0, 0, 70 * GIB
        answers = {
            "is_available": lambda: count > 0,
            "device_count": lambda: count,
            "get_device_capability": lambda index: capability,
            "get_device_name": lambda index: "a card",
            "set_device": lambda index: setattr(self, "current", index),
            "mem_get_info": lambda device: (self.free, 80 * GIB),
            "empty_cache": lambda: setattr(self, "reserved", 10),
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.reserved),
            "memory_reserved": lambda device: self.reserved,
            "max_memory_reserved": lambda device: self.peak,
            "synchronize": lambda device: None,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)


@pytest.mark.parametrize(
    ("count", "asked", "expected"),
    [(0, "auto", "cpu"), (2, "auto", "cuda:0"), (2, "cpu", "cpu"), (2, "cuda", "cuda:0"), (2, "cuda:1", "cuda:1")],
)
def test_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, count: int, asked: str, expected: str) -> None:
    gpus = FakeGpus(monkeypatch, count)
    assert choose_device(asked) == torch.device(expected)
    assert gpus.current == torch.device(expected).index


def test_a_gpu_that_is_not_there_is_refused_and_the_reason_told(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpus(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(StartupError, match="built without CUDA"):
        choose_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(StartupError, match=r"device cuda:1 cannot be used: no GPU is visible"):
        choose_device("cuda:1")
    FakeGpus(monkeypatch, 2)
    with pytest.raises(StartupError, match="2 GPUs are visible, counted from 0"):
        choose_device("cuda:2")


def test_a_gpu_without_what_triton_compiles_with_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeGpus(monkeypatch, 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert choose_device("cpu") == torch.device("cpu")
    for asked in ("cuda", "auto"):
        with pytest.raises(StartupError, match="a worker on a GPU needs a C compiler"):
            choose_device(asked)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    with pytest.raises(StartupError, match="Python's headers"):
        choose_device("cuda")
    (tmp_path / "Python.h").touch()
    assert choose_device("cuda") == torch.device("cuda:0")


def test_a_gpu_that_is_too_old_is_passed_over_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpus(monkeypatch, 1, capability=(7, 5))
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(StartupError, match=r"a card has compute capability 7\.5, at least 8\.0 is needed"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("count", "files", "hidden", "warns"),
    [
        (1, ["nvidia0"], None, True),  # too old
        (0, ["nvidia0", "nvidiactl"], None, True),  # torch is built without CUDA, or does not see it
        (0, ["nvidia0"], "0", True),
        (0, ["nvidia0"], "", False),  # hidden on purpose
        (0, ["nvidia0"], "-1", False),
        (0, ["nvidiactl", "null"], None, False),  # a driver without a GPU
    ],
)
def test_auto_says_why_it_takes_the_cpu_where_there_is_a_gpu_and_is_silent_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int, files: list[str], hidden: str | None, warns: bool
) -> None:
    FakeGpus(monkeypatch, count, capability=(7, 5))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr("worker_svc.service.devices._DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    for name in files:
        (tmp_path / name).touch()
    with capture_logs() as lines:
        assert choose_device("auto") == torch.device("cpu")
        assert choose_device("cpu") == torch.device("cpu")
    said = "a card has compute capability 7.5, at least 8.0 is needed" if count else "is built without CUDA"
    assert [line["log_level"] for line in lines] == ["warning"] * warns
    assert all("computing on the CPU, though there is a GPU" in line["event"] and said in line["why"] for line in lines)


def test_a_cache_of_8_bits_is_for_gpus_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpus(monkeypatch, 1, capability=(8, 9))
    assert cache_dtype("fp8", torch.device("cuda", 0)) == torch.float8_e4m3fn
    assert cache_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    assert cache_dtype("auto", torch.device("cpu")) is None
    assert cache_dtype("auto", torch.device("cpu"), "int8") == torch.bfloat16
    assert cache_dtype("float32", torch.device("cpu"), "int8") == torch.float32
    assert cache_dtype("auto", torch.device("cuda", 0), "fp8") is None
    with pytest.raises(StartupError, match="fp8 is for GPUs, not for device cpu"):
        cache_dtype("fp8", torch.device("cpu"))
    FakeGpus(monkeypatch, 1, capability=(8, 0))
    with pytest.raises(StartupError, match="a card computes with no 8-bit floats"):
        cache_dtype("fp8", torch.device("cuda", 0))


def test_others_on_a_gpu_count_against_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = FakeGpus(monkeypatch, 1)
    memory = memory_of(torch.device("cuda", 0), 0.75)
    assert memory.available_bytes() == 50 * GIB  # 60 of 80, of which others have 10
    gpus.free = 5 * GIB
    assert memory.available_bytes() == 0


def test_the_peak_is_what_the_allocator_takes_beyond_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = FakeGpus(monkeypatch, 1)
    gpus.reserved = gpus.peak = 500  # of which 490 are not used any more

    def work() -> None:
        gpus.peak = max(gpus.peak, 42)

    assert CudaMemory(torch.device("cuda", 0), 1.0).peak_bytes(work) == 32


def test_a_cpu_has_the_hosts_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(torch.device("cpu"), 0.9)
    assert isinstance(memory, HostMemory) and memory.is_host and memory.available_bytes() > 0
    monkeypatch.setattr("worker_svc.host.memory._STATUS", status := tmp_path / "status")
    status.write_text("VmHWM:\t 900 kB\nVmRSS:\t 400 kB\n")
    assert memory.peak_bytes(lambda: status.write_text("VmHWM:\t 950 kB\nVmRSS:\t 500 kB\n")) == 550 << 10
