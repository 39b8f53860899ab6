"""Decode's half of a room."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import secrets
from typing import TYPE_CHECKING, Any

from ..errors import (
    AuthenticationError,
    ConnectError,
    EngineClosed,
    HandoverError,
    NotifyRefused,
    ProtocolError,
    TransferError,
)
from ..notifications import Notification
from .handover import Handover, settled
from .layout import heads_of, senders
from .messages import ID_SIZE, Abort, Begin, Done, Failed, Hello, Start, encode
from .poll import KVPoll
from .wire import NAME, NO_MESSAGE, Wire

if TYPE_CHECKING:
    from .manager import KVManager

__all__ = ["KVReceiver"]

_logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
"""Seconds between two attempts to find a prefill that is not there yet; each is twice the last."""

_RANKS = 8
"""Bytes that a message may be larger than for rank 0 of 1."""


class _Source:
    """A prefill rank, and what has come of it."""

    def __init__(self, wire: Wire, start: Start) -> None:
        self.wire = wire
        self.start = start
        self.rank = start.to_rank
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

        From now on the blocks are prefill's until :meth:`done` returns or raises what is not a
        cancellation, or :meth:`abort` returns, or :attr:`quiet` says so. Raises
        :class:`~aioflagcx.errors.HandoverError`, likewise; ValueError and TypeError for arguments
        that cannot be, or make a message of more than ``notification_max_payload`` bytes (about
        250,000 blocks), before anything is told. Cancelling this aborts the room, and the
        cancellation is raised when the blocks may be reused; a second one is raised at once.
        """
        if self._started:
            raise RuntimeError(f"{self!r} has been started already")
        blocks = self._manager._blocks(block_ids)
        aux = self._manager._aux(aux)
        start = Start(self._id, self.room, 0, 1, self._manager.layout, blocks, aux)
        self._check_size(start)
        self._started = True
        if self._state is not KVPoll.Failed:
            if self._prefill:
                self._aim(start, self._prefill)
            self._limit(self._manager.bootstrap_timeout, "prefill did not answer")
            self._starting = self._manager._spawn(self._tell_all(start))
            try:
                await asyncio.wait((self._starting,))
            except asyncio.CancelledError:
                self._fail("start() was cancelled")
                await settled(self._settling)
                raise
            if not self._starting.cancelled() and (error := self._starting.exception()):
                self._fail(str(error), cause=error)
        await self._raise()

    def _check_size(self, start: Start) -> None:
        size = len(encode(start)) + _RANKS
        limit = self._manager.engine._config.notification_max_payload
        if size > limit:
            raise ValueError(
                f"{sum(map(len, start.blocks))} blocks, {len(start.aux)} bytes of aux and the "
                f"layout make a message of {size} bytes: at most {limit}, which is "
                "notification_max_payload. Raise it on both sides, or divide the request"
            )

    async def done(self) -> bytes:
        """Until all blocks are here; what prefill has sent along with the last of them.

        With several prefill ranks, of the lowest one that sent something. Raises
        :class:`~aioflagcx.errors.HandoverError` when the room has failed. In either case nothing
        changes the blocks any more. Cancelling this leaves the room alone, and the blocks
        prefill's: see :meth:`abort`.
        """
        if not self._started and self.error is None:
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
        if source.engine_id not in (None, notification.engine_id):
            return f"another engine, {source.engine_id}, is prefill rank {message.rank} here"
        if isinstance(message, Failed):
            self._stopped(source, message)
        elif isinstance(message, Hello):
            if self.error is not None:
                return f"decode has given it up: {self.error}"
            source.engine_id = notification.engine_id
            bootstrapping = self._state is KVPoll.Bootstrapping
            if bootstrapping and all(one.engine_id for one in self._sources.values()):
                self._advance(KVPoll.WaitingForInput)
                self._limit(self._manager.waiting_timeout, "prefill has not sent everything")
        elif source.engine_id is None:
            return f"prefill rank {message.rank} has not said hello"
        elif isinstance(message, Begin):
            self._advance(KVPoll.Transferring)
        else:
            source.aux = message.aux
            source.quiet = True
            source.answered.set()
            if self.error is not None:
                return f"decode has given it up: {self.error}"
            self._advance(KVPoll.Transferring)
            if all(one.aux is not None for one in self._sources.values()):
                self._succeed()
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

    def _aim(self, start: Start, prefill: tuple[str, ...]) -> None:
        """Settle which prefill ranks it has to do with, of these."""
        manager = self._manager
        layout = manager.layout
        ranks = senders(heads_of(layout), layout.rank, layout.ranks, len(prefill))
        self._sources = {
            rank: _Source(
                manager._wires.to(prefill[rank]),
                dataclasses.replace(start, to_rank=rank, to_ranks=len(prefill)),
            )
            for rank in ranks
        }
        manager._receivers[self._id] = self

    async def _tell_all(self, start: Start) -> None:
        if not self._sources:
            self._aim(start, await self._find())
        tellings = [asyncio.ensure_future(self._tell(one)) for one in self._sources.values()]
        try:
            await asyncio.gather(*tellings)
        finally:
            for telling in tellings:
                telling.cancel()

    async def _find(self) -> tuple[str, ...]:
        """Prefill as the directory knows it: it may have died without having said so there, and
        another one come."""
        pause = _FIRST_PAUSE
        while True:
            found = await self._manager._find(self.room)
            try:
                for address in found:
                    await self._manager._wires.to(address).session(self._manager.connect_timeout)
            except (AuthenticationError, ProtocolError):
                raise
            except ConnectError as error:
                self._trouble = str(error)
                _logger.debug("room %r: %s; looking again", self.room, error)
            else:
                return found
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _tell(self, source: _Source) -> None:
        """Try until it works; the room's limit ends that."""
        pause = _FIRST_PAUSE
        timeout = self._manager.connect_timeout
        while True:
            try:
                session = await source.wire.session(timeout)
                limit = session._link.max_payload
                if len(encode(source.start)) > limit:
                    raise HandoverError(
                        f"{session.id} takes notifications of {limit} bytes, its "
                        f"notification_max_payload: too little for these blocks"
                    )
                source.told = True
                await session.notify(NAME, encode(source.start))
            except (AuthenticationError, ProtocolError, EngineClosed):
                raise
            except (ConnectError, TransferError) as error:
                if isinstance(error, NotifyRefused) and NO_MESSAGE in str(error):
                    raise  # another version, which will not become ours
                self._trouble = str(error)
                _logger.debug("room %r: %s; trying again", self.room, error)
            else:
                source.wire.watch(self, functools.partial(self._found_again, source))
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _found_again(self, source: _Source) -> None:
        """Its session has ended, and it lives. Told again what it knows, it says if it has given
        the room up meanwhile."""
        if self.error is None and source.aux is None:
            self._manager._spawn(self._manager._try_to_tell(source.wire, source.start))

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
        if not source.answered.is_set():
            manager._spawn(self._give_up(source, reason))
            if source.engine_id is not None:
                await _within(source.answered, manager.fence_timeout)
        if source.engine_id is None or source.quiet:
            return
        _logger.info("room %r: fencing %s: %s", self.room, source.wire.id, reason)
        try:
            await manager.engine.quiesce(source.engine_id, timeout=None)
        except EngineClosed:  # and with the engine every way into our memory, once it is
            await manager.engine._at_rest()

    async def _give_up(self, source: _Source, reason: str) -> None:
        """Tell a prefill rank so; one that has not heard of us is waiting for us, too."""
        tell, start = self._manager._try_to_tell, source.start
        if not source.told:
            await tell(source.wire, start)
        abort = Abort(self._id, self.room, start.layout.rank, source.rank, reason)
        await tell(source.wire, abort)


async def _within(event: asyncio.Event, seconds: float | None) -> None:
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((waiting,), timeout=seconds)
    finally:
        waiting.cancel()
