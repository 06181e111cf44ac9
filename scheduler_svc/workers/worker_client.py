"""The connection to one worker: handshake, lease, step stream, and all of it again after a loss.

One thread an address lives here; it reads the stream and hands bytes on. Knows nothing of what a step contains.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
import structlog

from octavo.shared.access.tls import TlsError
from octavo.shared.backoff import backoff_s
from octavo.shared.rpc import WORKER_CHANNEL_OPTIONS
from protos import SCHEMA_REVISION, inference_pb2, worker_pb2, worker_pb2_grpc
from scheduler_svc.leases.worker_claims import (
    MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_FILES,
    WrongClaim,
    check_cached,
    check_info,
    check_lease,
    check_sizes,
)
from scheduler_svc.leases.worker_handle import AdapterRequest
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.text.tokenizer import Tokenizer, TokenizerError
from scheduler_svc.vital_parts import VitalParts

log = structlog.get_logger()

KEEPALIVE_INTERVAL_S = 1.0  # a sign of this program; that the process lives is seen by gRPC's pings
FAILURES_TO_TELL = 20  # a worker that is being started is no news for some seconds
RETRY_S = 0.25  # for a worker that does not answer yet; a refused connection costs next to nothing
LEASED_RETRY_S = 1.0  # for a worker that another scheduler holds
MAX_DISTRUSTED_RETRY_S = 60.0  # for one whose words are wrong time after time: LEASED_RETRY_S, doubled each time
LEASE_TIMEOUT_S = 30.0  # for the first message of a stream
GET_INFO_TIMEOUT_S = 10.0  # a worker that is still starting listens but does not answer yet
INITIALIZE_TIMEOUT_S = 600.0
ADAPTER_TIMEOUT_S = 600.0
EXECUTE = "/octavo.v1.Worker/Execute"
RECONNECT_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000))


class WorkerRefused(Exception):
    """This worker does not belong to the pool: another model, another protocol, too small a cache.

    `expected`: who it said it is, where it may join later without anything being changed about it.
    """

    def __init__(self, message: str, *, expected: worker_pb2.WorkerInfo | None = None) -> None:
        super().__init__(message)
        self.expected = expected


class Connect(Protocol):
    """Opens a channel to a worker."""

    def __call__(self, address: str, *, options: Sequence[tuple[str, int]]) -> grpc.Channel:
        """May raise OSError or ValueError where files cannot be read: it is asked again."""


class _Closed(Exception):
    """The stream ended because this client was closed."""


@dataclass(slots=True, eq=False)
class Membership:
    """A worker's place in the pool, from before it is asked for its lease until it is connected no more.

    Attributes:
        model: as this worker alone would serve it.
        link: None until the lease is granted.
    """

    info: worker_pb2.WorkerInfo
    sizes: worker_pb2.InitializeResponse
    model: ServedModel
    link: StepStream | None = None


class Members(Protocol):
    """Who decides whether a worker may join: the pool."""

    def settings_for(self, info: worker_pb2.WorkerInfo) -> worker_pb2.InitializeRequest:
        """What to initialise the worker with; raises WorkerRefused for one that cannot belong here."""

    def needs_tokenizer(self, info: worker_pb2.WorkerInfo) -> bool:
        """Whether `accept` wants the files of this worker's tokenizer."""

    def accept(
        self, info: worker_pb2.WorkerInfo, sizes: worker_pb2.InitializeResponse, tokenizer: Tokenizer | None
    ) -> Membership:
        """The worker's place, before its lease is asked for; raises WorkerRefused."""

    def left(self, member: Membership) -> None:
        """The place is free again, whether the worker had joined or not."""

    def asks(self) -> bool:
        """Whether whoever has the lease is to be told that it is wanted."""

    def joined(self, member: Membership, link: StepStream, lease: worker_pb2.LeaseGranted) -> None:
        """The lease is granted; `link` carries steps from now on."""


class Listener(Protocol):
    """Who hears what joined workers say: the engine. On the thread that reads the stream, so nothing here blocks."""

    def worker_said(self, link: StepStream, data: bytes) -> None:
        """A `StepResponse`, still in bytes."""

    def worker_lost(self, link: StepStream, reason: str) -> None:
        """Nothing more comes from it. Also called for a stream that never joined."""


@dataclass(slots=True)
class ConnectionState:
    """For `Control.ListWorkers`: how far an address has come."""

    health: inference_pb2.WorkerHealth = inference_pb2.WORKER_HEALTH_CONNECTING
    problem: str = ""


class StepStream:
    """An open `Execute` stream. Messages go in and out as bytes; the step loop encodes and decodes them."""

    def __init__(self, address: str, channel: grpc.Channel, settings_id: str, is_wanted: bool = False) -> None:
        self.address = address
        self.last_heard_ns = time.monotonic_ns()
        self.is_distrusted = False
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._epoch = 0
        opening = worker_pb2.OpenLease(settings_id=settings_id, is_wanted=is_wanted)
        self.send(worker_pb2.StepRequest(open=opening).SerializeToString())
        self._call = channel.stream_stream(EXECUTE)(self._requests())
        self._stub = worker_pb2_grpc.WorkerStub(channel)

    def wait_for_lease(self, info: worker_pb2.WorkerInfo) -> worker_pb2.LeaseGranted:
        """The first message of the stream. Raises grpc.RpcError, FAILED_PRECONDITION while another holds the lease, and
        WrongClaim for another message than a lease of the worker that `info` describes."""
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self._call.cancel()

        timer = threading.Timer(LEASE_TIMEOUT_S, give_up)
        timer.daemon = True
        timer.start()
        try:
            response = worker_pb2.StepResponse.FromString(next(self._call))
        except StopIteration:
            raise WrongClaim("it ended the stream without a word") from None
        except grpc.RpcError:
            if is_late.is_set():
                raise WrongClaim(f"it neither granted a lease within {LEASE_TIMEOUT_S:g} s nor refused") from None
            raise
        finally:
            timer.cancel()
        check_lease(info, response)
        self.last_heard_ns = time.monotonic_ns()
        self._epoch = response.notice.lease.epoch
        return response.notice.lease

    def messages(self) -> Iterator[bytes]:
        """Every message until the stream ends; raises RpcError where it breaks."""
        for data in self._call:
            self.last_heard_ns = time.monotonic_ns()
            yield data

    def send(self, data: bytes) -> None:
        """See `WorkerLink`; a keepalive is sent where nothing else is."""
        self._outgoing.put(data)

    def call(self, request: AdapterRequest, done: Callable[[str], None]) -> None:
        """See `WorkerLink.call`."""
        is_load = isinstance(request, worker_pb2.LoadAdapterRequest)
        method = self._stub.LoadAdapter if is_load else self._stub.UnloadAdapter
        try:
            call = method.future(request, timeout=ADAPTER_TIMEOUT_S)
        except ValueError as error:  # its channel is closed: the step loop is about to hear that the worker is lost
            done(str(error))
        else:
            call.add_done_callback(lambda call: done(_problem(call)))

    def distrust(self) -> None:
        """See `WorkerLink`."""
        self.is_distrusted = True

    def close(self) -> None:
        """Ends the stream at once, and with it the lease."""
        self._outgoing.put(None)
        self._call.cancel()

    def _requests(self) -> Iterator[bytes]:
        while True:
            try:
                data = self._outgoing.get(timeout=KEEPALIVE_INTERVAL_S)
            except queue.Empty:
                keepalive = worker_pb2.StepRequest(epoch=self._epoch, keepalive=worker_pb2.Keepalive())
                data = keepalive.SerializeToString()
            if data is None:
                return
            yield data


def _problem(call: grpc.Future) -> str:
    return "" if call.code() is grpc.StatusCode.OK else f"{call.code().name}: {call.details()}"


class WorkerClient:
    """Keeps one address connected until `close`."""

    def __init__(
        self, address: str, members: Members, listener: Listener, vital: VitalParts, connect: Connect | None = None
    ) -> None:
        """`connect` opens a channel with the given options; None: without TLS and token."""
        self.address = address
        self._connect = connect or grpc.insecure_channel
        self.state = ConnectionState()
        self.was_heard = False  # whether it has ever said who it is
        self.heard_s = time.monotonic()  # when it did so last; before that, since when it is asked
        self.expected: worker_pb2.WorkerInfo | None = None  # who it said it is, where it has yet to join and may
        self._members = members
        self._listener = listener
        self._stream: StepStream | None = None
        self._num_failures = 0  # since it served last, not told of
        self._told = ""  # the problem that the log has
        self._num_distrusted = 0  # times in a row that what it said was wrong
        self._closed = threading.Event()
        self._leaving = threading.Event()
        self._joining = threading.Lock()  # of what follows
        self._has_joined = False
        self._thread = vital.thread(f"worker-{address}", self._run, self._is_done)

    def start(self) -> None:
        """Connects, on a thread of its own, and again after every loss."""
        self._thread.start()

    def close(self) -> None:
        """Ends the stream, if there is one, and connects no more."""
        self._closed.set()
        if (stream := self._stream) is not None:
            stream.close()

    def give_up(self) -> bool:
        """Closes it unless it has joined, and says which."""
        with self._joining:
            if self._has_joined:
                return False
            self._closed.set()  # it joins no more
        self.close()
        return True

    def leave(self) -> None:
        """Joins no more. A stream that has joined ends when the engine gives the worker back, any other one now."""
        with self._joining:
            self._leaving.set()
            has_joined = self._has_joined
        if not has_joined:
            self.close()

    def _is_done(self) -> bool:
        return self._closed.is_set() or self._leaving.is_set()

    def _run(self) -> None:
        while not self._is_done():
            retry_s = RETRY_S
            try:
                with self._connect(self.address, options=[*WORKER_CHANNEL_OPTIONS, *RECONNECT_OPTIONS]) as channel:
                    self._serve_when_taken(channel)
                self._now(inference_pb2.WORKER_HEALTH_LOST, "the stream ended")
            except _Closed:
                return
            except WrongClaim as error:
                self._now(inference_pb2.WORKER_HEALTH_REFUSED, str(error))
                self._heard(None)
                self._num_distrusted += 1
            except grpc.RpcError as error:
                self._now(inference_pb2.WORKER_HEALTH_CONNECTING, f"{error.code().name}: {error.details()}")
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    retry_s = LEASED_RETRY_S
            except (OSError, TlsError) as error:
                self._now(inference_pb2.WORKER_HEALTH_CONNECTING, f"certificates or token: {error}")
                retry_s = LEASED_RETRY_S
            except Exception as error:
                log.exception("worker client failed", worker=self.address)
                self._now(inference_pb2.WORKER_HEALTH_LOST, str(error))
                retry_s = LEASED_RETRY_S
            self._wait(retry_s)

    def _wait(self, retry_s: float) -> None:
        if self._num_distrusted:
            retry_s = backoff_s(LEASED_RETRY_S, self._num_distrusted, MAX_DISTRUSTED_RETRY_S)
        self._closed.wait(retry_s)

    def _serve_when_taken(self, channel: grpc.Channel) -> None:
        """As `_serve`; a worker that the pool does not take is asked again on the same channel: a new one each time
        costs more than the question, and there may be many that others have."""
        while not self._is_done():
            try:
                return self._serve(channel)
            except WorkerRefused as error:
                self._now(inference_pb2.WORKER_HEALTH_REFUSED, str(error))
                self._heard(error.expected)
            self._wait(LEASED_RETRY_S)
        raise _Closed

    def _serve(self, channel: grpc.Channel) -> None:
        """One connection, from handshake to loss."""
        stub = worker_pb2_grpc.WorkerStub(channel)
        info = stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=GET_INFO_TIMEOUT_S)
        if info.schema_revision != SCHEMA_REVISION:
            raise WorkerRefused(f"speaks schema revision {info.schema_revision}, this scheduler {SCHEMA_REVISION}")
        check_info(info)
        settings = self._members.settings_for(info)
        self._heard(info)
        self._now(inference_pb2.WORKER_HEALTH_INITIALIZING, "")
        initializing = stub.Initialize.future(settings, timeout=INITIALIZE_TIMEOUT_S)
        # Made while the worker measures its first steps: SmolLM2's takes 0.1 to 0.2 s.
        tokenizer = self._fetch_tokenizer(stub, info) if self._members.needs_tokenizer(info) else None
        sizes = initializing.result()
        check_sizes(info, settings, sizes)
        member = self._members.accept(info, sizes, tokenizer)
        try:
            self._exchange_steps(channel, member)
        finally:
            self._members.left(member)

    def _heard(self, expected: worker_pb2.WorkerInfo | None) -> None:
        self.was_heard, self.heard_s, self.expected = True, time.monotonic(), expected

    def _exchange_steps(self, channel: grpc.Channel, member: Membership) -> None:
        """From the lease to its loss."""
        stream = StepStream(self.address, channel, member.sizes.settings_id, self._members.asks())
        try:
            self._stream = stream
            lease = stream.wait_for_lease(member.info)
            check_cached(member.sizes, lease)
            with self._joining:  # so that `leave` and `give_up` know which of the two came first
                if self._is_done():
                    return
                self._members.joined(member, stream, lease)
                self._has_joined = True
            self.expected = None
            self._now(inference_pb2.WORKER_HEALTH_SERVING, "")
            for data in stream.messages():
                self._listener.worker_said(stream, data)
            self._listener.worker_lost(stream, "it ended the stream")
        except grpc.RpcError as error:
            if self._closed.is_set():
                raise _Closed from error
            self._listener.worker_lost(stream, f"{error.code().name}: {error.details()}")
            raise
        finally:
            self._stream, self._has_joined = None, False
            if stream.is_distrusted:
                self._num_distrusted += 1
            elif self.state.health == inference_pb2.WORKER_HEALTH_SERVING:
                self._num_distrusted = 0
            stream.close()

    def _fetch_tokenizer(self, stub: worker_pb2_grpc.WorkerStub, info: worker_pb2.WorkerInfo) -> Tokenizer:
        """Raises WrongClaim for files without end, for others than those whose hash it has told, and for such as make
        no tokenizer."""
        files: dict[str, bytearray] = {}
        num_bytes = 0
        for chunk in stub.GetTokenizer(worker_pb2.GetTokenizerRequest(), timeout=60.0):
            if chunk.file_name:
                files.setdefault(chunk.file_name, bytearray()).extend(chunk.data)
            num_bytes += len(chunk.data)
            if num_bytes > MAX_TOKENIZER_BYTES or len(files) > MAX_TOKENIZER_FILES:
                raise WrongClaim(f"its tokenizer has more than {MAX_TOKENIZER_BYTES >> 20} MiB, or files without end")
        sha256 = hashlib.sha256(b"".join(files[name] for name in sorted(files))).hexdigest()
        if sha256 != info.tokenizer_sha256:
            raise WrongClaim(f"it sent a tokenizer {sha256[:12]} and said {info.tokenizer_sha256[:12]}")
        try:
            return Tokenizer.load({name: bytes(data) for name, data in files.items()})
        except TokenizerError as error:
            raise WrongClaim(f"its tokenizer cannot be used: {error}") from error

    def _now(self, health: inference_pb2.WorkerHealth, problem: str) -> None:
        """Keeps the state and tells of a new problem once; that a starting worker cannot be reached yet is no news."""
        self.state = ConnectionState(health, problem)
        if health == inference_pb2.WORKER_HEALTH_SERVING:
            self._num_failures, self._told = 0, ""
        if not problem or problem == self._told:
            return
        self._num_failures += 1
        if health != inference_pb2.WORKER_HEALTH_CONNECTING or self._num_failures == FAILURES_TO_TELL:
            log.info("worker is not serving", worker=self.address, why=problem)
            self._told = problem
