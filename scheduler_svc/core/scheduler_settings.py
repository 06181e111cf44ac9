"""How one worker's scheduler decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core.preemption_modes import Costs
from scheduler_svc.core.queues.policy import POLICIES, Policy
from scheduler_svc.core.queues.served_tokens import ServedTokens


@dataclass(frozen=True)
class SchedulerSettings:
    """Fixed for as long as the worker is leased.

    Attributes:
        policy: order of groups; the last in it is preempted first.
        enable_chunked_prefill: False computes whole prompts, in steps of their own, before decodes.
        step_time_goal: seconds that a step with decodes should take, however long prompts are; 0: any.
        delay_factor: without chunked prefill, see `PromptDelay`.
        preemption_mode, costs: see `Preemption`.
        num_micro_batches: steps that a worker computes at once, each in another stage of its pipeline. A sequence is in
            one of them at a time: what it draws is known at the last stage, and needed at the first.
        served: charged with what tenants are served, where the policy counts tokens.
    """

    policy: Policy = POLICIES["fcfs"]
    enable_chunked_prefill: bool = True
    step_time_goal: float = 0.0
    delay_factor: float = 0.0
    preemption_mode: str = "auto"
    costs: Costs = field(default_factory=Costs)
    num_micro_batches: int = 1
    served: ServedTokens | None = None
