"""Options of the scheduler service, one frozen dataclass: flags, variables and file keys follow from its fields."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from octavo.shared.log import LEVELS
from octavo.shared.options import COMMON, LOGGING, check_port, check_tls_files, is_host, option
from octavo.shared.ports import is_loopback
from octavo.shared.tracing.options import ENDPOINT_HELP, FOLLOW_HELP, SAMPLING_HELP, check_tracing_options
from scheduler_svc.core.preemption_modes import MODES
from scheduler_svc.core.queues.policy import POLICIES
from scheduler_svc.models.model_names import ModelNames
from scheduler_svc.requests.tenants import check_metadata_field

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.shared.access.tenant_limits import TenantTable
    from octavo.shared.tracing.tracer import Tracer
    from scheduler_svc.output.prompt_log import PromptLog
    from scheduler_svc.requests.request_checks import TextSettings

SCHEDULING, REQUESTS, WORKERS = "scheduling", "requests", "workers and processes"  # groups of options
ACCESS = "access"  # likewise
MAX_SHARDS = 256  # a byte of each request's number

# Options by the least that they may be, where they are given.
_LEAST = {
    0: (
        "scheduler_delay_factor",
        "worker_wait_timeout",
        "worker_quota",
        "takeover_after",
        "max_connection_age",
        "drain_timeout",
        "stream_interval_ms",
        "flight_recorder_steps",
    ),
    1: (
        "steps_in_flight",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_workers",
        "max_models",
        "max_waiting_requests",
        "max_waiting_tokens",
        "max_request_bytes",
        "max_concurrent_streams",
        "max_open_calls",
        "max_connections",
        "max_preparing_bytes",
        "max_worker_losses",
        "max_stop_string_chars",
        "frontends",
        "shards",
        "text_processes",
        "flight_recorder_memory",
    ),
}


@dataclass(frozen=True)
class SchedulerConfig:
    """Raises ValueError for options that contradict one another."""

    host: str = option("127.0.0.1", "address to listen on", group=COMMON)
    port: int = option(50051, "port to listen on; 0 takes a free one", group=COMMON)
    control_port: int | None = option(
        None, "port for Control alone; 0 takes a free one (default: beside Inference)", group=ACCESS, metavar="PORT"
    )
    worker: tuple[str, ...] = option(
        (),
        "HOST:PORT of a worker, or dns:///NAME:PORT for all addresses of a name; repeatable, no default",
        group=COMMON,
        metavar="ADDRESS",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "model name in requests: NAME for all models, ALIAS=NAME for one; repeatable (default: the workers' own)",
        group=COMMON,
        metavar="NAME",
    )

    lora_modules: tuple[str, ...] = option(
        (),
        "NAME=PATH of an adapter that workers load as they join, PATH as they see it; repeatable",
        group=COMMON,
        metavar="NAME=PATH",
    )

    scheduling_policy: str = option(
        "fcfs", "order in which waiting requests are served", group=SCHEDULING, choices=tuple(POLICIES)
    )
    tenant_weights: tuple[str, ...] = option(
        (), "under fair: a tenant's share, NAME=WEIGHT; others have 1; repeatable", group=SCHEDULING, metavar="SHARE"
    )
    tenant_metadata: str = option(
        "",
        "metadata field with a call's tenant, set by a proxy (default: clients name their tenant themselves)",
        group=REQUESTS,
        metavar="FIELD",
    )
    tls_cert_file: Path | None = option(
        None, "certificate (PEM) for clients and metrics; switches TLS on", group=ACCESS, metavar="FILE"
    )
    tls_key_file: Path | None = option(None, "its key (PEM)", group=ACCESS, metavar="FILE")
    tls_client_ca_file: Path | None = option(
        None, "authorities (PEM) of clients, who then have to show a certificate", group=ACCESS, metavar="FILE"
    )
    worker_tls_ca_file: Path | None = option(
        None,
        "authorities (PEM) of workers, which are then spoken to over TLS and shown the certificate",
        group=ACCESS,
        metavar="FILE",
    )
    worker_tls_name: str = option(
        "",
        "name that workers' certificates have to have (default: the host of each address)",
        group=ACCESS,
        metavar="NAME",
    )
    worker_token_file: Path | None = option(
        None, "file with the token that workers want (their --token-file)", group=ACCESS, metavar="FILE"
    )
    insecure: bool = option(False, "listen where others reach this service although nothing locks it", group=ACCESS)
    keys_file: Path | None = option(
        None,
        "keys of those who may call, with tenant and roles; `octavo keys add` writes it (default: everybody may)",
        group=ACCESS,
        metavar="FILE",
    )
    socket_folder: Path | None = option(
        None, "where sockets for others of this user are made, spoken to without TLS", group=ACCESS, hidden=True
    )
    jwt_jwks_file: Path | None = option(
        None, "public keys (JWKS) of who issues tokens to callers; takes JWT beside keys", group=ACCESS, metavar="FILE"
    )
    jwt_jwks_url: str = option(
        "", "where these are to be had: https, or http on loopback; asked every 5 minutes", group=ACCESS, metavar="URL"
    )
    jwt_issuer: str = option("", "`iss` that tokens have to have", group=ACCESS, metavar="ISSUER")
    jwt_audience: str = option("", "`aud` that tokens have to have", group=ACCESS, metavar="AUDIENCE")
    jwt_tenant_claim: str = option("sub", "claim with the tenant; a.b is b within a", group=ACCESS, metavar="CLAIM")
    jwt_roles_claim: str = option(
        "roles",
        "claim with the roles, a list or words; a token without it has inference",
        group=ACCESS,
        metavar="CLAIM",
    )
    preemption_mode: str = option(
        "auto",
        "what happens to a preempted request's cache: copied to host memory, or computed again",
        group=SCHEDULING,
        choices=MODES,
    )
    enable_prefix_caching: bool = option(True, "share the cache of prompts that begin alike", group=SCHEDULING)
    enable_chunked_prefill: bool = option(
        True, "compute long prompts in parts, beside decodes; off: whole, before decodes", group=SCHEDULING
    )
    step_time_goal: float = option(
        0.25,
        "seconds that a step may take where somebody decodes; prompts get what is left of it (0: no bound)",
        group=SCHEDULING,
    )
    scheduler_delay_factor: float = option(
        0.0,
        "without chunked prefill: pause between prompt steps, as a multiple of the last one's time",
        group=SCHEDULING,
    )
    max_num_seqs: int | None = option(
        None, "sequences that run at once on a worker (default: the worker's)", group=SCHEDULING
    )
    max_num_batched_tokens: int | None = option(None, "tokens in one step (default: the worker's)", group=SCHEDULING)
    max_model_len: int | str | None = option(
        None, "tokens in one sequence (default, and auto: the worker's)", group=SCHEDULING, metavar="N|auto"
    )
    tokenizer: Path | None = option(
        None, "folder of tokenizer files (default: the workers' own)", group=SCHEDULING, metavar="DIR"
    )

    max_waiting_requests: int = option(
        4096, "requests that may wait; more are refused with a retry hint", group=REQUESTS
    )
    max_waiting_tokens: int = option(
        4_194_304, "prompt tokens that may wait; more are refused with a retry hint", group=REQUESTS
    )
    max_request_bytes: int = option(1_048_576, "size of one request; larger ones are refused unread", group=REQUESTS)
    max_concurrent_streams: int = option(
        1024, "calls at once over one connection; more wait in the client", group=REQUESTS
    )
    max_open_calls: int = option(
        8192, "open calls in all, three quarters of them for one host; more are refused", group=REQUESTS
    )
    max_connections: int = option(
        1024, "connections at once, shared among hosts when nearly used up; more are closed", group=REQUESTS
    )
    max_connection_age: float = option(
        3600.0, "seconds after which a client is asked to connect again; 0: never", group=REQUESTS
    )
    max_preparing_bytes: int = option(
        67_108_864, "bytes of requests in preparation; more are refused with a retry hint", group=REQUESTS
    )
    text_timeout: float = option(10.0, "seconds that one request may take to render and tokenise", group=REQUESTS)
    allow_special_tokens_in_content: bool = option(
        False, "special tokens spelled out in a message are special, not plain text", group=REQUESTS
    )
    max_logprobs: int = option(20, "logprobs per token that a request may ask for", group=REQUESTS)
    max_stop_string_chars: int = option(1024, "characters in one stop string", group=REQUESTS)
    stream_interval_ms: float = option(
        0.0, "least time between two messages of a stream while others stream too", group=REQUESTS
    )
    drain_timeout: float = option(
        20.0, "seconds that requests get to finish after SIGTERM or Control.Drain", group=REQUESTS
    )

    max_workers: int = option(64, "workers to hold at most", group=WORKERS)
    worker_quota: int | None = option(
        None,
        "share of workers that other schedulers also use; 0: standby (default: all workers)",
        group=WORKERS,
        metavar="N",
    )
    takeover_after: float = option(
        5.0, "seconds without a scheduler after which a worker beyond the quota is taken", group=WORKERS
    )
    max_models: int = option(16, "models to know at once, each revision counted", group=WORKERS)
    steps_in_flight: int = option(2, "steps sent to a worker before the first is answered; 1: lock-step", group=WORKERS)
    worker_wait_timeout: float = option(
        120.0, "seconds that requests wait for a worker before they fail", group=WORKERS
    )
    max_worker_losses: int = option(
        3, "workers that may be lost while they run a request before it fails", group=WORKERS
    )
    frontends: int = option(
        1, "processes that share the port, tokenise and stream; 1: the scheduler itself", group=WORKERS
    )
    shards: int = option(1, "processes with a step loop, each with some of the workers; 1: a single one", group=WORKERS)
    text_processes: int = option(2, "processes that render and tokenise, for each frontend", group=WORKERS)

    log_level: str = option("info", "least severe log lines to show", group=LOGGING, choices=LEVELS)
    log_prompts: bool = option(
        False, "write the prompt and the answer of each request into the log: content of users", group=LOGGING
    )
    flight_recorder_steps: int = option(
        1024, "last steps of each worker that are kept for a record of a fault; 0: off", group=LOGGING, metavar="N"
    )
    flight_recorder_memory: int = option(64, "MiB of memory that they take at most", group=LOGGING, metavar="MIB")
    flight_recorder_dir: Path | None = option(
        None,
        "folder of flight records (default: one of the user's among temporary files)",
        group=LOGGING,
        metavar="DIR",
    )
    disable_log_stats: bool = option(False, "do not log statistics every 5 seconds", group=LOGGING)
    metrics_port: int | None = option(
        None,
        "port for Prometheus; 0 takes a free one (default: 9464, or none if that is taken)",
        group=LOGGING,
        metavar="PORT",
    )
    otlp_traces_endpoint: str = option("", ENDPOINT_HELP, group=LOGGING, metavar="URL")
    trace_sampling: float = option(1.0, SAMPLING_HELP, group=LOGGING, metavar="SHARE")
    trace_parents: bool = option(True, FOLLOW_HELP, group=LOGGING)

    def __post_init__(self) -> None:
        check_port("port", self.port)
        check_port("metrics_port", self.metrics_port)
        check_port("control_port", self.control_port)
        for address in self.worker:
            host, _, port = address.removeprefix("dns:///").rpartition(":")
            if not (is_host(host) and port.isdecimal() and 0 < int(port) <= 65535):
                raise ValueError(f"worker is {address!r}; HOST:PORT or dns:///NAME:PORT is accepted")
        check_metadata_field(self.tenant_metadata)
        check_tracing_options(self)
        check_tls_files(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)
        if self.worker_tls_name and self.worker_tls_ca_file is None:
            raise ValueError("worker_tls_name is for TLS, which worker_tls_ca_file switches on")
        if self.knows_callers and self.tenant_metadata:
            known = "keys_file each key" if self.keys_file is not None else "jwt_issuer each token"
            raise ValueError(f"tenant_metadata is {self.tenant_metadata!r}, but with {known} has its tenant")
        self._check_tokens()
        self.weights()  # raises for what is none
        self.model_names()  # likewise
        self.adapters()  # likewise
        if not 0 <= self.step_time_goal < math.inf:
            raise ValueError(f"step_time_goal is {self.step_time_goal}, a number from 0 on is accepted")
        for least, names in _LEAST.items():
            for name in names:
                value = getattr(self, name)
                if value is not None and not value >= least:  # so that NaN is refused, too
                    raise ValueError(f"{name} is {value}, at least {least} is accepted")
        if self.shards > MAX_SHARDS:
            raise ValueError(f"shards is {self.shards}, 1 to {MAX_SHARDS} are accepted")
        if self.worker_quota is not None and self.shards > 1:
            raise ValueError(
                f"worker_quota is {self.worker_quota} and shards {self.shards}: a quota counts the workers of one "
                "step loop, and the parent of shards divides its own; leave one of the two out, or give each "
                "scheduler with shards workers of its own (--worker)"
            )
        if not self.text_timeout > 0:
            raise ValueError(f"text_timeout is {self.text_timeout}, more than 0 is accepted")
        if self.log_prompts and self.log_level not in ("debug", "info"):
            raise ValueError(f"log_prompts writes lines of level info, which log_level {self.log_level!r} leaves out")
        length = self.max_model_len
        if not (length is None or length == "auto" or (isinstance(length, int) and length > 0)):
            raise ValueError(f"max_model_len is {length!r}; a number from 1 on or auto is accepted")
        if self.max_num_seqs and self.max_num_batched_tokens and self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs is {self.max_num_seqs}, more than max_num_batched_tokens, {self.max_num_batched_tokens}"
            )

    def local_socket(self, frontend: int = 0) -> str | None:
        """Where processes of this user reach one of the frontends, as gRPC names it; None: by no socket."""
        return None if self.socket_folder is None else f"unix:{self.socket_folder}/frontend-{frontend}"

    def text_settings(self) -> TextSettings:
        """What checking and tokenising a request depends on, for processes that do only that."""
        from scheduler_svc.requests.request_checks import TextSettings  # and much with it, which no command line needs

        return TextSettings(
            max_logprobs=self.max_logprobs,
            max_stop_string_chars=self.max_stop_string_chars,
            scheduling_policy=self.scheduling_policy,
            allow_special_tokens_in_content=self.allow_special_tokens_in_content,
        )

    def text_options(self) -> dict[str, Any]:
        """Those of `TextProcesses`."""
        return {
            "settings": self.text_settings(),
            "num_processes": self.text_processes,
            "time_limit_s": self.text_timeout,
        }

    def prompt_log(self) -> PromptLog | None:
        """Of `log_prompts`, not started; None where nothing is to be logged."""
        if not self.log_prompts:
            return None
        from scheduler_svc.output.prompt_log import PromptLog  # likewise

        return PromptLog()

    def new_tracer(self) -> Tracer | None:
        """None where tracing is off. Raises OptionError where packages are missing."""
        from octavo.shared.tracing.tracer import new_tracer  # and structlog, which no command line needs

        endpoint, sampling = self.otlp_traces_endpoint, self.trace_sampling
        return new_tracer("octavo-scheduler", endpoint, sampling, follows_parents=self.trace_parents)

    def model_names(self) -> ModelNames:
        """Of `served_model_name`. Raises ValueError."""
        return ModelNames.parse(self.served_model_name)

    def adapters(self) -> dict[str, str]:
        """Of `lora_modules`, paths by name. Raises ValueError."""
        paths: dict[str, str] = {}
        for entry in self.lora_modules:
            name, _, path = entry.partition("=")
            if not name or not path:
                raise ValueError(f"lora_modules has {entry!r}; NAME=PATH is accepted")
            if name in paths:
                raise ValueError(f"lora_modules has {name!r} twice")
            paths[name] = path
        return paths

    @property
    def tenants_are_known(self) -> bool:
        """Whether others than clients say whose a request is."""
        return bool(self.tenant_metadata) or self.knows_callers

    @property
    def takes_tokens(self) -> bool:
        """Whether callers may bring a token of an issuer."""
        return self.jwt_jwks_file is not None or bool(self.jwt_jwks_url)

    @property
    def knows_callers(self) -> bool:
        """Whether only those may call who bring a key or a token."""
        return self.keys_file is not None or self.takes_tokens

    def _check_tokens(self) -> None:
        """Raises ValueError."""
        if not self.takes_tokens:
            for name in ("jwt_issuer", "jwt_audience"):
                if getattr(self, name):
                    raise ValueError(f"{name} is for tokens, whose keys jwt_jwks_file or jwt_jwks_url has")
            return
        for name in ("jwt_issuer", "jwt_audience", "jwt_tenant_claim", "jwt_roles_claim"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty, which tokens need: without it those for others would be taken")
        url = self.jwt_jwks_url
        if url and not url.startswith("https://"):
            try:
                parts = urlsplit(url)
                is_local = parts.scheme == "http" and parts.hostname is not None and is_loopback(parts.hostname)
            except ValueError:
                is_local = False
            if not is_local:
                raise ValueError(f"jwt_jwks_url is {url!r}; https:// is accepted, and http:// of this machine")

    def tenants(self, *, starts_without: bool = False) -> Callable[[], TenantTable] | None:
        """What tenants may have and weigh by the keys file, read again when that changes. Raises KeysFileError, or
        `starts_without` a file that cannot be read."""
        if self.keys_file is None:
            return None
        from octavo.shared.access.keys import TenantsOfFile  # and YAML with it, which no command line needs

        return TenantsOfFile(self.keys_file, starts_without=starts_without).table

    def weights(self) -> dict[str, float]:
        """`tenant_weights` by tenant. Raises ValueError for an entry that is not NAME=WEIGHT with a positive weight."""
        weights = {}
        for entry in self.tenant_weights:
            name, _, weight = entry.rpartition("=")
            try:
                weights[name] = float(weight)
            except ValueError:
                weights[name] = 0.0
            if not name or not 0 < weights[name] < float("inf"):
                raise ValueError(f"tenant_weights has {entry!r}; NAME=WEIGHT with a positive weight is accepted")
        return weights
