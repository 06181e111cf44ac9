"""Options of tracing, which all services have by the same names. Imports nothing of OpenTelemetry."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Protocol

from octavo.shared.options import OptionError

ENDPOINT_HELP = "collector of traces, http://HOST:PORT or https://HOST:PORT, OTLP over gRPC (default: no tracing)"
SAMPLING_HELP = "share of requests that are traced, where no caller has decided already"
FOLLOW_HELP = "let a caller's traceparent decide whether its request is traced; off: --trace-sampling alone decides"
_PACKAGES = {
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc",
}


class TracingOptions(Protocol):
    """What the options of a service that begins traces have of it."""

    @property
    def otlp_traces_endpoint(self) -> str:
        """Where spans go; empty: tracing is off."""

    @property
    def trace_sampling(self) -> float:
        """From 0 to 1."""


def check_tracing_options(options: TracingOptions) -> None:
    """Raises ValueError for values that cannot be."""
    check_endpoint(options.otlp_traces_endpoint)
    if not 0 <= options.trace_sampling <= 1:
        raise ValueError(f"trace_sampling is {options.trace_sampling}, 0 to 1 are accepted")


def check_endpoint(endpoint: str) -> None:
    """Raises ValueError for what is no address of a collector."""
    if endpoint and not re.fullmatch(r"(https?|grpc)://[^/\s]+/?", endpoint):
        accepted = "http://HOST:PORT or https://HOST:PORT is accepted"
        raise ValueError(f"otlp_traces_endpoint is {endpoint!r}; {accepted}")


def check_tracing_packages() -> None:
    """Raises OptionError where OpenTelemetry is not installed."""
    for module, package in _PACKAGES.items():
        try:
            is_there = find_spec(module) is not None
        except ModuleNotFoundError:  # not even the packages above it
            is_there = False
        if not is_there:
            where = "pip install '.[tracing]' in a clone of Octavo"
            raise OptionError(f"otlp_traces_endpoint: {package} is not installed; {where} brings it")
