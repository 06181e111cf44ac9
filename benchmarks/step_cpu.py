"""What a decode step costs in processor time, thread by thread, in the scheduler's process and the worker's: `python -m
benchmarks.step_cpu`.

On a machine with few cores every microsecond beside the forward pass is taken from it. Requests of short prompts are
generated over `LLM`, so that nearly every step decodes, and Linux says before and after the time and the
switches of each thread (`/proc/PID/task/*/schedstat` and `status`). A thread that gives up its core voluntarily
waited for something: that is a hop from thread to thread, or a barrier of the model's threads.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from octavo.bench import offline
from octavo.bench.workloads import BenchRequest, Workload, warm_up
from octavo.llm import LLM

_PROC = Path("/proc")
_LEAST_US = 0.5  # a step; threads below that are left out


@dataclasses.dataclass(frozen=True)
class ThreadUse:
    """What one thread has used since it began."""

    name: str
    cpu_ns: int
    num_waits: int  # how often it gave its core up by itself

    def since(self, before: ThreadUse | None) -> ThreadUse:
        """What was used in between; None: the thread is new."""
        if before is None:
            return self
        return ThreadUse(self.name, self.cpu_ns - before.cpu_ns, self.num_waits - before.num_waits)


def main() -> int:
    """Prints a table for each number of requests."""
    parser = argparse.ArgumentParser(description="Shows the processor time of a decode step by thread.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32], help="how many run at once")
    parser.add_argument("--tokens", type=int, default=128, help="that each request generates")
    parser.add_argument("--repeats", type=int, default=3, help="of which the least is shown")
    arguments = parser.parse_args()
    with LLM(arguments.model, quantization=arguments.quantization) as llm:
        vocab_size = llm.get_tokenizer().vocab_size
        offline.run(llm, warm_up(vocab_size))
        for count in arguments.requests:
            workload = decode_steps(count, arguments.tokens, vocab_size)
            offline.run(llm, workload)
            runs = [measure(llm, workload) for _ in range(arguments.repeats)]
            print(f"\n{count} requests of {arguments.tokens} tokens, a step:\n{table(least(runs))}")
    return 0


def decode_steps(num_requests: int, num_tokens: int, vocab_size: int) -> Workload:
    """Requests with different prompts of 16 tokens, which one step takes in together."""
    prompts = [tuple((17 * request + i) % vocab_size for i in range(16)) for request in range(num_requests)]
    return Workload("decode", "short prompts", tuple(BenchRequest(prompt, num_tokens) for prompt in prompts))


def measure(llm: LLM, workload: Workload) -> dict[tuple[str, str], tuple[float, float]]:
    """(µs, waits) a step of each thread, by process and name; threads of one name together."""
    pids = {"scheduler": os.getpid(), "worker": child_of_this_process()}
    before = {process: threads_of(pid) for process, pid in pids.items()}
    num_before = llm.statistics()["num_steps"]
    offline.run(llm, workload)
    num_steps = llm.statistics()["num_steps"] - num_before
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for process, pid in pids.items():
        for thread_id, use in threads_of(pid).items():
            spent = use.since(before[process].get(thread_id))
            us, waits = found.get((process, use.name), (0.0, 0.0))
            found[process, use.name] = us + spent.cpu_ns / 1e3 / num_steps, waits + spent.num_waits / num_steps
    return found


def child_of_this_process() -> int:
    """The worker is the only one. Raises ValueError where there are others."""
    (pid,) = (
        int(pid) for task in (_PROC / "self" / "task").iterdir() for pid in (task / "children").read_text().split()
    )
    return pid


def threads_of(pid: int, proc: Path = _PROC) -> dict[int, ThreadUse]:
    """By thread id. Threads of this process have the names that Python gave them, others those that Linux knows."""
    own = {thread.native_id: thread.name for thread in threading.enumerate()} if pid == os.getpid() else {}
    found = {}
    for folder in (proc / str(pid) / "task").iterdir():
        thread_id = int(folder.name)
        try:
            cpu_ns = int((folder / "schedstat").read_text().split()[0])
            status = (folder / "status").read_text()
            name = own.get(thread_id) or ("main" if thread_id == pid else (folder / "comm").read_text().strip())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        found[thread_id] = ThreadUse(name, cpu_ns, _field(status, "voluntary_ctxt_switches"))
    return found


def _field(status: str, name: str) -> int:
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:"))


def least(runs: list[dict[tuple[str, str], tuple[float, float]]]) -> dict[tuple[str, str], tuple[float, float]]:
    """The run that took the least in all: what a neighbour disturbs only adds."""
    return min(runs, key=lambda run: sum(us for us, _ in run.values()))


def table(run: Mapping[tuple[str, str], tuple[float, float]]) -> str:
    """`run`: by process and thread, microseconds and waits of one step; threads below _LEAST_US are left out."""
    lines = ["| process | thread | µs | waits |", "| --- | --- | --- | --- |"]
    for (process, name), (us, waits) in sorted(run.items(), key=lambda entry: (entry[0][0], -entry[1][0])):
        if us >= _LEAST_US:
            lines.append(f"| {process} | {name} | {us:.0f} | {waits:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
