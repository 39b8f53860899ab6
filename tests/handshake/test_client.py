from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import socket

import pytest
from peers import (
    CLIENT,
    HOST,
    LIMITS,
    NOTIFY,
    RawPeer,
    RecordingHandler,
    Runner,
    connect,
    serving,
)

from aioflagcx.errors import (
    AuthenticationError,
    ConnectError,
    ConnectRefused,
    ConnectTimeout,
    HandshakeRejected,
    HostUnreachable,
    ProtocolError,
)
from aioflagcx.handshake import open_connection
from aioflagcx.handshake.client import _Attempt
from aioflagcx.handshake.codec import encode
from aioflagcx.handshake.messages import Error, Goodbye, HelloReply


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.mark.parametrize("secret", [None, "s", "päss wörd"])
def test_the_same_secret_on_both_sides_connects(run: Runner, secret: str | None) -> None:
    async def scenario() -> None:
        async with serving(secret=secret) as server:
            connection = await connect(server.port, secret=secret)
            assert (await connection.request(NOTIFY, 10)).accepted
            connection.close("done")
            await connection.wait_closed()

    run(scenario())


@pytest.mark.parametrize(("ours", "theirs"), [("a", "b"), ("a", None), (None, "b")])
def test_secrets_that_differ_are_an_authentication_error(
    run: Runner, ours: str | None, theirs: str | None
) -> None:
    async def scenario() -> None:
        handlers = RecordingHandler(), RecordingHandler()
        async with serving(handlers[0], secret=theirs) as server:
            with pytest.raises(AuthenticationError, match="AIOFLAGCX_AUTH_SECRET") as caught:
                await connect(server.port, handlers[1], secret=ours)
            assert caught.value.peer is not None
            assert str(server.port) in caught.value.peer or caught.value.peer == "server:2"
            for handler in handlers:
                assert handler.connections.empty()
                assert handler.ends.empty()

    run(scenario())


def test_nobody_listening_is_connect_refused(run: Runner) -> None:
    async def scenario() -> None:
        port = free_port()
        with pytest.raises(ConnectRefused, match="start the engine") as caught:
            await connect(port)
        assert caught.value.peer == f"{HOST}:{port}"
        assert isinstance(caught.value.cause, OSError)

    run(scenario())


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64 + ".invalid", "ü" * 100])
def test_a_name_that_does_not_resolve_is_host_unreachable(run: Runner, host: str) -> None:
    async def scenario() -> None:
        with pytest.raises(HostUnreachable, match="cannot resolve") as caught:
            await open_connection(
                host,
                1,
                identity=CLIENT,
                secret=None,
                limits=LIMITS,
                timeout=20,
                handler=RecordingHandler(),
            )
        assert caught.value.peer == f"{host}:1"

    run(scenario())


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ECONNREFUSED, ConnectRefused),
        (errno.EHOSTUNREACH, HostUnreachable),
        (errno.ENETUNREACH, HostUnreachable),
        (errno.ETIMEDOUT, ConnectTimeout),
        (errno.EMFILE, ConnectError),
    ],
)
def test_errors_of_the_system_are_mapped(number: int, expected: type[ConnectError]) -> None:
    attempt = _Attempt("10.0.0.2", 5, CLIENT, None, LIMITS, RecordingHandler())
    error = attempt._mapped(OSError(number, "words"))
    assert type(error) is expected
    assert error.peer == "10.0.0.2:5"
    assert "words" in str(error)


def test_a_host_that_does_not_answer_is_a_timeout_that_says_so(run: Runner) -> None:
    async def scenario() -> None:
        # A listener whose queue is full drops further connection attempts, as a firewall does.
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket())
            listener.bind((HOST, 0))
            listener.listen(0)
            for _ in range(3):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
            with pytest.raises(ConnectTimeout, match="the host does not answer"):
                await connect(listener.getsockname()[1], timeout=0.1)

    run(scenario())


def test_a_peer_that_accepts_but_does_not_answer_is_a_timeout_that_says_so(run: Runner) -> None:
    async def scenario() -> None:
        async def silent(peer: RawPeer) -> None:
            await peer.closed_by_peer()

        async with RawPeer.accepting(silent) as port:
            with pytest.raises(ConnectTimeout, match="nobody answers our hello") as caught:
                await connect(port, timeout=0.05)
            assert caught.value.peer == f"{HOST}:{port}"

    run(scenario())


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolError),
        (b"\0\0\0\1\xc1", ProtocolError),
        (b"\0\0\0\0", ProtocolError),
        (b"", ConnectError),
        (b"\0\0", ConnectError),
        (encode(Goodbye(reason="closing", fenced=False)), ConnectError),
        (encode(Error(code="rejected", message="full"), 1), HandshakeRejected),
        (encode(Error(code="rejected", message="full"), 0), HandshakeRejected),
        (encode(Error(code="unsupported", message="v"), 1), ProtocolError),
        (
            encode(
                HelloReply(
                    version=1, engine_id=bytes(16), session_id="x:1", nonce=bytes(32), mac=b""
                ),
                2,
            ),
            ProtocolError,
        ),
    ],
)
def test_a_peer_that_answers_hello_otherwise_is_told_apart(
    run: Runner, answer: bytes, expected: type[ConnectError]
) -> None:
    async def scenario() -> None:
        async def behave(peer: RawPeer) -> None:
            await peer.receive()
            peer.writer.write(answer)

        handler = RecordingHandler()
        async with RawPeer.accepting(behave) as port:
            with pytest.raises(ConnectError) as caught:
                await connect(port, handler)
            assert type(caught.value) is expected
            assert caught.value.peer == f"{HOST}:{port}"
        assert handler.connections.empty()
        assert handler.ends.empty()

    run(scenario())


def test_a_server_cannot_make_an_initiator_buffer_much(run: Runner) -> None:
    async def scenario() -> None:
        async def behave(peer: RawPeer) -> None:
            await peer.receive()
            peer.writer.write(b"\x00\x10\x00\x00" + bytes(1 << 20))

        async with RawPeer.accepting(behave) as port:
            with pytest.raises(ProtocolError, match="limit of 4096"):
                await connect(port)

    run(scenario())


def test_a_cancelled_attempt_leaves_nothing_behind(run: Runner) -> None:
    async def scenario() -> None:
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def behave(peer: RawPeer) -> None:
            accepted.set_result(None)
            await peer.closed_by_peer()
            gone.set_result(None)

        async with RawPeer.accepting(behave) as port:
            task = asyncio.ensure_future(connect(port))
            await accepted
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await gone

    run(scenario())


def test_a_host_with_several_addresses_is_tried_at_each(run: Runner) -> None:
    async def scenario() -> None:
        async with serving() as server:
            connection = await open_connection(
                "localhost",  # ::1 first on many hosts, where nothing listens
                server.port,
                identity=CLIENT,
                secret=None,
                limits=dataclasses.replace(LIMITS),
                timeout=10,
                handler=RecordingHandler(),
            )
            assert (await connection.request(NOTIFY, 10)).accepted
            connection.close("done")
            await connection.wait_closed()

    run(scenario())
