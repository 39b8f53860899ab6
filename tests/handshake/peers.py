"""The two ends of control connections, for tests: engines' handlers, and raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aioflagcx.handshake import (
    CloseReason,
    ControlConnection,
    HandshakeServer,
    Identity,
    Limits,
    open_connection,
)
from aioflagcx.handshake.authentication import Initiator, Responder
from aioflagcx.handshake.codec import Frame, FrameDecoder, encode
from aioflagcx.handshake.messages import (
    Connect,
    ConnectReply,
    Fence,
    FenceReply,
    Message,
    Metadata,
    MetadataUpdate,
    Notify,
    NotifyReply,
)

HOST = "127.0.0.1"
CLIENT = Identity(b"c" * 16, "client:1")
SERVER = Identity(b"s" * 16, "server:2")
LIMITS = Limits()

CONNECT = Connect(
    attempt=1, rails=[{"address": "a"}], since=0, keepalive_interval=1.0, keepalive_timeout=5.0
)
NOTIFY = Notify(name="n", payload=b"p", imm=0, imm_count=0)


def update(size: int = 0, generation: int = 1) -> MetadataUpdate:
    """A push or reply with a table of ``size`` bytes."""
    return MetadataUpdate(full=True, base=0, generation=generation, table=bytes(size), removed=b"")


def plain_reply(message: Message) -> Message | None:
    """The obvious answer to a request."""
    if isinstance(message, Connect):
        return ConnectReply(
            attempt=message.attempt,
            rails=message.rails,
            path="tcp",
            table=b"table",
            generation=7,
            keepalive_port=9,
            keepalive_token=bytes(16),
            notification_max_payload=100,
        )
    if isinstance(message, Metadata):
        return update()
    if isinstance(message, Notify):
        return NotifyReply(accepted=True, reason="")
    if isinstance(message, Fence):
        return FenceReply(attempt=message.attempt, rail=0)
    return None


class RecordingHandler:
    """Answers requests with ``answer`` and keeps what happened."""

    def __init__(self, answer: Callable[[Message], Awaitable[Message | None]] | None = None):
        self.answer = answer
        self.connections: asyncio.Queue[ControlConnection] = asyncio.Queue()
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.ends: asyncio.Queue[tuple[ControlConnection, CloseReason]] = asyncio.Queue()

    def connected(self, connection: ControlConnection) -> None:
        self.connections.put_nowait(connection)

    async def handle(self, connection: ControlConnection, message: Message) -> Message | None:
        self.messages.put_nowait(message)
        return plain_reply(message) if self.answer is None else await self.answer(message)

    def disconnected(self, connection: ControlConnection, reason: CloseReason) -> None:
        self.ends.put_nowait((connection, reason))


@contextlib.asynccontextmanager
async def serving(
    handler: RecordingHandler | None = None, *, secret: str | None = None, limits: Limits = LIMITS
) -> AsyncIterator[HandshakeServer]:
    """A server that runs."""
    server = HandshakeServer(
        HOST,
        0,
        identity=SERVER,
        secret=secret,
        limits=limits,
        handler=handler or RecordingHandler(),
    )
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def connect(
    port: int,
    handler: RecordingHandler | None = None,
    *,
    secret: str | None = None,
    limits: Limits = LIMITS,
    timeout: float = 10.0,
) -> ControlConnection:
    """A connection to a server on this host."""
    return await open_connection(
        HOST,
        port,
        identity=CLIENT,
        secret=secret,
        limits=limits,
        timeout=timeout,
        handler=handler or RecordingHandler(),
    )


@contextlib.asynccontextmanager
async def connected(
    client: RecordingHandler | None = None,
    server: RecordingHandler | None = None,
    *,
    limits: Limits = LIMITS,
) -> AsyncIterator[tuple[ControlConnection, ControlConnection]]:
    """Both ends of one connection: the initiator's and the responder's."""
    server = server or RecordingHandler()
    async with serving(server, limits=limits) as running:
        initiator = await connect(running.port, client, limits=limits)
        responder = await server.connections.get()
        try:
            yield initiator, responder
        finally:
            initiator.close("test over")
            await initiator.wait_closed()


class RawPeer:
    """A peer that speaks frames, or whatever a test wants, over a plain stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.decoder = FrameDecoder(1 << 30)

    @classmethod
    @contextlib.asynccontextmanager
    async def dial(cls, port: int) -> AsyncIterator[RawPeer]:
        """Connected by TCP, and nothing said yet."""
        peer = cls(*await asyncio.open_connection(HOST, port))
        try:
            yield peer
        finally:
            await peer.hang_up()

    @classmethod
    @contextlib.asynccontextmanager
    async def accepting(cls, behave: Callable[[RawPeer], Awaitable[None]]) -> AsyncIterator[int]:
        """The port of a server that does ``behave`` on each connection and then closes it."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = cls(reader, writer)
            try:
                await behave(peer)
            finally:
                await peer.hang_up()

        server = await asyncio.start_server(serve, HOST, 0)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def hang_up(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    def send(self, message: Message, request_id: int = 0) -> None:
        self.writer.write(encode(message, request_id))

    async def receive(self) -> Frame:
        """The next frame; EOFError when the other side has closed."""
        while (frame := self.decoder.next()) is None:
            data = await self.reader.read(65_536)
            if not data:
                raise EOFError
            self.decoder.feed(data)
        return frame

    async def closed_by_peer(self) -> list[Frame]:
        """Wait for the other side to close; what it sent before."""
        frames = []
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                frames.append(await self.receive())
        return frames

    async def introduce(self, secret: str | None = None) -> None:
        """Do hello and auth as the initiator; requests may then use ids from 3."""
        initiator = Initiator(CLIENT, secret)
        self.send(initiator.start(), 1)
        auth = initiator.receive((await self.receive()).message)
        assert auth is not None
        self.send(auth, 2)
        initiator.receive((await self.receive()).message)
        assert initiator.done

    async def welcome(self, secret: str | None = None) -> None:
        """Answer hello and auth as the responder."""
        responder = Responder(SERVER, secret)
        while not responder.done:
            frame = await self.receive()
            self.send(responder.receive(frame.message), frame.request_id)


Runner = Callable[[Awaitable[Any]], Any]
