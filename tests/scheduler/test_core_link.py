"""A frontend's link to the core, both ends in this process: what either keeps of a request is gone when that is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest

from octavo.shared.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS
from protos import frontend_pb2, frontend_pb2_grpc
from protos import inference_pb2 as pb
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.errors import DuplicateRequest, NotReady, QueueFull, UnknownName
from scheduler_svc.frontends.core_link import CoreLink
from scheduler_svc.frontends.core_service import CoreService
from scheduler_svc.frontends.frontend_links import FrontendLink, FrontendLinks
from scheduler_svc.models.model_description import encode_models
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.output.mailboxes import Mailboxes
from scheduler_svc.requests.frontend import Frontend
from scheduler_svc.serving import Serving
from tests.fakes import FakeWorker, say_forever, spell
from tests.scheduler.simulated_answers import NOTHING_TO_DRAW
from tests.waiting import until

DEADLINE_S = 20.0


@dataclass
class Ends:
    """The link, the other end of it, and what is around them."""

    link: CoreLink
    core_end: FrontendLink
    links: FrontendLinks
    serving: Serving
    frontend: Frontend
    mailboxes: Mailboxes
    following: asyncio.Task[None]

    async def submit(self, request_id: str = "one", *, replaces: bool = False, **params: object) -> SequenceGroup:
        """A request with a reader; raises its refusal."""
        sampling = pb.SamplingParams(**params)  # type: ignore[arg-type]  # as the test gives them
        group = self.frontend.prepare(pb.GenerateRequest(request_id=request_id, prompt="|", sampling_params=sampling))
        self.mailboxes.open(group.output)
        try:
            await self.link.submit(group, replaces=replaces)
        except Exception:
            self.mailboxes.close(group.output)
            raise
        return group

    def leave(self, group: SequenceGroup) -> None:
        self.mailboxes.close(group.output)
        self.link.abandon(group)

    async def check_nothing_is_kept(self) -> None:
        """Returns once neither end knows a request, nor the engine."""
        kept = (self.link._groups, self.link._numbers, self.link._answers, self.core_end._groups)
        await until(
            lambda: not any(kept) and not self.core_end._submissions and not self.serving.engine.live_groups(),
            seconds=DEADLINE_S,
        )


@asynccontextmanager
async def both_ends(tmp_path, worker: FakeWorker, **options: object) -> AsyncIterator[Ends]:
    links = FrontendLinks(asyncio.get_running_loop())
    serving = Serving(SchedulerConfig(worker=(worker.address,), **options), links)  # type: ignore[arg-type]  # as given
    server = grpc.aio.server(options=SERVER_OPTIONS)
    frontend_pb2_grpc.add_CoreServicer_to_server(CoreService(serving, links), server)
    address = f"unix:{tmp_path}/core"
    server.add_insecure_port(address)
    await server.start()
    serving.start()
    await until(lambda: serving.is_ready, seconds=DEADLINE_S)
    model = serving.frontend.model()
    model.tokenizer.save(tmp_path / "tokenizer")
    models = encode_models(serving.pool.models, lambda model: tmp_path / "tokenizer")
    links.set_state(frontend_pb2.CoreState(models=models, is_ready=True))
    mailboxes, told = Mailboxes(asyncio.get_running_loop()), asyncio.Event()

    async def on_state(state: frontend_pb2.CoreState) -> None:
        told.set()

    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        link = CoreLink(channel, mailboxes)
        following = asyncio.create_task(link.follow(on_state))
        await asyncio.wait_for(told.wait(), DEADLINE_S)
        frontend = Frontend(lambda: link.models, link.finish_sequence)
        (core_end,) = links._links
        yield Ends(link, core_end, links, serving, frontend, mailboxes, following)
        await asyncio.to_thread(serving.stop)
        links.close()
        await asyncio.gather(following, return_exceptions=True)
        await server.stop(None)


async def test_a_request_that_ends_by_itself(tmp_path):
    with FakeWorker(spell("abc")) as worker:
        async with both_ends(tmp_path, worker) as ends:
            group = await ends.submit(temperature=0.0)
            await until(lambda: group.output.is_finished, seconds=DEADLINE_S)
            message = group.output.next_message()
            assert message.outputs[0].text == "abc" and message.usage.completion_tokens == 4
            assert message.timings.queue_ns > 0 and group.first_scheduled_ns is not None
            ends.leave(group)
            await ends.check_nothing_is_kept()


async def test_a_stop_string_ends_it_in_the_core(tmp_path):
    with FakeWorker(say_forever("abcdef"), delay_s=0.01) as worker:
        async with both_ends(tmp_path, worker) as ends:
            group = await ends.submit(temperature=0.0, stop=["de"])
            await until(lambda: group.output.is_finished, seconds=DEADLINE_S)
            await until(
                lambda: not ends.serving.engine.live_groups(), seconds=DEADLINE_S
            )  # though its reader is still there
            output = group.output.next_message().outputs[0]
            assert (output.text, output.finish_reason) == ("abc", pb.FINISH_REASON_STOP)
            ends.leave(group)
            await ends.check_nothing_is_kept()


@pytest.mark.parametrize(("why", "code"), [("not finite", "INTERNAL"), (NOTHING_TO_DRAW, "INVALID_ARGUMENT")])
async def test_a_row_that_cannot_be_drawn_says_whose_fault_it_is(tmp_path, why, code):
    with FakeWorker(row_error=lambda _: why) as worker:
        async with both_ends(tmp_path, worker) as ends:
            group = await ends.submit()
            await until(lambda: group.output.is_finished, seconds=DEADLINE_S)
            error = group.output.next_message().outputs[0].error
            assert (error.code, error.message) == (code, why)
            ends.leave(group)
            await ends.check_nothing_is_kept()


async def test_the_end_of_one_output_is_not_that_of_another(tmp_path):
    with FakeWorker(delay_s=0.02) as worker:
        async with both_ends(tmp_path, worker) as ends:
            group = await ends.submit(n=2, max_tokens=100, ignore_eos=True)
            (there,) = ends.serving.engine.live_groups()
            ends.link.finish_sequence(group.sequences[1])
            await until(lambda: there.sequences[1].status is SequenceStatus.FINISHED, seconds=DEADLINE_S)
            assert there.unfinished() == [there.sequences[0]]
            ends.leave(group)
            await ends.check_nothing_is_kept()


async def test_a_reader_that_leaves_while_it_runs(tmp_path):
    with FakeWorker(delay_s=0.01) as worker:
        async with both_ends(tmp_path, worker) as ends:
            group = await ends.submit()
            await until(lambda: group.output.is_ready, seconds=DEADLINE_S)
            ends.leave(group)
            await ends.check_nothing_is_kept()


async def test_one_that_goes_on_at_another_core_is_counted_there(tmp_path):
    with FakeWorker(delay_s=0.01, max_num_seqs=1) as worker:
        async with both_ends(tmp_path, worker) as ends:
            moves, leaves = [await ends.submit(name, max_tokens=100, ignore_eos=True) for name in ("moves", "leaves")]
            ends.mailboxes.close(moves.output)
            ends.link.abandon(moves, is_moved=True)
            ends.leave(leaves)
            await ends.check_nothing_is_kept()
            counted = ends.serving.engine.metrics.total()
            assert +counted.num_finished == {FinishReason.ABORT: 1}


async def test_a_reader_that_leaves_before_the_core_has_answered(tmp_path):
    with FakeWorker(delay_s=0.01) as worker:
        async with both_ends(tmp_path, worker) as ends:
            for number in range(20):
                group = ends.frontend.prepare(pb.GenerateRequest(request_id=f"r{number}", prompt="|"))
                ends.mailboxes.open(group.output)
                submission = asyncio.create_task(ends.link.submit(group, replaces=bool(number % 2)))
                for _ in range(number):
                    await asyncio.sleep(0)
                submission.cancel()
                await asyncio.gather(submission, return_exceptions=True)
                ends.leave(group)
            await ends.check_nothing_is_kept()


@pytest.mark.parametrize("is_answered", [True, False])
async def test_one_that_is_aborted_ends_whether_the_core_has_answered_or_not(tmp_path, is_answered):
    with FakeWorker(delay_s=0.01) as worker:
        async with both_ends(tmp_path, worker) as ends:
            submitting = asyncio.create_task(ends.submit())
            while not ends.link._groups:
                await asyncio.sleep(0)  # both events may go in one message
            if is_answered:
                await submitting
            ends.link.abort_group(ends.link._groups[ends.link.next_number - 1])
            group = await submitting
            await until(lambda: group.output.is_finished, seconds=DEADLINE_S)
            assert group.output.next_message().outputs[0].finish_reason == pb.FINISH_REASON_ABORT
            ends.leave(group)
            ends.link.abort_group(group)  # which nobody reads any more
            await ends.check_nothing_is_kept()


async def test_what_is_refused(tmp_path):
    with FakeWorker(delay_s=0.05, max_num_seqs=1) as worker:
        async with both_ends(tmp_path, worker, max_waiting_requests=1, worker_wait_timeout=5.0) as ends:
            running = await ends.submit("running")
            await until(lambda: running.output.is_ready, seconds=DEADLINE_S)
            with pytest.raises(DuplicateRequest):
                await ends.submit("running")
            waiting = await ends.submit("waiting")
            with pytest.raises(QueueFull) as refused:
                await ends.submit("too many")
            assert refused.value.retry_after_s > 0
            request = pb.GenerateRequest(request_id="another")
            with pytest.raises(QueueFull):
                await ends.link.check_room(request, 0)
            await ends.link.check_room(pb.GenerateRequest(request_id="waiting"), 0)  # it is live: others answer it
            again = await ends.submit("waiting", replaces=True)
            await until(lambda: waiting.output.is_finished, seconds=DEADLINE_S)
            assert await ends.link.abort("running", None) and not await ends.link.abort("nobody's", None)
            await until(lambda: running.output.is_finished, seconds=DEADLINE_S)
            for group in (running, waiting, again):
                ends.leave(group)
            await ends.check_nothing_is_kept()
            await ends.link.check_room(request, 0)


async def test_an_adapter_that_is_not_there(tmp_path):
    with FakeWorker(max_loras=2) as worker:
        async with both_ends(tmp_path, worker) as ends:
            group = ends.frontend.prepare(pb.GenerateRequest(request_id="a", prompt="|", adapter="none"))
            with pytest.raises(UnknownName, match="adapter 'none' is not here; loaded: none"):
                await ends.link.submit(group, replaces=False)
            assert await ends.link.adapters() == []
            await ends.check_nothing_is_kept()


async def test_who_catches_up_knows_what_was_told_before(tmp_path, monkeypatch):
    """However long it takes to read it: another frontend may have answered with it already."""
    is_reading, may_read, decode = asyncio.Event(), threading.Event(), CoreLink._decode
    loop = asyncio.get_running_loop()

    def held(link: CoreLink, message: frontend_pb2.ServedModels) -> ServedModels:
        loop.call_soon_threadsafe(is_reading.set)
        assert may_read.wait(DEADLINE_S)
        return decode(link, message)

    with FakeWorker() as worker:
        async with both_ends(tmp_path, worker) as ends:
            await ends.link.catch_up()
            monkeypatch.setattr(CoreLink, "_decode", held)
            ends.links.set_state(frontend_pb2.CoreState())
            catching_up = asyncio.create_task(ends.link.catch_up())
            given_up = asyncio.create_task(ends.link.catch_up())
            await is_reading.wait()
            given_up.cancel()
            assert ends.link.models.known and not catching_up.done()
            may_read.set()
            await catching_up
            assert not ends.link.models.known
            ends.following.cancel()
            with pytest.raises(NotReady):
                await ends.link.catch_up()
            with pytest.raises(NotReady):
                await ends.link.catch_up()


async def test_requests_of_a_link_that_breaks_end(tmp_path):
    with FakeWorker(delay_s=0.01) as worker:
        async with both_ends(tmp_path, worker) as ends:
            await ends.submit("one"), await ends.submit("two")
            ends.following.cancel()
            await until(lambda: not ends.serving.engine.live_groups() and not ends.core_end._groups, seconds=DEADLINE_S)
            with pytest.raises(NotReady):
                await ends.submit("three")
