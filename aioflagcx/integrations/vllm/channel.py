"""The side channel: ZeroMQ sockets on the worker's event loop. A prefill worker listens."""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from .messages import Message, decode, encode

__all__ = ["Clients", "Reply", "Server"]

_logger = logging.getLogger(__name__)

_MAX_FRAME = 64 << 20
"""Bytes of a message; a longer one costs its sender the connection."""

_HEARTBEAT = 5_000
"""Milliseconds between ZeroMQ's own heartbeats."""

_SILENCE = 30_000
"""Milliseconds without one after which a connection counts as lost, and is made again."""

_LINGER = 1_000
"""Milliseconds that a closed socket takes to send what has been said."""

_MAX_IDLE = 256
"""Sockets to prefill workers with which nothing is under way; the limit of ZeroMQ is 1,023."""

Reply = Callable[[Message], None]
"""Sends to the peer that said something; silently nowhere when it is gone."""


def _send(socket: zmq.asyncio.Socket, frames: list[bytes], peer: str) -> None:
    """Without waiting: what cannot be queued is lost, which time limits take care of."""

    def sent(future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            _logger.warning("side channel to %s: a message was not sent: %s", peer, error)

    asyncio.ensure_future(socket.send_multipart(frames, flags=zmq.NOBLOCK)).add_done_callback(sent)


def _socket(context: zmq.asyncio.Context, kind: int, host: str) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME)
    socket.setsockopt(zmq.SNDHWM, 0)  # at a limit it would lose messages
    socket.setsockopt(zmq.LINGER, _LINGER)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE)
    return socket


class Server:
    """Where decode workers come to."""

    def __init__(self, hear: Callable[[Message, Reply], None]) -> None:
        """``hear`` gets every message."""
        self._hear = hear
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None

    def open(self, host: str, port: int) -> int:
        """Listen; the port, which is chosen for a ``port`` of 0. OSError names what is in use."""
        socket = _socket(self._context, zmq.ROUTER, host)
        address = _address(host, port)
        try:
            if port == 0:
                port = socket.bind_to_random_port(address.rsplit(":", 1)[0])
            else:
                socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            self._context.term()
            raise OSError(error.errno, f"the side channel cannot listen at {address}") from error
        self._socket = socket
        self._task = asyncio.ensure_future(self._run(socket))
        return port

    async def _run(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            identity = frames[0]
            peer = f"decode {identity.hex()}"
            if (message := _decoded(frames[1:], peer)) is not None:
                _hand_on(self._hear, message, self._reply(socket, identity, peer), peer)

    @staticmethod
    def _reply(socket: zmq.asyncio.Socket, identity: bytes, peer: str) -> Reply:
        def reply(message: Message) -> None:
            if not socket.closed:
                _send(socket, [identity, encode(message)], peer)

        return reply

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None and self._socket is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._socket.close()
            await asyncio.to_thread(self._context.term)
            self._task = self._socket = None


class Clients:
    """Sockets to the side channels of prefill workers, one each.

    Those in use stay (:meth:`use`, :meth:`leave`), and of the others those used last.
    """

    def __init__(self, hear: Callable[[Message, Reply], None]) -> None:
        """``hear`` gets every message."""
        self._hear = hear
        self._context = zmq.asyncio.Context()
        # In the order in which they were used last.
        self._sockets: collections.OrderedDict[
            str, tuple[zmq.asyncio.Socket, asyncio.Task[None]]
        ] = collections.OrderedDict()
        self._uses: collections.Counter[str] = collections.Counter()

    def use(self, address: str) -> None:
        """Something is under way with it from now on."""
        self._uses[address] += 1

    def leave(self, address: str) -> None:
        """One thing less is."""
        self._uses[address] -= 1
        if not self._uses[address]:
            del self._uses[address]
        self._close_idle()

    def send(self, address: str, message: Message) -> None:
        """``address``: "host:port"; see :func:`_send`.

        zmq.ZMQError for an address that is none, and when there are too many sockets; ValueError
        for a text that is no UTF-8.
        """
        frame = encode(message)
        if address not in self._sockets:
            host, _, port = address.rpartition(":")
            socket = _socket(self._context, zmq.DEALER, host)
            try:
                socket.connect(_address(host, int(port)))
            except BaseException:  # the context would wait for this socket, too, in the end
                socket.close()
                raise
            self._sockets[address] = socket, asyncio.ensure_future(self._run(address, socket))
        self._sockets.move_to_end(address)
        _send(self._sockets[address][0], [frame], address)
        self._close_idle()

    def _close_idle(self) -> None:
        if len(self._sockets) <= _MAX_IDLE:
            return
        idle = [address for address in self._sockets if address not in self._uses]
        for address in idle[: len(self._sockets) - _MAX_IDLE]:
            socket, task = self._sockets.pop(address)
            task.cancel()
            socket.close()

    async def _run(self, address: str, socket: zmq.asyncio.Socket) -> None:
        def reply(message: Message) -> None:
            self.send(address, message)

        while True:
            message = _decoded(await socket.recv_multipart(), address)
            if message is not None:
                _hand_on(self._hear, message, reply, address)

    async def close(self) -> None:
        """Idempotent."""
        sockets = list(self._sockets.values())
        self._sockets.clear()
        for socket, task in sockets:
            task.cancel()
            await asyncio.wait([task])
            socket.close()
        await asyncio.to_thread(self._context.term)


def _hand_on(
    hear: Callable[[Message, Reply], None], message: Message, reply: Reply, peer: str
) -> None:
    """One message that cannot be dealt with must not cost the others their channel."""
    try:
        hear(message, reply)
    except Exception:
        _logger.exception("side channel: a %s of %s failed", type(message).__name__, peer)


def _address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _decoded(frames: list[bytes], peer: str) -> Message | None:
    try:
        [frame] = frames
        return decode(frame)
    except ValueError as error:
        _logger.warning("side channel: %s said what is no message: %s", peer, error)
        return None
