"""Prefill's half of a room."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import numpy as np

from ..blocks import BlockLayout
from ..errors import AioFlagcxError, HandoverError, NotifyRefused, PeerLost, TransferError
from ..session import Session
from ..transfer import Transfer
from ..waiting import outlast
from .handover import Handover
from .layout import check_fit, heads_of, targets
from .messages import Begin, Blocks, Done, Failed, Hello, Start, encode
from .poll import KVPoll
from .wire import NAME, Wire

if TYPE_CHECKING:
    from .manager import KVManager

__all__ = ["KVSender"]

_logger = logging.getLogger(__name__)

_TRIES = 3
"""How often a write is begun whose session ends although decode is there: decode fences prefill
when another room has failed, and that ends the session for all of them."""


class _Target:
    """A decode rank, and what is on its way to it."""

    def __init__(self, start: Start, wire: Wire) -> None:
        self.start = start
        self.wire = wire
        self.session: Session | None = None
        """The one on which decode has said that we may write."""
        self.greeting = asyncio.Lock()
        self.finishing = False
        """It has been told that all is there, or is about to be."""
        self.transfers: set[Transfer] = set()
        self.quiet = True
        """Whether all transfers that have ended are known to be quiet over there."""


class _Chunk:
    """Blocks that are sent at once."""

    def __init__(self, src: list[Blocks], places: list[slice], layers: list[range]) -> None:
        self.src = src
        """Ours, of each group."""
        self.places = places
        """Where they go in decode's list, of each group."""
        self.layers = layers
        """Of each group."""


class KVSender(Handover):
    """Sends the KV cache of one request; made by :meth:`KVManager.sender`."""

    def __init__(self, manager: KVManager, room: str) -> None:
        super().__init__(manager, room)
        self.aux = b""
        """What decode has sent along with its blocks, once :meth:`ready`."""
        self._targets: dict[int, _Target] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sent = [np.zeros(len(group.layers), np.int64) for group in manager.layout.groups]
        self._sending: set[asyncio.Task[Any]] = set()
        self._greeting: set[asyncio.Task[Any]] = set()
        self._announcing: asyncio.Task[None] | None = None
        self._closing = False  # the last chunk has been given
        self._limit(manager.bootstrap_timeout, "no decode has come for it")

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many blocks decode expects, of each group; RuntimeError before :meth:`ready`."""
        if not self._targets:
            raise RuntimeError(f"{self!r}: no decode has come yet")
        start = next(iter(self._targets.values())).start
        return tuple(map(len, start.blocks))

    async def ready(self) -> None:
        """Until every decode rank has said where its blocks are.

        Raises :class:`~aioflagcx.errors.HandoverError` when the room has failed.
        """
        if not self._ready.done():
            await asyncio.wait((self._ready,))
        await self._raise()

    async def send(
        self,
        block_ids: Any,
        *,
        last: bool = True,
        layers: range | None = None,
        aux: bytes = b"",
    ) -> None:
        """Write these blocks of ours to decode's next ones; returns when they have landed.

        ``block_ids``: with several groups, a list for each. They go to the blocks of decode's list
        that follow those sent before. ``layers``: a range of layers (of each group) that are
        ready; each layer has its own place in decode's list. Until ``last`` there can be further
        calls, also while this one waits. With the last one everything that decode expects has been
        sent, and decode is told once it has landed, along with ``aux``.

        When it returns or raises, our blocks may be reused. Raises ValueError and TypeError, before
        a byte moves and without changing anything, for ids that are no blocks, more of them than
        decode expects, or fewer in the end; :class:`~aioflagcx.errors.HandoverError` when the room
        has failed. A call that is cancelled, however early, aborts the room.
        """
        sending: asyncio.Task[Any] | None = None
        try:
            await self.ready()
            sending = self._start_sending(block_ids, last, layers, aux)
            await asyncio.wait((sending,))
        except asyncio.CancelledError:
            self._fail("sending was cancelled")
            if sending is not None:
                with contextlib.suppress(asyncio.CancelledError):  # raised below
                    await outlast(sending)
            raise
        await self._raise()

    def _start_sending(
        self, block_ids: Any, last: bool, layers: range | None, aux: bytes
    ) -> asyncio.Task[Any]:
        if self._closing:
            raise RuntimeError(f"{self!r}: the last chunk has been sent already")
        aux = self._manager._aux(aux)
        chunk = self._chunk(block_ids, layers, last)
        self._closing = last
        if self._state is KVPoll.WaitingForInput:
            self._begin()
        return self._work(self._sending, self._send(chunk, last, aux))

    def _work(
        self, kind: set[asyncio.Task[Any]], work: Coroutine[Any, Any, None]
    ) -> asyncio.Task[Any]:
        """Something that ends with the room."""
        task = self._manager._spawn(work)
        kind.add(task)
        task.add_done_callback(kind.discard)
        return task

    # What decode says ------------------------------------------------------------------------

    def offered(self, start: Start, wire: Wire) -> None:
        """A decode rank has told where its blocks are."""
        layout, theirs = self._manager.layout, start.layout
        known = self._targets.get(theirs.rank)
        if known is not None:
            if known.start.id != start.id:
                words = f"decode rank {theirs.rank} has a receiver in this room already"
                self._manager._refuse(start, wire, words)
            return
        target = self._targets[theirs.rank] = _Target(start, wire)
        try:
            self._check(start)
            check_fit(layout, theirs)
        except ValueError as error:
            self._fail(f"decode rank {theirs.rank} does not fit: {error}")
            return
        self._work(self._greeting, self._introduce(target))

    def _check(self, start: Start) -> None:
        layout, theirs = self._manager.layout, start.layout
        if (start.to_rank, start.to_ranks) != (layout.rank, layout.ranks):
            raise ValueError(
                f"it takes this for rank {start.to_rank} of {start.to_ranks}, which is rank "
                f"{layout.rank} of {layout.ranks}; list the session ids of all ranks, in order"
            )
        expected = targets(heads_of(layout), layout.rank, layout.ranks, theirs.ranks)
        if theirs.rank not in expected:
            raise ValueError(f"this rank has nothing to do with it, but with {expected}")
        for other in self._targets.values():
            if other.start.layout.ranks != theirs.ranks:
                raise ValueError(f"{theirs.ranks} ranks, another said {other.start.layout.ranks}")
            counts, others = [list(map(len, one.blocks)) for one in (start, other.start)]
            if counts != others:
                raise ValueError(f"{counts} blocks, another rank has {others}")

    async def _introduce(self, target: _Target) -> None:
        """Greet a decode rank; with the last of them the room is ready. From then on its end is
        noticed, also while others are still missing."""
        try:
            await self._greet(target)
        except Exception as error:
            self._failed_by(error)
            return
        layout, theirs = self._manager.layout, target.start.layout
        expected = targets(heads_of(layout), layout.rank, layout.ranks, theirs.ranks)
        greeted = {rank for rank, one in self._targets.items() if one.session is not None}
        if self._state is KVPoll.Bootstrapping and greeted == set(expected):
            self.aux = self._targets[min(self._targets)].start.aux
            self._advance(KVPoll.WaitingForInput)
            self._limit(self._manager.waiting_timeout, "nothing was sent")
            self._found()
            self._ready.set_result(None)

    def _found_again(self, target: _Target) -> None:
        """Its session has ended, and it lives: has it given the room up meanwhile?"""
        if self.error is None and not target.finishing:
            self._work(self._greeting, self._introduce(target))

    async def _greet(self, target: _Target) -> Session:
        """The session on which we may write to a decode rank; asks on a new one.

        Decode can fence what it knows of. A session of which it does not know that it is ours could
        bring data after it has given the room up.
        """
        async with target.greeting:
            for tries_left in range(_TRIES - 1, -1, -1):
                if target.session is not None and target.session.alive:
                    break
                session = await target.wire.session(self._manager.connect_timeout)
                hello = encode(Hello(target.start.id, target.start.to_rank))
                try:
                    await session.notify(NAME, hello)
                except NotifyRefused as error:
                    words = f"{target.wire.id} takes nothing for this room: {error}"
                    raise HandoverError(words, cause=error) from None
                except TransferError:
                    if not tries_left:
                        raise
                else:
                    target.session = session
                    target.wire.watch(self, functools.partial(self._found_again, target))
            assert target.session is not None
            return target.session

    def lost(self, wire: Wire, reason: str) -> None:
        """See :class:`~aioflagcx.kv.wire.Watcher`."""
        self._fail(reason)

    def aborted(self, rank: int, reason: str) -> None:
        """A decode rank has given the room up."""
        self._fail(f"decode rank {rank} has given it up: {reason}")

    # Sending ---------------------------------------------------------------------------------

    def _chunk(self, block_ids: Any, layers: range | None, last: bool) -> _Chunk:
        """What is to be sent; from now on it counts as sent."""
        manager = self._manager
        src = list(manager._blocks(block_ids))
        chosen: list[range] = []
        places: list[slice] = []
        after = [sent.copy() for sent in self._sent]
        for index, (ids, group, expected) in enumerate(
            zip(src, manager.layout.groups, self.blocks, strict=True)
        ):
            which = manager._layers(layers, len(group.layers))
            begins = {int(sent) for sent in after[index][which.start : which.stop]}
            if len(begins) > 1:
                raise ValueError(
                    f"layers {which.start} to {which.stop - 1} of groups[{index}] have got to "
                    f"different blocks, {sorted(begins)}: send them one by one"
                )
            begin = begins.pop() if begins else 0
            if begin + len(ids) > expected and which:
                raise ValueError(
                    f"groups[{index}]: {begin} blocks have been sent and {len(ids)} are to be, "
                    f"decode has {expected}"
                )
            after[index][which.start : which.stop] += len(ids)
            if last and (after[index] != expected).any():
                behind = int(np.flatnonzero(after[index] != expected)[0])
                raise ValueError(
                    f"groups[{index}]: with the last chunk, {after[index][behind]} blocks of "
                    f"layer {behind} would have been sent, decode has {expected}"
                )
            chosen.append(which)
            places.append(slice(begin, begin + len(ids)))
        self._sent = after
        return _Chunk(src, places, chosen)

    def _begin(self) -> None:
        self._advance(KVPoll.Transferring)
        self._no_limit()
        for target in self._targets.values():
            begin = Begin(target.start.id, target.start.to_rank)
            self._manager._spawn(self._manager._try_to_tell(target.wire, begin))

    async def _send(self, chunk: _Chunk, last: bool, aux: bytes) -> None:
        others = self._sending - {asyncio.current_task()}
        if last and others:
            await asyncio.wait(others)
        if last and len(self._targets) == 1:
            await self._write_to_all(chunk, aux)
        else:
            # Who has heard that all is there cannot fail any more. So nobody hears it before
            # everybody has everything: with several ranks the data and the word go apart.
            await self._write_to_all(chunk, None)
            if last:
                await self._write_to_all(_Chunk([], [], []), aux)
        if last and self.error is None:
            self._succeed()

    async def _write_to_all(self, chunk: _Chunk, done: bytes | None) -> None:
        """Until all of it has landed, or the room has failed; ``done``: and tell them with this."""
        if self.error is None:
            ranks = self._targets.values()
            await asyncio.gather(*(self._try_to_write(target, chunk, done) for target in ranks))

    async def _try_to_write(self, target: _Target, chunk: _Chunk, done: bytes | None) -> None:
        try:
            await self._write(target, chunk, done)
        except Exception as error:
            self._failed_by(error)

    def _failed_by(self, error: BaseException) -> None:
        """It fails by an error of ours, which the other side is told, too."""
        if not isinstance(error, AioFlagcxError):
            _logger.error("room %r", self.room, exc_info=error)
        self._fail(str(error) or type(error).__name__, cause=error)

    async def _write(self, target: _Target, chunk: _Chunk, done: bytes | None) -> None:
        manager = self._manager
        layouts: list[BlockLayout] = []
        src: list[Blocks] = []
        dst: list[Blocks] = []
        for index, ids in enumerate(chunk.src):
            layout = manager._block_layout(target.start.layout, index, chunk.layers[index])
            if layout is not None and len(ids):
                layouts.append(layout)
                src.append(ids)
                dst.append(target.start.blocks[index][chunk.places[index]])
        if not layouts and done is None:
            return
        notify = None
        if done is not None:
            target.finishing = True
            notify = (NAME, encode(Done(target.start.id, target.start.to_rank, done)))
        for tries_left in range(_TRIES - 1, -1, -1):
            session = await self._greet(target)
            if self.error is not None:
                raise self.error
            transfer = manager.engine._submit_blocks(
                session, layouts, src, dst, notify, manager.transfer_timeout, reconnect=False
            )
            target.transfers.add(transfer)
            try:
                await transfer
            except PeerLost as error:
                # Ours again if decode lets us: it may have fenced us for another room's sake.
                if not tries_left or not error.remote_quiet:
                    raise
                if error.notify_delivered is not False:
                    break  # all has landed, and decode says if it has heard so
            else:
                return
            finally:
                target.transfers.discard(transfer)
                target.quiet = target.quiet and transfer.remote_quiet
        assert done is not None
        again = Done(target.start.id, target.start.to_rank, done)
        await target.wire.tell(again, manager.connect_timeout)

    # How it ends -----------------------------------------------------------------------------

    def _has_failed(self, reason: str) -> None:
        self._manager._remember(self, reason)

    def _succeed(self) -> None:
        self._advance(KVPoll.Success)
        self._no_limit()
        self._end()

    def _found(self) -> None:
        """Nobody needs to look for it any more."""
        if self._announcing is not None:
            self._announcing.cancel()
            self._announcing = None

    def _end(self) -> None:
        self._found()
        self._manager._forget_sender(self)
        for target in self._targets.values():
            target.wire.forget(self)

    async def _settle(self, reason: str) -> None:
        if not self._ready.done():
            self._ready.set_result(None)  # those who wait look at the error
        manager = self._manager
        transfers = [one for target in self._targets.values() for one in target.transfers]
        for transfer in transfers:
            transfer.cancel()
        for transfer in transfers:  # no other one is begun
            await transfer._quiet()
        for task in (*self._greeting, *self._sending):
            task.cancel()  # it may be waiting for a decode that does not answer
        self._end()
        tellings = []
        for target in self._targets.values():
            quiet = target.quiet and all(one.remote_quiet for one in target.transfers)
            failed = Failed(target.start.id, target.start.to_rank, reason, quiet)
            if not quiet:
                manager._never_quiet(target.start.id)
            tellings.append(manager._spawn(manager._try_to_tell(target.wire, failed)))
        if tellings:  # a decode that is stopped answers later, or never
            await asyncio.wait(tellings, timeout=manager.fence_timeout)

    @property
    def receivers(self) -> set[bytes]:
        """The ids of the receivers that it knows of."""
        return {target.start.id for target in self._targets.values()}
