"""Promise 1: once an await on a transfer has returned, the caller's memory is its own again.

However a write ended, its source is overwritten with a marker at once; no marker may ever reach
the peer. However a read ended, its destination is; no other byte may ever come in. Late bytes
have until the end of the test to show up, which goes on with many more rounds in other memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from promises.host import Host
from promises.lab import Lab
from promises.measures import MiB, until
from promises.peers import ChildPeer

from aioflagcx import Engine, Session, Transfer
from aioflagcx.errors import (
    PeerLost,
    RemoteAccessError,
    RemoteAddressError,
    TransferCancelled,
    TransferTimeout,
)

VALUE, MARKER = 0x11, 0xA5
PART, ROUNDS = 8 * MiB, 48
PASSES = {"process": 16, "local": 8, "tcp": 4}
"""How often one transfer moves its part, so that it takes some milliseconds: timers are not
more exact than that."""

Stopper = Callable[[Transfer, Engine, float], Awaitable[bool]]
"""Stops a transfer after about so many seconds; whether it was stopped, or done before."""


async def by_timeout(transfer: Transfer, engine: Engine, seconds: float) -> bool:
    """The timeout was given when it was submitted."""
    try:
        await transfer
    except TransferTimeout:
        assert transfer.status == "timed_out"
        return True
    return False


async def by_cancel(transfer: Transfer, engine: Engine, seconds: float) -> bool:
    loop = asyncio.get_running_loop()
    timer = loop.call_later(seconds, transfer.cancel)
    try:
        await transfer
    except TransferCancelled:
        assert transfer.status == "cancelled"
        return True
    finally:
        timer.cancel()
    return False


async def by_cancelled_awaiter(transfer: Transfer, engine: Engine, seconds: float) -> bool:
    """Cancelled twice, of which the second is absorbed."""

    async def wait() -> int:
        return await transfer

    task = asyncio.ensure_future(wait())
    loop = asyncio.get_running_loop()
    timers = [loop.call_later(after, task.cancel) for after in (seconds, seconds + 0.0005)]
    try:
        await task
    except asyncio.CancelledError:
        assert transfer.done()
        return transfer.status == "cancelled"
    finally:
        for timer in timers:
            timer.cancel()
    return False


async def by_wait_for(transfer: Transfer, engine: Engine, seconds: float) -> bool:
    async def wait() -> int:
        return await transfer

    try:
        await asyncio.wait_for(wait(), seconds)
    except asyncio.TimeoutError:
        assert transfer.done()
        return True
    return False


async def by_cancel_in_a_hurry(transfer: Transfer, engine: Engine, seconds: float) -> bool:
    """Without the time to let posted slices complete: their queue pair is given up."""
    return await by_cancel(transfer, engine, seconds)


STOPPERS = (by_timeout, by_cancel, by_cancelled_awaiter, by_wait_for, by_cancel_in_a_hurry)
DRAIN_TIMEOUTS = {by_cancel_in_a_hurry: 0.001}


def passes(session: Session, local: int, remote: int) -> tuple[Any, Any, int]:
    """The arguments of a transfer that moves one part several times."""
    count = PASSES[session.path]
    return np.full(count, local), np.full(count, remote), PART


async def time_of_one(engine: Engine, session: Session, local: int, remote: int) -> float:
    """Seconds that a transfer of one part takes, undisturbed, after a first one."""
    loop = asyncio.get_running_loop()
    await engine.write(session, *passes(session, local, remote))
    started = loop.time()
    await engine.write(session, *passes(session, local, remote))
    return loop.time() - started


def in_the_middle(transfer: Transfer) -> bool:
    return 0 < transfer.bytes_done < transfer.bytes_total


@pytest.mark.parametrize("stopper", STOPPERS, ids=lambda stopper: stopper.__name__)
async def test_no_byte_leaves_the_source_after_a_write_was_stopped(
    lab: Lab, stopper: Stopper
) -> None:
    engine = await lab.engine(drain_timeout=DRAIN_TIMEOUTS.get(stopper, 1.0))
    peer = await lab.peer(ROUNDS * PART)
    ours = np.full(ROUNDS * PART, VALUE, np.uint8)
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    duration = await time_of_one(engine, session, region.addr, peer.at(0))
    rng = np.random.default_rng(1)
    caught = 0
    for round_ in range(ROUNDS):
        start, end = round_ * PART, (round_ + 1) * PART
        seconds = float(rng.uniform(0.0001, duration / 2))  # the timer may be late
        transfer = engine.submit_write(
            session,
            *passes(session, region.at(start), peer.at(start)),
            timeout=seconds if stopper is by_timeout else 30,
        )
        stopped = await stopper(transfer, engine, seconds)
        ours[start:end] = MARKER
        caught += stopped and in_the_middle(transfer)
        if not stopped:
            assert (peer.memory[start:end] == VALUE).all()
        assert not (peer.memory[max(start - 2 * PART, 0) : end] == MARKER).any()
    await peer.run(Host.quiesce, engine.session_id)
    assert not (peer.memory == MARKER).any(), "a byte left its source after the await returned"
    assert caught, "no write was stopped in the middle"


@pytest.mark.parametrize("stopper", STOPPERS, ids=lambda stopper: stopper.__name__)
async def test_no_byte_comes_in_after_a_read_was_stopped(lab: Lab, stopper: Stopper) -> None:
    engine = await lab.engine(drain_timeout=DRAIN_TIMEOUTS.get(stopper, 1.0))
    peer = await lab.peer(PART)
    peer.memory[:] = VALUE
    ours = np.zeros(ROUNDS * PART, np.uint8)
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    duration = await time_of_one(engine, session, region.addr, peer.at(0))
    peer.memory[:] = VALUE
    rng = np.random.default_rng(2)
    caught = 0
    expected = np.full(ROUNDS * PART, VALUE, np.uint8)
    for round_ in range(ROUNDS):
        start, end = round_ * PART, (round_ + 1) * PART
        seconds = float(rng.uniform(0.0001, duration / 2))  # the timer may be late
        transfer = engine.submit_read(
            session,
            *passes(session, region.at(start), peer.at(0)),
            timeout=seconds if stopper is by_timeout else 30,
        )
        stopped = await stopper(transfer, engine, seconds)
        if stopped:
            ours[start:end] = expected[start:end] = MARKER
        else:
            assert (ours[start:end] == VALUE).all()
        caught += stopped and in_the_middle(transfer)
        recent = slice(max(start - 2 * PART, 0), end)
        assert np.array_equal(ours[recent], expected[recent])
    await session.close()
    assert np.array_equal(ours, expected), "a byte came in after the await"
    assert caught, "no read was stopped in the middle"


@pytest.mark.parametrize("drain_timeout", [1.0, 0.001])
async def test_no_byte_leaves_the_source_of_one_write_when_another_is_stopped(
    lab: Lab, drain_timeout: float
) -> None:
    """Giving up a queue pair moves what others had posted on it; theirs must come from their own
    source only while they run, and wholly."""
    engine, peer = await lab.engine(drain_timeout=drain_timeout), await lab.peer(4 * PART)
    ours = np.full(4 * PART, VALUE, np.uint8)
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    duration = await time_of_one(engine, session, region.addr, peer.at(0))
    rng = np.random.default_rng(3)
    for round_ in range(40):
        ours[:] = VALUE
        peer.memory[:] = 0
        transfers = [
            engine.submit_write(session, *passes(session, region.at(i * PART), peer.at(i * PART)))
            for i in range(4)
        ]
        victim = round_ % 4
        asyncio.get_running_loop().call_later(
            float(rng.uniform(0, 4 * duration)), transfers[victim].cancel
        )
        for i, transfer in enumerate(transfers):
            try:
                await transfer
            except TransferCancelled:
                assert i == victim
            else:
                part = slice(i * PART, (i + 1) * PART)
                assert (peer.memory[part] == VALUE).all(), "success, but not every byte is there"
            ours[i * PART : (i + 1) * PART] = MARKER
        assert not (peer.memory == MARKER).any()
    await peer.run(Host.quiesce, engine.session_id)
    assert not (peer.memory == MARKER).any()


async def test_no_byte_leaves_the_source_after_the_peer_refused_the_write(lab: Lab) -> None:
    """It deregisters the memory while it is being written."""
    engine, peer = await lab.engine(), await lab.peer(64 * MiB, register=False)
    ours = np.full(64 * MiB, VALUE, np.uint8)
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    refused = 0
    for _ in range(12):
        ours[:] = VALUE
        await peer.run(Host.register, "memory", 0, 64 * MiB)
        await session.refresh()
        transfer = engine.submit_write(
            session, np.full(8, region.addr), np.full(8, peer.at(0)), region.size
        )
        await until(lambda t=transfer: t.bytes_done > 0)
        gone = asyncio.ensure_future(peer.run(Host.deregister, "memory"))
        with contextlib.suppress(RemoteAccessError, RemoteAddressError):
            await transfer
        refused += transfer.status == "failed"
        ours[:] = MARKER
        await gone
        assert not (peer.memory == MARKER).any()
    await peer.run(Host.quiesce, engine.session_id)
    assert not (peer.memory == MARKER).any()
    assert refused, "no write was refused on its way"


@pytest.mark.arrangements("local-processes", "tcp-processes")
async def test_no_byte_leaves_the_source_after_the_peer_was_lost(lab: Lab) -> None:
    size = 64 * MiB
    engine = await lab.engine(keepalive_interval=0.2, keepalive_timeout=1.0)
    ours = np.full(size, VALUE, np.uint8)
    region = await engine.register(ours)
    peers: list[ChildPeer] = []
    for killed in (True, False, True, False):
        ours[:] = VALUE
        peer = await lab.peer(size)
        peers.append(peer)
        session = await lab.connect(engine, peer)
        transfers = [
            engine.submit_write(session, region, peer.at(0), region, timeout=None)
            for _ in range(50)
        ]
        await until(lambda t=transfers: any(one.bytes_done for one in t))
        await peer.kill() if killed else peer.stop()
        for transfer in transfers:
            with contextlib.suppress(PeerLost):
                await transfer
        if killed or lab.arrangement.path != "local":  # where a stopped peer is written to as well
            assert any(transfer.status == "failed" for transfer in transfers)
        ours[:] = MARKER
        if not killed:
            peer.resume()
            await peer.run(Host.quiesce, engine.session_id)
    for peer in peers:
        assert not (peer.memory == MARKER).any()


@pytest.mark.arrangements("local-processes", "tcp-processes")
async def test_no_byte_leaves_the_source_after_a_write_to_a_stopped_peer_was_cancelled(
    lab: Lab,
) -> None:
    size = 16 * MiB
    engine = await lab.engine(drain_timeout=0.3, keepalive_timeout=60)
    peer: ChildPeer = await lab.peer(size)
    ours = np.full(size, VALUE, np.uint8)
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    for round_ in range(6):
        ours[:] = VALUE
        transfer = engine.submit_write(session, region, peer.at(0), region)
        await until(lambda t=transfer, n=round_: t.bytes_done >= n * MiB)
        peer.stop()
        transfer.cancel()
        with contextlib.suppress(TransferCancelled):
            await transfer
        ours[:] = MARKER
        peer.resume()
        await peer.run(Host.responders)  # it is going again
        assert not (peer.memory == MARKER).any()
    await peer.run(Host.quiesce, engine.session_id)
    assert not (peer.memory == MARKER).any()
