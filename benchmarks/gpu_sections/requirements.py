"""What must be installed where the GPU is, checked before anything runs: that machine may reach no registry."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

# Module -> the distribution that brings it. Those from torch to transformers come with the machine's own CUDA build.
_MODULES = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "grpc": "grpcio",
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "grpc_health": "grpcio-health-checking",
    "grpc_channelz": "grpcio-channelz",
    "grpc_reflection": "grpcio-reflection",
    "structlog": "structlog",
    "yaml": "PyYAML",
    "jinja2": "jinja2",
    "prometheus_client": "prometheus-client",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
    "scipy": "scipy",
}


def missing() -> list[str]:
    """Distributions without which a section would fail, in the order of the list above."""
    return [distribution for module, distribution in _MODULES.items() if not _is_there(module)]


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def problem() -> str:
    """Why what is installed does not work together, empty where it does: generated code asks for its own versions."""
    try:
        importlib.import_module("protos.inference_pb2_grpc")
    except Exception as error:  # of a kind of their own
        return f"protobuf or grpcio does not fit: {error}"
    return ""


def how_to_bring(distributions: list[str]) -> str:
    """Commands for a machine that reaches a registry, and what to set on the one that does not."""
    return (
        f"missing here: {', '.join(distributions)}\n"
        "where a registry can be reached, for the same Python:\n"
        f"  pip install --target brought --no-deps {' '.join(distributions)}\n"
        "carry that folder along, and here:\n"
        "  PYTHONPATH=brought python -m benchmarks.gpu"
    )
