"""The text processes of a server: a few, each given one request at a time, and killed when one takes too long.

A request whose process dies goes to another. One that takes longer than the limit is refused, and its process is
replaced. Where there are several, the last takes small requests alone, so that these never wait behind large ones; the
others take whatever came first. Texts too short to take long never come here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections import deque
from collections.abc import Callable
from itertools import count

import structlog

from scheduler_svc.errors import FieldViolation, InvalidRequest, NotReady, RequestRefused
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.requests import frames
from scheduler_svc.requests.admission import SMALL_BYTES
from scheduler_svc.requests.frames import Answer, Ask
from scheduler_svc.requests.killable_process import KillableProcess
from scheduler_svc.requests.request_checks import TextSettings
from scheduler_svc.requests.request_text import PreparedText
from scheduler_svc.requests.short_texts import ShortTexts

log = structlog.get_logger()

LOAD_TIMEOUT_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 8.0  # before a process is started after one that never had a model


class TextProcesses:
    """For one event loop.

    Args:
        served_models: what requests are prepared for.
        num_processes: at least 1.
        time_limit_s: for one request, rendering and tokenising together.
    """

    def __init__(
        self,
        served_models: Callable[[], ServedModels],
        settings: TextSettings,
        num_processes: int = 2,
        time_limit_s: float = 10.0,
    ) -> None:
        self._served_models = served_models
        self._short = ShortTexts(served_models, settings)
        self._settings = json.dumps(dataclasses.asdict(settings)).encode()
        self._time_limit_s = time_limit_s
        self._numbers = count()
        self._small: deque[_Job] = deque()
        self._large: deque[_Job] = deque()
        self._slots = [_Slot(takes_large=number < max(1, num_processes - 1)) for number in range(num_processes)]
        self._running: set[_Job] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._seen = self._models = ServedModels()  # the last that were asked for: a new process loads them at once
        self._is_loading = False  # a process that has some already, while the others go on with what they have
        self._closed_by: RequestRefused | None = None

    def start(self) -> None:
        """On the running event loop, which keeps them from now on."""
        self._keepers = [asyncio.create_task(self._keep(slot)) for slot in self._slots]

    def close(self, refusal: RequestRefused) -> None:
        """Whoever waits or comes is refused so."""
        self._closed_by = refusal
        self._refuse_waiting(refusal)
        for job in self._running:
            job.fail(refusal)

    async def stop(self) -> None:
        """Kills them, whatever they do."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def expect(self, models: ServedModels) -> None:
        """Requests for these models are about to come: they are loaded meanwhile, and all others forgotten."""
        if models is self._seen:
            return
        self._seen, models = models, models.without_counts()
        if models != self._models:
            self._models = models
            self._wake_all()

    @property
    def pids(self) -> list[int]:
        """Of those that run now."""
        return [slot.process.pid for slot in self._slots if slot.process is not None]

    async def prepare(self, data: bytes) -> PreparedText:
        """What the bytes of a `GenerateRequest` ask for. Raises RequestRefused."""
        self._check_open()
        if (prepared := self._short.prepare(data)) is not None:
            return prepared
        return frames.decode_prepared(await self._ask(Ask.PREPARE, data))

    async def tokenize(self, data: bytes) -> bytes:
        """A `TokenizeResponse` to a `TokenizeRequest`, both as bytes. Raises RequestRefused."""
        return await self._ask(Ask.TOKENIZE, data)

    async def detokenize(self, data: bytes) -> bytes:
        """A `DetokenizeResponse` to a `DetokenizeRequest`, both as bytes. Raises RequestRefused."""
        return await self._ask(Ask.DETOKENIZE, data)

    async def _ask(self, kind: Ask, data: bytes) -> bytes:
        self._check_open()
        self.expect(self._served_models())
        self._models.check_any()
        job = _Job(kind, data, next(self._numbers))
        queue = self._queue_of(job)
        queue.append(job)
        self._wake_for(job)
        try:
            return await job.answer
        except asyncio.CancelledError:  # its bytes are no longer counted
            with contextlib.suppress(ValueError):  # it is in a process already
                queue.remove(job)
            raise

    def _check_open(self) -> None:
        if self._closed_by is not None:
            raise self._closed_by.with_traceback(None)  # one refusal for all: it would gather the frames of each

    def _queue_of(self, job: _Job) -> deque[_Job]:
        return self._small if len(job.data) <= SMALL_BYTES else self._large

    def _wake_all(self) -> None:
        for slot in self._slots:
            slot.wake.set()

    def _wake_for(self, job: _Job) -> None:
        """One idle slot that takes it; of a small one, rather that which takes nothing else."""
        is_small = self._queue_of(job) is self._small
        for slot in reversed(self._slots) if is_small else self._slots:
            if slot.is_idle and (is_small or slot.takes_large):
                slot.is_idle = False
                slot.wake.set()
                return

    def _next_job(self, slot: _Slot) -> _Job | None:
        for queue in (self._small, self._large):
            while queue and queue[0].answer.done():
                queue.popleft()  # nobody waits for it any more
        if self._large and slot.takes_large and not (self._small and self._small[0].number < self._large[0].number):
            return self._large.popleft()
        return self._small.popleft() if self._small else None

    async def _keep(self, slot: _Slot) -> None:
        """One process after another, for as long as the server lives."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                slot.process = await KillableProcess.start(slot.wake.set)
                await self._feed(slot, slot.process)
                log.warning("a text process has ended; it is replaced", pid=slot.process.pid)
            except OSError as error:
                log.error("a text process cannot be started", why=str(error), again_in_s=pause_s)
                if not self.pids:
                    self._refuse_waiting(NotReady("no process can be started here to read requests; try another"))
            except Exception:
                log.exception("a text process failed", again_in_s=pause_s)
            finally:
                process, slot.process, slot.is_idle = slot.process, None, False
                if process is not None:
                    await process.kill()
            if process is not None and process.loaded is not None:
                pause_s = FIRST_PAUSE_S
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _feed(self, slot: _Slot, process: KillableProcess) -> None:
        """Until it has ended, or has to be replaced. Raises RuntimeError where it cannot load the model."""
        while not process.has_ended:
            slot.wake.clear()
            if process.loaded is not None and process.loaded is not self._models and not self._is_loading:
                if not await self._load_next(process):
                    return
            elif (job := self._next_job(slot)) is not None:
                self._running.add(job)
                try:
                    if not await self._run(job, process):
                        return
                finally:
                    self._running.discard(job)
            elif process.loaded is None and self._models.known:
                try:
                    await self._load(process)
                except (EOFError, ConnectionError):
                    return
            else:
                slot.is_idle = True
                await slot.wake.wait()
                slot.is_idle = False

    async def _load_next(self, process: KillableProcess) -> bool:
        """One process after another: a tokenizer may take seconds. False: it has ended."""
        self._is_loading = True
        try:
            await self._load(process)
        except (EOFError, ConnectionError):
            return False
        finally:
            self._is_loading = False
            self._wake_all()
        return True

    async def _load(self, process: KillableProcess) -> None:
        """All models of now. Raises what `KillableProcess.load` raises."""
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await process.load(self._models, self._settings)
        except TimeoutError:
            raise RuntimeError(f"a text process had no tokenizer after {LOAD_TIMEOUT_S:g} s") from None

    async def _run(self, job: _Job, process: KillableProcess) -> bool:
        """Gives the job its answer; False: the process is of no more use."""
        if process.has_ended:  # before it had anything of this request
            self._put_back(job)
            return False
        try:
            if process.loaded is None:
                await self._load(process)
            answer, payload = await self._ask_in_time(job, process)
            if answer is Answer.REFUSED and process.loaded is not self._models:
                await self._load(process)  # a model that came a moment ago is no stranger
                answer, payload = await self._ask_in_time(job, process)
        except TimeoutError:
            log.warning("a request takes too long; its text process is killed", pid=process.pid, bytes=len(job.data))
            what = f"not rendered and tokenised within {self._time_limit_s:g} s (--text-timeout)"
            job.fail(InvalidRequest(FieldViolation("request", what)))
            return False
        except (EOFError, ConnectionError):
            self._lose(job)
            return False
        except BaseException as error:
            job.fail(error if isinstance(error, Exception) else RuntimeError("the server is stopping"))
            raise
        if answer is Answer.OK:
            job.give(payload)
        elif answer is Answer.REFUSED:
            job.fail(frames.decode_refusal(payload))
        else:
            failure = RuntimeError("a text process failed over a request")
            failure.add_note(payload.decode(errors="replace"))
            job.fail(failure)
        return True

    async def _ask_in_time(self, job: _Job, process: KillableProcess) -> tuple[Answer, bytes]:
        async with asyncio.timeout(self._time_limit_s):
            return await process.ask(job.kind, job.data)

    def _lose(self, job: _Job) -> None:
        """It is tried again before all others, unless it met more deaths than there were processes: all of these may
        have been killed at once, by somebody else."""
        job.num_losses += 1
        if job.num_losses > len(self._slots):
            job.fail(RuntimeError(f"{job.num_losses} text processes have died over this request"))
        elif not job.answer.done():
            self._put_back(job)

    def _refuse_waiting(self, refusal: RequestRefused) -> None:
        for queue in (self._small, self._large):
            for job in queue:
                job.fail(refusal)
            queue.clear()

    def _put_back(self, job: _Job) -> None:
        self._queue_of(job).appendleft(job)
        self._wake_for(job)


class _Job:
    """One request on its way through a process, and who waits for its answer."""

    __slots__ = ("answer", "data", "kind", "num_losses", "number")

    def __init__(self, kind: Ask, data: bytes, number: int) -> None:
        self.kind = kind
        self.data = data
        self.number = number
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.num_losses = 0

    def give(self, payload: bytes) -> None:
        if not self.answer.done():
            self.answer.set_result(payload)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _Slot:
    """A place for a process. `wake` is set when there may be something to do, or the process has ended."""

    def __init__(self, takes_large: bool) -> None:
        self.takes_large = takes_large
        self.wake = asyncio.Event()
        self.is_idle = False
        self.process: KillableProcess | None = None
