"""The scheduler core in the caller's process with a worker beside it: what `LLM` and `LLMEngine` share."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from octavo.arguments.asked import Asked
from octavo.arguments.prompts import Prompt, shown
from octavo.calls.forks import refuse_in_fork
from octavo.calls.generation import Generation, build_request
from octavo.embedded.options import EmbeddedOptions, read_options
from octavo.embedded.request_seeds import RequestSeeds
from octavo.errors import OctavoError
from octavo.lora_request import LoRARequest
from octavo.retrying import RetryPolicy
from octavo.shared.ctrl_c import ctrl_c_waits

if TYPE_CHECKING:
    from protos import inference_pb2 as pb
    from scheduler_svc.core.sequences.sequence import SequenceGroup
    from scheduler_svc.models.served_model import ServedModel
    from scheduler_svc.output.output_processor import Delivery
    from scheduler_svc.requests.frontend import Frontend
    from scheduler_svc.text.chat_template import ChatTemplate
    from scheduler_svc.text.tokenizer import Tokenizer

READY_TIMEOUT_S = 600.0
POLL_S = 0.01
PATIENCE_TOKENS = 512  # half a millisecond of work, so that nothing else waits long


class Closed(OctavoError, RuntimeError):
    """What is used was shut down, or made in another process."""


class Embedded:
    """Starts a worker process and everything that `octavo scheduler` has but its sockets. Its threads do not hold it.

    Args:
        model: a folder, or a name that `octavo model fetch` knows.
        options: options of `octavo serve` by their Python names; None is an option's default.
        deliver: gets messages, on the output thread, or in `take_turn` without threads.
        runs_itself: False leaves the step loop to the caller, who calls `take_turn` and `send_steps`.

    Raises:
        OptionError: an unknown or impossible option.
        WorkerEnded: the worker did not start; its own message is in it.
        Forked: in a fork of a process that has had one.
    """

    def __init__(
        self, model: str, options: dict[str, Any], deliver: Callable[[Delivery], None], *, runs_itself: bool = True
    ) -> None:
        from octavo.embedded.worker_process import WorkerProcess
        from octavo.serving.wanted_models import fetch_models

        read = read_options(model, options)
        refuse_in_fork()
        fetch_models(read.worker)
        self.seeds = RequestSeeds(read.seed)
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._reading_along = 0
        self._lock = threading.Lock()
        self._runs_itself = runs_itself
        self.worker = WorkerProcess(read.worker)
        try:
            # What takes time comes after: the worker imports torch meanwhile.
            self._start(read, deliver, shows_level="log_level" in options)
            self._wait_until_ready()
        except BaseException:
            self.shutdown()
            raise

    def _start(self, read: EmbeddedOptions, deliver: Callable[[Delivery], None], shows_level: bool) -> None:
        from octavo.shared import log
        from scheduler_svc.engine.statistics import StatisticsLine, log_statistics_until
        from scheduler_svc.output.output_processor import OutputProcessor
        from scheduler_svc.serving import Serving
        from scheduler_svc.vital_parts import VitalParts

        self._logs_statistics = not read.scheduler.disable_log_stats
        log.configure_library("info" if self._logs_statistics and not shows_level else read.scheduler.log_level)
        config = dataclasses.replace(
            read.scheduler,
            worker=(self.worker.address,),
            worker_token_file=self.worker.token_file,
            tokenizer=None,  # that of the worker, which finds it by name, too
        )
        self.max_waiting_tokens = config.max_waiting_tokens
        vital = VitalParts()
        self._outputs = OutputProcessor(deliver, vital)
        self.serving = Serving(config, self._outputs, vital)
        self.engine, self.frontend = self.serving.engine, self.serving.frontend
        self._statistics_line = StatisticsLine(self.engine)
        if not self._runs_itself:
            self.serving.pool.start()
            return
        self._outputs.patience = PATIENCE_TOKENS
        self.serving.start()
        if self._logs_statistics:
            arguments = (self._ended, self.engine)
            threading.Thread(target=log_statistics_until, args=arguments, name="statistics", daemon=True).start()

    @property
    def model(self) -> ServedModel:
        """The one that is served. Raises what has ended worker or scheduler, if anything has."""
        self.check()
        return self.frontend.model()

    def use_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Replaces the model's own tokenizer, for requests from now on."""
        self.serving.pool.replace_tokenizer(tokenizer)

    def generation(self, asked: Asked, seed: int, **fields: Any) -> Generation:
        """A request of what is asked; `seed` is for one whose parameters have none.

        Raises ValueError for what cannot be put into a message.
        """
        prompt = asked.prompt
        if isinstance(prompt, Prompt):
            text = prompt.text if prompt.token_ids is None else None
            fields |= {"prompt_token_ids": prompt.token_ids, "cache_salt": prompt.cache_salt}
        else:
            text, fields = None, fields | prompt._asdict()
        fields["adapter"] = asked.lora_request.lora_name if asked.lora_request else None
        request = build_request(text, asked.params, priority=asked.priority, **fields)
        if asked.params.seed is None:
            request.sampling_params.seed = seed
        return Generation(request, RetryPolicy(window_s=0.0), time.monotonic_ns())

    def chat_frontend(
        self, chat_template: str | ChatTemplate | None, variables: Mapping[str, Any] | None = None
    ) -> Frontend:
        """What prepares requests with messages. Raises ValueError where there is no template, or it is broken."""
        from scheduler_svc.text.chat_template import ChatTemplate

        if isinstance(chat_template, ChatTemplate):  # of another tokenizer
            chat_template = chat_template.source
        if not isinstance(chat_template, (str, type(None))):
            raise ValueError(f"chat_template is {shown(chat_template)}; accepted: the text of a template")
        if chat_template is None and self.model.tokenizer.chat_template is None:
            raise ValueError(f"messages: model {self.model.name!r} has no chat template; give one as chat_template")
        if chat_template is not None or variables:
            return self.frontend.with_chat_template(chat_template, variables)
        return self.frontend

    def load_adapters(self, lora_requests: Iterable[LoRARequest | None]) -> None:
        """Has the worker load what it has not yet; returns when it has. Raises ValueError with the worker's reason."""
        from scheduler_svc.errors import RequestRefused

        for lora in dict.fromkeys(each for each in lora_requests if each is not None):
            try:
                self._wait_for(self.engine.load_adapter(lora.lora_name, lora.lora_path))
            except RequestRefused as refusal:
                raise ValueError(f"lora_request {lora.lora_name!r}: {refusal}") from refusal

    def unload_adapter(self, name: str) -> None:
        """Returns when the requests that use it have ended, for which it takes steps where nobody else does, and the
        worker has unloaded it. Raises ValueError where there is none of that name."""
        from scheduler_svc.errors import RequestRefused

        try:
            self._wait_for(self.engine.unload_adapter(name), takes_steps=True)
        except RequestRefused as refusal:
            raise ValueError(str(refusal)) from refusal

    def _wait_for(self, future: Future[int], *, takes_steps: bool = False) -> None:
        """Until the worker has answered. Raises its refusal, and what ends the worker meanwhile."""
        while not future.done():
            self.check()
            self.worker.check()
            if self._runs_itself:
                time.sleep(POLL_S)
                continue
            if takes_steps:
                self.send_steps()
            self.take_turn()
        future.result()

    def takes_other_prompts(self, request: pb.GenerateRequest) -> bool:
        """Whether the parameters of a refused request are taken with the shortest prompt: then its own is at fault."""
        from protos import inference_pb2 as pb
        from scheduler_svc.errors import RequestRefused

        shortest = pb.GenerateRequest(
            sampling_params=request.sampling_params,
            prompt_token_ids=pb.TokenIds(ids=[0]),
            priority=request.priority,
            stream=request.stream,
        )
        try:
            self.frontend.prepare(shortest)
        except RequestRefused:
            return False
        return True

    @contextlib.contextmanager
    def reading_along(self, reads_along: bool) -> Iterator[None]:
        """While any caller reads along, outputs are made as their tokens come; else of many together, in less time."""
        with self._lock:
            self._reading_along += reads_along
            self._outputs.patience = 1 if self._reading_along else PATIENCE_TOKENS
        try:
            yield
        finally:
            with self._lock:
                self._reading_along -= reads_along
                self._outputs.patience = 1 if self._reading_along else PATIENCE_TOKENS

    def submit(self, group: SequenceGroup) -> None:
        """Queues a request, in the caller's thread: Ctrl-C waits, else half of one might stay. Raises what
        `Engine.submit` raises."""
        with ctrl_c_waits():
            self.engine.submit(group)

    def send_steps(self) -> None:
        """The first half of a turn of an engine that does not run itself: schedules. Ctrl-C waits likewise."""
        with ctrl_c_waits():
            self.engine.send_steps()

    def take_turn(self) -> None:
        """The other half: takes what has happened and delivers what it gave."""
        with ctrl_c_waits():
            self.engine.take_events()
            self._outputs.run_pending()
        if self._logs_statistics and self._statistics_line.is_due:
            self._statistics_line.log()

    def check(self) -> None:
        """Raises Closed where nothing can be generated any more."""
        if self._ended.is_set():
            raise Closed("it was shut down")
        if os.getpid() != self._pid:
            raise Closed("it was made in another process, whose threads are not here: make it where it is used")
        if failure := self.serving.vital.failure:
            raise Closed(f"the scheduler in it has failed: {failure}")

    def statistics(self) -> dict[str, Any]:
        """Sums since the start over answered steps (`StepStatistics`)."""
        self.check()
        return dataclasses.asdict(self.engine.workers[0].statistics)

    def shutdown(self) -> None:
        """Ends what is unfinished and the worker. Does nothing the second time, nor in a fork of the process."""
        if os.getpid() != self._pid:  # asked first: a thread that the fork left behind may hold the lock for ever
            return
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
        try:
            if hasattr(self, "serving"):  # a start that failed may have come without it
                self.serving.stop()
        finally:
            self.worker.stop()

    def let_go(self) -> None:
        """`shutdown` for the garbage collector, which may run on a thread that cannot wait for its own end."""
        if threading.current_thread() is threading.main_thread():
            self.shutdown()
        else:
            threading.Thread(target=self.shutdown, name="shutdown").start()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self.serving.is_ready:
            self.worker.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the worker was not ready after {READY_TIMEOUT_S:.0f} s")
            if self._runs_itself:
                time.sleep(POLL_S)
            else:
                self.take_turn()
