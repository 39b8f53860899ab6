"""Promise 5: a peer that dies, stops, restarts or closes makes transfers fail with the reason, in
time; nothing hangs; the next call connects afresh."""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np
import pytest
from promises.host import Host, connections, listeners, wait_disconnected
from promises.lab import ARRANGEMENTS, Lab
from promises.measures import SLACK, KiB, MiB, random_bytes, until
from promises.peers import ChildPeer

from aioflagcx import Engine, Session, Transfer
from aioflagcx.errors import (
    AioFlagcxError,
    ConnectError,
    ConnectRefused,
    ConnectTimeout,
    EngineClosed,
    PeerLost,
    PeerRestarted,
    RemoteAddressError,
    TransferError,
    TransferTimeout,
)
from aioflagcx.handshake import ControlConnection, HandshakeServer, Identity, Limits

BIG = 64 * MiB


def submit_endless(
    engine: Engine, session: Session, source: int, target: int, count: int = 4
) -> list[Transfer]:
    """Writes and reads of 16 GiB each, which will not be done before what the test does."""
    sources, targets = np.full(256, source), np.full(256, target)
    return [
        (engine.submit_write, engine.submit_read)[i % 2](
            session, sources, targets, BIG, timeout=None
        )
        for i in range(count)
    ]


async def errors_of(transfers: list[Transfer], limit: float) -> list[BaseException]:
    """How transfers fail, which they all must within `limit` seconds."""
    started = time.monotonic()
    outcomes = await asyncio.wait_for(
        asyncio.gather(*transfers, return_exceptions=True), limit + 30
    )
    assert time.monotonic() - started < limit
    return outcomes


@pytest.mark.arrangements("local-processes", "tcp-processes")
async def test_a_killed_peer_fails_all_its_transfers_and_its_successor_is_connected_afresh(
    lab: Lab,
) -> None:
    keepalive_timeout, drain_timeout = 2.0, 1.0
    engine = await lab.engine(
        keepalive_interval=0.3, keepalive_timeout=keepalive_timeout, drain_timeout=drain_timeout
    )
    peer: ChildPeer = await lab.peer(BIG)
    ours = random_bytes(BIG, 1).copy()
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)

    transfers = submit_endless(engine, session, region.addr, peer.at(0))
    await until(lambda: any(transfer.bytes_done for transfer in transfers))
    await peer.kill()
    errors = await errors_of(transfers, keepalive_timeout + drain_timeout + SLACK)
    for transfer, error in zip(transfers, errors, strict=True):
        assert isinstance(error, PeerLost)
        assert error.peer == peer.session_id
        assert peer.session_id in str(error)
        assert transfer.status == "failed"
        assert transfer.remote_quiet == error.remote_quiet
    assert not session.alive
    assert engine.stats().transfers_pending == 0

    # Nobody is there: that is said at once.
    for again in (session, session.id):
        with pytest.raises(ConnectRefused) as refused:
            await asyncio.wait_for(engine.write(again, region.addr, peer.at(0), 1), 10)
        assert refused.value.peer == peer.session_id

    # Somebody else is there: the session object is of the old engine, its id is of the new one.
    successor = await lab.peer(BIG, port=peer.rpc_port)
    assert successor.session_id == peer.session_id
    with pytest.raises(PeerRestarted) as restarted:
        await engine.write(session, region.addr, successor.at(0), 1)
    assert restarted.value.peer == peer.session_id
    assert not successor.memory.any()
    assert await engine.write(session.id, region, successor.at(0), region) == BIG
    assert np.array_equal(successor.memory, ours)
    afresh = await lab.connect(engine, successor)
    assert afresh.peer_engine_id != session.peer_engine_id


@pytest.mark.arrangements("local-processes", "tcp-processes")
async def test_a_peer_that_restarts_unnoticed_is_found_out_by_the_next_call(lab: Lab) -> None:
    engine = await lab.engine()
    peer: ChildPeer = await lab.peer(KiB)
    region = await engine.register(np.ones(KiB, np.uint8))
    session = await lab.connect(engine, peer)
    await peer.kill()
    successor = await lab.peer(KiB, port=peer.rpc_port)
    # Whether or not the loss was noticed: it is a typed error that names the peer, or success
    # for an id, never a write to where the old engine's memory was.
    with pytest.raises((PeerRestarted, PeerLost)) as lost:
        await engine.write(session, region, successor.at(0), region)
    assert lost.value.peer == peer.session_id
    assert not successor.memory.any()
    await engine.write(session.id, region, successor.at(0), region)
    assert successor.memory.all()


@pytest.mark.arrangements("local-processes", "tcp-processes")
async def test_a_stopped_peer_fails_its_transfers_in_time_and_is_connected_afresh_when_it_goes_on(
    lab: Lab,
) -> None:
    keepalive_timeout, drain_timeout, connect_timeout = 1.5, 0.5, 1.0
    engine = await lab.engine(
        keepalive_interval=0.2,
        keepalive_timeout=keepalive_timeout,
        drain_timeout=drain_timeout,
        connect_timeout=connect_timeout,
    )
    peer: ChildPeer = await lab.peer(BIG)
    ours = random_bytes(BIG, 1).copy()
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)

    transfers = submit_endless(engine, session, region.addr, peer.at(0))
    await until(lambda: any(transfer.bytes_done for transfer in transfers))
    peer.stop()
    errors = await errors_of(transfers, keepalive_timeout + drain_timeout + SLACK)
    for index, (transfer, error) in enumerate(zip(transfers, errors, strict=True)):
        assert isinstance(error, PeerLost)
        assert error.peer == peer.session_id
        assert transfer.status == "failed"
        assert transfer.remote_quiet == error.remote_quiet
        if index % 2 == 0:  # a write: its bytes may be on the way still, or are copied here
            assert transfer.remote_quiet is (lab.arrangement.path == "local")

    started = time.monotonic()
    with pytest.raises(ConnectTimeout) as timed_out:
        await engine.write(session.id, region, peer.at(0), region)
    assert isinstance(timed_out.value, TimeoutError)
    assert timed_out.value.peer == peer.session_id
    assert time.monotonic() - started < connect_timeout + SLACK

    peer.resume()
    # The same engine: the old session object serves as well as the id.
    assert await engine.write(session, region, peer.at(0), region) == BIG
    afresh = await lab.connect(engine, peer)
    assert afresh.peer_engine_id == session.peer_engine_id
    assert np.array_equal(peer.memory, ours)


@pytest.mark.arrangements("tcp-processes")
async def test_a_timeout_ends_a_transfer_to_a_stopped_peer_long_before_the_keepalive_does(
    lab: Lab,
) -> None:
    drain_timeout, timeout = 0.5, 0.4
    engine = await lab.engine(keepalive_timeout=60, drain_timeout=drain_timeout)
    peer: ChildPeer = await lab.peer(BIG)
    region = await engine.register(np.ones(BIG, np.uint8))
    session = await lab.connect(engine, peer)
    peer.stop()
    started = time.monotonic()
    with pytest.raises(TransferTimeout) as timed_out:
        await engine.write(session, region, peer.at(0), region, timeout=timeout)
    elapsed = time.monotonic() - started
    assert timeout <= elapsed < timeout + drain_timeout + SLACK
    assert timed_out.value.remote_quiet is False
    assert timed_out.value.peer == peer.session_id

    # An awaiter that is cancelled waits for quiet, too, and no longer.
    task = asyncio.ensure_future(engine.write(session, region, peer.at(0), region))
    await asyncio.sleep(0)
    started = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < drain_timeout + SLACK

    peer.resume()
    assert await engine.write(session, region, peer.at(0), region) == BIG
    assert peer.memory.all()


@pytest.mark.arrangements("process", "process-threads", "local-processes", "tcp", "tcp-processes")
async def test_a_peer_that_closes_its_engine_fails_transfers_and_refuses_new_ones(
    lab: Lab,
) -> None:
    engine = await lab.engine()
    peer = await lab.peer(BIG)
    region = await engine.register(np.ones(BIG, np.uint8))
    session = await lab.connect(engine, peer)
    transfers = submit_endless(engine, session, region.addr, peer.at(0))
    await until(lambda: any(transfer.bytes_done for transfer in transfers))

    await asyncio.wait_for(peer.run(Host.close), 10)
    # Its memory is its own again: nothing of ours arrives after close() has returned.
    peer.memory[:] = 0
    errors = await errors_of(transfers, 1.0 + SLACK)
    for error in errors:
        assert isinstance(error, PeerLost), error
        assert error.peer == peer.session_id
    with pytest.raises(ConnectRefused):
        await engine.write(session.id, region, peer.at(0), region)
    assert not peer.memory.any()


@pytest.mark.arrangements("process", "process-threads", "local-processes", "tcp", "tcp-processes")
async def test_closing_the_engine_ends_its_transfers_with_engine_closed(lab: Lab) -> None:
    engine = await lab.engine(drain_timeout=1.0)
    peer = await lab.peer(BIG)
    ours = np.ones(BIG, np.uint8)
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    transfers = submit_endless(engine, session, region.addr, peer.at(0))
    await until(lambda: any(transfer.bytes_done for transfer in transfers))

    started = time.monotonic()
    await asyncio.wait_for(engine.close(), 10)
    assert time.monotonic() - started < 1.0 + 0.5 + SLACK
    ours[:] = 2  # ours again
    for transfer in transfers:
        assert transfer.done()
        with pytest.raises(EngineClosed):
            await transfer
    with pytest.raises(EngineClosed):
        await engine.write(session, region, peer.at(0), region)
    assert (ours == 2).all(), "a read came in after close"
    assert not (peer.memory == 2).any(), "a write went out after close"

    # The peer has lost nothing but this session.
    other = await lab.engine()
    region = await other.register(np.full(BIG, 3, np.uint8))
    await other.write(peer.session_id, region, peer.at(0), region)
    assert (peer.memory == 3).all()


@pytest.mark.arrangements("local-processes", "tcp-processes")
async def test_a_peer_that_dies_while_connecting_is_a_connect_error_in_time(lab: Lab) -> None:
    engine = await lab.engine(connect_timeout=2.0)
    peer: ChildPeer = await lab.peer(KiB)
    region = await engine.register(np.ones(KiB, np.uint8))
    peer.stop()
    write = asyncio.ensure_future(engine.write(peer.session_id, region, peer.at(0), region))
    await asyncio.sleep(0)
    await peer.kill()
    with pytest.raises(AioFlagcxError) as failed:
        await asyncio.wait_for(write, 2.0 + SLACK)
    assert failed.value.peer == peer.session_id


class Curt:
    """Serves peers by saying goodbye as soon as they have introduced themselves."""

    def connected(self, connection: ControlConnection) -> None:
        connection.close("not now")

    async def handle(self, connection: ControlConnection, message: object) -> None:
        return None

    def disconnected(self, connection: ControlConnection, reason: object) -> None:
        pass


@pytest.mark.arrangements("tcp")
async def test_a_peer_that_says_goodbye_at_once_is_a_connect_error_and_leaves_nothing_behind(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    identity = Identity(bytes(16), "127.0.0.1:1")
    limits = Limits.from_config(lab.config())
    server = HandshakeServer(
        "127.0.0.1", 0, identity=identity, secret=None, limits=limits, handler=Curt()
    )
    await server.start()
    engine = await lab.engine()
    for _ in range(5):
        with pytest.raises(ConnectError) as failed:
            await engine.connect(f"127.0.0.1:{server.port}")
        assert "not now" in str(failed.value)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    await until(lambda: engine.stats().sessions == 0)
    await server.close()


@pytest.mark.parametrize("signal", ["killed", "stopped"])
@pytest.mark.arrangements("local-processes", "tcp-processes")
async def test_one_lost_peer_disturbs_no_other(lab: Lab, signal: str) -> None:
    engine = await lab.engine(keepalive_interval=0.2, keepalive_timeout=1.5)
    lost, healthy = await lab.peer(BIG), await lab.peer(BIG)
    ours = random_bytes(BIG, 1).copy()
    region = await engine.register(ours)
    to_lost, to_healthy = await lab.connect(engine, lost), await lab.connect(engine, healthy)
    transfers = submit_endless(engine, to_lost, region.addr, lost.at(0))
    await until(lambda: any(transfer.bytes_done for transfer in transfers))
    await lost.kill() if signal == "killed" else lost.stop()
    ended = asyncio.ensure_future(errors_of(transfers, 1.5 + 1.0 + SLACK))
    while not ended.done():
        healthy.memory[:] = 0
        assert await engine.write(to_healthy, region, healthy.at(0), region) == BIG
        assert np.array_equal(healthy.memory, ours)
    assert all(isinstance(error, PeerLost) for error in await ended)
    assert to_healthy.alive


async def test_regions_of_a_lost_session_are_void_for_the_next_engine(lab: Lab) -> None:
    """An address of the old engine is refused by the new one, unless it has it too."""
    engine = await lab.engine()
    peer = await lab.peer(KiB)
    region = await engine.register(np.ones(KiB, np.uint8))
    await lab.connect(engine, peer)
    await peer.run(Host.close)
    successor = await lab.peer(KiB, port=peer.rpc_port, register=False)
    with pytest.raises((RemoteAddressError, PeerLost)):
        await engine.write(successor.session_id, region, peer.at(0), region)
    with pytest.raises(RemoteAddressError):
        await engine.write(successor.session_id, region, peer.at(0), region)
    assert not peer.memory.any()


@pytest.mark.timeout(180)
@pytest.mark.arrangements("tcp")
async def test_a_peer_whose_loop_is_blocked_for_20_s_loses_nothing(lab: Lab) -> None:
    """On every path at once, since it takes so long: two loops in one process, two processes."""
    seconds, size = 20.0, 8 * MiB
    keepalive = {"keepalive_interval": 0.3, "keepalive_timeout": 3.0}
    names = ("process-threads", "tcp-processes")
    ours = random_bytes(size, 1).copy()

    async def write_into_blocked(name: str) -> int:
        path = ARRANGEMENTS[name].path
        engine = await lab.engine(lab.config(path, **keepalive))
        peer = await lab.peer(2 * size, arrangement=ARRANGEMENTS[name], **keepalive)
        region = await engine.register(ours, name=name)
        session = await engine.connect(peer.session_id)
        assert session.path == path
        blocked = asyncio.ensure_future(peer.run(Host.block_loop, seconds))
        await asyncio.sleep(0)
        notified = [
            asyncio.ensure_future(
                engine.write(
                    session, region, peer.at(size), region, notify=(f"{i}", b""), timeout=60
                )
            )
            for i in range(3)
        ]
        rounds = 0
        while not blocked.done():
            peer.memory[:size] = 0
            assert await engine.write(session, region, peer.at(0), region) == size
            assert np.array_equal(peer.memory[:size], ours)
            rounds += 1
        await blocked
        assert session.alive
        assert (await engine.connect(peer.session_id)) is session
        await asyncio.gather(*notified)
        await session.notify("end", b"")
        assert sorted(await peer.run(Host.notification_names, "end")) == ["0", "1", "2"]
        assert np.array_equal(peer.memory[size:], ours)
        assert await peer.run(Host.responders) == 1
        return rounds

    started = time.monotonic()
    rounds = await asyncio.gather(*(write_into_blocked(name) for name in names))
    assert time.monotonic() - started > seconds
    # A session that died and came back would have been slower by seconds, or failed.
    assert min(rounds) > 20


async def test_a_closed_engine_listens_at_no_port_any_more(lab: Lab) -> None:
    """Whoever connects is refused at once, though the engine object is still there."""
    before = listeners()
    engine, peer = await lab.engine(), await lab.peer(KiB)
    region = await engine.register(np.ones(KiB, np.uint8))
    session = await lab.connect(engine, peer)
    await engine.write(session, region, peer.at(0), region)
    assert len(listeners() - before) >= 2, "handshake and keepalive, at least"
    await peer.run(Host.close)
    await engine.close()
    assert listeners() <= before


@pytest.mark.parametrize("ended_by", ["session", "engine", "peer"])
async def test_whoever_ends_a_session_no_connection_is_left(lab: Lab, ended_by: str) -> None:
    before = connections()
    engine, peer = await lab.engine(), await lab.peer(KiB)
    region = await engine.register(np.ones(KiB, np.uint8))
    session = await lab.connect(engine, peer)
    await engine.write(session, region, peer.at(0), region)
    await until(lambda: len(connections() - before) >= 2)  # control and keepalive, at least
    if ended_by == "session":
        await session.close()
    elif ended_by == "engine":
        await engine.close()
    else:
        await peer.run(Host.close)
    await until(lambda: not connections() - before)
    if peer.pid != os.getpid():
        await peer.run(wait_disconnected)


@pytest.mark.arrangements("local-processes", "tcp-processes")
async def test_a_session_with_a_stopped_peer_leaves_no_connection_here_either(lab: Lab) -> None:
    before = connections()
    engine = await lab.engine(keepalive_timeout=3_600)
    peer: ChildPeer = await lab.peer(KiB)
    session = await lab.connect(engine, peer)
    await until(lambda: len(connections() - before) >= 2)  # control and keepalive, at least
    peer.stop()
    await session.close()
    await until(lambda: not connections() - before)


@pytest.mark.arrangements("process", "process-threads", "local-processes", "tcp", "tcp-processes")
async def test_a_closed_session_cancels_what_is_under_way_and_the_next_call_connects_again(
    lab: Lab,
) -> None:
    engine, peer = await lab.engine(), await lab.peer(BIG)
    ours = np.ones(BIG, np.uint8)
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    transfers = submit_endless(engine, session, region.addr, peer.at(0))
    await until(lambda: any(transfer.bytes_done for transfer in transfers))
    await asyncio.wait_for(session.close(), 10)
    for transfer in transfers:
        assert transfer.done()
        with pytest.raises(TransferError):
            await transfer
    assert not session.alive
    ours[:] = 1  # some of them were reads
    peer.memory[:] = 0
    assert await engine.write(session.id, region, peer.at(0), region) == BIG
    assert peer.memory.all()
