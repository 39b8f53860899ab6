"""Sessions: connecting once, sharing, losing, connecting again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import numpy as np
import pytest
from conformance.devices import Devices
from conformance.fixtures import Engines
from conformance.pair import Pair, silent_peer, until

from aioflagcx import Engine, Session
from aioflagcx.errors import (
    AuthenticationError,
    ConnectRefused,
    ConnectTimeout,
    HostUnreachable,
    PeerLost,
    PeerRestarted,
    TransferCancelled,
    TransferTimeout,
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_session_tells_what_it_is(pair: Pair, devices: Devices) -> None:
    session = pair.session
    assert session.id == pair.theirs.session_id
    assert session.peer_engine_id == pair.theirs.engine_id
    assert session.path == devices.path
    assert session.alive


async def test_there_is_one_session_with_each_peer(pair: Pair) -> None:
    assert await pair.ours.connect(pair.theirs.session_id) is pair.session
    assert pair.theirs.stats().responders == 1


async def test_concurrent_calls_share_one_connect(engines: Engines) -> None:
    ours, theirs = await engines.near(), await engines.far()
    region = await ours.register(bytearray(64))
    target = await theirs.register(bytearray(64))
    connects = [ours.connect(theirs.session_id) for _ in range(20)]
    writes = [ours.write(theirs.session_id, region, target, 64) for _ in range(20)]
    results = await asyncio.gather(*connects, *writes)
    assert len(set(map(id, results[:20]))) == 1
    assert results[20:] == [64] * 20
    assert theirs.stats().responders == ours.stats().sessions == 1


async def test_a_caller_who_gives_up_leaves_the_connect_to_the_others(engines: Engines) -> None:
    ours, theirs = await engines.near(), await engines.far()
    for turns in range(8):
        first = asyncio.create_task(ours.connect(theirs.session_id))
        others = [asyncio.create_task(ours.connect(theirs.session_id)) for _ in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        first.cancel()
        sessions = await asyncio.gather(*others)
        assert all(session.alive for session in sessions)
        await asyncio.wait((first,))
        await sessions[0].close()


async def test_a_short_timeout_does_not_end_the_connect_of_others(engines: Engines) -> None:
    ours = await engines.near()
    with silent_peer() as peer:
        short = asyncio.create_task(ours.connect(peer, timeout=0.05))
        await asyncio.sleep(0)
        long = asyncio.create_task(ours.connect(peer, timeout=0.4))
        started = asyncio.get_running_loop().time()
        with pytest.raises(ConnectTimeout):
            await short
        with pytest.raises(ConnectTimeout):
            await long
        assert asyncio.get_running_loop().time() - started > 0.3


async def test_when_all_give_up_the_connect_is_given_up(engines: Engines) -> None:
    ours = await engines.near()
    with silent_peer() as peer:
        callers = [asyncio.create_task(ours.connect(peer, timeout=None)) for _ in range(3)]
        for _ in range(5):
            await asyncio.sleep(0)
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=2)
        assert all(task.done() for task in tasks)


@pytest.mark.parametrize("turns", range(0, 30, 3))
async def test_a_connect_cancelled_at_any_time_leaves_nothing(engines: Engines, turns: int) -> None:
    ours, theirs = await engines.near(), await engines.far()
    caller = asyncio.create_task(ours.connect(theirs.session_id))
    for _ in range(turns):
        await asyncio.sleep(0)
    caller.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await caller
    assembly: Any = ours._open
    for session in list(assembly.peers.live.values()):  # it was faster
        await session.close()
    await until(lambda: not ours.stats().sessions and not theirs.stats().responders)
    session = await ours.connect(theirs.session_id)
    assert session.alive


# Errors of connecting ----------------------------------------------------------------------------


async def test_nobody_listens(engines: Engines) -> None:
    ours = await engines.near()
    region = await ours.register(bytearray(8))
    peer = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConnectRefused) as caught:
        await ours.connect(peer)
    assert caught.value.peer == peer
    transfer = ours.submit_write(peer, region, 1, 1)
    with pytest.raises(ConnectRefused):
        await transfer
    assert transfer.status == "failed"
    assert transfer.remote_quiet


async def test_no_such_host(engines: Engines) -> None:
    ours = await engines.near()
    with pytest.raises(HostUnreachable):
        await ours.connect("no-such-host.invalid:1")


async def test_a_silent_peer(engines: Engines) -> None:
    ours = await engines.near(connect_timeout=0.2)
    region = await ours.register(bytearray(8))
    with silent_peer() as peer:
        with pytest.raises(ConnectTimeout, match=r"0\.1 s"):
            await ours.connect(peer, timeout=0.1)
        with pytest.raises(ConnectTimeout, match=r"0\.2 s"):
            await ours.write(peer, region, 1, 1)
        with pytest.raises(TransferTimeout, match=r"0\.1 s.*no session") as caught:
            await ours.write(peer, region, 1, 1, timeout=0.1)
        assert caught.value.peer == peer


async def test_a_transfer_that_still_connects_ends_at_once(engines: Engines) -> None:
    ours = await engines.near()
    region = await ours.register(bytearray(8))
    with silent_peer() as peer:
        transfer = ours.submit_write(peer, region, 1, 1)
        for _ in range(10):
            await asyncio.sleep(0)
        assert transfer.cancel()
        assert transfer.done()
        assert transfer.remote_quiet
        with pytest.raises(TransferCancelled) as caught:
            await transfer
        assert caught.value.peer == peer
        assert peer in repr(transfer)
        await asyncio.wait_for(ours.deregister(region), 1)  # nothing holds it


async def test_different_secrets(engines: Engines) -> None:
    ours = await engines.near(auth_secret="one secret of over thirty-two letters")
    theirs = await engines.far(auth_secret="another secret of over thirty-two letters")
    with pytest.raises(AuthenticationError):
        await ours.connect(theirs.session_id)


# The end of sessions -----------------------------------------------------------------------------


async def test_closed_by_us(pair: Pair) -> None:
    await pair.session.close()
    assert not pair.session.alive
    await pair.session.close()
    with pytest.raises(PeerLost):
        await pair.session.notify("a", b"")
    with pytest.raises(PeerLost):
        await pair.session.refresh()
    await until(lambda: not pair.theirs.stats().responders)
    again = await pair.ours.connect(pair.theirs.session_id)
    assert again is not pair.session


async def test_a_dead_session_connects_again_by_its_id(pair: Pair) -> None:
    await pair.session.close()
    assert await pair.write() == 4096
    assert await pair.write() == 4096
    assert pair.ours.stats().sessions == 1


async def closed_at(pair: Pair) -> None:
    """The peer's end has been noticed."""
    await until(lambda: not pair.session.alive)


async def test_a_peer_that_closes(pair: Pair) -> None:
    await pair.theirs.close()
    await closed_at(pair)
    with pytest.raises(ConnectRefused):
        await pair.write()


async def test_a_peer_that_restarted(pair: Pair, engines: Engines) -> None:
    port = pair.theirs.rpc_port
    await pair.theirs.close()
    await closed_at(pair)
    theirs: Engine = await engines.far(port)
    target = await theirs.register(bytearray(4096), name="dst")
    with pytest.raises(PeerRestarted, match=theirs.engine_id) as caught:
        await pair.write()
    assert caught.value.remote_quiet
    # By its id a caller gets the new engine, and learns its regions.
    session: Session = await pair.ours.connect(pair.session.id)
    assert session.peer_engine_id == theirs.engine_id
    assert await pair.ours.write(session, pair.local, session.regions["dst"], 64) == 64
    assert await pair.ours.write(session.id, pair.local, target, 64) == 64
    with pytest.raises(PeerRestarted):
        await pair.write()


async def test_two_engines_connect_to_each_other_at_once(engines: Engines) -> None:
    one, two = await engines.near(), await engines.far()
    a = await one.register(np.zeros(64, np.uint8))
    b = await two.register(np.ones(64, np.uint8))
    for _ in range(5):
        there, back = await asyncio.gather(one.connect(two.session_id), two.connect(one.session_id))
        assert await asyncio.gather(one.read(there, a, b, 64), two.read(back, b, a, 64)) == [64, 64]
        await asyncio.gather(there.close(), back.close())


async def test_many_peers_at_once(engines: Engines) -> None:
    ours = await engines.near()
    peers = await asyncio.gather(*(engines.far() for _ in range(12)))
    region = await ours.register(bytearray(4096))
    targets = await asyncio.gather(*(peer.register(bytearray(4096)) for peer in peers))
    moved = await asyncio.gather(
        *(
            ours.write(peer.session_id, region, target, 4096)
            for peer, target in zip(peers, targets, strict=True)
        )
    )
    assert moved == [4096] * 12
