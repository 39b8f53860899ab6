from __future__ import annotations

import asyncio
import dataclasses
import select
import socket
import time
from collections.abc import Callable

import pytest
from peers import (
    CLIENT,
    CONNECT,
    LIMITS,
    NOTIFY,
    SERVER,
    RawPeer,
    RecordingHandler,
    Runner,
    connect,
    connected,
    plain_reply,
    serving,
    update,
)

from aioflagcx.errors import (
    AioFlagcxError,
    AuthenticationError,
    ConnectError,
    ConnectTimeout,
    HandshakeRejected,
    PeerLost,
    ProtocolError,
    TransferTimeout,
)
from aioflagcx.handshake import CloseReason, ControlConnection
from aioflagcx.handshake.authentication import Initiator, Responder
from aioflagcx.handshake.codec import LENGTH, encode
from aioflagcx.handshake.messages import (
    Error,
    Fence,
    FenceReply,
    Message,
    Metadata,
    Notify,
    NotifyReply,
)


def test_both_sides_know_each_other(run: Runner) -> None:
    async def scenario() -> None:
        async with connected() as (initiator, responder):
            assert initiator.peer_engine_id == SERVER.engine_id
            assert initiator.peer_session_id == initiator.peer == SERVER.session_id
            assert responder.peer_engine_id == CLIENT.engine_id
            assert responder.peer_session_id == responder.peer == CLIENT.session_id
            for end in (initiator, responder):
                assert end.peer_host == end.local_host == "127.0.0.1"
                assert not end.is_closed
                sock = end._transport.get_extra_info("socket")  # type: ignore[union-attr]
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(scenario())


def test_every_request_gets_its_reply_in_both_directions(run: Runner) -> None:
    async def scenario() -> None:
        async with connected() as ends:
            for end in ends:
                assert await end.request(CONNECT, 10) == plain_reply(CONNECT)
                assert (await end.request(Metadata(since=0), None)).generation == 1
                assert (await end.request(NOTIFY, 10)).accepted
                assert (await end.request(Fence(attempt=5, rail=0), 10)).attempt == 5

    run(scenario())


def test_replies_find_their_requests_in_any_order(run: Runner) -> None:
    async def scenario() -> None:
        release = [asyncio.Event() for _ in range(10)]

        async def answer(message: Message) -> Message:
            assert isinstance(message, Fence)
            await release[message.attempt].wait()
            if message.attempt:
                release[message.attempt - 1].set()
            return FenceReply(attempt=message.attempt, rail=0)

        async with connected(server=RecordingHandler(answer)) as (initiator, _):
            requests = [
                asyncio.ensure_future(initiator.request(Fence(attempt=n, rail=0), 10))
                for n in range(10)
            ]
            release[9].set()
            assert [reply.attempt for reply in await asyncio.gather(*requests)] == list(range(10))

    run(scenario())


def test_pushes_arrive_in_order_on_both_sides(run: Runner) -> None:
    async def scenario() -> None:
        handlers = RecordingHandler(), RecordingHandler()
        async with connected(*handlers) as (initiator, responder):
            for sender, receiver in ((initiator, handlers[1]), (responder, handlers[0])):
                sent = [update(n * 100, generation=n) for n in range(100)]
                for message in sent:
                    sender.push(message)
                assert [await receiver.messages.get() for _ in sent] == sent

    run(scenario())


@pytest.mark.parametrize(
    ("raised", "expected", "words"),
    [
        (HandshakeRejected("no rail in common"), HandshakeRejected, "no rail in common"),
        (ProtocolError("nonsense"), ProtocolError, "nonsense"),
        (RuntimeError("oops"), ConnectError, "RuntimeError: oops"),
        (RuntimeError("x" * 5000), ConnectError, "xxx"),
    ],
)
def test_what_a_handler_raises_reaches_the_requester(
    run: Runner, raised: Exception, expected: type[AioFlagcxError], words: str
) -> None:
    async def scenario() -> None:
        async def answer(_: Message) -> Message:
            raise raised

        async with connected(server=RecordingHandler(answer)) as (initiator, _):
            for _ in range(2):  # the connection outlives it
                with pytest.raises(AioFlagcxError, match=words) as caught:
                    await initiator.request(CONNECT, 10)
                assert type(caught.value) is expected
                assert caught.value.peer == SERVER.session_id

    run(scenario())


@pytest.mark.parametrize("answered", [None, FenceReply(attempt=1, rail=0)])
def test_a_handler_that_answers_wrongly_is_an_internal_error(
    run: Runner, answered: Message | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async def answer(_: Message) -> Message | None:
            return answered

        async with connected(server=RecordingHandler(answer)) as (initiator, _):
            with pytest.raises(ConnectError, match="handler answered connect"):
                await initiator.request(CONNECT, 10)

    run(scenario())
    assert "handling connect failed" in caplog.text


def test_a_handler_that_fails_on_a_push_costs_a_log_record(
    run: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async def answer(message: Message) -> Message | None:
            if isinstance(message, Fence):
                return FenceReply(attempt=message.attempt, rail=0)
            raise RuntimeError("oops")

        async with connected(server=RecordingHandler(answer)) as (initiator, _):
            initiator.push(update())
            assert (await initiator.request(Fence(attempt=1, rail=0), 10)).attempt == 1

    run(scenario())
    assert "handling metadata failed" in caplog.text


@pytest.mark.parametrize(
    ("message", "expected"), [(CONNECT, ConnectTimeout), (NOTIFY, TransferTimeout)]
)
def test_a_request_times_out_and_its_late_reply_is_dropped(
    run: Runner, message: Notify, expected: type[AioFlagcxError]
) -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def answer(message: Message) -> Message | None:
            if not isinstance(message, Fence):
                await release.wait()
            return plain_reply(message)

        async with connected(server=RecordingHandler(answer)) as (initiator, _):
            with pytest.raises(expected, match=r"within 0\.01 s") as caught:
                await initiator.request(message, 0.01)
            assert caught.value.peer == SERVER.session_id
            release.set()
            for n in range(3):
                assert (await initiator.request(Fence(attempt=n, rail=0), 10)).attempt == n

    run(scenario())


def test_a_reply_that_arrived_while_our_own_loop_was_blocked_is_in_time(run: Runner) -> None:
    async def scenario() -> None:
        async with connected() as (initiator, _):
            sock = initiator._transport.get_extra_info("socket")  # type: ignore[union-attr]
            with socket.fromfd(sock.fileno(), sock.family, sock.type) as readable:
                task = asyncio.ensure_future(initiator.request(NOTIFY, 0.02))
                # A turn at a time until the reply is there but not read, then block.
                for _ in range(100):
                    await asyncio.sleep(0)
                    if select.select([readable], [], [], 0)[0]:
                        break
                time.sleep(0.1)  # noqa: ASYNC251
                assert (await task).accepted

    run(scenario())


def test_a_cancelled_request_leaves_the_connection_usable(run: Runner) -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def answer(message: Message) -> Message | None:
            if isinstance(message, Notify):
                await release.wait()
            return plain_reply(message)

        server = RecordingHandler(answer)
        async with connected(server=server) as (initiator, _):
            task = asyncio.ensure_future(initiator.request(NOTIFY, 10))
            await server.messages.get()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            release.set()
            assert (await initiator.request(Fence(attempt=1, rail=0), 10)).attempt == 1

    run(scenario())


def test_a_dropped_connection_fails_what_waits_and_what_comes_after(run: Runner) -> None:
    async def scenario() -> None:
        handler = RecordingHandler()

        async def behave(peer: RawPeer) -> None:
            await peer.welcome()
            for _ in range(3):
                await peer.receive()

        async with RawPeer.accepting(behave) as port:
            connection = await connect(port, handler)
            requests = [connection.request(Fence(attempt=n, rail=0), None) for n in range(3)]
            for outcome in await asyncio.gather(*requests, return_exceptions=True):
                assert isinstance(outcome, PeerLost)
                assert outcome.peer == SERVER.session_id
            reason = await connection.closed
            assert reason.kind == "lost"
            assert await handler.ends.get() == (connection, reason)
            with pytest.raises(PeerLost):
                await connection.request(Fence(attempt=1, rail=0), 10)
            connection.push(update())  # nothing happens
            connection.close("again")
            assert await connection.closed == reason
            await connection.wait_closed()

    run(scenario())


@pytest.mark.parametrize("fenced", [True, False])
def test_close_says_goodbye_with_the_reason(run: Runner, fenced: bool) -> None:
    async def scenario() -> None:
        handlers = RecordingHandler(), RecordingHandler()
        async with connected(*handlers) as (initiator, responder):
            responder.close("model\nunloaded", fenced=fenced)
            reason = await initiator.closed
            assert reason.kind == "goodbye"
            assert reason.fenced is initiator.is_fenced is fenced
            assert not responder.is_fenced
            assert "model\\nunloaded" in str(reason)
            assert (await responder.closed).kind == "local"
            assert (await handlers[0].ends.get())[1] == reason
            assert (await handlers[1].ends.get())[1].kind == "local"
            for end in (initiator, responder):
                with pytest.raises(PeerLost, match="unloaded"):
                    await end.request(NOTIFY, 10)

    run(scenario())


def test_what_was_written_before_close_still_arrives(run: Runner) -> None:
    async def scenario() -> None:
        handler = RecordingHandler()
        async with connected(handler) as (_, responder):
            responder.push(update(4_000_000))
            responder.close("done")
            assert await handler.messages.get() == update(4_000_000)

    run(scenario())


def test_a_peer_that_does_not_read_cannot_delay_close_beyond_the_grace(run: Runner) -> None:
    async def scenario() -> None:
        server = RecordingHandler()
        limits = dataclasses.replace(LIMITS, close_grace=0.05)
        async with serving(server, limits=limits) as running, RawPeer.dial(running.port) as peer:
            await peer.introduce()
            connection = await server.connections.get()
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            connection.push(update(8_000_000))
            connection.close("bye")
            assert (await connection.closed).kind == "local"

    run(scenario())


def test_a_peer_that_does_not_read_pushes_is_given_up(run: Runner) -> None:
    async def scenario() -> None:
        server = RecordingHandler()
        limits = dataclasses.replace(LIMITS, max_frame=100_000)
        async with serving(server, limits=limits) as running, RawPeer.dial(running.port) as peer:
            await peer.introduce()
            connection = await server.connections.get()
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            transport = connection._transport
            assert transport is not None
            largest = 0
            while not connection.is_closed:
                connection.push(update(50_000))
                largest = max(largest, transport.get_write_buffer_size())
                await asyncio.sleep(0)
            reason = await connection.closed
            assert reason.kind == "unread"
            assert largest <= limits.max_unsent + 51_000  # the push that was too much
            assert (await server.ends.get())[1] == reason

    run(scenario())


def test_a_peer_that_does_not_read_replies_costs_bounded_memory_and_nobody_else(
    run: Runner,
) -> None:
    async def scenario() -> None:
        concurrent = 0

        async def answer(message: Message) -> Message | None:
            nonlocal concurrent
            concurrent += 1
            return update(90_000) if isinstance(message, Metadata) else plain_reply(message)

        server = RecordingHandler(answer)
        limits = dataclasses.replace(LIMITS, max_frame=100_000, max_handlers=4)
        async with serving(server, limits=limits) as running, RawPeer.dial(running.port) as peer:
            await peer.introduce()
            slow = await server.connections.get()
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            count = 1000
            for n in range(count):
                peer.send(Metadata(since=n), 3 + n)
            other = await connect(running.port)
            # Handled are as many as fit into buffers of the system and the limits.
            handled = -1
            while handled != concurrent:
                handled = concurrent
                for n in range(100):
                    assert (await other.request(Fence(attempt=n, rail=0), 10)).attempt == n
                    concurrent -= 1
            assert handled < count
            assert not slow.is_closed
            assert len(slow._handlers) <= limits.max_handlers
            assert slow._transport is not None
            assert slow._transport.get_write_buffer_size() <= limits.max_unsent
            peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
            ids = sorted([(await peer.receive()).request_id for _ in range(count)])
            assert ids == list(range(3, 3 + count))
            other.close("done")
            await other.wait_closed()

    run(scenario())


def test_a_request_waits_until_the_peer_reads_but_not_beyond_its_timeout(run: Runner) -> None:
    async def scenario() -> None:
        server = RecordingHandler()
        async with serving(server) as running, RawPeer.dial(running.port) as peer:
            await peer.introduce()
            connection = await server.connections.get()
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            connection.push(update(8_000_000))
            assert connection._drained is not None
            unsent = connection._transport.get_write_buffer_size()  # type: ignore[union-attr]
            with pytest.raises(TransferTimeout):
                await connection.request(NOTIFY, 0.02)
            assert connection._transport.get_write_buffer_size() <= unsent  # type: ignore[union-attr]
            waiting = asyncio.ensure_future(connection.request(Fence(attempt=3, rail=0), 10))
            peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert (await peer.receive()).message == update(8_000_000)
            frame = await peer.receive()  # the request that timed out was never sent
            assert frame.message == Fence(attempt=3, rail=0)
            peer.send(FenceReply(attempt=3, rail=0), frame.request_id)
            assert (await waiting).attempt == 3

    run(scenario())


def test_drained_waits_for_the_peer_to_read_or_the_connection_to_end(run: Runner) -> None:
    async def scenario() -> None:
        server = RecordingHandler()
        async with serving(server) as running, RawPeer.dial(running.port) as peer:
            await peer.introduce()
            connection = await server.connections.get()
            await connection.drained()
            for _ in range(2):
                peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
                connection.push(update(8_000_000))
                waiting = asyncio.ensure_future(connection.drained())
                await asyncio.sleep(0)
                assert not waiting.done()
                peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
                await peer.receive()
                await waiting
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            connection.push(update(8_000_000))
            waiting = asyncio.ensure_future(connection.drained())
            await asyncio.sleep(0)
            assert not waiting.done()
            connection.abort(CloseReason("local", "test over"))
            await waiting

    run(scenario())


def test_requests_handled_at_once_are_bounded_by_number(run: Runner) -> None:
    async def scenario() -> None:
        running = most = 0
        release = asyncio.Event()
        full = asyncio.Event()

        async def answer(message: Message) -> Message | None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == 3:
                full.set()
            await release.wait()
            running -= 1
            return plain_reply(message)

        limits = dataclasses.replace(LIMITS, max_handlers=3)
        async with connected(server=RecordingHandler(answer), limits=limits) as (initiator, _):
            requests = [
                asyncio.ensure_future(initiator.request(Fence(attempt=n, rail=0), 10))
                for n in range(20)
            ]
            await full.wait()
            release.set()
            assert [reply.attempt for reply in await asyncio.gather(*requests)] == list(range(20))
        assert most == 3

    run(scenario())


def test_requests_handled_at_once_are_bounded_by_size(run: Runner) -> None:
    async def scenario() -> None:
        running = most = 0
        release = asyncio.Event()

        async def answer(message: Message) -> Message | None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await release.wait()
            running -= 1
            return plain_reply(message)

        limits = dataclasses.replace(LIMITS, max_frame=10_000)
        server = RecordingHandler(answer)
        async with connected(server=server, limits=limits) as (initiator, _):
            message = Notify(name="n", payload=bytes(9000), imm=0, imm_count=0)
            requests = [asyncio.ensure_future(initiator.request(message, 10)) for _ in range(9)]
            for _ in range(3):
                await server.messages.get()
            release.set()
            assert all(reply.accepted for reply in await asyncio.gather(*requests))
        assert most == 3  # the third reaches two frames of the largest size

    run(scenario())


def test_a_flood_of_frames_leaves_turns_to_the_event_loop(run: Runner) -> None:
    async def scenario() -> None:
        server = RecordingHandler()
        limits = dataclasses.replace(LIMITS, max_turn=0.0)
        async with serving(server, limits=limits) as running, RawPeer.dial(running.port) as peer:
            await peer.introduce()
            connection = await server.connections.get()
            seen_at = []
            turns = 0

            async def count_turns() -> None:
                nonlocal turns
                while True:
                    await asyncio.sleep(0)
                    turns += 1
                    if not server.messages.empty():
                        server.messages.get_nowait()
                        seen_at.append(turns)

            counter = asyncio.ensure_future(count_turns())
            peer.writer.write(encode(update()) * 500 + encode(Fence(attempt=1, rail=0), 3))
            assert (await peer.receive()).message == FenceReply(attempt=1, rail=0)
            counter.cancel()
            assert len(set(seen_at)) > 400  # not all in one turn
            assert not connection.is_closed

    run(scenario())


def test_an_unknown_kind_is_answered_with_an_error_and_a_push_of_one_is_ignored(
    run: Runner,
) -> None:
    def unknown(request_id: int) -> bytes:
        content = b"\x94\xa4sing" + bytes([request_id]) + b"\x00\x81\xa4song\x01"
        return LENGTH.pack(len(content)) + content

    async def scenario() -> None:
        async with serving() as running, RawPeer.dial(running.port) as peer:
            await peer.introduce()
            peer.writer.write(unknown(0) + unknown(7))
            frame = await peer.receive()
            assert (frame.request_id, frame.is_reply) == (7, True)
            assert isinstance(frame.message, Error)
            assert frame.message.code == "unsupported"
            assert "sing" in frame.message.message
            peer.send(Fence(attempt=1, rail=0), 8)
            assert (await peer.receive()).message == FenceReply(attempt=1, rail=0)

    run(scenario())


@pytest.mark.parametrize(
    ("bytes_for", "expected", "words"),
    [
        (lambda n: encode(FenceReply(attempt=1, rail=0), n + 1), ProtocolError, "never made"),
        (lambda n: encode(NotifyReply(accepted=True, reason=""), n), ProtocolError, "answered"),
        (lambda n: b"\0\0\0\1\xc1", ProtocolError, "broken frame"),
        (lambda n: b"GET / HTTP/1.1\r\n\r\n", ProtocolError, "exceed the limit"),
        (lambda n: encode(Error(code="protocol", message="no")), ProtocolError, "no"),
        (lambda n: encode(Error(code="rejected", message="no"), n), HandshakeRejected, "no"),
        (
            lambda n: encode(Error(code="authentication", message="no"), n),
            AuthenticationError,
            "no",
        ),
        (lambda n: encode(Error(code="unsupported", message="no"), n), ProtocolError, "no"),
        (lambda n: encode(Error(code="internal", message="no"), n), ConnectError, "no"),
        (
            lambda n: LENGTH.pack(6) + b"\x94\xa1x" + bytes([n]) + b"\x01\x80",
            ProtocolError,
            "x, which is not known",
        ),
    ],
)
def test_a_reply_that_is_none_fails_the_request(
    run: Runner,
    bytes_for: Callable[[int], bytes],
    expected: type[AioFlagcxError],
    words: str,
) -> None:
    async def scenario() -> None:
        async def behave(peer: RawPeer) -> None:
            await peer.welcome()
            frame = await peer.receive()
            peer.writer.write(bytes_for(frame.request_id))
            await peer.closed_by_peer()

        async with RawPeer.accepting(behave) as port:
            connection = await connect(port)
            with pytest.raises(AioFlagcxError, match=words) as caught:
                await connection.request(Fence(attempt=1, rail=0), 10)
            assert type(caught.value) is expected
            connection.close("done")
            await connection.wait_closed()

    run(scenario())


def test_hello_cannot_be_repeated(run: Runner) -> None:
    async def scenario() -> None:
        async with serving() as running, RawPeer.dial(running.port) as peer:
            await peer.introduce()
            peer.send(Initiator(CLIENT, None).start(), 3)
            frames = await peer.closed_by_peer()
            assert frames[0].message == Error(code="protocol", message="the peer repeats its hello")

    run(scenario())


def test_a_message_larger_than_the_limit_is_refused_before_it_is_sent(run: Runner) -> None:
    async def scenario() -> None:
        limits = dataclasses.replace(LIMITS, max_frame=10_000)

        async def answer(message: Message) -> Message | None:
            return update(20_000) if isinstance(message, Metadata) else plain_reply(message)

        async with connected(server=RecordingHandler(answer), limits=limits) as (initiator, _):
            large = Notify(name="n", payload=bytes(10_000), imm=0, imm_count=0)
            with pytest.raises(ProtocolError, match="handshake_max_frame"):
                await initiator.request(large, 10)
            with pytest.raises(ProtocolError, match="handshake_max_frame"):
                initiator.push(update(10_000))
            with pytest.raises(ProtocolError, match="handshake_max_frame"):
                await initiator.request(Metadata(since=0), 10)
            assert (await initiator.request(NOTIFY, 10)).accepted

    run(scenario())


def test_a_push_right_behind_the_auth_reply_is_handled_with_the_full_limit(run: Runner) -> None:
    async def scenario() -> None:
        async def together(peer: RawPeer) -> None:
            responder = Responder(SERVER, None)
            hello = await peer.receive()
            peer.send(responder.receive(hello.message), 1)
            auth = await peer.receive()
            data = encode(responder.receive(auth.message), 2) + encode(update(50_000))
            peer.writer.write(data)
            await peer.closed_by_peer()

        handler = RecordingHandler()
        async with RawPeer.accepting(together) as port:
            connection = await connect(port, handler)
            assert await handler.messages.get() == update(50_000)
            assert await handler.connections.get() is connection
            connection.close("done")
            await connection.wait_closed()

    run(scenario())


def test_handlers_run_on_after_the_end_and_are_cancelled_by_wait_closed(run: Runner) -> None:
    async def scenario() -> None:
        finish = asyncio.Event()
        finished: list[int] = []
        cancelled: list[int] = []

        async def answer(message: Message) -> Message | None:
            assert isinstance(message, Fence)
            try:
                if message.attempt:
                    await finish.wait()
                else:
                    await asyncio.Event().wait()
                finished.append(message.attempt)
            except asyncio.CancelledError:
                cancelled.append(message.attempt)
                raise
            return plain_reply(message)

        server = RecordingHandler(answer)
        limits = dataclasses.replace(LIMITS, close_grace=0.05)
        async with serving(server, limits=limits) as running:
            async with RawPeer.dial(running.port) as peer:
                await peer.introduce()
                peer.send(Fence(attempt=0, rail=0), 3)
                peer.send(Fence(attempt=1, rail=0), 4)
                for _ in range(2):
                    await server.messages.get()
            connection, reason = await server.ends.get()
            assert reason.kind == "lost"
            assert not finished
            finish.set()
            await connection.wait_closed()
            assert finished == [1]
            assert cancelled == [0]

    run(scenario())


def test_a_handler_that_fails_when_told_costs_that_connection(
    run: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(RecordingHandler):
        def connected(self, connection: ControlConnection) -> None:
            raise RuntimeError("connected")

        def disconnected(self, connection: ControlConnection, reason: object) -> None:
            raise RuntimeError("disconnected")

    async def scenario() -> None:
        async with serving(Broken()) as running:
            connection = await connect(running.port)
            assert (await connection.closed).kind == "goodbye"

    run(scenario())
    assert "failed in connected()" in caplog.text
    assert "failed in disconnected()" in caplog.text
