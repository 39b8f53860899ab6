"""The side channel: ZeroMQ sockets on the worker's event loop. A prefill worker listens."""

from __future__ import annotations

import asyncio
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

Reply = Callable[[Message], None]
"""Sends to the peer that said something; silently nowhere when it is gone."""


def _send(socket: zmq.asyncio.Socket, frames: list[bytes], peer: str) -> None:
    """Without waiting: what cannot be queued is lost, which time limits take care of."""

    def sent(future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            _logger.warning("side channel to %s: a message was not sent: %s", peer, error)

    asyncio.ensure_future(socket.send_multipart(frames, flags=zmq.NOBLOCK)).add_done_callback(sent)


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
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int(":" in host))
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
            self._context.term()
            self._task = self._socket = None


class Clients:
    """Sockets to the side channels of prefill workers, one each, which stay."""

    def __init__(self, hear: Callable[[Message, Reply], None]) -> None:
        """``hear`` gets every message."""
        self._hear = hear
        self._context = zmq.asyncio.Context()
        self._sockets: dict[str, tuple[zmq.asyncio.Socket, asyncio.Task[None]]] = {}

    def send(self, address: str, message: Message) -> None:
        """``address``: "host:port"; see :func:`_send`. zmq.ZMQError for one that is none."""
        if address not in self._sockets:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME)
            socket.setsockopt(zmq.LINGER, 0)
            host, _, port = address.rpartition(":")
            socket.setsockopt(zmq.IPV6, int(":" in host))
            try:
                socket.connect(_address(host, int(port)))
            except zmq.ZMQError:
                socket.close()
                raise
            self._sockets[address] = socket, asyncio.ensure_future(self._run(address, socket))
        _send(self._sockets[address][0], [encode(message)], address)

    async def _run(self, address: str, socket: zmq.asyncio.Socket) -> None:
        def reply(message: Message) -> None:
            self.send(address, message)

        while True:
            message = _decoded(await socket.recv_multipart(), address)
            if message is not None:
                _hand_on(self._hear, message, reply, address)

    async def close(self) -> None:
        """Idempotent."""
        sockets, self._sockets = self._sockets, {}
        for socket, task in sockets.values():
            task.cancel()
            await asyncio.wait([task])
            socket.close()
        self._context.term()


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
