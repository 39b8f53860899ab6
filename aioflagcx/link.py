"""The initiator's end of a session: one control connection and the native session beside it.

Both live and die together. A link that is lost stays lost; the next call makes a new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from . import _native
from .errors import (
    AioFlagcxError,
    ConnectError,
    HandshakeRejected,
    NotifyRefused,
    PeerLost,
    TransferError,
)
from .handshake import CloseReason, ControlConnection, open_connection, parse_address
from .handshake.messages import Message, MetadataUpdate, Notify
from .notifications import Outgoing
from .rails import Rails
from .remote_table import RemoteTable
from .runtime import Runtime
from .waiting import outlast

__all__ = ["Link"]

_logger = logging.getLogger(__name__)

_GOODBYE_GRACE = 0.05
"""Seconds after the end of the keepalive in which the peer's goodbye may still arrive."""


_FAREWELL = 1.0
"""Seconds after a refusal for the session's end in which the goodbye arrives, unless it is lost."""


class Link:
    """A connected session; made by :meth:`open`.

    Told what happens to it by its control connection and by
    :class:`~aioflagcx.events.Events`.
    """

    native: _native.Session
    table: RemoteTable
    """Where the peer's memory is."""

    rails: Rails
    """The queue pairs."""

    _connection: ControlConnection

    def __init__(
        self, runtime: Runtime, session_id: str, ended: Callable[[Link, bool], None]
    ) -> None:
        self.id = session_id
        """The peer's session id, as we were asked to connect to it."""
        self.peer_engine_id = ""
        """The peer's engine id, in hexadecimal."""
        self.alive = False
        """Whether it can be used."""
        self._runtime = runtime
        self._ended = ended
        self._max_payload = 0
        self._loss: tuple[str, BaseException | None] | None = None
        self._freeing: asyncio.Task[None] | None = None
        self._last_imm = 0
        self._watchers: list[Callable[[str], object]] = []

    @classmethod
    async def open(
        cls, runtime: Runtime, session_id: str, timeout: float, ended: Callable[[Link, bool], None]
    ) -> Link:
        """Connect to the engine at ``session_id`` within ``timeout`` seconds.

        ``ended(link, gone)`` is called when the link can be used no more, and again, with
        ``gone`` True, when it has given everything back. Raises a
        :class:`~aioflagcx.errors.ConnectError`, and then nothing is left behind.
        """
        link = cls(runtime, session_id, ended)
        deadline = runtime.loop.time() + timeout
        host, port = parse_address(session_id)
        inbox = _Inbox()
        connection = await open_connection(
            host,
            port,
            identity=runtime.identity,
            secret=runtime.config.auth_secret,
            limits=runtime.limits,
            timeout=timeout,
            handler=inbox,
        )
        link._begin(connection)
        inbox.link = link
        try:
            await link._establish(deadline)
        except BaseException as error:
            link._lose(f"no session came about: {error}", farewell="no session came about")
            await link.freed()
            inbox.link = None  # when the connection had ended before, nobody else does it
            raise
        return link

    def _begin(self, connection: ControlConnection) -> None:
        runtime = self._runtime
        self._connection = connection
        self.peer_engine_id = connection.peer_engine_id.hex()
        self.native = runtime.native.create_session(self.id)
        runtime.events.links[self.native.id] = self
        self.table = RemoteTable(connection, self.native, runtime.threads)
        self.rails = Rails(runtime, connection, self.native, self.table, self._rails_lost)

    async def _establish(self, deadline: float) -> None:
        reply = await self.rails.open(deadline)
        if self._loss is not None or self._connection.is_closed:
            raise ConnectError(f"{self.id} closed the connection at once", peer=self.id)
        self._max_payload = reply.notification_max_payload
        self.native.watch(self._connection.peer_host, reply.keepalive_port, reply.keepalive_token)
        self.alive = True
        _logger.info("connected to %s by %s", self.id, self.path)

    # What transfers use ----------------------------------------------------------------------

    @property
    def path(self) -> str:
        """How data moves: "process", "local", "tcp" or "ibverbs"."""
        return self.rails.path

    @property
    def copies(self) -> bool:
        """Whether it moves by copies that this process makes."""
        return self.rails.copies

    @property
    def max_payload(self) -> int:
        """Bytes of the largest notification that the peer takes."""
        return self._max_payload

    @property
    def dismissed(self) -> bool:
        """Whether the peer has ended it on purpose, as a fence does."""
        ending = self._connection.ending
        return ending is not None and ending.kind == "goodbye"

    def next_imm(self) -> int:
        """A fresh immediate: nonzero, 32 bits, not used before for a very long time."""
        self._last_imm = self._last_imm % 0xFFFF_FFFF + 1
        return self._last_imm

    def check_notify(self, outgoing: Outgoing) -> None:
        """Raise :class:`~aioflagcx.errors.NotifyRefused` when the peer will not take it."""
        if len(outgoing.payload) > self._max_payload:
            raise NotifyRefused(
                f"a notification of {len(outgoing.payload)} bytes is too large for {self.id}, "
                f"which takes at most {self._max_payload}",
                peer=self.id,
                remote_quiet=True,
            )

    async def notify(self, outgoing: Outgoing, timeout: float | None = None) -> None:
        """Have the peer deliver a notification, once the data before it has landed.

        Raises :class:`~aioflagcx.errors.NotifyRefused`, :class:`~aioflagcx.errors.PeerLost` when
        the session had ended before, or another :class:`~aioflagcx.errors.TransferError` with
        ``notify_delivered`` None.
        """
        if self._loss is not None:
            raise self.loss(True)
        self.check_notify(outgoing)
        message = Notify(
            name=outgoing.name,
            payload=outgoing.payload,
            imm=outgoing.imm,
            imm_count=outgoing.imm_count,
        )
        try:
            reply = await self._connection.request(message, timeout)
        except TransferError as error:
            error.notify_delivered = None
            if self._connection.ending is not None:  # who asks again must find no session here
                self._lose(str(self._connection.ending))
            raise
        except HandshakeRejected:
            # It has ended over there, and the goodbye that is on its way says more.
            await asyncio.wait((self._connection.closed,), timeout=_FAREWELL)
            self._lose("the peer has ended it")
            raise self.loss(True) from None
        except ConnectError as error:
            raise TransferError(
                f"{self.id} did not say whether the notification was delivered",
                peer=self.id,
                cause=error,
                notify_delivered=None,
            ) from error
        if not reply.accepted:
            raise NotifyRefused(
                f"{self.id} refused the notification: {reply.reason}",
                peer=self.id,
                remote_quiet=True,
            )

    async def fence(self, epochs: Sequence[_native.Epoch], timeout: float) -> bool:
        """Whether the peer confirms within ``timeout`` that ``epochs`` can do nothing more."""
        return await self.rails.fences.confirm(epochs, timeout)

    def loss(self, remote_quiet: bool, rail: str | None = None) -> PeerLost:
        """The error of a transfer that was under way when the link was lost."""
        words, cause = self._loss or ("the session failed", None)
        return PeerLost(
            f"{self.id} was lost: {words}",
            peer=self.id,
            rail=rail,
            cause=cause,
            remote_quiet=remote_quiet,
        )

    def watch(self, lost: Callable[[str], object]) -> None:
        """Call ``lost`` with the reason once the link is lost; at once if it is already."""
        if self._loss is not None:
            lost(self._loss[0])
        else:
            self._watchers.append(lost)

    # What happens to it ----------------------------------------------------------------------

    async def table_pushed(self, update: MetadataUpdate) -> None:
        """The peer's regions have changed."""
        try:
            await self.table.pushed(update)
        except AioFlagcxError as error:
            _logger.warning("%s: a region table was not taken: %s", self.id, error)

    def disconnected(self, reason: CloseReason) -> None:
        """The control connection has ended, and the session with it."""
        self._lose(str(reason))

    def keepalive_lost(self, reason: str) -> None:
        """The peer's process gives no sign of life."""
        # A peer that closes ends its keepalive, too, and its goodbye says more.
        words = f"no sign of life: {reason}"
        self._runtime.loop.call_later(_GOODBYE_GRACE, self._lose, words)

    def submit_failed(self, error: _native.NativeError) -> None:
        """The native session has failed before the event that says so has been seen."""
        self._lose(error.detail)

    def path_noted(self, event: _native.PathNote) -> None:
        """A rail does not take the path that both sides like best."""
        _logger.info(
            "%s: %s goes by %s, since the same-host path is not possible: %s",
            self.id,
            event.rail,
            event.path,
            event.note,
        )

    def endpoint_down(self, event: _native.EndpointDown) -> None:
        """A rail's queue pairs have failed."""
        if self._loss is None:
            self.rails.endpoint_down(event)

    def _rails_lost(self, words: str, cause: BaseException | None, farewell: str) -> None:
        self._lose(words, cause, farewell=farewell)

    def _lose(
        self, words: str, cause: BaseException | None = None, *, farewell: str | None = None
    ) -> None:
        """End it, once: its transfers fail with these words as soon as they are quiet."""
        if self._loss is not None:
            return
        self._loss = words, cause
        if self.alive:
            _logger.info("session with %s ended: %s", self.id, words)
        self.retire()
        self.rails.stop()
        if farewell is None:
            self._connection.abort(CloseReason("lost", words))
        else:
            self._connection.close(farewell)
        self.native.fail()
        self._freeing = self._runtime.loop.create_task(self._free())
        for lost in self._watchers:
            lost(words)
        self._watchers.clear()

    def retire(self) -> None:
        """No new call may use it; what is under way goes on."""
        self.alive = False
        self._ended(self, False)

    async def _free(self) -> None:
        try:
            await self.rails.stopped()
            await self._runtime.threads.run(self.native.close)
            self._runtime.events.links.pop(self.native.id, None)
            await self._connection.wait_closed()
        finally:
            self._ended(self, True)

    async def freed(self) -> None:
        """Until everything of a lost link has been given back."""
        if self._freeing is not None:
            await outlast(self._freeing)

    async def close(self, farewell: str) -> None:
        """End it on purpose and wait until it is gone."""
        self._lose("it was closed here", farewell=farewell)
        await self.freed()


class _Inbox:
    """What arrives on a link's control connection; lets go of the link at the end."""

    def __init__(self) -> None:
        self.link: Link | None = None
        """None before it has begun, too: then its first request finds out what happened."""

    def connected(self, connection: ControlConnection) -> None:
        """:meth:`Link.open` goes on."""

    async def handle(self, connection: ControlConnection, message: Message) -> Message | None:
        """The peer pushes its table; it has nothing to ask for on our connection."""
        if not isinstance(message, MetadataUpdate):
            raise HandshakeRejected(f"{message.KIND} belongs on a connection of your own")
        if self.link is not None:
            await self.link.table_pushed(message)
        return None

    def disconnected(self, connection: ControlConnection, reason: CloseReason) -> None:
        """The session ends with its control connection."""
        if self.link is not None:
            self.link.disconnected(reason)
            self.link = None
