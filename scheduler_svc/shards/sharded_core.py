"""A frontend's core when there are several: each group goes to the shard with the cheapest worker for it.

When its shard is lost, or has no worker for it any more, it goes on at another one. All that needs is here: its prompt
and sampling parameters, and what its outputs have got. The other shard gets it as a request that is resumed, and draws
what the lost one would have drawn: a draw depends on its position alone. A beam search begins anew, as nobody has seen
anything of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable
from functools import partial

import grpc
import structlog

from octavo.shared.backoff import backoff_s
from octavo.shared.rpc import WORKER_CHANNEL_OPTIONS
from protos import frontend_pb2, shards_pb2
from protos import inference_pb2 as pb
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.engine.failed_requests import FailedRequests
from scheduler_svc.errors import DuplicateRequest, NotReady, QueueFull, RequestRefused, UnknownName, Unsupported
from scheduler_svc.frontends.core_link import StateListener
from scheduler_svc.limits.over_limit import OverLimit
from scheduler_svc.limits.refused_tenants import RefusedTenants
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.output.mailboxes import Mailboxes
from scheduler_svc.output.output_processor import take_end
from scheduler_svc.shards.front_link import AbortedOnItsWay, FrontLink
from scheduler_svc.shards.group_wants import wanted_of
from scheduler_svc.shards.routing_table import RoutingTable, Wanted
from scheduler_svc.shards.shard_link import DrawnTokens, ShardLink
from scheduler_svc.shards.shared_models import SharedModels
from scheduler_svc.shards.unserved_models import UnservedModels

log = structlog.get_logger()

RETRY_S = 0.05  # of what may be otherwise at any moment: an id that is being freed, a shard that takes nothing now
LONGEST_RETRY_S = 1.0  # of a group that no shard takes, after ever longer pauses: there may be thousands of them
RECONNECT_S = 0.25  # after a link to a shard broke, while the parent has not missed the shard
LOOK_S = 0.1  # between two looks at what waits
TELL_USE_S = 1.0  # between two times that the parent is told of generated tokens
STRANDED_S = 1.0  # that a group waits in a shard without a worker for it, while another shard has one
PASSING = (NotReady, QueueFull, UnknownName, Unsupported)  # refusals; one that comes has yet to load adapters
NO_SHARD = "no shard of this scheduler runs at this moment"


class ShardedCore:
    """A `Core` over all shards. For one event loop's thread.

    Args:
        channel: to the parent.
        num_shards: that there are when all run.
        wait_timeout_s: that a group waits for a shard which can go on with it, once its own is lost; and that a
            request waits for the models of a shard that does not run.
        max_losses: of shards under one group, which may be the reason.
        counts_tokens: the parent is told what each group has generated, for the limits of its tenant.

    Attributes:
        models: of all shards.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        mailboxes: Mailboxes,
        *,
        num_shards: int,
        wait_timeout_s: float,
        max_losses: int,
        counts_tokens: bool = False,
    ) -> None:
        self._front = FrontLink(channel)
        self._mailboxes = mailboxes
        self._num_shards = num_shards
        self._wait_timeout_s = wait_timeout_s
        self._complete_s = time.monotonic()  # when all shards had told their models last
        self._awaits_shards = True
        self._max_losses = max_losses
        self._table = RoutingTable()
        self._drawn = DrawnTokens()
        self._links: dict[str, ShardLink] = {}  # by socket
        self._latest: dict[int, ShardLink] = {}  # by shard: the one whose reports the table has
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._homes: dict[SequenceGroup, ShardLink] = {}
        self._ids: dict[SequenceGroup, int] = {}  # numbers of their claims
        self._aborted: set[SequenceGroup] = set()  # that have yet to end
        self._counts_tokens = counts_tokens
        self._refused_tenants = RefusedTenants()
        self._used: dict[SequenceGroup, tuple[int, int]] = {}  # tokens that it brought along, and generated ones told
        self._moves: dict[SequenceGroup, asyncio.Task[None]] = {}
        self._num_losses: dict[SequenceGroup, int] = {}
        self._failed = FailedRequests()
        self._shared_models = SharedModels()
        self.models = ServedModels()
        self._state = shards_pb2.FrontState()
        self._on_state: StateListener | None = None
        self._is_closing = False

    async def follow(self, on_state: StateListener) -> None:
        """Takes what the parent and the shards say until the parent closes its link. Raises AioRpcError where that
        breaks."""
        self._on_state = on_state
        looking = asyncio.create_task(self._look_after_waiting())
        try:
            await self._front.follow(self._take_front_state, self._abort_here)
        finally:
            self._is_closing = True
            tasks = [looking, *self._followers.values(), *self._moves.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._failed.write()

    def say_listening(self, pid: int) -> None:
        """Tells the parent that clients can connect; `pid`: this process."""
        self._front.say_listening(pid)

    # ---- Core -------------------------------------------------------------------------------------------------------

    async def check_room(self, request: pb.GenerateRequest, num_preparing: int, num_bytes: int = 0) -> None:
        """Refuses where every shard's queue is full, with the last one's refusal, and where the parent, which is asked
        of tenants that it has refused, would refuse this one again."""
        if request.tenant in self._refused_tenants:
            await self._front.check_limits(request.tenant, request.request_id, num_bytes)
        links = self._open_links()
        if links and all(link.is_queue_full for link in links):
            refusal: QueueFull | None = None
            for link in links:
                try:
                    return await link.check_room(request, num_preparing // len(links))
                except QueueFull as error:
                    refusal = error
                except grpc.aio.AioRpcError:
                    pass  # it is gone: those that are left decide when the request is submitted
            if refusal is not None:
                raise refusal

    def refused(self, refusal: RequestRefused) -> None:
        """One of the shards counts it."""
        for link in self._open_links()[:1]:  # one of them counts it
            link.refused(refusal)

    async def submit(self, group: SequenceGroup, *, replaces: bool) -> None:
        """Claims the request id at the parent, waits there for its tenant's turn, then goes to the shard with the
        cheapest worker. A refusal is counted here: others may take what one shard refuses."""
        try:
            self._ids[group] = await self._claim(group, replaces)
            if self._counts_tokens:
                self._used[group] = group.output.num_tokens, 0
        except AbortedOnItsWay:
            return self._end(group, FinishReason.ABORT, "")
        except RequestRefused as refusal:
            if isinstance(refusal, OverLimit):
                self._refused_tenants.note(refusal)
            self.refused(refusal)
            raise
        try:
            await self._submit_anywhere(group)
        except AbortedOnItsWay:
            self._end(group, FinishReason.ABORT, "")
        except RequestRefused as refusal:
            self.refused(refusal)
            self._used.pop(group, None)
            self._aborted.discard(group)  # who aborted it meanwhile has what it wanted
            self._front.refuse(self._ids.pop(group))
            raise
        except BaseException:
            self._release_id(group)
            raise

    def forget(self, group: SequenceGroup) -> None:
        """As `abandon`."""
        self.abandon(group)

    def abandon(self, group: SequenceGroup) -> None:
        """Wherever the group is, or while it waits for another shard; its id is free then."""
        if (move := self._moves.pop(group, None)) is not None:
            move.cancel()
        if (link := self._homes.pop(group, None)) is not None:
            link.abandon(group)
        self._drawn.forget(group)
        self._num_losses.pop(group, None)
        self._release_id(group)

    async def abort(self, request_id: str, tenant: str | None) -> bool:
        """By the parent, which knows the frontend that has it, and only that one knows where it is.

        Shards would not find a request on its way from the parent to one of them, or from one to another.
        """
        return await self._front.abort(request_id, tenant)

    def _abort_here(self, group: SequenceGroup) -> bool:
        """Ends a request that was claimed here; False: it is being ended already."""
        if group in self._aborted:
            return False
        self._aborted.add(group)
        if group in self._moves:
            self._end(group, FinishReason.ABORT, "")
        elif (link := self._homes.get(group)) is not None:
            link.abort_group(group)
        return True

    async def adapters(self) -> list[str]:
        """Those that any shard has; sorted."""
        return sorted({name for link in self._open_links() for name in link.adapters_there})

    async def catch_up(self) -> None:
        """See `Core`: of the parent, and then of every shard that it has told of. One that is lost meanwhile has told
        all that it ever will; one that is only silent is, before long."""
        await self._front.catch_up()
        await asyncio.gather(*(link.catch_up() for link in self._links.values()), return_exceptions=True)

    def finish_sequence(self, sequence: Sequence) -> None:
        """The sequence's text is complete."""
        sequence.status = SequenceStatus.FINISHED
        group = sequence.group
        if (link := self._homes.get(group)) is not None:
            link.finish_sequence(sequence)
        if group.output.is_finished:
            self._release_id(group)

    # ---- ids --------------------------------------------------------------------------------------------------------

    async def _claim(self, group: SequenceGroup, replaces: bool) -> int:
        while (number := await self._front.claim(group)) is None:
            if not replaces:
                raise DuplicateRequest(f"request {group.request_id!r} is live already")
            await self.abort(group.request_id, group.tenant)
            await asyncio.sleep(RETRY_S)
        return number

    def _release_id(self, group: SequenceGroup) -> None:
        if (number := self._ids.pop(group, None)) is not None:
            self._tell_use(group, number)
            self._used.pop(group, None)
            self._front.release(number)
        self._aborted.discard(group)

    def _tell_use(self, group: SequenceGroup, number: int) -> None:
        """What it has generated here, where that is news to the parent, and the parent counts it."""
        if self._counts_tokens:
            num_resumed, num_told = self._used.get(group, (0, 0))
            if (num_tokens := group.output.num_tokens - num_resumed) > num_told:
                self._used[group] = num_resumed, num_tokens
                self._front.use(number, num_tokens)

    # ---- where a group goes -----------------------------------------------------------------------------------------

    async def _submit_anywhere(
        self, group: SequenceGroup, *, is_moved: bool = False, besides: ShardLink | None = None
    ) -> None:
        """`besides`: one that is not asked. Raises what the last of the others refuses it with, and AbortedOnItsWay."""
        refusal: RequestRefused = NotReady(NO_SHARD)
        asked = {besides} if besides is not None else set()
        while True:
            if group in self._aborted:  # before it is assigned to a shard, which would never report it
                raise AbortedOnItsWay
            if (link := self._choose(group, asked)) is None:
                raise refusal
            self._homes[group] = link
            try:
                return await link.submit(group, replaces=False, is_moved=is_moved)
            except DuplicateRequest:
                # The parent gave it the id, so the shard is about to hear that whoever has it there is gone. Nobody is
                # replaced: this one may be given up itself, and on its way for longer than the next of its id.
                self._homes.pop(group, None)
                await asyncio.sleep(RETRY_S)
            except RequestRefused as error:
                self._homes.pop(group, None)
                if not (link.is_closed or isinstance(error, QueueFull | NotReady)):
                    raise
                refusal = refusal if link.is_closed else error
                asked.add(link)
            except BaseException:
                self._homes.pop(group, None)
                link.abandon(group)
                raise

    def _choose(self, group: SequenceGroup, asked: set[ShardLink]) -> ShardLink | None:
        """The shard of the cheapest worker, of those that were not asked; who has no worker at all comes last.

        Where a shard has the group's adapter, asked or not, none without it is: it would say that there is no such.
        """
        able = [link for link in self._open_links() if link.models.find(group.model)]
        links = {link.shard: link for link in _with_adapter(group, able) or able if link not in asked}
        if not links:
            return None
        choice = self._table.choose(self._wanted(group), links)
        if choice is not None:
            link = links[choice.shard]
            self._table.assign(choice, link.next_number)
            return link
        serving = [link for link in links.values() if self._table.serves(link.shard, group.model)]
        return (serving or sorted(links.values(), key=lambda link: not link.is_ready))[0]

    def _wanted(self, group: SequenceGroup) -> Wanted:
        model = self.models.find(group.model)
        versions = {link.shard: link.adapters_there.get(group.adapter) for link in self._open_links()}
        return wanted_of(group, model.block_size if model is not None else 1, versions.get)

    def _open_links(self) -> list[ShardLink]:
        return [link for link in self._links.values() if not link.is_closed]

    # ---- groups that move -------------------------------------------------------------------------------------------

    def _move(self, group: SequenceGroup, leaving: ShardLink | None = None) -> None:
        """Its shard is lost, or cannot begin it: it goes on at another."""
        self._homes.pop(group, None)
        if group in self._aborted:
            return self._end(group, FinishReason.ABORT, "")
        self._drawn.give_to(group)
        group.output.begins_anew_elsewhere()
        group.num_moves += 1
        if group.trace is not None:
            why = "its shard is lost" if leaving is None else "another shard can begin it"
            group.trace.moved("", why, time.monotonic_ns())
        self._moves[group] = asyncio.create_task(self._submit_again(group, leaving))

    async def _submit_again(self, group: SequenceGroup, leaving: ShardLink | None) -> None:
        where_it_was = "its shard is lost" if leaving is None else "it has left its shard"
        refusal, num_tries = RequestRefused(), 0
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                while True:
                    try:
                        await self._submit_anywhere(group, is_moved=True, besides=leaving)
                        if group.trace is not None:
                            group.trace.came_to("", time.monotonic_ns())
                        return
                    except PASSING as error:
                        leaving, refusal, num_tries = None, error, num_tries + 1
                        await asyncio.sleep(backoff_s(RETRY_S, num_tries, LONGEST_RETRY_S))
        except TimeoutError:
            why = f"none took it within {self._wait_timeout_s:g} s (--worker-wait-timeout): {refusal}"
            self._end(group, FinishReason.ERROR, f"{where_it_was}, and {why}")
        except RequestRefused as error:
            self._end(group, FinishReason.ERROR, f"{where_it_was}, and another one refused it: {error}")
        except Exception:
            log.exception("a request cannot go on at another shard", request_id=group.request_id)
            self._end(group, FinishReason.ERROR, f"{where_it_was}, and another one failed over it")
        finally:
            if self._moves.get(group) is asyncio.current_task():
                del self._moves[group]

    def _end(self, group: SequenceGroup, reason: FinishReason, message: str) -> None:
        """Of a group that no shard has."""
        if reason is FinishReason.ERROR:
            self._failed.note(group.request_id, message)
        self._mailboxes.ring(partial(take_end, group, reason, message))
        self._release_id(group)
        move = self._moves.pop(group, None)
        if move is not None and move is not asyncio.current_task():
            move.cancel()

    def _on_lost(self, link: ShardLink) -> None:
        if self._latest.get(link.shard) is link:
            self._table.forget(link.shard)
        groups = link.unfinished()
        if link.models.known:  # or it was not there
            log.warning("a shard is lost; its requests go on at others", shard=link.shard, requests=len(groups))
        for group in groups:
            losses = self._num_losses[group] = self._num_losses.get(group, 0) + 1
            if losses >= self._max_losses:
                self._homes.pop(group, None)
                self._end(group, FinishReason.ERROR, f"{losses} shards were lost while running it")
            else:
                self._move(group)

    async def _look_after_waiting(self) -> None:
        """Moves groups that wait, where another shard could begin them, and away from shards without a worker."""
        unserved, clock = UnservedModels(self._table.serves, STRANDED_S), asyncio.get_running_loop().time
        told_s = clock()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self._failed.look(time.monotonic_ns())
                if self._counts_tokens and clock() - told_s >= TELL_USE_S:
                    told_s = clock()
                    for group, number in self._ids.items():
                        self._tell_use(group, number)
                if self._is_awaiting_shards() is not self._awaits_shards:
                    await self._tell_state()
                await self._move_waiting(unserved, clock())
            except Exception:
                log.exception("requests that wait could not be looked at")

    async def _move_waiting(self, unserved: UnservedModels, now_s: float) -> None:
        links = {link.shard: link for link in self._open_links()}
        models = [each.model.fingerprint for each in self.models.known]
        for shard, model in unserved.look(links, models, now_s):
            others = [link for link in links.values() if self._table.serves(link.shard, model)]
            for group in links[shard].unfinished():
                if group.model == model and _with_adapter(group, others):
                    self._move_away(group, links[shard])
        for link in links.values():
            await self._move_to_idle(link, [other for other in links.values() if other is not link])

    async def _move_to_idle(self, link: ShardLink, others: Collection[ShardLink]) -> None:
        """The longest waiting groups of a shard that others could begin at once, and it could not."""
        for number in reversed(link.waiting_there):
            group = link.group(number)
            if group is None or self._homes.get(group) is not link:
                continue
            wanted, able = self._wanted(group), {other.shard for other in _with_adapter(group, others)}
            if not able:
                continue  # for those behind it there may be one
            if self._table.can_begin(wanted, {link.shard}) or not self._table.can_begin(wanted, able):
                break
            self._move_away(group, link)
            await asyncio.sleep(0)  # it is assigned to another before the next one is looked at
        link.waiting_there = []  # until it says so again

    def _move_away(self, group: SequenceGroup, link: ShardLink) -> None:
        link.abandon(group, is_moved=True)
        self._move(group, link)

    # ---- what the parent says ---------------------------------------------------------------------------------------

    async def _take_front_state(self, state: shards_pb2.FrontState) -> None:
        self._state = state
        sockets = {shard.socket: shard.index for shard in state.shards}
        for socket in self._followers.keys() - sockets.keys():
            self._followers.pop(socket).cancel()
        for socket, shard in sockets.items():
            if socket not in self._followers:
                self._followers[socket] = asyncio.create_task(self._follow_shard(socket, shard))
        await self._tell_state()

    async def _follow_shard(self, socket: str, shard: int) -> None:
        """Until the parent says that the shard is gone: a link may break where one of two processes was held up."""
        while True:
            async with grpc.aio.insecure_channel(socket, options=WORKER_CHANNEL_OPTIONS) as channel:
                link = self._links[socket] = self._latest[shard] = ShardLink(
                    channel, self._mailboxes, shard, self._table, self._drawn, self._shared_models, self._on_group_ended
                )
                self._table.forget(shard)  # of a former life, whose link may be slow to end
                try:
                    await link.follow(partial(self._take_shard_state, link))
                except grpc.aio.AioRpcError as error:
                    log.info("the link to a shard is broken", shard=shard, why=error.details())
                except Exception:
                    log.exception("the link to a shard has failed", shard=shard)
                finally:
                    self._links.pop(socket, None)
                    if not (self._is_closing or self._state.is_broken_off):
                        self._on_lost(link)
                        await self._tell_state()
            await asyncio.sleep(RECONNECT_S)

    def _on_group_ended(self, group: SequenceGroup) -> None:
        self._release_id(group)

    async def _take_shard_state(self, link: ShardLink, state: frontend_pb2.CoreState) -> None:
        link.is_ready, link.has_told = state.is_ready, True
        await self._tell_state()

    async def _tell_state(self) -> None:
        if self._on_state is None:
            return
        self._awaits_shards = self._is_awaiting_shards()
        models = [link.models for link in self._links.values()]
        self.models = self._shared_models.merged(models, awaits_shards=self._awaits_shards)
        state = frontend_pb2.CoreState(
            is_ready=any(link.is_ready for link in self._links.values()),
            is_draining=self._state.is_draining,
            is_broken_off=self._state.is_broken_off,
        )
        await self._on_state(state)

    def _is_awaiting_shards(self) -> bool:
        now_s = time.monotonic()
        if sum(link.has_told for link in self._links.values()) >= self._num_shards:
            self._complete_s = now_s
            return False
        return now_s - self._complete_s < self._wait_timeout_s


def _with_adapter(group: SequenceGroup, links: Iterable[ShardLink]) -> list[ShardLink]:
    """Those that have loaded the group's adapter; all where it uses none."""
    return [link for link in links if not group.adapter or group.adapter in link.adapters_there]
