"""The adapters of this scheduler: which there are, which worker has which, and which requests still use them.

    LOADING     the workers that take adapters were told; nobody may use it before all of them have it. A configured one
                begins so, and waits for the first worker that can load it
    LOADED      requests may name it; a worker that joins is told, and gets groups that use it once it has answered
    UNLOADING   no new request may name it. Those taken before are served to their end, on a new worker if theirs is
                lost; then each worker unloads it, after the answer to the step that released the last of its slots

A name has one generation at a time; what is loaded under it later is another one, so prefixes that were cached with the
first are not found with the second.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import structlog

from protos import worker_pb2
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.errors import (
    FieldViolation,
    InvalidRequest,
    NameTaken,
    NotReady,
    RequestRefused,
    UnknownName,
    Unsupported,
    WorkerFailed,
)
from scheduler_svc.flight.entries import Kind
from scheduler_svc.flight.recorder import NoRecorder
from scheduler_svc.leases.worker_handle import WorkerHandle

log = structlog.get_logger()

MAX_NAME_CHARS = 256
MAX_LISTED_CHARS, MAX_PROBLEMS = 1000, 3  # in a refusal, which goes as a header of at most 8 KiB


class Phase(enum.Enum):
    """How far an adapter is, in the words that refusals use."""

    LOADING = "being loaded"
    LOADED = "loaded"
    UNLOADING = "being unloaded"


@dataclass(slots=True, eq=False)
class Adapter:
    """One generation of an adapter, and what is going on with it."""

    name: str
    path: str
    generation: int
    is_configured: bool = False  # by an option: every worker is to have it, whether any is here now
    phase: Phase = Phase.LOADING
    users: set[SequenceGroup] = field(default_factory=set)  # taken and not ended
    asked: set[WorkerHandle] = field(default_factory=set)  # have yet to answer
    problems: list[tuple[str, str]] = field(default_factory=list)  # models and lines, since the callers came
    models: set[str] = field(default_factory=set)  # fingerprints of those of which a worker has had it
    refused_by: set[str] = field(default_factory=set)  # and of those of which one could not load it
    why_not: str = ""  # what kept a configured one from being loaded last
    callers: list[Future[int]] = field(default_factory=list)  # wait for the end of what is going on
    released_by: dict[WorkerHandle, int] = field(default_factory=dict)  # the step that tells of the last free slot


class Adapters:
    """Belongs to the step loop's thread, on which `later` runs a function; some methods may be called from any.

    Callers get their answers in a `Future` that is running already, so that nobody else ends it.

    Args:
        wake: a worker has something to be told, where no other work makes a step.
        loaded: groups of an adapter that a worker has from now on may go there.
        configured: paths by name of adapters that every worker loads as it joins.
    """

    def __init__(
        self,
        later: Callable[[Callable[[], None]], None],
        wake: Callable[[WorkerHandle], None] = lambda worker: None,
        loaded: Callable[[WorkerHandle], None] = lambda worker: None,
        configured: Mapping[str, str] = MappingProxyType({}),
        recorder: NoRecorder | None = None,
    ) -> None:
        self._recorder = recorder or NoRecorder()
        self._later = later
        self._wake = wake
        self._loaded = loaded
        self._workers: list[WorkerHandle] = []  # that take adapters
        self._by_name = {
            name: Adapter(name, path, generation, is_configured=True)
            for generation, (name, path) in enumerate(configured.items(), 1)
        }
        self._num_loaded = len(configured)  # ever
        self._lock = threading.Lock()  # over names, phases and users, which any thread looks at
        self._is_supported = False  # a worker that takes adapters has been here

    # ---- from any thread --------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Those that a request may name, and the configured ones that it may once a worker could load them: whoever
        takes a name for that of a model or of nothing would give up, and not try again."""
        with self._lock:
            to_come = [
                name
                for name, adapter in self._by_name.items()
                if adapter.is_configured and adapter.phase is Phase.LOADING
            ]
            return sorted([*self._names(), *to_come])

    def generations(self) -> dict[str, int]:
        """Of those that a request may name."""
        with self._lock:
            return {name: self._by_name[name].generation for name in self._names()}

    def use(self, group: SequenceGroup) -> None:
        """A request is being taken; `release` has to follow. Raises what `_unknown` gives."""
        if not group.adapter:
            return
        with self._lock:
            adapter = self._by_name.get(group.adapter)
            if adapter is None or adapter.phase is not Phase.LOADED:
                raise self._unknown(group.adapter)
            if group.model in adapter.refused_by - adapter.models:
                raise UnknownName(f"adapter {adapter.name!r} is not for this model: its workers could not load it")
            adapter.users.add(group)
            group.use_adapter_generation(adapter.generation)

    # ---- loading and unloading --------------------------------------------------------------------------------------

    def load(self, name: str, path: str, caller: Future[int]) -> None:
        """Has an adapter loaded wherever it is not; `caller` gets its generation, or WorkerFailed if a worker cannot,
        or NotReady if all that were asked left meanwhile.

        What was not loaded before is then taken back from those that could. Of several models one may take it whose
        workers all can: it is no adapter of another, whose workers all cannot. Raises RequestRefused.
        """
        _check(name, path)
        if not self._workers:
            raise NotReady("no worker that takes adapters is here now") if self._is_supported else _unsupported()
        adapter = self._by_name.get(name)
        if adapter is None:
            self._num_loaded += 1
            adapter = Adapter(name, path, self._num_loaded)
            with self._lock:
                self._by_name[name] = adapter
        elif adapter.phase is Phase.UNLOADING:
            raise NotReady(f"adapter {name!r} is being unloaded; {len(adapter.users)} requests use it still")
        elif adapter.path != path:
            raise NameTaken(f"adapter {name!r} is {adapter.phase.value} from {adapter.path!r}; unload that one first")
        adapter.callers.append(caller)
        for worker in self._workers:
            self._ask_to_load(worker, adapter)
        self._advance(adapter)

    def unload(self, name: str, caller: Future[int]) -> None:
        """Has an adapter unloaded once nobody uses it; `caller` gets its generation, or WorkerFailed.

        A configured one that no worker could load is forgotten. Raises RequestRefused.
        """
        adapter = self._by_name.get(name)
        if adapter is None:
            raise self._unknown(name)
        if adapter.phase is Phase.LOADING and (adapter.asked or not adapter.is_configured):
            raise NotReady(f"adapter {name!r} is being loaded")
        if adapter.phase is not Phase.UNLOADING:
            self._pass_to(Phase.UNLOADING, adapter)
        adapter.callers.append(caller)
        self._advance(adapter)

    def close(self) -> None:
        """Whoever waits for a load or an unload gets NotReady."""
        for adapter in self._by_name.values():
            _answer_callers(adapter, NotReady("this server is shutting down"))

    # ---- what happens to requests and workers -----------------------------------------------------------------------

    def release(self, group: SequenceGroup) -> None:
        """A request has ended, or was not taken after all."""
        adapter = self._by_name.get(group.adapter) if group.adapter else None
        if adapter is not None:
            with self._lock:
                adapter.users.discard(group)
            self._advance(adapter)

    def worker_joined(self, worker: WorkerHandle) -> None:
        """Has the worker load everything that may be used, where it takes adapters."""
        if not worker.info.max_loras:
            return
        self._workers.append(worker)
        self._is_supported = True
        for adapter in self._by_name.values():
            if adapter.phase is not Phase.UNLOADING or adapter.users:
                self._ask_to_load(worker, adapter)

    def worker_left(self, worker: WorkerHandle) -> None:
        """It is lost, or takes no more steps."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        for adapter in list(self._by_name.values()):
            adapter.asked.discard(worker)
            adapter.released_by.pop(worker, None)
            self._advance(adapter)

    def step_answered(self, worker: WorkerHandle, is_rolled_back: bool) -> None:
        """Unloads what this answer shows to be used no more; `is_rolled_back`: the worker forgot its slots."""
        for adapter in [adapter for adapter in self._by_name.values() if adapter.phase is Phase.UNLOADING]:
            if is_rolled_back:  # the worker is told of its slots anew
                adapter.released_by.pop(worker, None)
            self._advance(adapter)

    def was_loaded(self, worker: WorkerHandle, loaded: worker_pb2.AdapterState) -> None:
        """A worker says on its stream that it has an adapter, which may be news or not."""
        adapter = self._by_name.get(loaded.name)
        if adapter is None or adapter.phase is Phase.UNLOADING or worker not in adapter.asked:
            return
        if adapter.generation == loaded.generation:
            self._note_loaded(worker, adapter)

    # ---- one adapter ------------------------------------------------------------------------------------------------

    def _ask_to_load(self, worker: WorkerHandle, adapter: Adapter) -> None:
        if adapter.name in worker.adapters or worker in adapter.asked:
            return
        request = worker_pb2.LoadAdapterRequest(
            name=adapter.name, path=adapter.path, generation=adapter.generation, epoch=worker.epoch
        )
        self._ask(worker, adapter, request, self._on_load_answered)

    def _ask(
        self,
        worker: WorkerHandle,
        adapter: Adapter,
        request: worker_pb2.LoadAdapterRequest | worker_pb2.UnloadAdapterRequest,
        on_answered: Callable[[WorkerHandle, Adapter, str], None],
    ) -> None:
        adapter.asked.add(worker)
        worker.link.call(request, lambda problem: self._later(partial(on_answered, worker, adapter, problem)))

    def _on_load_answered(self, worker: WorkerHandle, adapter: Adapter, problem: str) -> None:
        self._recorder.control(Kind.ADAPTER, adapter.name, worker, False, problem)
        if worker not in adapter.asked:
            return  # it left
        if not problem:
            self._note_loaded(worker, adapter)
        else:
            adapter.refused_by.add(worker.model)
        self._note_answer(worker, adapter, problem)

    def _on_unload_answered(self, worker: WorkerHandle, adapter: Adapter, problem: str) -> None:
        self._recorder.control(Kind.ADAPTER, adapter.name, worker, True, problem)
        if worker in adapter.asked:
            self._note_answer(worker, adapter, problem)

    def _note_loaded(self, worker: WorkerHandle, adapter: Adapter) -> None:
        worker.adapters[adapter.name] = adapter.generation
        adapter.models.add(worker.model)
        self._loaded(worker)

    def _note_answer(self, worker: WorkerHandle, adapter: Adapter, problem: str) -> None:
        adapter.asked.discard(worker)
        if problem:
            log.warning("adapter failed", adapter=adapter.name, worker=worker.link.address, why=problem)
            adapter.problems.append((worker.model, f"worker {worker.link.address}: {problem}"))
        self._advance(adapter)

    def _advance(self, adapter: Adapter) -> None:
        """Does what can be done now, and tells the callers when nothing is left to do."""
        if adapter.phase is Phase.UNLOADING and not adapter.users:
            self._unload_where_released(adapter)
        if adapter.asked or (adapter.phase is Phase.UNLOADING and (adapter.users or self._is_anywhere(adapter))):
            return
        if adapter.is_configured and adapter.phase is Phase.LOADING:
            self._advance_configured(adapter)
            return
        problems = self._problems_of_its_models(adapter)
        refusal: RequestRefused | None = None
        if problems:
            refusal = WorkerFailed(f"adapter {adapter.name!r}: {_listed_problems(problems)}")
        if adapter.phase is Phase.LOADING and not self._is_anywhere(adapter):
            refusal = refusal or NotReady(f"adapter {adapter.name!r}: every worker that takes adapters left meanwhile")
            self._forget(adapter)
        elif adapter.phase is Phase.LOADING:
            self._pass_to(Phase.UNLOADING if problems else Phase.LOADED, adapter)
        elif adapter.phase is Phase.UNLOADING:
            self._forget(adapter)
        _answer_callers(adapter, refusal)
        if adapter.phase is Phase.UNLOADING and adapter.name in self._by_name:
            self._advance(adapter)  # what some workers have loaded, and others could not

    def _advance_configured(self, adapter: Adapter) -> None:
        """Workers that could not load it are left without; the log has said why. None has it: the next one may."""
        adapter.why_not = _listed_problems(self._problems_of_its_models(adapter))
        refusal: RequestRefused | None = None
        if self._is_anywhere(adapter):
            self._pass_to(Phase.LOADED, adapter)
        else:
            refusal = WorkerFailed(f"adapter {adapter.name!r}: {adapter.why_not}")
        _answer_callers(adapter, refusal)

    def _problems_of_its_models(self, adapter: Adapter) -> list[str]:
        """What there is to be told of, once: where a model has it, nothing of others."""
        problems, adapter.problems = adapter.problems, []
        has = {worker.model for worker in self._workers if adapter.name in worker.adapters}
        return [line for model, line in problems if not has or model in has]

    def _unload_where_released(self, adapter: Adapter) -> None:
        for worker in self._workers:
            if adapter.name not in worker.adapters or worker in adapter.asked:
                continue
            has_released = _has_released(worker, adapter)
            if worker.scheduler.tells_releases:
                self._wake(worker)
            if has_released:
                del worker.adapters[adapter.name]
                request = worker_pb2.UnloadAdapterRequest(name=adapter.name, epoch=worker.epoch)
                self._ask(worker, adapter, request, self._on_unload_answered)

    def _is_anywhere(self, adapter: Adapter) -> bool:
        return any(adapter.name in worker.adapters for worker in self._workers)

    def _pass_to(self, phase: Phase, adapter: Adapter) -> None:
        with self._lock:
            adapter.phase = phase

    def _forget(self, adapter: Adapter) -> None:
        with self._lock:
            del self._by_name[adapter.name]

    def _names(self) -> list[str]:
        return sorted(name for name, adapter in self._by_name.items() if adapter.phase is Phase.LOADED)

    def _unknown(self, name: str) -> RequestRefused:
        adapter = self._by_name.get(name)
        if adapter is not None and adapter.is_configured and adapter.phase is Phase.LOADING:
            if adapter.why_not and not adapter.asked:  # whoever tries again hears the same
                return WorkerFailed(f"adapter {name!r} could not be loaded: {adapter.why_not}")
            return NotReady(f"adapter {name!r} is being loaded: try again")
        if not self._is_supported:
            return _unsupported()
        state = "is not here" if adapter is None else f"is {adapter.phase.value}"
        names = ", ".join(map(repr, self._names())) or "none"
        listed = names if len(names) <= MAX_LISTED_CHARS else f"{names[:MAX_LISTED_CHARS]} ..."
        return UnknownName(f"adapter {name[:MAX_NAME_CHARS]!r} {state}; loaded: {listed}")


def _answer_callers(adapter: Adapter, refusal: RequestRefused | None) -> None:
    """What they waited for has come to its end, well or with a refusal."""
    callers, adapter.callers = adapter.callers, []
    for caller in callers:
        if caller.done():
            continue  # the step loop failed over what it asked for, and has told it so
        if refusal is not None:
            caller.set_exception(refusal)
        else:
            caller.set_result(adapter.generation)


def _has_released(worker: WorkerHandle, adapter: Adapter) -> bool:
    """Whether the worker has answered a step that came after the last slot of the adapter was given up.

    Where no other work makes one, a step is asked for that says nothing else.
    """
    step_id = adapter.released_by.get(worker)
    if step_id is None:
        is_told = not worker.scheduler.groups.released_slots
        worker.scheduler.tells_releases |= not is_told
        step_id = adapter.released_by[worker] = worker.last_step_id + (not is_told)
    return worker.num_steps_answered >= step_id


def _check(name: str, path: str) -> None:
    accepted = f"1 to {MAX_NAME_CHARS} characters"
    for field_name, value in (("name", name), ("path", path)):
        if not value:
            raise InvalidRequest(FieldViolation(field_name, f"got none; accepted: {accepted}"))
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(FieldViolation("name", f"got {len(name)} characters; accepted: {accepted}"))
    if not name.isprintable():  # it stands in lists, logs and terminals
        raise InvalidRequest(FieldViolation("name", f"got {name!r}; accepted: characters that can be printed"))


def _listed_problems(problems: list[str]) -> str:
    more = f"; and {len(problems) - MAX_PROBLEMS} more workers" if len(problems) > MAX_PROBLEMS else ""
    return "; ".join(problems[:MAX_PROBLEMS]) + more


def _unsupported() -> Unsupported:
    return Unsupported("adapter: no worker of this server takes adapters")
