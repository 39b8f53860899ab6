"""Promise 2: `remote_quiet` tells whether a failed write can still change the peer's memory.

When it is True, the owner fills that memory at once and it must stay as it is. When it is False,
the owner calls `quiesce` first; then it must stay as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np
import pytest
from promises.host import Host
from promises.lab import Lab
from promises.measures import SLACK, MiB, until
from promises.peers import ChildPeer

from aioflagcx.errors import PeerLost, TransferCancelled, TransferError, TransferTimeout

VALUE, FILL = 0x22, 0x77
PART, ROUNDS = 8 * MiB, 48
PASSES = {"process": 16, "local": 8, "tcp": 4}
"""As in test_quiet_source.py."""


@pytest.mark.parametrize("drain_timeout", [1.0, 0.001], ids=["drained", "in-a-hurry"])
@pytest.mark.parametrize("by_timeout", [True, False], ids=["timeout", "cancel"])
async def test_memory_that_was_reported_quiet_does_not_change_any_more(
    lab: Lab, by_timeout: bool, drain_timeout: float
) -> None:
    """In a hurry, posted slices are not waited for, so that the peer has to fence them."""
    engine = await lab.engine(drain_timeout=drain_timeout)
    peer = await lab.peer(ROUNDS * PART)
    region = await engine.register(np.full(PART, VALUE, np.uint8))
    session = await lab.connect(engine, peer)
    loop = asyncio.get_running_loop()
    passes = PASSES[session.path]
    source = np.full(passes, region.addr)
    await engine.write(session, source, np.full(passes, peer.at(0)), PART)
    started = loop.time()
    await engine.write(session, source, np.full(passes, peer.at(0)), PART)
    duration = loop.time() - started
    rng = np.random.default_rng(1)
    expected = np.full(ROUNDS * PART, FILL, np.uint8)
    in_the_middle = quiet = 0
    for round_ in range(ROUNDS):
        part = slice(round_ * PART, (round_ + 1) * PART)
        seconds = float(rng.uniform(0.0001, duration / 2))  # the timer may be late
        transfer = engine.submit_write(
            session,
            source,
            np.full(passes, peer.at(part.start)),
            PART,
            timeout=seconds if by_timeout else 30,
        )
        timer = None if by_timeout else loop.call_later(seconds, transfer.cancel)
        try:
            await transfer
        except (TransferTimeout, TransferCancelled) as error:
            assert error.remote_quiet == transfer.remote_quiet
            in_the_middle += 0 < transfer.bytes_done < transfer.bytes_total
        else:
            assert transfer.remote_quiet
        if timer is not None:
            timer.cancel()
        if transfer.remote_quiet:
            quiet += 1
            peer.memory[part] = FILL
        else:
            await peer.run(Host.quiesce, engine.session_id)
            peer.memory[part] = FILL
        recent = slice(max(part.start - 2 * PART, 0), part.stop)
        assert np.array_equal(peer.memory[recent], expected[recent])
    await session.close()
    assert np.array_equal(peer.memory, expected), "memory changed that had been quiet"
    assert in_the_middle, "no write was stopped in the middle"
    assert quiet > ROUNDS / 2, "a healthy peer confirms"


async def test_quiesce_by_the_owner_ends_what_a_peer_can_do(lab: Lab) -> None:
    """In the middle of the peer's writes, many times; its next call connects again."""
    engine, peer = await lab.engine(), await lab.peer(32 * MiB)
    region = await engine.register(np.full(32 * MiB, VALUE, np.uint8))
    for round_ in range(10):
        session = await lab.connect(engine, peer)
        transfers = [engine.submit_write(session, region, peer.at(0), region) for _ in range(200)]
        await until(lambda t=transfers: any(one.bytes_done for one in t))
        await peer.run(Host.quiesce, (engine.session_id, engine.engine_id)[round_ % 2])
        peer.memory[:] = FILL
        outcomes = await asyncio.gather(*transfers, return_exceptions=True)
        assert any(isinstance(outcome, PeerLost) for outcome in outcomes)
        assert all(isinstance(outcome, PeerLost | int) for outcome in outcomes), outcomes
        assert all(transfer.remote_quiet for transfer in transfers), "the goodbye confirms it"
        assert (peer.memory == FILL).all(), "bytes arrived after quiesce"
        assert await engine.write(peer.session_id, region, peer.at(0), region) == 32 * MiB
        assert (peer.memory == VALUE).all()


async def test_quiesce_touches_no_other_peer(lab: Lab) -> None:
    peer = await lab.peer(32 * MiB)
    one, other = await lab.engine(), await lab.engine()
    region = await one.register(np.full(MiB, VALUE, np.uint8))
    other_region = await other.register(np.full(16 * MiB, VALUE, np.uint8))
    for _ in range(10):
        session = await lab.connect(other, peer)
        quiesced = await lab.connect(one, peer)
        await one.write(quiesced, region, peer.at(0), region)
        write = other.submit_write(session, other_region, peer.at(16 * MiB), other_region)
        await peer.run(Host.quiesce, one.engine_id)
        assert await write == 16 * MiB
        assert session.alive
        await until(lambda s=quiesced: not s.alive)


@pytest.mark.arrangements("local-processes", "tcp-processes")
async def test_a_stopped_peer_confirms_nothing_and_its_quiesce_afterwards_holds(lab: Lab) -> None:
    size, drain_timeout = 64 * MiB, 0.4
    engine = await lab.engine(drain_timeout=drain_timeout, keepalive_timeout=60)
    peer: ChildPeer = await lab.peer(size)
    region = await engine.register(np.full(size, VALUE, np.uint8))
    unconfirmed = 0
    for round_ in range(8):
        session = await lab.connect(engine, peer)
        transfer = engine.submit_write(
            session, region, peer.at(0), region, timeout=0.3 if round_ % 2 else None
        )
        await until(lambda t=transfer, n=round_: t.bytes_done > n * MiB)
        peer.stop()
        started = time.monotonic()
        if round_ % 2 == 0:
            transfer.cancel()
        with contextlib.suppress(TransferError):
            await transfer
        assert time.monotonic() - started < 0.3 + drain_timeout + SLACK
        if transfer.remote_quiet:  # everything posted had been acknowledged before the stop
            peer.memory[:] = FILL
            peer.resume()
        else:
            unconfirmed += 1
            peer.resume()
            await peer.run(Host.quiesce, engine.session_id)
            peer.memory[:] = FILL
        await peer.run(Host.responders)  # it is going again
        assert (peer.memory == FILL).all(), "bytes arrived after all was quiet"
        await peer.run(Host.quiesce, engine.session_id)
        await until(lambda s=session: not s.alive)
        assert (peer.memory == FILL).all(), "bytes arrived after all was quiet"
    if lab.arrangement.path == "local":  # where a write is copied, nothing of it is on the way
        assert not unconfirmed
    else:
        assert unconfirmed, "no write was caught in the middle"


@pytest.mark.arrangements("local-processes", "tcp-processes")
async def test_an_engine_fences_a_lost_peer_by_itself(lab: Lab) -> None:
    """The writer stops; its peer loses it, and what was on its way comes to nothing."""
    size = 16 * MiB
    config = {"keepalive_interval": 0.2, "keepalive_timeout": 1.0}
    owner = await lab.engine(**config)
    memory = np.zeros(size, np.uint8)
    region = await owner.register(memory)
    writer: ChildPeer = await lab.peer(size, **config)
    stream = writer.start_call(Host.write_without_end, owner.session_id, region.addr, size, VALUE)
    await until(lambda: memory[-1] == VALUE)
    writer.stop()
    await until(lambda: owner.stats().responders == 0)
    memory[:] = FILL
    writer.resume()
    assert isinstance(await stream, PeerLost)
    assert (memory == FILL).all(), "bytes arrived from a peer that had been given up"


@pytest.mark.arrangements("local-processes", "tcp-processes")
async def test_an_engine_whose_loop_is_blocked_fences_a_lost_peer_all_the_same(lab: Lab) -> None:
    size = 16 * MiB
    config = {"keepalive_interval": 0.2, "keepalive_timeout": 1.0}
    owner: ChildPeer = await lab.peer(size, **config)
    writer: ChildPeer = await lab.peer(size, **config)
    stream = writer.start_call(Host.write_without_end, owner.session_id, owner.at(0), size, VALUE)
    await until(lambda: owner.memory[-1] == VALUE)
    blocked = owner.start_call(Host.block_loop, 4.0)
    writer.stop()
    await asyncio.sleep(2.0)  # nothing tells when the owner gives the writer up
    owner.memory[:] = FILL
    writer.resume()
    assert isinstance(await stream, PeerLost)
    assert not blocked.done()
    assert (owner.memory == FILL).all(), "bytes arrived from a peer that had been given up"
    await blocked
    assert (owner.memory == FILL).all(), "bytes arrived from a peer that had been given up"
