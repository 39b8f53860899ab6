from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
import struct

import pytest
from peers import (
    CLIENT,
    HOST,
    LIMITS,
    NOTIFY,
    SERVER,
    RawPeer,
    RecordingHandler,
    Runner,
    connect,
    serving,
)

from aioflagcx.errors import ConfigError, ConnectRefused, PeerLost
from aioflagcx.handshake import HandshakeServer, Identity, open_connection
from aioflagcx.handshake.authentication import Initiator
from aioflagcx.handshake.codec import LENGTH, encode
from aioflagcx.handshake.messages import Auth, Error, Fence, FenceReply, Goodbye, HelloReply

HELLO = encode(Initiator(CLIENT, None).start(), 1)


@pytest.mark.parametrize(
    "hostile",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"\0\0\0\0",
        b"\0\0\0\1\xc1",
        b"\xff\xff\xff\xff" + bytes(100_000),
        LENGTH.pack(4097),
        LENGTH.pack(4096) + b"\x91" * 4096,
        LENGTH.pack(5) + b"\xdd\xff\xff\xff\xff",
        encode(Fence(attempt=1, rail=0), 1),
        encode(Auth(mac=b""), 1),
        encode(FenceReply(attempt=1, rail=0), 1),
        encode(Error(code="x", message="y")),
        encode(Goodbye(reason="never mind\r\n", fenced=False)),
        HELLO + HELLO,
        HELLO + encode(Auth(mac=b"x" * 32), 2),
        HELLO + encode(Auth(mac=b""), 2) + b"\0\0\0\1\xc1",
        HELLO + encode(Auth(mac=b""), 2) + HELLO,
        os.urandom(10_000),
    ],
)
def test_hostile_bytes_cost_that_connection_only(run: Runner, hostile: bytes) -> None:
    async def scenario() -> None:
        async with serving() as server:
            good = await connect(server.port)
            for _ in range(5):
                async with RawPeer.dial(server.port) as peer:
                    peer.writer.write(hostile)
                    await peer.closed_by_peer()
                assert (await good.request(NOTIFY, 10)).accepted
            good.close("done")
            await good.wait_closed()

    run(scenario())


def test_broken_bytes_are_answered_with_an_error_and_logged_once(
    run: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving() as server, RawPeer.dial(server.port) as peer:
            peer.writer.write(b"\0\0\0\1\xc1" * 100)
            frames = await peer.closed_by_peer()
            assert len(frames) == 1
            assert isinstance(frames[0].message, Error)
            assert frames[0].message.code == "protocol"

    with caplog.at_level(logging.DEBUG, logger="aioflagcx"):
        run(scenario())
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "broken frame" in caplog.text
    assert HOST in caplog.text


def test_a_peer_cannot_forge_log_lines(run: Runner, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with serving() as server, RawPeer.dial(server.port) as peer:
            peer.send(Goodbye(reason="bye\nERROR: disk on fire", fenced=False))
            await peer.closed_by_peer()

    with caplog.at_level(logging.DEBUG, logger="aioflagcx"):
        run(scenario())
    (record,) = caplog.records
    assert "disk on fire" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_working_connection_is_not_logged(run: Runner, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with serving() as server:
            connection = await connect(server.port)
            await connection.request(NOTIFY, 10)
            connection.close("done")
            await connection.wait_closed()

    with caplog.at_level(logging.DEBUG, logger="aioflagcx"):
        run(scenario())
    assert not caplog.records


def test_a_wrong_proof_is_answered_with_the_reason(run: Runner) -> None:
    async def scenario() -> None:
        handler = RecordingHandler()
        async with serving(handler, secret="s") as server, RawPeer.dial(server.port) as peer:
            peer.writer.write(HELLO)
            assert isinstance((await peer.receive()).message, HelloReply)
            peer.send(Auth(mac=bytes(32)), 2)
            (frame,) = await peer.closed_by_peer()
            assert isinstance(frame.message, Error)
            assert frame.message.code == "authentication"
            assert (frame.request_id, frame.is_reply) == (2, True)
        assert handler.connections.empty()
        assert handler.ends.empty()

    run(scenario())


@pytest.mark.parametrize("said", [b"", b"\0\0", HELLO[:-1], HELLO])
def test_a_peer_that_does_not_authenticate_in_time_is_dropped(run: Runner, said: bytes) -> None:
    async def scenario() -> None:
        limits = dataclasses.replace(LIMITS, authentication_timeout=0.05)
        async with serving(limits=limits) as server:
            good = await connect(server.port)
            async with RawPeer.dial(server.port) as peer:
                peer.writer.write(said)
                await peer.closed_by_peer()
            assert (await good.request(NOTIFY, 10)).accepted  # the deadline is not for it
            good.close("done")
            await good.wait_closed()

    run(scenario())


@pytest.mark.parametrize("introduced", [False, True])
def test_a_half_closed_peer_is_closed(run: Runner, introduced: bool) -> None:
    async def scenario() -> None:
        handler = RecordingHandler()
        async with serving(handler) as server, RawPeer.dial(server.port) as peer:
            if introduced:
                await peer.introduce()
            peer.writer.write_eof()
            await peer.closed_by_peer()
            if introduced:
                assert (await handler.ends.get())[1].kind == "lost"

    run(scenario())


def test_a_peer_that_ends_in_the_middle_of_a_frame_is_lost(run: Runner) -> None:
    async def scenario() -> None:
        handler = RecordingHandler()
        async with serving(handler) as server, RawPeer.dial(server.port) as peer:
            await peer.introduce()
            peer.writer.write(encode(NOTIFY, 3)[:-1])
            peer.writer.write_eof()
            reason = (await handler.ends.get())[1]
            assert reason.kind == "lost"
            assert "middle of a frame" in str(reason)

    run(scenario())


def test_a_peer_that_resets_at_once_costs_nothing(run: Runner) -> None:
    async def scenario() -> None:
        async with serving() as server:
            for _ in range(50):
                with socket.create_connection((HOST, server.port)) as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection = await connect(server.port)
            assert (await connection.request(NOTIFY, 10)).accepted
            connection.close("done")
            await connection.wait_closed()

    run(scenario())


def test_of_too_many_that_do_not_authenticate_the_oldest_goes(run: Runner) -> None:
    async def scenario() -> None:
        limits = dataclasses.replace(LIMITS, max_unauthenticated=3)
        async with serving(limits=limits) as server:
            good = await connect(server.port)
            async with (
                RawPeer.dial(server.port) as first,
                RawPeer.dial(server.port) as second,
                RawPeer.dial(server.port) as third,
                RawPeer.dial(server.port) as fourth,
            ):
                await first.closed_by_peer()
                for peer in (second, third, fourth):
                    await peer.introduce()
            assert (await good.request(NOTIFY, 10)).accepted
            good.close("done")
            await good.wait_closed()

    run(scenario())


def test_a_stopped_server_goes_on_with_the_connections_it_has(run: Runner) -> None:
    async def scenario() -> None:
        async with serving() as server:
            connection = await connect(server.port)
            server.stop()
            with pytest.raises(ConnectRefused):
                await connect(server.port)
            assert (await connection.request(NOTIFY, 10)).accepted
            await server.close("engine closed")
            assert (await connection.closed).kind == "goodbye"

    run(scenario())


def test_close_says_goodbye_to_all_and_frees_the_port(run: Runner) -> None:
    async def scenario() -> None:
        async with serving() as server:
            connections = [await connect(server.port) for _ in range(5)]
            waiting = [
                asyncio.ensure_future(connection.request(NOTIFY, None))
                for connection in connections
            ]
            await server.close("engine closed")
            for connection, request in zip(connections, waiting, strict=True):
                reason = await connection.closed
                assert reason.kind == "goodbye"
                assert "engine closed" in str(reason)
                (outcome,) = await asyncio.gather(request, return_exceptions=True)
                assert isinstance(outcome, PeerLost)
            assert not server.connections
            with pytest.raises(ConnectRefused):
                await connect(server.port)
            await server.close()
            again = HandshakeServer(
                HOST,
                server.port,
                identity=SERVER,
                secret=None,
                limits=LIMITS,
                handler=RecordingHandler(),
            )
            await again.start()
            await again.close()

    run(scenario())


def test_the_port_is_known_before_anyone_can_connect(run: Runner) -> None:
    async def scenario() -> None:
        server = HandshakeServer(
            HOST,
            0,
            identity=SERVER,
            secret=None,
            limits=LIMITS,
            handler=RecordingHandler(),
        )
        await server.bind()
        assert server.port > 0
        with pytest.raises(ConnectRefused):
            await connect(server.port)
        server.identity = Identity(b"x" * 16, f"{HOST}:{server.port}")
        await server.start()
        connection = await connect(server.port)
        assert connection.peer_session_id == f"{HOST}:{server.port}"
        connection.close("done")
        await connection.wait_closed()
        await server.close()

    run(scenario())


def test_a_server_that_was_bound_but_not_started_can_be_closed(run: Runner) -> None:
    async def scenario() -> None:
        server = HandshakeServer(
            HOST, 0, identity=SERVER, secret=None, limits=LIMITS, handler=RecordingHandler()
        )
        await server.close()
        await server.bind()
        await server.close()

    run(scenario())


def test_an_address_that_cannot_be_bound_is_named(run: Runner) -> None:
    async def scenario() -> None:
        async with serving() as running:
            for host, port in ((HOST, running.port), ("192.0.2.1", 0), ("no-host.invalid", 0)):
                server = HandshakeServer(
                    host,
                    port,
                    identity=SERVER,
                    secret=None,
                    limits=LIMITS,
                    handler=RecordingHandler(),
                )
                with pytest.raises(ConfigError, match=f"cannot listen on {host}:{port}"):
                    await server.start()

    run(scenario())


def test_ipv6_works(run: Runner) -> None:
    async def scenario() -> None:
        server = HandshakeServer(
            "::1", 0, identity=SERVER, secret=None, limits=LIMITS, handler=RecordingHandler()
        )
        await server.start()
        connection = await open_connection(
            "::1",
            server.port,
            identity=CLIENT,
            secret=None,
            limits=LIMITS,
            timeout=10,
            handler=RecordingHandler(),
        )
        assert connection.peer_host == "::1"
        connection.close("done")
        await connection.wait_closed()
        await server.close()

    run(scenario())


def test_many_connect_at_once(run: Runner) -> None:
    async def scenario() -> None:
        async with serving(secret="s") as server:
            connections = await asyncio.gather(
                *(connect(server.port, secret="s") for _ in range(200))
            )
            replies = await asyncio.gather(*(c.request(NOTIFY, 10) for c in connections))
            assert all(reply.accepted for reply in replies)
            for connection in connections:
                connection.close("done")
            await asyncio.gather(*(c.wait_closed() for c in connections))

    run(scenario())
