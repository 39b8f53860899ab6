"""One control connection: requests, replies and pushes between two engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from typing import Any, TypeVar, cast

from ..errors import (
    AioFlagcxError,
    ConnectError,
    ConnectTimeout,
    HandshakeRejected,
    PeerLost,
    ProtocolError,
    TransferTimeout,
)
from .addresses import format_address
from .authentication import Initiator, Responder, error_from_reply, error_to_reply
from .codec import LENGTH, Frame, FrameDecoder, UnknownKind, encode
from .fields import clip, printable
from .handler import CloseReason, Handler, HandlerTasks
from .limits import Limits
from .messages import Auth, Connect, Devices, Error, Goodbye, Hello, Message, Request

__all__ = ["ControlConnection"]

logger = logging.getLogger("aioflagcx.handshake")

R = TypeVar("R", bound=Message)


class ControlConnection(asyncio.Protocol):
    """A connection, made by :func:`~.client.open_connection` or :class:`~.server.HandshakeServer`.

    All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        handshake: Initiator | Responder,
        handler: Handler,
        limits: Limits,
        *,
        peer: str = "unknown peer",
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._handshake = handshake
        self._handler = handler
        self._limits = limits
        self._peer = peer
        self._decoder = FrameDecoder(limits.max_frame_unauthenticated)
        self._transport: asyncio.Transport | None = None
        self._peer_address = self._local_address = ("unknown", 0)
        self._drained: asyncio.Future[None] | None = None
        self._reason: CloseReason | None = None
        self._failure: AioFlagcxError | None = None
        self._announced = False
        self._next_id = 1
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._handlers = HandlerTasks(limits, self._schedule)
        self._turn: asyncio.Handle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None
        self.established: asyncio.Future[None] = self._loop.create_future()
        """Done when both sides have authenticated; its exception says why they have not."""
        self.closed: asyncio.Future[CloseReason] = self._loop.create_future()
        """Done when the connection has ended."""

    def __repr__(self) -> str:
        state = str(self._reason) if self._reason else "open"
        return f"<ControlConnection {self._peer} {state}>"

    @property
    def peer(self) -> str:
        """How errors and logs name the peer: its session id, or its address before the hello."""
        return self._peer

    @property
    def peer_engine_id(self) -> bytes:
        """The peer's engine id; RuntimeError before the hello."""
        if self._handshake.peer is None:
            raise RuntimeError("the peer has not introduced itself yet")
        return self._handshake.peer.engine_id

    @property
    def peer_session_id(self) -> str:
        """The peer's session id; RuntimeError before the hello."""
        if self._handshake.peer is None:
            raise RuntimeError("the peer has not introduced itself yet")
        return self._handshake.peer.session_id

    @property
    def peer_host(self) -> str:
        """The IP address from which the peer speaks."""
        return self._peer_address[0]

    @property
    def local_host(self) -> str:
        """The IP address at which the peer reaches us."""
        return self._local_address[0]

    @property
    def is_closed(self) -> bool:
        """The connection has ended or is about to."""
        return self._reason is not None

    @property
    def ending(self) -> CloseReason | None:
        """Why, as soon as that is known; the end is :attr:`closed`."""
        return self._reason

    @property
    def is_fenced(self) -> bool:
        """The peer has said goodbye, and that none of our queue pairs can touch its memory."""
        return self._reason is not None and self._reason.fenced

    async def request(self, message: Request[R], timeout: float | None) -> R:
        """Send a request and wait for its reply, at most ``timeout`` seconds (None: no limit).

        A reply that comes later is dropped. Raises
        :class:`~aioflagcx.errors.ConnectTimeout` (for a connect) or
        :class:`~aioflagcx.errors.TransferTimeout` when the time is over,
        :class:`~aioflagcx.errors.PeerLost` when the connection ends before the reply, a
        :class:`~aioflagcx.errors.ConnectError` for an error reply, and
        :class:`~aioflagcx.errors.ProtocolError` when the message exceeds ``max_frame``.
        """
        if self._reason is not None:
            raise self._lost(self._reason)
        request_id = self._next_id
        frame = self._encoded(message, request_id)
        self._next_id += 1
        reply: asyncio.Future[Message] = self._loop.create_future()
        self._pending[request_id] = reply
        timer = None
        if timeout is not None:
            timer = self._loop.call_later(timeout, _expire, reply)
        try:
            while self._drained is not None and not reply.done():
                either: set[asyncio.Future[Any]] = {self._drained, reply}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                self._write(frame)
            answer = await reply
        except TimeoutError:
            connecting = isinstance(message, Connect | Devices)
            kind = ConnectTimeout if connecting else TransferTimeout
            words = f"{self._peer} did not answer {message.KIND} within {timeout:g} s"
            raise kind(words, peer=self._peer) from None
        finally:
            del self._pending[request_id]
            if timer is not None:
                timer.cancel()
            if reply.done() and not reply.cancelled():
                reply.exception()  # retrieved, also when the caller was cancelled meanwhile
        if isinstance(answer, Error):
            raise error_from_reply(answer, self._peer)
        if not isinstance(answer, message.REPLY):
            error = ProtocolError(
                f"the peer answered {message.KIND} with {type(answer).__name__}", peer=self._peer
            )
            self._broken(error)
            raise error
        return cast(R, answer)

    def push(self, message: Message) -> None:
        """Send a message that nobody answers; nothing happens when the connection has ended.

        Does not wait: the connection is given up when the peer leaves too much unread. Raises
        :class:`~aioflagcx.errors.ProtocolError` when the message exceeds ``max_frame``.
        """
        frame = self._encoded(message, 0)
        if self._reason is None:
            self._write(frame)

    async def drained(self) -> None:
        """Wait until the peer has taken most of what was written, or the connection has ended."""
        while self._drained is not None and self._reason is None:
            await asyncio.wait({self._drained})

    def close(self, reason: str, *, fenced: bool = False) -> None:
        """Say goodbye, deliver what was written, at most for ``close_grace``, and end.

        ``fenced`` tells the peer that none of its queue pairs can touch our memory any more.
        """
        if self._reason is None and self._transport is not None:
            self._write(encode(Goodbye(reason=clip(reason), fenced=fenced)))
        self._end(CloseReason("local", f"closed here: {reason}"))

    def abort(self, reason: CloseReason) -> None:
        """End at once; what the peer has not taken is lost."""
        self._end(reason, at_once=True)

    async def wait_closed(self) -> None:
        """Wait for the end of the connection and, at most ``close_grace``, of its handlers.

        Handlers that are still running then are cancelled.
        """
        await asyncio.wait({self.closed})
        await self._handlers.settle()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._reason is not None:
            self._transport.abort()
            return
        sock = self._transport.get_extra_info("socket")
        # A peer that is gone already has no address; connection_lost() will follow.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._local_address = sock.getsockname()[:2]
            self._peer_address = sock.getpeername()[:2]
        if isinstance(self._handshake, Initiator):
            self._send(self._handshake.start())
        else:
            self._peer = format_address(*self._peer_address)

    def data_received(self, data: bytes) -> None:
        if self._reason is None:
            self._decoder.feed(data)
            if self._turn is None:
                self._process()

    def eof_received(self) -> bool:
        return False  # half-closed is closed: the transport ends the connection

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reason is None:
            self._end(self._how_lost(exc), at_once=True)
        assert self._reason is not None
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        self.resume_writing()
        self.closed.set_result(self._reason)
        if self._announced:
            try:
                self._handler.disconnected(self, self._reason)
            except Exception:
                logger.exception("%s: handler failed in disconnected()", self._peer)

    # Incoming frames.

    def _process(self) -> None:
        """Handle the frames that have arrived, within the limits of a turn and of handlers."""
        self._turn = None
        started = time.monotonic()  # uvloop's own time stands still within a turn
        while self._reason is None:
            if self._handlers.full:
                self._read(False)
                return
            try:
                frame = self._decoder.next()
            except ProtocolError as error:
                self._broken(error)
                return
            if frame is None:
                self._read(True)
                return
            self._dispatch(frame)
            if time.monotonic() - started >= self._limits.max_turn:
                self._read(False)
                self._schedule()
                return

    def _schedule(self) -> None:
        """Have :meth:`_process` called in the event loop's next turn."""
        if self._turn is None and self._reason is None:
            self._turn = self._loop.call_soon(self._process)

    def _dispatch(self, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, Goodbye):
            words = f"closed by the peer: {printable(message.reason)}"
            self._end(CloseReason("goodbye", words, fenced=message.fenced))
        elif frame.is_reply and frame.request_id == 0:
            assert isinstance(message, Error)
            self._failure = error_from_reply(message, self._peer)
            self._end(
                CloseReason("protocol", f"given up by the peer: {printable(message.message)}")
            )
        elif not self._handshake.done:
            self._dispatch_handshake(frame)
        elif frame.is_reply:
            self._dispatch_reply(frame)
        elif isinstance(message, UnknownKind):
            if frame.request_id:
                words = f"kind {printable(message.kind)} is not known"
                self._write(encode(Error(code="unsupported", message=words), frame.request_id))
        elif isinstance(message, Hello | Auth):
            self._broken(ProtocolError(f"the peer repeats its {message.KIND}", peer=self._peer))
        else:
            self._handlers.start(self._handle(frame), frame.size)

    def _dispatch_handshake(self, frame: Frame) -> None:
        handshake = self._handshake
        if isinstance(handshake, Initiator):
            try:
                # Each request waits for its reply, so only the latest id can be answered.
                if not frame.is_reply or frame.request_id != self._next_id - 1:
                    raise ProtocolError("the peer does not answer our hello or auth")
                request = handshake.receive(frame.message)
            except ConnectError as error:
                self._refuse(error)
                return
            if handshake.peer is not None:
                self._peer = handshake.peer.session_id
            if request is not None:
                self._send(request)
        else:
            reply = handshake.receive(frame.message)
            if isinstance(reply, Error):
                self._write(encode(reply, 0 if frame.is_reply else frame.request_id))
                self._end(CloseReason("handshake", reply.message))
                return
            if handshake.peer is not None:
                self._peer = handshake.peer.session_id
            self._write(encode(reply, frame.request_id))
        if handshake.done:
            self._announce()

    def _announce(self) -> None:
        """Both sides have accepted each other: tell the handler, allow everything."""
        self._decoder.max_frame = self._limits.max_frame
        self._announced = True
        try:
            self._handler.connected(self)
        except Exception:
            logger.exception("%s: handler failed in connected()", self._peer)
            self.close("internal error")
        if not self.established.done():
            self.established.set_result(None)

    def _dispatch_reply(self, frame: Frame) -> None:
        if frame.request_id >= self._next_id:
            error = ProtocolError("the peer answers a request we never made", peer=self._peer)
            self._broken(error)
            return
        reply = self._pending.get(frame.request_id)
        # Without a waiter it is the late reply to a request that has timed out.
        if reply is None or reply.done():
            return
        if isinstance(frame.message, UnknownKind):
            words = f"the peer answers with {printable(frame.message.kind)}, which is not known"
            reply.set_exception(ProtocolError(words, peer=self._peer))
        else:
            reply.set_result(frame.message)

    # Handlers.

    async def _handle(self, frame: Frame) -> None:
        message = cast(Message, frame.message)
        expected = message.REPLY if isinstance(message, Request) else None
        reply: Message | None
        try:
            reply = await self._handler.handle(self, message)
            if expected is not None and not isinstance(reply, expected | Error):
                raise TypeError(f"handler answered {message.KIND} with {type(reply).__name__}")
        except (HandshakeRejected, ProtocolError) as error:
            reply = error_to_reply(error)
        except Exception as error:
            logger.exception("%s: handling %s failed", self._peer, message.KIND)
            reply = Error(code="internal", message=clip(f"{type(error).__name__}: {error}"))
        if expected is None or reply is None:
            return
        try:
            data = self._encoded(reply, frame.request_id)
        except ProtocolError as error:
            data = encode(error_to_reply(error), frame.request_id)
        # A peer that does not read its replies keeps its handlers occupied, not our memory.
        await self.drained()
        if self._reason is None:
            self._write(data)

    # Outgoing bytes.

    def _send(self, request: Request[R]) -> None:
        """Send a request of the handshake, whose reply has no waiter."""
        self._write(encode(request, self._next_id))
        self._next_id += 1

    def _encoded(self, message: Message, request_id: int) -> bytes:
        data = encode(message, request_id)
        if len(data) - LENGTH.size > self._limits.max_frame:
            raise ProtocolError(
                f"a {message.KIND} message of {len(data)} bytes exceeds handshake_max_frame "
                f"({self._limits.max_frame}): raise it on both sides",
                peer=self._peer,
            )
        return data

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)
        unsent = self._transport.get_write_buffer_size()
        if unsent > self._limits.max_unsent:
            self.abort(CloseReason("unread", f"the peer leaves {unsent} bytes unread"))

    def _read(self, wanted: bool) -> None:
        """Resume or pause reading; a transport accepts each at any time while it is open."""
        transport = self._transport
        if transport is None or transport.is_closing() or transport.is_reading() == wanted:
            return
        if wanted:
            transport.resume_reading()
        else:
            transport.pause_reading()

    # The end.

    def _refuse(self, error: ConnectError) -> None:
        """The peer failed our side of hello and authentication."""
        error = type(error)(error.message, peer=error.peer or self._peer, cause=error.cause)
        self._failure = error
        self._write(encode(Goodbye(reason=clip(error.message), fenced=False)))
        self._end(CloseReason("handshake", error.message))

    def _broken(self, error: ProtocolError) -> None:
        """The peer's bytes make no sense: tell it why and end."""
        if self._reason is not None:
            return
        self._failure = ProtocolError(error.message, peer=self._peer, cause=error.cause)
        self._write(encode(error_to_reply(error)))
        self._end(CloseReason("protocol", error.message))

    def _how_lost(self, exc: Exception | None) -> CloseReason:
        try:
            self._decoder.end()
        except ProtocolError as error:
            return CloseReason("lost", error.message)
        detail = f"connection lost: {exc}" if exc else "the peer closed the connection"
        return CloseReason("lost", detail)

    def _end(self, reason: CloseReason, *, at_once: bool = False) -> None:
        """Record why, fail what waits, and close the transport."""
        if self._reason is None:
            self._reason = reason
            for reply in self._pending.values():
                if not reply.done():
                    reply.set_exception(self._lost(reason))
            if not self.established.done():
                self.established.set_exception(
                    self._failure
                    or ConnectError(
                        f"no session with {self._peer}: {reason} during the handshake",
                        peer=self._peer,
                    )
                )
                self.established.exception()  # retrieved: a server's has no other waiter
        if self._turn is not None:
            self._turn.cancel()
        if self._transport is None:
            return  # connection_made() aborts
        if at_once:
            self._transport.abort()
        elif self._abort_timer is None:
            self._transport.close()
            self._abort_timer = self._loop.call_later(
                self._limits.close_grace, self._transport.abort
            )

    def _lost(self, reason: CloseReason) -> AioFlagcxError:
        if self._failure is not None:
            return type(self._failure)(
                self._failure.message, peer=self._peer, cause=self._failure.cause
            )
        return PeerLost(f"no connection to {self._peer}: {reason}", peer=self._peer)


def _expire(reply: asyncio.Future[Message]) -> None:
    """The time of a request is over."""
    if not reply.done():
        reply.set_exception(TimeoutError())
