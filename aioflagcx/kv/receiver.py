"""Decode's half of a room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from typing import TYPE_CHECKING, Any

from ..errors import (
    AuthenticationError,
    ConnectError,
    EngineClosed,
    ProtocolError,
    TransferError,
)
from ..notifications import Notification
from .handover import Handover
from .layout import heads_of, senders
from .messages import ID_SIZE, Abort, Begin, Blocks, Done, Failed, Hello, Message, Start
from .poll import KVPoll
from .wire import Wire

if TYPE_CHECKING:
    from .manager import KVManager

__all__ = ["KVReceiver"]

_logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
"""Seconds between two attempts to find a prefill that is not there yet; each is twice the last."""


class _Source:
    """A prefill rank, and what has come of it."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire = wire
        self.rank = rank
        self.told = False
        """It may know of us."""
        self.engine_id: str | None = None
        """Set once it may write to our blocks."""
        self.aux: bytes | None = None
        """Set once all it had to write has landed."""
        self.quiet = False
        """It has stopped, and nothing of it is on its way."""
        self.answered = asyncio.Event()
        """It has said whether it is quiet, or never will."""


class KVReceiver(Handover):
    """Takes the KV cache of one request; made by :meth:`KVManager.receiver`."""

    def __init__(self, manager: KVManager, room: str, prefill: tuple[str, ...]) -> None:
        super().__init__(manager, room)
        self.quiet = False
        """Whether nothing can change the blocks any more: after Success, and after a failure once
        prefill has confirmed that it has stopped or has been fenced off. For code that polls."""
        self._id = secrets.token_bytes(ID_SIZE)
        self._prefill = prefill  # empty: the directory knows
        self._sources: dict[int, _Source] = {}
        self._starting: asyncio.Task[Any] | None = None
        self._started = False
        self._trouble = ""
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, block_ids: Any, *, aux: bytes = b"") -> None:
        """Let prefill write to these blocks; returns when it knows.

        ``block_ids``: of the pool, in the order in which prefill will send; with several groups, a
        list for each. ``aux``: bytes for prefill, :attr:`KVSender.aux`. A prefill that is not
        there yet is waited for, up to ``bootstrap_timeout``.

        From now on the blocks are prefill's until :meth:`done` returns or raises, or :meth:`abort`
        returns. Raises :class:`~aioflagcx.errors.HandoverError`, likewise; ValueError and
        TypeError for arguments that cannot be, before anything is told.
        """
        if self._started:
            raise RuntimeError(f"{self!r} has been started already")
        blocks = self._manager._blocks(block_ids)
        aux = self._manager._aux(aux)
        self._started = True
        if self._state is not KVPoll.Failed:
            self._limit(self._manager.bootstrap_timeout, "prefill did not answer")
            self._starting = self._manager._spawn(self._tell_all(blocks, aux))
            try:
                await asyncio.wait((self._starting,))
            except asyncio.CancelledError:
                self._fail("start() was cancelled")
                raise
            if not self._starting.cancelled() and (error := self._starting.exception()):
                self._fail(str(error), cause=error)
        await self._raise()

    async def done(self) -> bytes:
        """Until all blocks are here; what prefill has sent along with the last of them.

        With several prefill ranks, of the lowest one that sent something. Raises
        :class:`~aioflagcx.errors.HandoverError` when the room has failed. In either case nothing
        changes the blocks any more. Cancelling this leaves the room alone: see :meth:`abort`.
        """
        if not self._started and not self._over.done():
            raise RuntimeError(f"{self!r} has not been started")
        if not self._over.done():
            await asyncio.wait((self._over,))
        await self._raise()
        return self.aux

    @property
    def aux(self) -> bytes:
        """What :meth:`done` returns, after Success."""
        sources = sorted(self._sources.items())
        return next((source.aux for _, source in sources if source.aux), b"")

    # What prefill says -----------------------------------------------------------------------

    def heard(
        self, message: Hello | Begin | Done | Failed, notification: Notification
    ) -> str | None:
        """Why it is refused, or None."""
        source = self._sources.get(message.rank)
        if source is None:
            return f"prefill rank {message.rank} has nothing to do with this rank"
        failed = self._state is KVPoll.Failed
        if isinstance(message, Hello):
            if failed:
                return "decode has given the room up"
            source.engine_id = notification.engine_id
            bootstrapping = self._state is KVPoll.Bootstrapping
            if bootstrapping and all(one.engine_id for one in self._sources.values()):
                self._advance(KVPoll.WaitingForInput)
                self._limit(self._manager.waiting_timeout, "prefill has not sent everything")
        elif source.engine_id is None:
            if isinstance(message, Failed):
                self._stopped(source, message)
        elif isinstance(message, Begin):
            self._advance(KVPoll.Transferring)
        elif isinstance(message, Done):
            source.aux = message.aux
            source.quiet = True
            source.answered.set()
            self._advance(KVPoll.Transferring)
            if not failed and all(one.aux is not None for one in self._sources.values()):
                self._succeed()
        else:
            self._stopped(source, message)
        return None

    def _stopped(self, source: _Source, message: Failed) -> None:
        source.quiet = source.quiet or message.quiet
        source.answered.set()
        self._fail(f"prefill rank {source.rank} has stopped: {message.reason}")

    def lost(self, wire: Wire, reason: str) -> None:
        """See :class:`~aioflagcx.kv.wire.Watcher`."""
        for source in self._sources.values():
            if source.wire is wire:
                source.answered.set()
        self._fail(reason)

    # How it begins and ends ------------------------------------------------------------------

    async def _tell_all(self, blocks: tuple[Blocks, ...], aux: bytes) -> None:
        manager = self._manager
        prefill = self._prefill or await manager._find(self.room)
        layout = manager.layout
        ranks = senders(heads_of(layout), layout.rank, layout.ranks, len(prefill))
        self._sources = {rank: _Source(manager._wires.to(prefill[rank]), rank) for rank in ranks}
        manager._receivers[self._id] = self
        tellings = [
            asyncio.ensure_future(
                self._tell(
                    source,
                    Start(self._id, self.room, source.rank, len(prefill), layout, blocks, aux),
                )
            )
            for source in self._sources.values()
        ]
        try:
            await asyncio.gather(*tellings)
        finally:
            for telling in tellings:
                telling.cancel()

    async def _tell(self, source: _Source, start: Message) -> None:
        """Try until it works; the room's limit ends that."""
        pause = _FIRST_PAUSE
        while True:
            try:
                await source.wire.session(self._manager.connect_timeout)
                source.told = True
                await source.wire.tell(start, self._manager.connect_timeout)
            except (AuthenticationError, ProtocolError, EngineClosed):
                raise
            except (ConnectError, TransferError) as error:
                self._trouble = str(error)
                _logger.debug("room %r: %s; trying again", self.room, error)
            else:
                source.wire.watch(self)
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _expired(self, words: str) -> None:
        if self._trouble and self._state is KVPoll.Bootstrapping:
            words += f"; the last attempt: {self._trouble}"
        super()._expired(words)

    def _succeed(self) -> None:
        self._advance(KVPoll.Success)
        self._no_limit()
        self.quiet = True
        self._end()

    def _end(self) -> None:
        self._manager._forget_receiver(self._id, self)
        for source in self._sources.values():
            source.wire.forget(self)
        if not self._over.done():
            self._over.set_result(None)

    async def _settle(self, reason: str) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait((self._starting,))
        try:
            await asyncio.gather(
                *(self._silence(source, reason) for source in self._sources.values())
            )
            self.quiet = True
        finally:
            self._end()

    async def _silence(self, source: _Source, reason: str) -> None:
        """Until this rank cannot write to our blocks any more.

        One that has not said hello cannot, and is refused from now on. One that has, says that it
        has stopped, or is fenced off: it is stopped, dead or cut off.
        """
        manager = self._manager
        if source.told and not source.answered.is_set():
            abort = Abort(self._id, self.room, manager.layout.rank, source.rank, reason)
            manager._spawn(manager._try_to_tell(source.wire, abort))
            if source.engine_id is not None:
                await _within(source.answered, manager.fence_timeout)
        if source.engine_id is None or source.quiet:
            return
        _logger.info("room %r: fencing %s: %s", self.room, source.wire.id, reason)
        with contextlib.suppress(EngineClosed):  # and with the engine every way into our memory
            await manager.engine.quiesce(source.engine_id, timeout=None)


async def _within(event: asyncio.Event, seconds: float | None) -> None:
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait((waiting,), timeout=seconds)
    waiting.cancel()
