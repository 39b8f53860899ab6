"""Promise 6: one rail's failure moves its slices to another, and the caller sees success.

Each engine has several soft devices, as a host has several NICs, and devices are taken away while
transfers run by them, here or at the peer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from promises.host import Host, plug, unplug
from promises.lab import Lab
from promises.measures import KiB, MiB, misplaced_words, number_words, random_bytes, until
from promises.peers import Peer

from aioflagcx import Engine, Session
from aioflagcx.errors import ConnectError, PeerLost, TransferError

BIG = 128 * MiB
PASSES = {"process": 12, "local": 12, "tcp": 4}
"""How often BIG is moved over the same bytes: long enough to lose a device in the middle."""
FILL = 0x5A
MOST_TURNS = 20
"""Devices taken away until one of them has left something that was posted."""
WITH_THREADS = ("process", "local-processes", "tcp", "tcp-processes")

Switch = Callable[[int], Awaitable[None]]


def switches(side: str, engine: Engine, peer: Peer) -> tuple[Switch, Switch]:
    """What takes a device of our engine, or of the peer's, away and puts it back."""
    if side == "ours":
        return lambda device: unplug(engine, device), lambda device: plug(engine, device)
    return lambda device: peer.run(Host.unplug, device), lambda device: peer.run(Host.plug, device)


def rails_of(session: Session) -> list[Any]:
    return session._link.rails._rails


async def until_busy(engine: Engine, write: Callable[[], Awaitable[int]], rail: str) -> None:
    """Write until `rail` has carried something, which depends on who is scheduled when."""
    before = engine.stats().rails.get(rail, 0)
    deadline = time.monotonic() + 60
    while engine.stats().rails.get(rail, 0) == before:
        assert time.monotonic() < deadline, f"{rail} carries nothing: {engine.stats().rails}"
        await write()


async def test_every_device_carries_a_part(lab: Lab) -> None:
    engine, peer = await lab.engine(devices="soft:2"), await lab.peer(BIG, devices="soft:2")
    ours = np.empty(BIG, np.uint8)
    number_words(ours)
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    theirs = session.regions["memory"]
    for rail in ("soft0->soft0", "soft1->soft1"):
        await until_busy(engine, lambda: engine.write(session, region, theirs, region), rail)
    assert misplaced_words(peer.memory) == 0
    stats = engine.stats()
    assert sum(stats.rails.values()) == stats.bytes_written
    ours[:] = 0
    for rail in ("soft0->soft0", "soft1->soft1"):
        await until_busy(engine, lambda: engine.read(session, region, theirs, region), rail)
    assert misplaced_words(ours) == 0


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (2, 3), (3, 2)])
@pytest.mark.arrangements("process", "local", "tcp")
async def test_engines_may_have_different_numbers_of_devices(
    lab: Lab, here: int, there: int
) -> None:
    engine = await lab.engine(devices=f"soft:{here}")
    peer = await lab.peer(16 * MiB, devices=f"soft:{there}")
    ours = random_bytes(16 * MiB, 1).copy()
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    theirs = session.regions["memory"]
    await until(lambda: not engine.stats().rails_down)
    for rail in range(max(here, there)):
        name = f"soft{rail % here}->soft{rail % there}"
        await until_busy(engine, lambda: engine.write(session, region, theirs, region), name)
    assert np.array_equal(peer.memory, ours)
    peer.memory[:] ^= 0xFF
    await engine.read(session, region, theirs, region)
    assert np.array_equal(peer.memory, ours)


@pytest.mark.parametrize("op", ["write", "read"])
@pytest.mark.parametrize("side", ["ours", "theirs"])
@pytest.mark.arrangements(*WITH_THREADS)
async def test_a_device_lost_in_the_middle_of_a_transfer_costs_nobody_anything(
    lab: Lab, side: str, op: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await lab.engine(devices="soft:2")
    peer = await lab.peer(BIG + MiB, devices="soft:2")
    ours = np.empty(BIG + MiB, np.uint8)
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    theirs = session.regions["memory"]
    away, back = switches(side, engine, peer)
    source, target = (ours, peer.memory) if op == "write" else (peer.memory, ours)
    submit = engine.submit_write if op == "write" else engine.submit_read
    number_words(source)
    passes = PASSES[session.path]
    here, there = np.full(passes, region.addr), np.full(passes, theirs.addr)
    reposted = 0
    caplog.set_level(logging.INFO, "aioflagcx")

    def elsewhere() -> Awaitable[int]:
        """What goes by both rails, and does not touch what the transfer has moved."""
        return submit(session, region.at(BIG), theirs.at(BIG), MiB)

    for turn in range(MOST_TURNS):
        if turn >= 3 and reposted:
            break
        lost = (turn + 1) % 2
        healthy, failing = rails_of(session)[1 - lost], rails_of(session)[lost]
        name = f"soft{lost}->soft{lost}"
        await until(lambda: not engine.stats().rails_down)
        before, attempt = engine.stats(), healthy.attempt
        caplog.clear()
        target[:] = 0
        transfer = submit(session, here, there, BIG)
        await until(lambda transfer=transfer: transfer.bytes_done > 0)
        await away(lost)
        assert await transfer == passes * BIG
        assert misplaced_words(target[:BIG]) == 0
        target[:BIG] = FILL
        reposted += engine.stats().slices_reposted - before.slices_reposted

        while not failing.tries:  # a rail that was idle is not missed before it is used
            await elsewhere()
        assert session.alive
        assert engine.stats().rails_down == 1
        assert engine.stats().endpoints_failed == before.endpoints_failed + 1
        assert (healthy.up, healthy.attempt) == (True, attempt)
        assert await elsewhere() == MiB

        await back(lost)
        await until(lambda: not engine.stats().rails_down)
        await until_busy(engine, elsewhere, name)
        assert np.array_equal(target[BIG:], source[BIG:])
        assert healthy.attempt == attempt
        assert (target[:BIG] == FILL).all(), "something came late by the rail that was lost"
        told = [record for record in caplog.records if f"rail {name} is" in record.message]
        assert [record.levelname for record in told] == ["WARNING", "INFO"]
        assert "gone" in told[0].message
    assert reposted, "no device was lost in the middle of anything"
    assert (await peer.run(Host.responders)) == 1


@pytest.mark.parametrize("side", ["ours", "theirs"])
@pytest.mark.arrangements("process", "local", "tcp")
async def test_a_connect_does_with_the_devices_that_are_there(
    lab: Lab, side: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, peer = await lab.engine(devices="soft:3"), await lab.peer(MiB, devices="soft:3")
    ours = random_bytes(MiB, 1).copy()
    region = await engine.register(ours)
    away, back = switches(side, engine, peer)
    caplog.set_level(logging.INFO, "aioflagcx")
    await away(0)
    session = await lab.connect(engine, peer)
    assert engine.stats().rails_down == 1
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "soft0->" in warning.message and "soft0 is gone" in warning.message
    assert await engine.write(session, region, session.regions["memory"], region) == MiB
    assert np.array_equal(peer.memory, ours)
    await back(0)
    await until(lambda: not engine.stats().rails_down)
    assert any("soft0->soft0 is back" in record.message for record in caplog.records)


@pytest.mark.parametrize("side", ["ours", "theirs"])
@pytest.mark.arrangements("process", "local", "tcp")
async def test_a_connect_without_any_device_gives_the_reason_of_each(lab: Lab, side: str) -> None:
    engine, peer = await lab.engine(devices="soft:2"), await lab.peer(KiB, devices="soft:2")
    away, back = switches(side, engine, peer)
    for device in range(2):
        await away(device)
    with pytest.raises(ConnectError, match=r"soft0 is gone.*soft1 is gone") as caught:
        await engine.connect(peer.session_id)
    assert caught.value.peer == peer.session_id
    await until(lambda: engine.stats().sessions == 0)
    await back(1)
    session = await lab.connect(engine, peer)
    region = await engine.register(np.ones(KiB, np.uint8))
    await engine.write(session, region, session.regions["memory"], region)
    assert peer.memory.all()


@pytest.mark.arrangements("process", "local", "tcp")
async def test_one_device_here_uses_all_of_the_peers_and_outlives_one_of_them(lab: Lab) -> None:
    engine, peer = await lab.engine(devices="soft:1"), await lab.peer(MiB, devices="soft:2")
    region = await engine.register(random_bytes(MiB, 1).copy())
    await peer.run(Host.unplug, 0)
    session = await lab.connect(engine, peer)  # although the first rail is that device's
    assert engine.stats().rails_down == 1
    assert await engine.write(session, region, session.regions["memory"], region) == MiB
    assert np.array_equal(peer.memory, region.view())


@pytest.mark.parametrize("side", ["ours", "theirs"])
@pytest.mark.arrangements(*WITH_THREADS)
async def test_without_any_rail_left_the_session_is_lost_and_the_next_call_connects_afresh(
    lab: Lab, side: str
) -> None:
    engine, peer = await lab.engine(devices="soft:2"), await lab.peer(16 * MiB, devices="soft:2")
    region = await engine.register(np.ones(16 * MiB, np.uint8))
    session = await lab.connect(engine, peer)
    away, back = switches(side, engine, peer)
    pieces = np.zeros(10_000, np.int64)
    endless = engine.submit_write(
        session, pieces + region.addr, pieces + peer.at(0), region.size, timeout=None
    )
    await until(lambda: endless.bytes_done > 0)
    for device in (1, 0):
        await away(device)
    with pytest.raises(PeerLost, match=r"soft0 is gone.*soft1 is gone") as caught:
        await asyncio.wait_for(endless, 20)
    assert caught.value.remote_quiet, "the peer is there, and can fence"
    assert not session.alive
    peer.memory[:] = FILL
    for device in (0, 1):
        await back(device)
    assert (peer.memory == FILL).all()
    assert await engine.write(session, region, peer.at(0), region) == region.size
    assert (peer.memory == 1).all()


@pytest.mark.arrangements(*WITH_THREADS)
async def test_devices_that_come_and_go_are_not_noticed_by_many_transfers(lab: Lab) -> None:
    """As long as one rail is up at any moment, everything arrives, and nothing else changes."""
    part, tasks, rounds = 256 * KiB, 12, 12
    engine = await lab.engine(devices="soft:3")
    peer = await lab.peer(part * tasks, devices="soft:3")
    ours = random_bytes(part * tasks, 3).copy()
    await engine.register(ours)
    session = await lab.connect(engine, peer)
    busy = tasks

    async def work(index: int) -> None:
        nonlocal busy
        rng = np.random.default_rng(index)
        here = slice(index * part, (index + 1) * part)
        for round_ in range(rounds):
            ours[here] = np.frombuffer(rng.bytes(part), np.uint8)
            moved = await engine.write(
                session, ours.ctypes.data + here.start, peer.at(here.start), part
            )
            assert moved == part
            assert np.array_equal(peer.memory[here], ours[here]), (index, round_)
            await asyncio.sleep(0)
        busy -= 1

    async def trouble() -> int:
        changes = 0
        while busy:
            away, back = switches(("ours", "theirs")[changes % 2], engine, peer)
            device = 1 + changes // 2 % 2
            await away(device)
            await until(lambda: not busy or bool(engine.stats().rails_down))
            await back(device)
            await until(lambda: not busy or not engine.stats().rails_down)
            changes += 1
        return changes

    *_, changes = await asyncio.gather(*(work(index) for index in range(tasks)), trouble())
    assert changes, "nothing happened to any device"
    assert session.alive


async def test_a_lost_device_of_the_only_rail_ends_in_a_typed_error(lab: Lab) -> None:
    engine, peer = await lab.engine(), await lab.peer(KiB)
    region = await engine.register(np.ones(KiB, np.uint8))
    session = await lab.connect(engine, peer)
    await peer.run(Host.unplug, 0)
    with pytest.raises(TransferError) as caught:
        await engine.write(session, region, session.regions["memory"], region)
    assert caught.value.peer == peer.session_id
