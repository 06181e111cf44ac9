"""A stream of responses that a thread of its own reads, so that a caller that waits for them can be interrupted.

Ctrl-C raises KeyboardInterrupt between any two instructions of the main thread. Within gRPC these may be such that a
lock of the call has just been taken, or is about to be given back: the thread of the channel then waits for it for
ever, and with it every later call. So iterating over this runs no line of gRPC in the caller's thread. A response is
read only when the caller wants it, as without another thread: a server notices slow readers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue  # nothing interrupts its methods half-way: they are not written in Python
from typing import Any, Generic, Self, TypeVar

import grpc

from octavo.errors import RequestFailed

Response = TypeVar("Response")


class InterruptibleStream(Generic[Response]):
    """An iterator that raises RequestFailed where the call does. A caller that leaves it early has to `cancel` it."""

    def __init__(self, start: Callable[[], Any]) -> None:
        """`start` begins the call, once the first response is wanted."""
        self._start = start
        self._asked: SimpleQueue[bool] = SimpleQueue()  # for a response; False: to end
        self._responses: SimpleQueue[Response | BaseException] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._end: BaseException | None = None
        self._call: Any = None
        self._is_cancelled = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Response:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="responses", daemon=True)
            self._thread.start()
        if self._end is None:
            self._asked.put(True)
            response = self._responses.get()
            if not isinstance(response, BaseException):
                return response
            self._end = response
        raise self._end

    def cancel(self) -> None:
        """Ends the call if it has not ended; returns at once. Nobody may iterate any more."""
        self._is_cancelled = True
        self._asked.put(False)
        # While the interpreter ends no thread starts, and connections are closed anyway.
        if self._end is None and not sys.is_finalizing():
            threading.Thread(target=self._cancel, name="cancel", daemon=True).start()

    def _cancel(self) -> None:
        if (call := self._call) is not None:
            call.cancel()

    def _read(self) -> None:
        try:
            while self._asked.get():
                if self._call is None:
                    self._call = self._start()
                    if self._is_cancelled:  # meanwhile, when there was nothing yet to cancel
                        self._call.cancel()
                self._responses.put(self._next())
            self._cancel()
        except StopIteration:
            self._responses.put(StopIteration())  # another one: the traceback of this one holds the call
        except BaseException as error:
            self._responses.put(error)
        finally:
            self._call = None  # here: the end of its life takes locks, too

    def _next(self) -> Response:
        try:
            response: Response = next(self._call)
            return response
        except grpc.RpcError as error:
            failure = RequestFailed.from_rpc_error(error)
            error.with_traceback(None)  # it is the call, which that would keep alive until garbage is collected
        raise failure
