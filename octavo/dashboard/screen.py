"""A `View` as tables: the server, its models, its workers with their caches, its oldest requests."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from octavo.dashboard.fitting_table import Cell, Column, FittingTable, text
from octavo.dashboard.server_watch import Speed, View
from octavo.shared.terminal_text import harmless_line
from protos import inference_pb2 as pb

_SHOWN_DIGITS = 12  # of a fingerprint
_SHOWN_ADAPTERS = 4  # of a worker
_ID_WIDTH = 36  # characters of a request's id
_BAR_WIDTH = 16  # characters
_STATE_WIDTH, _SPEED_WIDTH = 8, 6  # characters
_NS = 1e-9
_COLOURS = {
    "serving": "green",
    "running": "green",
    "joining": "cyan",
    "waiting": "yellow",
    "draining": "yellow",
    "preempted": "magenta",
    "swapped": "magenta",
    "lost": "red",
    "failed": "red",
}


def screen(view: View, address: str) -> RenderableType:
    """All of it, one part below the other."""
    parts: list[RenderableType] = [_head(view, address), Text(), _models(view), Text(), _workers(view)]
    if view.requests:
        parts += [Text(), _requests(view)]
    return Group(*parts)


def _head(view: View, address: str) -> Text:
    load, speeds = view.load, view.speeds.values()
    running = f"{load.num_requests_running:,} running, {load.num_requests_waiting:,} waiting"
    tokens = (
        f"{sum(each.prefill_tokens for each in speeds):,.0f} in, {sum(each.decode_tokens for each in speeds):,.0f} out"
    )
    return Text.assemble(
        (f"Octavo {harmless_line(view.info.version)}", "bold"),
        f" at {address}, up {_duration(view.info.uptime_ns * _NS)}\n",
        (running, "bold"),
        f" ({load.num_tokens_waiting:,} tokens)",
        f"; tokens/s: {tokens}" if view.speeds else "",
    )


def _numbers(*titles: str, min_width: int = 0) -> list[Column]:
    return [Column(title, is_number=True, min_width=min_width) for title in titles]


def _models(view: View) -> FittingTable:
    columns = [Column("model", is_name=True), *_numbers("running", "waiting", "workers", "draining")]
    columns += _numbers("in/s", "out/s", min_width=_SPEED_WIDTH)
    table = FittingTable(columns, spared=("draining", "workers", "waiting", "running"))
    of_model = {worker.address: worker.model_fingerprint for worker in view.load.workers}
    for model in view.load.models:
        speeds = [speed for address, speed in view.speeds.items() if of_model.get(address) == model.fingerprint]
        table.add_row(
            f"{model.name}@{model.fingerprint[:_SHOWN_DIGITS]}",
            f"{model.num_requests_running:,}",
            f"{model.num_requests_waiting:,}",
            str(model.num_workers_serving),
            str(model.num_workers_draining),
            _sum(speeds, "prefill_tokens"),
            _sum(speeds, "decode_tokens"),
        )
    return table


def _workers(view: View) -> FittingTable:
    workers = view.load.workers
    has_groups = any(_num_ranks(worker) > 1 for worker in workers)  # else it says nothing, and takes room
    has_adapters = any(worker.adapters for worker in workers)
    has_problems = any(worker.problem for worker in workers)
    columns = [Column("worker", is_name=True), Column("state", min_width=_STATE_WIDTH), Column("model", is_name=True)]
    columns += [Column("cache"), *_numbers("blocks", "host", "running", "preempted", "steps/s")]
    columns += [*_numbers("in/s", "out/s", min_width=_SPEED_WIDTH), *_numbers("swapped/s")]
    columns += [Column("ranks")] if has_groups else []
    columns += [Column("adapters", folds=True)] if has_adapters else []
    columns += [Column("problem")] if has_problems else []
    same_model = ["model"] if len({worker.model for worker in workers}) == 1 else []  # which the table above names
    spared = ["problem", "cache", "host", "swapped/s", *same_model, "preempted", "adapters", "ranks", "steps/s"]
    table = FittingTable(columns, spared=[*spared, "running", "model", "blocks"], below={"problem": _problems(workers)})
    for worker in workers:
        speed = view.speeds.get(worker.address)
        table.add_row(
            worker.address,
            _state(pb.WorkerHealth.Name(worker.health).removeprefix("WORKER_HEALTH_")),
            worker.model,
            _bar(worker.num_device_blocks - worker.num_free_device_blocks, worker.num_device_blocks),
            _share(worker.num_free_device_blocks, worker.num_device_blocks),
            _share(worker.num_free_host_blocks, worker.num_host_blocks),
            str(worker.num_running),
            str(worker.num_preempted),
            *_worker_speeds(speed),
            *([_ranks(worker)] if has_groups else []),
            *([Text(harmless_line(_adapters(worker)), overflow="fold")] if has_adapters else []),
            *([text(worker.problem, "red")] if has_problems else []),
        )
    return table


def _problems(workers: Iterable[pb.WorkerState]) -> list[Text]:
    """A line each, as long as it is."""
    return [
        Text(harmless_line(f"{worker.address}: {worker.problem}"), style="red", overflow="fold")
        for worker in workers
        if worker.problem
    ]


def _num_ranks(worker: pb.WorkerState) -> int:
    return max(1, worker.tensor_parallel_size) * max(1, worker.pipeline_parallel_size)


def _ranks(worker: pb.WorkerState) -> str:
    """How many, and of how many stages."""
    stages = worker.pipeline_parallel_size
    return f"{_num_ranks(worker)} in {stages} stages" if stages > 1 else str(_num_ranks(worker))


def _adapters(worker: pb.WorkerState) -> str:
    """Names of the first ones, and how many there are besides."""
    names = ", ".join(worker.adapters[:_SHOWN_ADAPTERS])
    more = len(worker.adapters) - _SHOWN_ADAPTERS
    return f"{names} and {more} more" if more > 0 else names or "-"


def _worker_speeds(speed: Speed | None) -> list[str]:
    if speed is None:
        return ["-"] * 4
    swapped = speed.blocks_swapped_in + speed.blocks_swapped_out
    return [_number(each) for each in (speed.steps, speed.prefill_tokens, speed.decode_tokens, swapped)]


def _requests(view: View) -> FittingTable:
    columns = [Column("request", is_name=True), Column("state", min_width=_STATE_WIDTH)]
    columns += [Column("worker", is_name=True), Column("model", is_name=True)]
    columns += _numbers("prompt", "output", "cached", "preempted", "moved", "age")
    table = FittingTable(columns, spared=("moved", "preempted", "cached", "model", "worker", "prompt"))
    for request in view.requests:
        num_tokens = sum(each.num_tokens - request.num_prompt_tokens for each in request.sequences)
        table.add_row(
            _shortened(request.request_id),
            _state(pb.RequestPhase.Name(request.phase).removeprefix("REQUEST_PHASE_")),
            request.worker or "-",
            request.model,
            f"{request.num_prompt_tokens:,}",
            f"{max(num_tokens, 0):,}",
            f"{max((each.num_cached_tokens for each in request.sequences), default=0):,}",
            str(request.times_preempted),
            str(request.times_moved),
            _duration(request.age_ns * _NS),
        )
    return table


def _shortened(request_id: str) -> Text:
    cell = text(request_id)
    cell.truncate(_ID_WIDTH, overflow="ellipsis")
    return cell


def _state(name: str) -> Text:
    word = name.lower()
    return text(word, _COLOURS.get(word, ""))


def _bar(used: int, total: int) -> Cell:
    colour = "red" if used > 0.95 * total else "yellow" if used > 0.8 * total else "green"
    bar = ProgressBar(total=max(total, 1), completed=used, width=_BAR_WIDTH, complete_style=colour)
    return bar if total else text("-")


def _share(free: int, total: int) -> str:
    """What is used, in percent of so many blocks."""
    return f"{100 * (total - free) / total:.0f}% of {total:,}" if total else "-"


def _sum(speeds: list[Speed], name: str) -> str:
    return _number(sum(getattr(speed, name) for speed in speeds) if speeds else None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    """As a clock shows it: 0:07, 12:30, 3:05:00."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
