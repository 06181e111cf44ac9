"""What a figure was measured on: the hardware and the versions that matter, for file names and for readers."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from octavo.shared.cores import available_cores

_PACKAGES = ("octavo", "torch", "triton", "transformers", "grpcio", "protobuf", "numpy")


def describe() -> dict[str, Any]:
    """Readable facts; what cannot be found out is left out or "unknown"."""
    return {
        "cpu": _cpu_name(),
        "instructions": _instructions(),
        "cores": available_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "commit": _commit(),
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def slug(facts: dict[str, Any]) -> str:
    """A short name of the hardware for a file: `intel-xeon-platinum-8259cl-2-cores`. With AMX it says so, as virtual
    machines of one processor differ in it."""
    name = re.sub(r"\((r|tm)\)|\bcpu\b|@.*", " ", facts["cpu"].lower())
    amx = ["amx"] if "amx_" in facts["instructions"] else []
    return "-".join([*re.findall(r"[a-z0-9.]+", name), *amx, f"{facts['cores']}-cores"])


def _cpu_name() -> str:
    """The processor's name, with family and model: a virtual machine's name may be no more than the maker's line."""
    try:
        cpu_info = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpu_info = ""
    names = ("model name", "cpu family", "model")
    name, *numbers = (re.search(rf"^{key}\s*:\s*(.+)$", cpu_info, re.MULTILINE) for key in names)
    if name is None:
        return platform.processor() or platform.machine() or "unknown"
    family, model = (found.group(1).strip() if found else "" for found in numbers)
    return name.group(1).strip() + (f", family {family} model {model}" if family and model else "")


def _instructions() -> str:
    """Those of the processor that decide which kernels it gets: `avx2 avx512_bf16 ...`."""
    try:
        flags = re.search(r"^flags\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        flags = None
    wanted = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    return " ".join(name for name in wanted if flags and name in flags.group(1).split()) or "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # git is not installed
        return "unknown"
    return done.stdout.strip() or "unknown"
