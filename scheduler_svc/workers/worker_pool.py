"""The workers that this scheduler knows: their addresses, one client each, who may join, and the models they serve.

`HOST:PORT` is one worker. `dns:///NAME:PORT` is as many as the name has addresses, looked up every second: gRPC's own
re-resolution was seen to miss a container that came back.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from protos import worker_pb2
from scheduler_svc.engine.engine import Engine
from scheduler_svc.errors import UnknownName
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.models.model_names import ModelNames
from scheduler_svc.models.served_model import ServedModel, fingerprint_of
from scheduler_svc.models.served_models import AwaitedModel, KnownModel, ServedModels
from scheduler_svc.text.tokenizer import Tokenizer
from scheduler_svc.vital_parts import VitalParts
from scheduler_svc.workers.worker_client import Connect, Membership, StepStream, WorkerClient, WorkerRefused
from scheduler_svc.workers.worker_quota import WorkerQuota

log = structlog.get_logger()

DNS_PREFIX = "dns:///"
DNS_INTERVAL_S = 1.0


class WorkerPool:
    """Connects workers to an engine. Those that compute the same tokens from the same text serve one model.

    A model is known from its first worker's lease on. One without any worker is forgotten after `forget_after_s`, while
    others have workers: where all are lost, all are waited for.

    Args:
        addresses: `HOST:PORT` or `dns:///NAME:PORT`.
        bounds: the most that this scheduler wants of a worker's own bounds; zero takes them as they are.
        tokenizer_folder: takes the place of the tokenizer files of all workers. Raises TokenizerError.
        names: how requests name models.
        connect: see `WorkerClient`.

    Attributes:
        models: those that are known now. Another object whenever anything about them has changed.
        drained: instances that were given back for good.
    """

    def __init__(
        self,
        engine: Engine,
        addresses: Sequence[str],
        vital: VitalParts | None = None,
        *,
        max_workers: int = 64,
        bounds: worker_pb2.InitializeRequest | None = None,
        tokenizer_folder: Path | None = None,
        names: ModelNames | None = None,
        max_models: int = 16,
        forget_after_s: float = 0.0,
        quota: WorkerQuota | None = None,
        connect: Connect | None = None,
    ) -> None:
        self._connect = connect
        self.engine, self._metrics = engine, engine.metrics
        engine.on_wanted = self._on_wanted
        self._quota = quota or WorkerQuota(None)
        self.hands_over = threading.Event()  # the last worker is wanted elsewhere: this scheduler has to end
        self._vital = vital or VitalParts()
        self._name_of = names or ModelNames()
        self.models = ServedModels(default_name=self._name_of.default)
        self._members: list[Membership] = []  # workers that have joined, or are about to
        self._empty_since_s: dict[str, float] = {}  # by fingerprint: models that have no worker
        self._max_models = max_models
        self._forget_after_s = forget_after_s
        self.clients: dict[str, WorkerClient] = {}
        self._names = [address[len(DNS_PREFIX) :] for address in addresses if address.startswith(DNS_PREFIX)]
        self._unresolved = set(self._names)  # those that have had no address yet
        self._began_s = time.monotonic()
        self._has_addresses = bool(addresses)  # or they have yet to be given
        self._fixed = [address for address in addresses if not address.startswith(DNS_PREFIX)]
        self._max_workers = max_workers
        self._bounds = bounds or worker_pb2.InitializeRequest()
        self._tokenizer = Tokenizer.from_folder(tokenizer_folder) if tokenizer_folder is not None else None
        self.drained: set[str] = set()
        self._lock = threading.Lock()  # of models and members
        self._closed = threading.Event()

    def start(self) -> None:
        """A client for each address that was named; names are looked up from now on."""
        for address in self._fixed:
            self._add(address)
        if self._names:
            self._vital.thread("worker-names", self._follow_names, self._closed.is_set).start()

    def drain(self, address: str) -> int:
        """Gives a worker back once it has answered what it has; a new instance at the address may join again.

        Its requests move to others of its model. Where there are none they end on it before it is given back.

        Returns how many requests it has. Raises UnknownName.
        """

        def drain() -> int:
            (worker,) = self.engine.workers_at(address)
            self.drained.add(worker.info.instance_id)
            return self.engine.drain_worker(worker, may_finish=True)

        return self.engine.call(drain).result()

    def close(self) -> None:
        """Ends every worker's stream, which the engine is not told of: it is about to stop. None joins any more."""
        self._closed.set()
        for client in list(self.clients.values()):
            client.close()

    # ---- what a WorkerClient asks and tells -------------------------------------------------------------------------

    def settings_for(self, info: worker_pb2.WorkerInfo) -> worker_pb2.InitializeRequest:
        """The worker's bounds, lowered where this scheduler wants less. Raises WorkerRefused."""
        with self._lock:
            self._check(info)
        num_tokens = _lower(info.max_num_batched_tokens, self._bounds.max_num_batched_tokens)
        return worker_pb2.InitializeRequest(
            max_num_seqs=min(_lower(info.max_num_seqs, self._bounds.max_num_seqs), num_tokens),
            max_num_batched_tokens=num_tokens,
            max_model_len=_lower(info.max_model_len, self._bounds.max_model_len),
        )

    def needs_tokenizer(self, info: worker_pb2.WorkerInfo) -> bool:
        """See `Members`; each tokenizer is fetched once."""
        return self._tokenizer is None and self._known_tokenizer(info) is None

    def accept(
        self, info: worker_pb2.WorkerInfo, sizes: worker_pb2.InitializeResponse, tokenizer: Tokenizer | None
    ) -> Membership:
        """A place for the worker; `left` gives it back. `tokenizer`: where `needs_tokenizer`.

        Raises WorkerRefused for a worker that does not fit the pool.
        """
        with self._lock:
            self._check(info)
            tokenizer = self._tokenizer or tokenizer or self._known_tokenizer(info)
            if tokenizer is None:
                raise WorkerRefused("its model was forgotten while it was asked for less; it is asked again")
            name = self._name_of.model(info.model)
            member = Membership(info, sizes, ServedModel.from_worker(info, sizes, tokenizer, name))
            self._members.append(member)
            return member

    def _check(self, info: worker_pb2.WorkerInfo) -> None:
        """Raises WorkerRefused where there is no place for the worker, or for its model."""
        if info.instance_id in self.drained:
            raise WorkerRefused("it was drained; started again it may join")
        if len(self._members) >= self._max_workers:
            raise WorkerRefused(f"there are {self._max_workers} workers already (--max-workers)")
        if refusal := self._quota.refusal(info, len(self._members)):
            raise WorkerRefused(refusal, expected=info)
        fingerprint = self._fingerprint_of(info)
        same = [member.info for member in self._members if member.model.fingerprint == fingerprint]
        if same and same[0].block_size != info.block_size:
            theirs, ours = info.block_size, same[0].block_size
            raise WorkerRefused(f"its cache blocks hold {theirs} tokens, those of its model's other workers {ours}")
        known, expected = self.models.known, self._members
        fingerprints = {each.model.fingerprint for each in known} | {each.model.fingerprint for each in expected}
        if fingerprint in fingerprints or len(fingerprints) < self._max_models:
            return
        if not self._forget_one():
            names = ", ".join(self.models.names)
            raise WorkerRefused(f"{self._max_models} models are known already (--max-models): {names}")

    def _known_tokenizer(self, info: worker_pb2.WorkerInfo) -> Tokenizer | None:
        known = (each.model for each in self.models.known)
        return next((model.tokenizer for model in known if model.tokenizer_sha256 == info.tokenizer_sha256), None)

    def asks(self) -> bool:
        """Whether whoever has the lease of a worker that was accepted is to be told that it is wanted."""
        with self._lock:
            return self._quota.asks(len(self._members))

    def _on_wanted(self, worker: WorkerHandle) -> None:
        """Another scheduler lacks this worker. On the step loop's thread."""
        held = [each for each in self.engine.workers if not each.is_leaving]
        if worker not in held or not self._quota.gives_back(len(held)):
            return
        if len(held) == 1:
            if not self.hands_over.is_set():
                log.info("the last worker is wanted by another scheduler", worker=worker.link.address)
            self.hands_over.set()
        else:
            log.info("worker is wanted by another scheduler", worker=worker.link.address)
            self.engine.drain_worker(worker)

    def joined(self, member: Membership, link: StepStream, lease: worker_pb2.LeaseGranted) -> None:
        """See `Members`."""
        with self._lock:
            member.link = link
            self._quota.has_joined(member.info)
            self._define(member)
        self.engine.worker_joined(link, member.info, member.sizes, lease, model=member.model.fingerprint)

    def left(self, member: Membership) -> None:
        """A worker that was accepted is connected no more, or could not be: another one may take its place."""
        with self._lock:
            self._members.remove(member)
            self._count()

    # ---- models -----------------------------------------------------------------------------------------------------

    def look(self) -> ServedModels:
        """The models of now: workers that drain are counted, and models that have had none for long are forgotten.

        To be called now and then.
        """
        with self._lock:
            self._count()
            if len(self._empty_since_s) < len(self.models.known):
                now_s = time.monotonic()
                for fingerprint, since_s in list(self._empty_since_s.items()):
                    if now_s - since_s >= self._forget_after_s:
                        self._forget(fingerprint)
            return self.models

    def replace_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Of every model that is known: for text from now on."""
        with self._lock:
            self.models = self.models.with_tokenizer(tokenizer)

    def _define(self, member: Membership) -> None:
        """The worker's model is known from now on, with what this worker adds to it."""
        fingerprint = member.model.fingerprint
        if self.models.find(fingerprint) is None:
            log.info("model is known", model=member.model.name, fingerprint=fingerprint, others=self.models.names)
            known = (*self.models.known, KnownModel(member.model))
            self._metrics.introduce(fingerprint, member.model.name)
        else:
            known = tuple(
                replace(each, model=each.model.with_worker(member.info, member.sizes))
                if each.model.fingerprint == fingerprint
                else each
                for each in self.models.known
            )
        self.models = replace(self.models, known=known)
        self._empty_since_s.pop(fingerprint, None)
        self._count()

    def _count(self) -> None:
        """Workers by model."""
        are_draining = {id(worker.link) for worker in list(self.engine.workers) if worker.is_closing}
        joined, draining = Counter[str](), Counter[str]()
        for member in self._members:
            if member.link is not None:
                joined[member.model.fingerprint] += 1
                draining[member.model.fingerprint] += id(member.link) in are_draining
        known = []
        for each in self.models.known:
            num_draining = draining[fingerprint := each.model.fingerprint]
            known.append(KnownModel(each.model, joined[fingerprint] - num_draining, num_draining))
            if not joined[fingerprint]:
                self._empty_since_s.setdefault(fingerprint, time.monotonic())
        awaited = self._awaited()
        if tuple(known) != self.models.known or awaited != self.models.awaited:
            self.models = replace(self.models, known=tuple(known), awaited=awaited)

    def _awaited(self) -> frozenset[AwaitedModel]:
        """Of workers that have yet to join, of which each is waited for as long as for one that was lost."""
        earliest_s = time.monotonic() - self._forget_after_s
        awaited = set[AwaitedModel]()
        if self._began_s > earliest_s and (self._unresolved or not self._has_addresses):
            awaited.add(AwaitedModel())
        for client in list(self.clients.values()):
            info = client.expected
            if client.heard_s <= earliest_s:
                continue
            if not client.was_heard:
                awaited.add(AwaitedModel())
            elif info is not None:
                awaited.add(AwaitedModel(self._name_of.model(info.model), self._fingerprint_of(info)))
        return frozenset(awaited)

    def _fingerprint_of(self, info: worker_pb2.WorkerInfo) -> str:
        return fingerprint_of(info, self._tokenizer.sha256 if self._tokenizer else info.tokenizer_sha256)

    def _forget_one(self) -> bool:
        """Makes room: forgets the model that has been without a worker for longest, if no request is live for one."""
        wanted = self.engine.num_live_by_model()
        for fingerprint in sorted(self._empty_since_s, key=self._empty_since_s.__getitem__):
            if fingerprint not in wanted:
                self._forget(fingerprint)
                return True
        return False

    def _forget(self, fingerprint: str) -> None:
        del self._empty_since_s[fingerprint]
        known = (each for each in self.models.known if each.model.fingerprint != fingerprint)
        self.models = replace(self.models, known=tuple(known))
        log.info("model is forgotten", fingerprint=fingerprint, others=self.models.names)

    # ---- addresses --------------------------------------------------------------------------------------------------

    def hold(self, addresses: Collection[str], drained: Collection[str] = ()) -> None:
        """These workers from now on, and no others: who is not among them is given back once it has answered.

        `drained`: instances that another pool has given back for good.
        """
        self._has_addresses = True
        self.drained.update(drained)
        for address in self.clients.keys() - set(addresses):
            log.info("worker is given back", worker=address)
            self.clients.pop(address).leave()
            self.engine.call(partial(self._give_back, address)).result()
        for address in addresses:
            if address not in self.clients:
                self._add(address)

    def _give_back(self, address: str) -> None:
        """On the step loop's thread. Does nothing for a worker that has not joined."""
        with contextlib.suppress(UnknownName):
            for worker in self.engine.workers_at(address):
                self.engine.drain_worker(worker)

    def _add(self, address: str) -> None:
        self._has_addresses = True
        client = self.clients[address] = WorkerClient(address, self, self.engine, self._vital, self._connect)
        client.start()

    def _follow_names(self) -> None:
        while True:
            by_name = {name: resolve(name) for name in self._names}
            found = {address for addresses in by_name.values() for address in addresses}
            for address in found - self.clients.keys():
                log.info("worker address appeared", worker=address)
                self._add(address)
            self._unresolved -= {name for name, addresses in by_name.items() if addresses}
            for address in self.clients.keys() - found - set(self._fixed):
                if self.clients[address].give_up():
                    log.info("worker address is gone", worker=address)
                    del self.clients[address]
            if self._closed.wait(DNS_INTERVAL_S):
                return


def _lower(bound: int, wanted: int) -> int:
    return min(bound, wanted) if wanted else bound


def resolve(name: str) -> set[str]:
    """`HOST:PORT` of every address of the name; none while the name is unknown, or the resolver fails."""
    host, _, port = name.rpartition(":")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError:
        return set()
    except Exception as error:  # a name that is none, or whatever a resolver of this system comes up with
        log.warning("a name cannot be looked up", name=name, why=f"{type(error).__name__}: {error}")
        return set()
    hosts = {f"[{where[0]}]" if family == socket.AF_INET6 else where[0] for family, _, _, _, where in found}
    return {f"{host}:{port}" for host in hosts}
