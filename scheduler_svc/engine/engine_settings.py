"""How the step loop schedules, and when it gives up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from octavo.shared.access.tenant_limits import TenantTable


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Of one engine, for all its workers; the fields of `SchedulerConfig` say what each means."""

    scheduling_policy: str = "fcfs"
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    tenants_are_known: bool = False  # their names do not come from clients, see `ServedTokens.share_of`
    tenants: Callable[[], TenantTable] | None = None  # what they may have and weigh; None: no file says
    has_tenant_limits: bool = True  # of `tenants`; False: somebody before this engine keeps them
    counts_refusals: bool = True  # of `submit`; False: who submits does, and may ask several engines
    preemption_mode: str = "auto"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    step_time_goal: float = 0.0
    scheduler_delay_factor: float = 0.0
    steps_in_flight: int = 2
    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 4_194_304
    worker_wait_timeout_s: float = 120.0
    max_worker_losses: int = 3
    adapters: Mapping[str, str] = field(default_factory=dict)  # paths by name, of those that every worker is to load
