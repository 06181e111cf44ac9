"""What processes of tests share once it is imported before they are forked (`tests.forkserver`).

No kernel, and nothing that would start OpenMP: a process that is forked could compute with no threads then.
"""

from __future__ import annotations

import importlib

from numba.core.registry import cpu_target

for module in (
    "worker_svc.server",
    "scheduler_svc.server",
    "scheduler_svc.frontend_process",
    "scheduler_svc.shards.shard_process",
    "gateway_svc.server",
    "octavo.commands.scheduler",
    "octavo.commands.serve",
    "octavo.shared.supervisor",
    "tests.forked_children",
):
    importlib.import_module(module)
# What numba imports with the first function that it compiles or reads: half of what a worker takes to its first step.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
