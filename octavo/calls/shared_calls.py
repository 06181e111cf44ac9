"""Many requests over one call of `GenerateMany`: what is new of them comes in one message.

For whoever passes on the requests of many clients: a message of gRPC costs as much CPU time as all else that is done
with a token. What streams and is short goes this way; the rest has calls of its own, and all has where a scheduler does
not know the method.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from octavo.calls.addresses import Server
from octavo.calls.lingering_call import LEAST_S
from octavo.errors import RequestFailed
from octavo.shared.tracing.context import TRACEPARENT, TRACESTATE, of_fields
from protos import inference_pb2 as pb

MAX_REQUESTS = 512  # over one call at once; the next ones begin another
MAX_REQUEST_BYTES = 32_768  # a message has 64 KiB at most
MAX_BACKLOG = 64  # messages that wait here for a slow reader, before the scheduler is told to put them together
MAX_AGE_S = 300.0  # a call that is older takes no more requests: what balances connections finds them again
IDLE_S = 10.0  # without a request, after which a call is ended
MAX_IDLE = 64  # calls without a request, of any age: with as many keys they would fill the connection
ASK_AGAIN_S = 60.0  # a scheduler that did not know the method may have been replaced
_OF_ONE_REQUEST = frozenset({TRACEPARENT, TRACESTATE})  # metadata that go beside it: they differ from call to call
_REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
_CODES = {code.value[0]: code for code in grpc.StatusCode}

Metadata = Sequence[tuple[str, str]]


class NotKnown(Exception):
    """This scheduler has no such method: the request is to have a call of its own."""


class SharedCalls:
    """The calls of one client, by scheduler and metadata: who sends other metadata has another call."""

    def __init__(self) -> None:
        self._in_use: dict[tuple[Server, Metadata], SharedCall] = {}
        self._all: set[SharedCall] = set()
        self._without: dict[Server, float] = {}  # schedulers that do not know the method, and since when

    def start(self, server: Server, request: pb.GenerateRequest, metadata: Metadata) -> SharedStream | None:
        """The request's messages; None where it has to have a call of its own."""
        comes_whole = request.HasField("stream") and not request.stream
        if comes_whole or self._lacks_it(server):
            return None
        data = request.SerializeToString()
        if len(data) > MAX_REQUEST_BYTES:
            return None
        message = pb.GenerateManyRequest(request=data)
        if any(name in _OF_ONE_REQUEST for name, _ in metadata):
            if (trace := of_fields(metadata)) is not None:  # what is none, and may be of any length, stays behind
                message.traceparent, message.tracestate = trace.traceparent, trace.state
            metadata = [field for field in metadata if field[0] not in _OF_ONE_REQUEST]
        place = (server, tuple(metadata))
        call = self._in_use.get(place)
        if call is None or not call.takes_more:
            self._end_oldest_idle()
            call = self._in_use[place] = SharedCall(server, metadata, self._ended)
            self._all.add(call)
        return call.start(message)

    def _end_oldest_idle(self) -> None:
        idle = [(call.idle_since_s, call) for call in self._all if call.idle_since_s is not None]
        for _, call in sorted(idle, key=lambda each: each[0])[:-MAX_IDLE]:
            call.end()

    def _lacks_it(self, server: Server) -> bool:
        since_s = self._without.get(server)
        return since_s is not None and asyncio.get_running_loop().time() - since_s < ASK_AGAIN_S

    def _ended(self, call: SharedCall, is_unknown: bool) -> None:
        self._all.discard(call)
        for place in [place for place, each in self._in_use.items() if each is call]:
            del self._in_use[place]
        if is_unknown:
            self._without[call.server] = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Ends all calls."""
        calls = list(self._all)
        for call in calls:
            call.cancel()
        await asyncio.gather(*(call.reading for call in calls), return_exceptions=True)


class SharedCall:
    """One call. For one event loop.

    Args:
        ended: told when it has, and whether that is because the scheduler does not know the method.

    Attributes:
        reading: ends after the call.
        idle_since_s: when it had its last request; None: it has one, or ends.
    """

    def __init__(self, server: Server, metadata: Metadata, ended: Callable[[SharedCall, bool], None]) -> None:
        self.server = server
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, SharedStream] = {}  # by key
        self._keys = itertools.count(1)
        self._outgoing: asyncio.Queue[pb.GenerateManyRequest | None] = asyncio.Queue()
        self._call = server.inference.GenerateMany(self._requests(), metadata=metadata)
        self._began_s = self._loop.time()
        self._idle_timer: asyncio.TimerHandle | None = None
        self.idle_since_s: float | None = None
        self._is_ending = False
        self._ended = ended
        self.reading = asyncio.create_task(self._read())

    @property
    def takes_more(self) -> bool:
        """Whether one more request may go over it."""
        is_young = self._loop.time() - self._began_s < MAX_AGE_S
        return is_young and not self._is_ending and len(self._streams) < MAX_REQUESTS

    def start(self, message: pb.GenerateManyRequest) -> SharedStream:
        """Sends a request, which gets its key here."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = self.idle_since_s = None
        key = message.key = next(self._keys)
        stream = self._streams[key] = SharedStream(self, key)
        self.send(message)
        return stream

    def send(self, message: pb.GenerateManyRequest) -> None:
        """After what was sent before."""
        self._outgoing.put_nowait(message)

    def forget(self, key: int) -> bool:
        """A request has ended, or is wanted no more; False: it was known."""
        is_known = self._streams.pop(key, None) is not None
        if is_known and not self._streams and self._idle_timer is None:
            self._idle_timer = self._loop.call_later(IDLE_S, self.end)
            self.idle_since_s = self._loop.time()
        return is_known

    def cancel(self) -> None:
        """Ends the call, and with it all requests."""
        self._call.cancel()

    def end(self) -> None:
        """Takes no more requests."""
        self._is_ending, self.idle_since_s = True, None
        self._outgoing.put_nowait(None)

    async def _requests(self) -> AsyncIterator[pb.GenerateManyRequest]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    async def _read(self) -> None:
        failure: Exception = RequestFailed(grpc.StatusCode.UNAVAILABLE, "the call of many requests has ended")
        try:
            async for message in self._call:
                for part in message.parts:
                    if (stream := self._streams.get(part.key)) is not None:
                        stream.take(part)
        except grpc.RpcError as error:
            failure = RequestFailed.from_rpc_error(error)
            if failure.code is grpc.StatusCode.UNIMPLEMENTED:
                failure = NotKnown()
            elif failure.code not in _REFUSALS:  # by whatever word: the call was lost, and nobody was refused
                failure = RequestFailed(grpc.StatusCode.UNAVAILABLE, failure.message)
        except asyncio.CancelledError:
            failure = RequestFailed(grpc.StatusCode.CANCELLED, "the client was closed")
        finally:
            self._is_ending, self.idle_since_s = True, None
            self._ended(self, isinstance(failure, NotKnown))
            self._outgoing.put_nowait(None)
            if self._idle_timer is not None:
                self._idle_timer.cancel()
            for stream in list(self._streams.values()):
                stream.fail(failure)
            self._streams.clear()


class SharedStream:
    """The messages of one request, as of a call of its own. `cancel` ends it, as late as `LingeringCall` does: requests
    of a call that are begun and given up have all others of it refused."""

    def __init__(self, call: SharedCall, key: int) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._may_end_s = self._loop.time() + LEAST_S
        self._key = key
        self._came: deque[pb.GenerateResponse] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._is_over = self._is_held = self._is_left = False

    def __aiter__(self) -> SharedStream:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        """Raises RequestFailed, NotKnown."""
        while not self._came:
            if self._failure is not None:
                raise self._failure
            if self._is_over:
                raise StopAsyncIteration
            if self._is_held:
                self._hold(False)
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._came.popleft()

    def cancel(self) -> None:
        """Nothing more is wanted. Does nothing once it is over."""
        if self._is_over or self._failure is not None:
            return
        self._is_over = self._is_left = True
        self._wake()
        if (left_s := self._may_end_s - self._loop.time()) > 0:
            self._loop.call_later(left_s, self._end)
        else:
            self._end()

    def take(self, part: pb.GenerateManyResponse.Part) -> None:
        """What came for it."""
        if part.HasField("ending"):
            ending = part.ending
            code = _CODES.get(ending.code, grpc.StatusCode.UNKNOWN)
            self.fail(RequestFailed.from_details(code, ending.message, ending.details))
            self._call.forget(self._key)
            return
        response = part.response
        if not self._is_left:
            self._came.append(response)
        if response.HasField("usage"):
            self._is_over = True
            self._call.forget(self._key)
        elif len(self._came) > MAX_BACKLOG and not self._is_held:
            self._hold(True)
        self._wake()

    def fail(self, failure: Exception) -> None:
        """After what has come, this."""
        self._failure = failure
        self._wake()

    def _end(self) -> None:
        if self._call.forget(self._key):
            self._call.send(pb.GenerateManyRequest(key=self._key, cancel=True))

    def _hold(self, is_held: bool) -> None:
        self._is_held = is_held
        self._call.send(pb.GenerateManyRequest(key=self._key, hold=is_held))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
