"""Options of an `LLM`: those of `octavo serve` by their Python names, for the worker and for the scheduler core."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.arguments.vllm_arguments import in_own_words
from octavo.shared.options import KNOWN, OptionError, from_values, unknown_option

if TYPE_CHECKING:
    from scheduler_svc.config import SchedulerConfig
    from worker_svc.config import WorkerConfig

# Of what listens and is connected to, of who may call and how often, and of traces: an `LLM` has none of these.
NOT_EMBEDDED = frozenset(
    {"host", "port", "control_port", "metrics_port", "insecure", "socket_folder"}
    | {"tls_cert_file", "tls_key_file", "tls_client_ca_file", "keys_file", "tenant_metadata"}
    | {"jwt_jwks_file", "jwt_jwks_url", "jwt_issuer", "jwt_audience", "jwt_tenant_claim", "jwt_roles_claim"}
    | {"worker", "max_workers", "worker_quota", "takeover_after", "frontends", "shards"}
    | {"token_file", "tls_client_name", "worker_token_file", "worker_tls_ca_file", "worker_tls_name"}
    | {"max_connections", "max_connection_age", "max_concurrent_streams", "max_open_calls", "max_request_bytes"}
    | {"max_preparing_bytes", "text_processes", "text_timeout", "stream_interval_ms"}
    | {"drain_timeout", "finish_timeout", "log_prompts", "otlp_traces_endpoint", "trace_sampling", "trace_parents"}
)


class EmbeddedOptions(NamedTuple):
    """What `LLM` was given, sorted by who it is for."""

    worker: WorkerConfig
    scheduler: SchedulerConfig
    seed: int | None  # of draws; None: each request draws its own


def read_options(model: str, options: dict[str, Any]) -> EmbeddedOptions:
    """What the two parts get of `options`, in which None is the default, and vLLM's names may be (`vllm_arguments`).

    Three defaults differ from those of services: steps may take as long as they do, as nobody reads along; only
    warnings are logged, and the line of statistics is not. Asked for with `disable_log_stats=False`, that line is shown
    at any level that was not asked for itself.
    Raises OptionError for a name that neither part knows, and for a value that is not accepted.
    """
    from scheduler_svc.config import SchedulerConfig
    from worker_svc.config import WorkerConfig

    if not str(model):
        raise OptionError("model: '' is no folder and no name")
    # A script may give all that a parser filled by `EngineArgs.add_cli_args` has read.
    options = {name: value for name, value in options.items() if value is not None and name != KNOWN}
    if "dtype" in options:  # torch.float16 is as good as its name
        options["dtype"] = str(options["dtype"]).removeprefix("torch.")
    try:
        model, options = in_own_words(str(model), options)
    except ValueError as error:
        raise OptionError(str(error)) from None
    names = {cls: {field.name for field in dataclasses.fields(cls)} for cls in (WorkerConfig, SchedulerConfig)}
    known = set().union(*names.values()) - NOT_EMBEDDED
    for name in options:
        if name in NOT_EMBEDDED:
            raise OptionError(f"{name}: an LLM starts a worker of its own and listens nowhere; `octavo serve` takes it")
        if name not in known:
            raise unknown_option(name, known)
    own = {"step_time_goal": 0.0, "log_level": "warning", "disable_log_stats": True}
    options = {**own, **options, "model": str(model)}
    worker = from_values(WorkerConfig, {name: options[name] for name in names[WorkerConfig] & options.keys()})
    scheduler = from_values(SchedulerConfig, {name: options[name] for name in names[SchedulerConfig] & options.keys()})
    return EmbeddedOptions(worker, scheduler, worker.seed if "seed" in options else None)
