"""The target's end of sessions: what peers that connected to us ask for."""

from __future__ import annotations

import asyncio
import logging
import math
import re

from . import _native
from .errors import HandshakeRejected, ProtocolError, QuiesceTimeout
from .handshake import CloseReason, ControlConnection, format_address, parse_address
from .handshake.messages import (
    Connect,
    ConnectReply,
    Devices,
    DevicesReply,
    Fence,
    FenceReply,
    Message,
    Metadata,
    MetadataUpdate,
    Notify,
    NotifyReply,
)
from .notifications import Notification, NotificationQueue
from .runtime import Runtime

__all__ = ["Guest", "Serving"]

_logger = logging.getLogger(__name__)

_FENCE_TIMEOUT = 1.0
"""Seconds a peer that asks for a fence may take to finish the copy it is inside of: a thousand
times more than it needs."""

_COPY_TIME = 0.25
"""Seconds that one copy of a peer on this host takes at most, unless the peer is stopped."""

_LONGEST_NAP = 0.05
"""Seconds between two looks whether a peer is through with its copy."""

_ENGINE_ID = re.compile(r"[0-9a-f]{32}", re.ASCII | re.IGNORECASE)


def is_engine_id(value: object) -> bool:
    """Whether it looks like one; a session id never does."""
    return isinstance(value, str) and _ENGINE_ID.fullmatch(value) is not None


class Guest:
    """One connection that a peer opened, and the native responder its queue pairs belong to."""

    def __init__(
        self, runtime: Runtime, queue: NotificationQueue, connection: ControlConnection
    ) -> None:
        self._runtime = runtime
        self._queue = queue
        self._connection = connection
        self.session_id = connection.peer_session_id
        """Where the peer says it can be reached."""
        self.engine_id = connection.peer_engine_id.hex()
        """The peer's engine id, in hexadecimal."""
        # Guards the responder's queue pairs: accepting, fencing and closing take turns.
        self._changing = asyncio.Lock()
        self._responder: _native.Responder | None = None
        self._gone = False
        self._pushed = 0  # generation of the table that the peer has, or will have
        self._pusher: asyncio.Task[None] | None = None
        self._immediates: dict[int, asyncio.Future[bool]] = {}

    async def answer(self, message: Message) -> Message | None:
        """The reply to a request of the peer."""
        if isinstance(message, Devices):
            return DevicesReply(devices=tuple(self._runtime.native.device_descriptions))
        if isinstance(message, Connect):
            return await self._connect(message)
        if self._responder is None:
            raise ProtocolError(f"{message.KIND} before connect")
        if isinstance(message, Metadata):
            return await self._table(message.since)
        if isinstance(message, Notify):
            return await self._notify(message, self._responder)
        if isinstance(message, Fence):
            async with self._changing:
                fenced = await self._runtime.threads.run(
                    self._responder.fence, message.attempt, message.rail, _FENCE_TIMEOUT
                )
            if not fenced:
                raise HandshakeRejected(f"{self.session_id} is stopped inside a copy")
            return FenceReply(attempt=message.attempt, rail=message.rail)
        _logger.debug("%s pushed %s, which is ignored", self.session_id, message.KIND)
        return None

    async def _connect(self, message: Connect) -> ConnectReply:
        async with self._changing:
            if not self._gone:
                return await self._accept(message)
        # The goodbye is on its way and says more than a refusal.
        await asyncio.wait((self._connection.closed,))
        raise HandshakeRejected("the session has been closed")

    async def _accept(self, message: Connect) -> ConnectReply:
        runtime = self._runtime
        responder = self._responder
        if responder is None:
            responder = self._responder = runtime.native.create_responder(
                self.session_id, message.keepalive_interval, message.keepalive_timeout
            )
            runtime.events.guests[responder.id] = self
        rails = [dict(rail) for rail in message.rails]
        try:
            accepted = await runtime.threads.run(responder.accept, message.attempt, rails)
        except _native.NativeError as error:
            raise HandshakeRejected(f"{error.call}: {error.detail}", cause=error) from error
        update = await self._table(message.since)
        # Rails come and go by themselves: mostly the initiator has the table.
        unchanged = not update.full and update.generation == message.since
        if not unchanged and not update.full:
            update = await self._table(0)
        return ConnectReply(
            attempt=message.attempt,
            rails=tuple(accepted),
            path=responder.path,
            table=b"" if unchanged else update.table,
            generation=update.generation,
            keepalive_port=runtime.native.keepalive_port,
            keepalive_token=responder.keepalive_token,
            notification_max_payload=runtime.config.notification_max_payload,
        )

    async def _table(self, since: int) -> MetadataUpdate:
        """Our MR table, or what changed in it; the peer will have it."""
        native = self._runtime.native
        full, base, generation, table, removed = await self._runtime.threads.run(
            native.table_since, since
        )
        self._pushed = max(self._pushed, generation)
        return MetadataUpdate(
            full=full, base=base, generation=generation, table=table, removed=removed
        )

    async def _notify(self, message: Notify, responder: _native.Responder) -> NotifyReply:
        if self._gone:
            raise HandshakeRejected("the session has ended")
        if len(message.payload) > self._runtime.config.notification_max_payload:
            return NotifyReply(accepted=False, reason="the payload is too large")
        if message.imm in self._immediates:
            raise ProtocolError(f"immediate {message.imm} is waited for already")
        if message.imm and not responder.expect(message.imm, message.imm_count):
            arrived = self._immediates[message.imm] = self._runtime.loop.create_future()
            try:
                if not await arrived:
                    raise HandshakeRejected("the session has ended")
            finally:
                del self._immediates[message.imm]
                responder.forget(message.imm)
        notification = Notification(message.name, message.payload, self.engine_id, self.session_id)
        refusal = self._queue.deliver(notification)
        return NotifyReply(accepted=refusal is None, reason=refusal or "")

    def immediates(self, imm: int) -> None:
        """All immediates that a notification waits for have come."""
        arrived = self._immediates.get(imm)
        if arrived is not None and not arrived.done():
            arrived.set_result(True)

    def push_table(self) -> None:
        """Our regions have changed: tell the peer, unless that is under way already."""
        if self._pushed and self._pusher is None and not self._gone:
            self._pusher = self._runtime.loop.create_task(self._push())

    async def _push(self) -> None:
        try:
            # A peer that reads slowly gets fewer and larger updates.
            while not self._gone and self._pushed < self._runtime.native.generation:
                await self._connection.drained()
                if self._gone:
                    return
                self._connection.push(await self._table(self._pushed))
        except ProtocolError as error:
            self._connection.close(f"our region table cannot be sent: {error}")
        finally:
            self._pusher = None

    def keepalive_lost(self, reason: str) -> None:
        """The peer's process gives no sign of life; the native core has fenced it already."""
        self._connection.abort(CloseReason("lost", f"no sign of life: {reason}"))

    async def leave(self, timeout: float | None = 0.0) -> bool:
        """Make sure that nothing of the peer can touch our memory any more. Idempotent.

        It can begin nothing new. False when ``timeout`` seconds (None: no limit) do not suffice
        for it to finish the copy it is inside of, as it is stopped: call again to wait on.
        """
        self._gone = True
        for arrived in self._immediates.values():
            if not arrived.done():
                arrived.set_result(False)
        async with self._changing:
            responder = self._responder
            if responder is None:
                return True
            quiet = await self._runtime.threads.run(responder.close, 0.0)
            self._runtime.events.guests.pop(responder.id, None)
        return quiet or await self._quiet_within(responder, timeout)

    async def dismiss(self, reason: str, timeout: float | None = 0.0) -> bool:
        """Fence the peer, say goodbye and whether it is fenced, and :meth:`leave`."""
        self._gone = True
        fenced = False
        try:
            fenced = await self._fence_all()
        finally:
            # Before the keepalive ends, which says less.
            self._connection.close(reason, fenced=fenced)
        return await self.leave(timeout)

    async def _fence_all(self) -> bool:
        """Whether nothing of the peer can touch our memory any more; it can begin nothing new."""
        async with self._changing:  # whoever comes later finds that it is gone
            responder = self._responder
        return responder is None or await self._quiet_within(responder, _COPY_TIME)

    async def _quiet_within(self, responder: _native.Responder, timeout: float | None) -> bool:
        """Fence it, looking again and again: a thread that waits is one less for others."""
        loop, nap = self._runtime.loop, 0.001
        deadline = math.inf if timeout is None else loop.time() + timeout
        while not await self._runtime.threads.run(responder.fence_all, 0.0):
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(min(nap, deadline - loop.time()))
            nap = min(2 * nap, _LONGEST_NAP)
        return True


class Serving:
    """The handler of the handshake server."""

    def __init__(self, runtime: Runtime, queue: NotificationQueue) -> None:
        self._runtime = runtime
        self._queue = queue
        self._guests: dict[ControlConnection, Guest] = {}
        self._leaving: dict[Guest, asyncio.Task[None]] = {}
        self._stopped: set[Guest] = set()  # fenced, but still inside a copy when last looked at
        self._closed = False

    def connected(self, connection: ControlConnection) -> None:
        """A peer has authenticated."""
        if self._closed:
            connection.close("engine closed", fenced=True)
        else:
            self._guests[connection] = Guest(self._runtime, self._queue, connection)

    async def handle(self, connection: ControlConnection, message: Message) -> Message | None:
        """Answer a request."""
        guest = self._guests.get(connection)
        if guest is None:
            raise HandshakeRejected("the engine is closing")
        return await guest.answer(message)

    def disconnected(self, connection: ControlConnection, reason: CloseReason) -> None:
        """A peer is gone: fence what it could write to."""
        guest = self._guests.pop(connection, None)
        if guest is None:
            return
        _logger.info("session of %s ended: %s", guest.session_id, reason)
        task = self._leaving[guest] = self._runtime.loop.create_task(self._dismiss(guest))
        task.add_done_callback(lambda _: self._leaving.pop(guest))

    def push_tables(self) -> None:
        """Our regions have changed: tell every peer."""
        for guest in self._guests.values():
            guest.push_table()

    async def _dismiss(self, guest: Guest) -> None:
        """Fence a peer that is gone; one that is stopped is kept in mind."""
        quiet = await guest.leave(_COPY_TIME)
        for stopped in tuple(self._stopped):  # which may have gone on, or ended
            if await stopped.leave():
                self._stopped.discard(stopped)
        if not quiet:
            self._stopped.add(guest)
            _logger.warning(
                "%s was stopped while it copied: it may write on, into what it was writing to, "
                "until it is ended",
                guest.session_id,
            )

    async def quiesce(self, peer: str, timeout: float | None) -> None:
        """Fence everything that the engine with this session or engine id can write to here.

        TypeError and ValueError for what is neither: to do nothing would pass for a fence.
        Raises :class:`~aioflagcx.errors.QuiesceTimeout`.
        """
        if not isinstance(peer, str):
            raise TypeError(f"expected a session or engine id, not {type(peer).__name__}")
        is_engine = is_engine_id(peer)
        peer = peer.lower() if is_engine else format_address(*parse_address(peer))
        guests = [
            guest
            for guest in {*self._guests.values(), *self._leaving, *self._stopped}
            if peer in (guest.session_id, guest.engine_id)
        ]
        if not guests:
            _logger.debug("quiesce(%r): no such peer is connected", peer)
        quiet = await asyncio.gather(*(guest.dismiss("quiesced", timeout) for guest in guests))
        for guest, is_quiet in zip(guests, quiet, strict=True):
            (self._stopped.discard if is_quiet else self._stopped.add)(guest)
        if not all(quiet):
            raise QuiesceTimeout(
                f"{peer} is on this host and was stopped while it copied: it can begin nothing "
                f"new, but did not finish within {timeout} s what it had begun. Do not reuse the "
                "memory that it was writing to; continue or end that process, and quiesce again"
            )

    async def close(self) -> None:
        """Refuse who comes; fence every peer, say goodbye to it, and wait for its end."""
        self._closed = True
        guests = dict(self._guests)
        await asyncio.gather(*(guest.dismiss("engine closed") for guest in guests.values()))
        await asyncio.gather(*(connection.wait_closed() for connection in guests))
        while self._leaving:
            await asyncio.wait(tuple(self._leaving.values()))
