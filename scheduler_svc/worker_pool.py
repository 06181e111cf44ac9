"""The workers that this scheduler knows: their addresses, one client each, and who may join.

`HOST:PORT` is one worker. `dns:///NAME:PORT` is as many as the name has addresses, looked up every second: gRPC's own
re-resolution was seen to miss a container that came back.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from protos import inference_pb2, worker_pb2
from scheduler_svc.engine import Engine
from scheduler_svc.served_model import ServedModel
from scheduler_svc.tokenizer import Tokenizer
from scheduler_svc.vital_parts import VitalParts
from scheduler_svc.worker_client import StepStream, WorkerClient, WorkerRefused

log = structlog.get_logger()

DNS_PREFIX = "dns:///"
DNS_INTERVAL_S = 1.0


class WorkerPool:
    """Connects workers to an engine. All workers serve one model: that of the first, until none of them is left.

    Then a worker with another model may define it anew: at once where no request waits, and otherwise once those have
    had the time that they are given for a worker of their own (`replace_after_s`). Who then still waits is served by a
    worker of its own model, if one comes within `--worker-wait-timeout`, and by no other.

    Args:
        addresses: `HOST:PORT` or `dns:///NAME:PORT`.
        bounds: the most that this scheduler wants of a worker's own bounds; zero takes them as they are.
        tokenizer_folder: takes the place of the workers' tokenizer files.
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
        served_model_name: str = "",
        replace_after_s: float = 0.0,
    ) -> None:
        self.engine = engine
        self._vital = vital or VitalParts()
        self.model: ServedModel | None = None  # of the first worker that was accepted, which may never join
        self._has_served = False
        self._replace_after_s = replace_after_s
        self._last_left_s = time.monotonic()
        self.clients: dict[str, WorkerClient] = {}
        self._names = [address[len(DNS_PREFIX) :] for address in addresses if address.startswith(DNS_PREFIX)]
        self._fixed = [address for address in addresses if not address.startswith(DNS_PREFIX)]
        self._max_workers = max_workers
        self._bounds = bounds or worker_pb2.InitializeRequest()
        self._tokenizer_folder = tokenizer_folder
        self._served_model_name = served_model_name
        self._drained: set[str] = set()  # instances that were given back for good
        self._num_accepted = 0  # workers that have joined, or are about to
        self._accepting = threading.Lock()  # the first worker decides on the model, and two may be first
        self._closed = threading.Event()

    @property
    def served_model(self) -> ServedModel | None:
        """None until a worker has joined: that of one which another scheduler holds is not served here."""
        return self.model if self._has_served else None

    def start(self) -> None:
        for address in self._fixed:
            self._add(address)
        if self._names:
            self._vital.thread("worker-names", self._follow_names, self._closed.is_set).start()

    def drain(self, address: str) -> int:
        """Gives a worker back once it has answered what it has; a new instance at the address may join again.

        Returns how many requests have to move. Raises UnknownName.
        """
        instances = {worker.link.address: worker.info.instance_id for worker in list(self.engine.workers)}
        num_requests = self.engine.drain_worker(address)
        self._drained.add(instances[address])
        return num_requests

    def close(self) -> None:
        self._closed.set()
        for client in list(self.clients.values()):
            client.close()

    # ---- what a WorkerClient asks and tells -------------------------------------------------------------------------

    def settings_for(self, info: worker_pb2.WorkerInfo) -> worker_pb2.InitializeRequest:
        """The worker's bounds, lowered where this scheduler wants less. Raises WorkerRefused for another model."""
        with self._accepting:
            self._check_model(info)
        num_tokens = _lower(info.max_num_batched_tokens, self._bounds.max_num_batched_tokens)
        return worker_pb2.InitializeRequest(
            max_num_seqs=min(_lower(info.max_num_seqs, self._bounds.max_num_seqs), num_tokens),
            max_num_batched_tokens=num_tokens,
            max_model_len=_lower(info.max_model_len, self._bounds.max_model_len),
        )

    def needs_tokenizer(self, info: worker_pb2.WorkerInfo) -> bool:
        model = self.model
        return self._tokenizer_folder is None and (model is None or model.tokenizer_sha256 != info.tokenizer_sha256)

    def accept(
        self, info: worker_pb2.WorkerInfo, sizes: worker_pb2.InitializeResponse, tokenizer: Tokenizer | None
    ) -> None:
        """`tokenizer`: where `needs_tokenizer`. Raises WorkerRefused for a worker that does not fit the pool."""
        if info.instance_id in self._drained:
            raise WorkerRefused("it was drained; started again it may join")
        with self._accepting:
            if self._num_accepted >= self._max_workers:
                raise WorkerRefused(f"there are {self._max_workers} workers already (--max-workers)")
            if self._check_model(info):
                self._define_model(info, sizes, tokenizer)
            else:
                assert self.model is not None, "it would be defined now"
                self.model = self.model.with_worker(info, sizes)
            self._num_accepted += 1

    def _check_model(self, info: worker_pb2.WorkerInfo) -> bool:
        """Whether a worker that joins defines the model. Raises WorkerRefused where its own cannot be served now."""
        if self.model is None:
            return True
        if (difference := self.model.difference(info)) is None:
            return False
        if self._num_accepted:
            raise WorkerRefused(difference)
        waited_s, num_waiting = time.monotonic() - self._last_left_s, len(self.engine.live)
        if num_waiting and waited_s < self._replace_after_s:
            until = f"until then or for {self._replace_after_s:g} s they wait for a worker of theirs"
            raise WorkerRefused(f"{difference}; {num_waiting} requests are for that one, {until}")
        return True

    def _define_model(
        self, info: worker_pb2.WorkerInfo, sizes: worker_pb2.InitializeResponse, tokenizer: Tokenizer | None
    ) -> None:
        former = self.model
        if self._tokenizer_folder is not None:
            tokenizer = Tokenizer.from_folder(self._tokenizer_folder)
        elif tokenizer is None and former is not None and former.tokenizer_sha256 == info.tokenizer_sha256:
            tokenizer = former.tokenizer
        if tokenizer is None:
            raise WorkerRefused("its model became the pool's while it was asked for less; it is asked again")
        self.model = model = ServedModel.from_worker(info, sizes, tokenizer, self._served_model_name)
        self._has_served = False
        log.info("model is known", model=model.name, max_model_len=model.max_model_len)
        if former is not None:
            log.warning("another model is served from now on", model=model.name, before=former.name)

    def left(self) -> None:
        """A worker that was accepted is connected no more, or could not be: another one may take its place."""
        with self._accepting:
            self._num_accepted -= 1
            self._last_left_s = time.monotonic()

    def joined(
        self,
        link: StepStream,
        info: worker_pb2.WorkerInfo,
        sizes: worker_pb2.InitializeResponse,
        lease: worker_pb2.LeaseGranted,
    ) -> None:
        assert self.model is not None, "it was accepted"
        self.engine.worker_joined(link, info, sizes, lease, self.model.fingerprint)
        self._has_served = True

    def said(self, link: StepStream, data: bytes) -> None:
        self.engine.worker_said(link, data)

    def lost(self, link: StepStream, reason: str) -> None:
        self.engine.worker_lost(link, reason)

    # ---- addresses --------------------------------------------------------------------------------------------------

    def _add(self, address: str) -> None:
        client = self.clients[address] = WorkerClient(address, self, self._vital)
        client.start()

    def _follow_names(self) -> None:
        while not self._closed.wait(0 if not self.clients else DNS_INTERVAL_S):
            found = {address for name in self._names for address in _resolve(name)}
            for address in found - self.clients.keys():
                log.info("worker address appeared", worker=address)
                self._add(address)
            for address in self.clients.keys() - found - set(self._fixed):
                if self.clients[address].state.health != inference_pb2.WORKER_HEALTH_SERVING:
                    log.info("worker address is gone", worker=address)
                    self.clients.pop(address).close()
            if not self.clients and self._closed.wait(DNS_INTERVAL_S):
                return


def _lower(bound: int, wanted: int) -> int:
    return min(bound, wanted) if wanted else bound


def _resolve(name: str) -> set[str]:
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
