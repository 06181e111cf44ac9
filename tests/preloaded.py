"""What processes of tests share once it is imported before they are forked (`tests.forkserver`).

No kernel, and nothing that would start OpenMP: a process that is forked could compute with no threads then.
"""

from __future__ import annotations

import importlib

for module in (
    "worker_svc.server",
    "scheduler_svc.server",
    "scheduler_svc.frontend_process",
    "scheduler_svc.requests.text_process",
    "scheduler_svc.shards.shard_process",
    "gateway_svc.server",
    "octavo.commands.scheduler",
    "octavo.commands.serve",
    "octavo.shared.processes.supervisor",
    "tests.forked_children",
):
    importlib.import_module(module)
