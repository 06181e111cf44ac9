"""From the step loop to the coroutines that write messages: one wake-up of the event loop a step.

A stream's coroutine is woken when there is something to write, and finds everything that came since it wrote last: a
client that reads slowly, or a loop that is behind, gets fewer and larger messages. With an interval a stream's messages
are that far apart, but neither its first and last message nor those of a lone stream ever wait.

Streams write in turns, a few at once. Writes that are done stand in one queue with calls that begin, of which gRPC
accepts one after the other: without turns each call waited until every busy stream had written, health checks too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from functools import partial

from protos import inference_pb2 as pb
from protos import worker_pb2
from scheduler_svc.core.sequences.beam_search import BeamHypothesis
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step_plan import NewTokens
from scheduler_svc.output.output_processor import (
    make_prompt_logprobs,
    take_beams,
    take_end,
    take_prompt_logprobs,
    take_tokens,
)
from scheduler_svc.output.request_stream import RequestStream

WRITES_AT_ONCE = 32  # with 64 busy streams as many messages as without turns, with 1,024 requests begin in 1 s, not 12
LONGEST_TURN_S = 0.02
PAUSE_S = 1e-3  # between pieces of a long work: the step loop gets the interpreter's lock, and others their turns


class Mailboxes:
    """An `OutputSink`. What is taken, and every message, is made on the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float = 0.0) -> None:
        self._loop = loop
        self._pace = Pace(interval_s)
        self._turns = Turns(loop)
        self._boxes: dict[RequestStream, Box] = {}
        self._behind: deque[RequestStream] = deque()  # of whose prompt logprobs have yet to be made, in turn

    def open(self, stream: RequestStream) -> Mailbox:
        """A box for a request that is about to be submitted; to be closed whatever becomes of it."""
        box = self._boxes[stream] = Mailbox(stream, self._loop, self._pace, self._turns)
        return box

    def open_shared(self, stream: RequestStream, due: Callable[[], None]) -> Box:
        """Likewise for one of those whose messages are written together: they take no turns among themselves."""
        box = self._boxes[stream] = Box(stream, self._loop, self._pace, due)
        return box

    def close(self, stream: RequestStream) -> None:
        """What still comes for the stream is dropped."""
        box = self._boxes.pop(stream)
        if isinstance(box, Mailbox):
            self._turns.give_back(box)

    # ---- OutputSink, called on the step loop's thread ---------------------------------------------------------------

    def start(self) -> None:
        """Nothing to start: the loop runs."""

    def stop(self) -> None:
        """Nothing to stop."""

    def put_prompt_logprobs(self, group: SequenceGroup, logprobs: worker_pb2.SequenceOutputs) -> None:
        """See `OutputSink`."""
        self._soon(self.take_prompt_logprobs, group, logprobs)

    def put_tokens(self, tokens: NewTokens, outputs: worker_pb2.SequenceOutputs) -> None:
        """See `OutputSink`; the time of arrival is taken here, on the step loop's thread."""
        self._soon(self.ring, partial(take_tokens, tokens, outputs, time.monotonic_ns()))

    def put_beams(self, group: SequenceGroup, hypotheses: AbstractSequence[BeamHypothesis]) -> None:
        """See `OutputSink`."""
        self._soon(self.ring, partial(take_beams, group, hypotheses))

    def put_end(self, group: SequenceGroup, reason: FinishReason, message: str, is_invalid: bool) -> None:
        """See `OutputSink`."""
        self._soon(self.ring, partial(take_end, group, reason, message, is_invalid))

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to read
            self._loop.call_soon_threadsafe(function, *arguments)

    # ---- on the event loop ------------------------------------------------------------------------------------------

    def ring(self, take: Callable[[], list[RequestStream]]) -> None:
        """Lets `take` feed streams, and gives a turn to the readers of those that it names."""
        boxes = self._boxes
        for stream in take():
            if (box := boxes.get(stream)) is not None and stream.is_ready:
                box.ring()

    def take_prompt_logprobs(self, group: SequenceGroup, logprobs: worker_pb2.SequenceOutputs) -> None:
        """Feeds a stream those of its prompt. A piece of them is made at once, and the others as there is time."""
        take_prompt_logprobs(group, logprobs)
        self._behind.append(group.output)
        if len(self._behind) == 1:
            self._make_piece()

    def _make_piece(self) -> None:
        stream = self._behind.popleft()
        if stream in self._boxes and make_prompt_logprobs(stream):
            self._behind.append(stream)
        else:
            self.ring(lambda: [stream])
        if self._behind:
            self._loop.call_later(PAUSE_S, self._make_piece)


class Box:
    """What a reader has to know of its stream: when a message that it wants can be made.

    `due` is called once a message is wanted, there is something to say, and it need not wait.
    """

    def __init__(
        self, stream: RequestStream, loop: asyncio.AbstractEventLoop, pace: Pace, due: Callable[[], None]
    ) -> None:
        self.last_sent_s: float | None = None
        self._stream = stream
        self._loop = loop
        self._pace = pace
        self._due = due
        self._is_wanted = False  # a message, of which `due` has not told
        self._timer: asyncio.TimerHandle | None = None

    def want(self) -> None:
        """One more message is wanted."""
        self._is_wanted = True
        if self._stream.is_ready:
            self.ring()

    def ring(self) -> None:
        """There is a message, or it is time to look again: says so, or sets a timer where it has to wait."""
        if not self._is_wanted or (self._pace.is_on and self._has_to_wait()):
            return
        self._is_wanted = False
        self._due()

    def take(self) -> pb.GenerateResponse:
        """The message that is due; the last one has a usage."""
        message = self._stream.next_message()
        assert message is not None
        if self._pace.is_on:
            self._pace.sent(self, self._loop.time())
        return message

    def _has_to_wait(self) -> bool:
        if self._timer is not None:
            if not self._stream.is_finished:
                return True
            self._timer.cancel()
            self._timer = None
        delay_s = 0.0 if self._stream.is_finished else self._pace.delay_s(self, self._loop.time())
        if delay_s > 0.0:
            self._timer = self._loop.call_later(delay_s, self._on_timer)
        return delay_s > 0.0

    def _on_timer(self) -> None:
        self._timer = None
        self.ring()


class Mailbox(Box):
    """One reader's place to wait for its stream's next message: a call of its own, which writes in turns."""

    def __init__(self, stream: RequestStream, loop: asyncio.AbstractEventLoop, pace: Pace, turns: Turns) -> None:
        super().__init__(stream, loop, pace, partial(turns.ask, self))
        self._turns = turns
        self._waiter: asyncio.Future[None] | None = None

    async def receive(self) -> pb.GenerateResponse:
        """The next message, which is the last one if it has a usage."""
        self._turns.give_back(self)
        self._waiter = self._loop.create_future()
        self.want()
        await self._waiter
        return self.take()

    def wake(self) -> bool:
        """It is this reader's turn; False: its client is gone."""
        if self._waiter is None or self._waiter.done():
            return False
        self._waiter.set_result(None)
        return True


class Turns:
    """Who writes when: first come, first served, and only so many at once.

    A write that its client's window holds up gives its turn away after a while, so that no number of clients that do
    not read keeps the others from being written to.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[Mailbox] = deque()
        self._holders: dict[Mailbox, float] = {}  # since when, the oldest first
        self._timer: asyncio.TimerHandle | None = None

    def ask(self, box: Mailbox) -> None:
        """`box.wake` will be called."""
        self._queue.append(box)
        self._give()

    def give_back(self, box: Mailbox) -> None:
        """It has written, or is gone. Does nothing for one without a turn."""
        if self._holders.pop(box, None) is not None and self._queue:
            self._give()

    def _give(self) -> None:
        now_s = self._loop.time()
        while self._queue and (len(self._holders) < WRITES_AT_ONCE or self._takes_away(now_s)):
            box = self._queue.popleft()
            if box.wake():
                self._holders[box] = now_s
        if self._queue and self._timer is None:
            self._timer = self._loop.call_later(LONGEST_TURN_S, self._on_timer)

    def _takes_away(self, now_s: float) -> bool:
        """Whether the oldest turn was too long, and is over by that."""
        box, since_s = next(iter(self._holders.items()))
        if now_s - since_s < LONGEST_TURN_S:
            return False
        del self._holders[box]
        return True

    def _on_timer(self) -> None:
        self._timer = None
        self._give()


class Pace:
    """How far apart the messages of a stream are while others are sent, too.

    A stream is lone while no other has been sent anything for an interval.
    """

    def __init__(self, interval_s: float) -> None:
        self.is_on = interval_s > 0.0
        self._interval_s = interval_s
        self._last: Box | None = None  # who was sent to last
        self._last_other_s = float("-inf")  # when anyone else was

    def sent(self, box: Box, now_s: float) -> None:
        """A message of this box was written at `now_s`, on the event loop's clock."""
        if self._last is not box and self._last is not None and self._last.last_sent_s is not None:
            self._last_other_s = self._last.last_sent_s
        self._last = box
        box.last_sent_s = now_s

    def delay_s(self, box: Box, now_s: float) -> float:
        """How long a message for `box` has to wait from now on; not positive: it need not."""
        if box.last_sent_s is None:
            return 0.0
        last = self._last
        other_s = self._last_other_s if last is box or last is None or last.last_sent_s is None else last.last_sent_s
        if other_s + self._interval_s <= now_s:
            return 0.0
        return box.last_sent_s + self._interval_s - now_s
