"""Options of the HTTP service, one frozen dataclass: flags, variables and file keys follow from its fields."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.shared.log import LEVELS
from octavo.shared.options import COMMON, LOGGING, check_port, check_tls_files, is_host, option
from octavo.shared.tracing.options import ENDPOINT_HELP, FOLLOW_HELP, SAMPLING_HELP, check_tracing_options

if TYPE_CHECKING:
    from octavo.shared.tracing.tracer import Tracer

REQUESTS, PAGE, CONNECTIONS, ACCESS = "requests", "page", "connections", "access"  # groups of options
DEFAULT_PORT = 8000


@dataclass(frozen=True)
class GatewayConfig:
    """Raises ValueError for options that cannot be."""

    host: str = option("127.0.0.1", "address to listen on", group=COMMON)
    port: int = option(DEFAULT_PORT, "port to listen on; 0 takes a free one", group=COMMON)
    scheduler: str = option(
        "127.0.0.1:50051",
        "HOST:PORT of a scheduler; several with commas between them: the next one is asked when one is gone",
        group=COMMON,
        metavar="ADDRESS",
    )
    processes: int = option(1, "processes that share the port", group=COMMON)

    insecure: bool = option(False, "listen where others reach this service although nothing locks it", group=ACCESS)
    tls_cert_file: Path | None = option(
        None, "certificate (PEM) for HTTPS, shown to schedulers as well", group=ACCESS, metavar="FILE"
    )
    tls_key_file: Path | None = option(None, "its key (PEM)", group=ACCESS, metavar="FILE")
    tls_client_ca_file: Path | None = option(
        None, "authorities (PEM) of clients, who then have to show a certificate", group=ACCESS, metavar="FILE"
    )
    scheduler_tls_ca_file: Path | None = option(
        None, "authorities (PEM) of schedulers, which are then spoken to over TLS", group=ACCESS, metavar="FILE"
    )

    max_body_bytes: int = option(1_048_576, "size of one request; larger ones are refused with 413", group=REQUESTS)
    retry_window: float = option(
        120.0, "seconds that a request waits for a scheduler, before it begins and after each loss", group=REQUESTS
    )
    share_calls: bool = option(
        True,
        "the streams of many clients over one gRPC call; off where something between counts or balances single calls",
        group=REQUESTS,
    )
    pass_header: tuple[str, ...] = option(
        ("authorization", "traceparent", "tracestate"),
        "an HTTP header that goes on as metadata, such as the field of --tenant-metadata; repeatable, in place of the "
        "default: authorization, traceparent, tracestate",
        group=REQUESTS,
        metavar="NAME",
    )
    allow_origin: tuple[str, ...] = option(
        (), "a web page's origin that may call from a browser, * for all; repeatable", group=REQUESTS, metavar="ORIGIN"
    )
    lora_updates: bool = option(
        False,
        "let clients load and unload adapters by /v1/load_lora_adapter and /v1/unload_lora_adapter",
        group=REQUESTS,
    )
    drain_timeout: float = option(20.0, "seconds that requests get to finish after SIGTERM", group=REQUESTS)

    page: bool = option(True, "a playground for browsers, at /", group=PAGE)
    live_panel: bool = option(
        False,
        "beside it what the scheduler does: queues, workers, and the lengths and cache blocks of everybody's requests",
        group=PAGE,
    )
    demo: bool = option(
        False,
        "let the panel withhold cache blocks of workers, to watch preemption; not for a server in use",
        group=PAGE,
    )

    max_connections: int = option(
        4096, "connections at once; beyond them idle ones are closed, or else the new one", group=CONNECTIONS
    )
    keep_alive: float = option(60.0, "seconds that a connection may be idle between requests", group=CONNECTIONS)
    read_timeout: float = option(30.0, "seconds in which a request has to be here, its body too", group=CONNECTIONS)
    write_timeout: float = option(
        120.0, "seconds after which a client that reads nothing of its answer is cut off", group=CONNECTIONS
    )

    comment_interval: float = option(
        15.0, "seconds without an event after which a stream gets a comment, for proxies; 0: none", group=CONNECTIONS
    )

    log_level: str = option("info", "least important log lines to show", group=LOGGING, choices=LEVELS)
    metrics_host: str = option("127.0.0.1", "address at which Prometheus reaches it", group=LOGGING)
    metrics_port: int | None = option(
        None,
        "port for Prometheus; 0 takes a free one (default: 9465, or none if that is taken)",
        group=LOGGING,
        metavar="PORT",
    )
    otlp_traces_endpoint: str = option("", ENDPOINT_HELP, group=LOGGING, metavar="URL")
    trace_sampling: float = option(1.0, SAMPLING_HELP, group=LOGGING, metavar="SHARE")
    trace_parents: bool = option(True, FOLLOW_HELP, group=LOGGING)
    shares_port: bool = option(False, "one of several processes", hidden=True)
    serves_metrics: bool = option(True, "has found a port for them", hidden=True)

    def __post_init__(self) -> None:
        check_port("port", self.port)
        check_port("metrics_port", self.metrics_port)
        check_tracing_options(self)
        check_tls_files(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)
        for address in self.scheduler.split(","):
            host, _, port = address.strip().removeprefix("dns:///").rpartition(":")
            is_tcp = is_host(host.strip("[]")) and port.isdecimal() and 0 < int(port) <= 65535
            if not (is_tcp or address.strip().startswith("unix:")):
                raise ValueError(f"scheduler is {address.strip()!r}; HOST:PORT is accepted")
        for name in ("processes", "max_body_bytes", "max_connections"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, at least 1 is accepted")
        for name in ("retry_window", "drain_timeout", "comment_interval"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, at least 0 is accepted")
        for name in ("keep_alive", "read_timeout", "write_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, more than 0 is accepted")
        if self.live_panel and not self.page:
            raise ValueError("live_panel is a part of the page, which no_page leaves out")
        if self.demo and not self.live_panel:
            raise ValueError("demo is a part of live_panel, which is off")
        for name in self.pass_header:
            if not re.fullmatch(r"[a-z0-9_.-]+", name) or name.startswith("grpc-") or name.endswith("-bin"):
                raise ValueError(
                    f"pass_header is {name!r}; lower-case letters, digits, _ . and - are accepted, no grpc-, -bin"
                )

    def new_tracer(self) -> Tracer | None:
        """None where tracing is off. Raises OptionError where packages are missing."""
        from octavo.shared.tracing.tracer import new_tracer  # and structlog, which no command line needs

        endpoint, sampling = self.otlp_traces_endpoint, self.trace_sampling
        return new_tracer("octavo-gateway", endpoint, sampling, follows_parents=self.trace_parents)
