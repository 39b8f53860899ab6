"""Promise 3: a write's notification comes after its data, once, or not at all when it fails."""

from __future__ import annotations

import asyncio
import struct

import numpy as np
import pytest
from promises.host import Host
from promises.lab import Lab
from promises.measures import KiB, MiB, until

from aioflagcx.errors import (
    NotifyRefused,
    PeerLost,
    RemoteAddressError,
    TransferCancelled,
)

WHERE = struct.Struct("<QQB")
LANE = 4 * MiB


async def incomplete_at_arrival(host: Host, last: str) -> tuple[list[str], list[str]]:
    """Names of the notifications until `last`; and of those whose data was not there yet.

    Each tells offset, length and value of its data. Values only grow, so what a later write has
    stored meanwhile is complete as well.
    """
    names, incomplete = [], []
    async for notification in host.engine.notifications():
        if notification.name == last:
            break
        names.append(notification.name)
        offset, length, value = WHERE.unpack(notification.payload)
        if host.memory[offset : offset + length].min() < value:
            incomplete.append(notification.name)
    return names, incomplete


@pytest.mark.arrangements("process", "process-threads", "local-processes", "tcp", "tcp-processes")
async def test_data_is_complete_at_the_moment_of_its_notification(lab: Lab) -> None:
    lanes, rounds = 6, 40
    engine = await lab.engine(qps_per_endpoint=2)
    peer = await lab.peer(lanes * LANE, qps_per_endpoint=2)
    ours = np.zeros(lanes * LANE, np.uint8)
    await engine.register(ours)
    session = await lab.connect(engine, peer)
    arrivals = asyncio.ensure_future(peer.run(incomplete_at_arrival, "end"))
    sent = []

    async def fill(lane: int) -> None:
        """Write each round's value over the last one's, whole or in pieces."""
        rng = np.random.default_rng(lane)
        for value in range(1, rounds + 1):
            length = int(rng.choice([1, 513, 64 * KiB, 300_001, LANE]))
            start = lane * LANE
            ours[start : start + length] = value
            cuts = np.unique(rng.integers(0, length, int(rng.integers(1, 200))))
            cuts[0] = 0
            name = f"{lane}/{value}"
            sent.append(name)
            await engine.write(
                session,
                ours.ctypes.data + start + cuts,
                peer.at(start) + cuts,
                np.diff(np.append(cuts, length)),
                notify=(name, WHERE.pack(start, length, value)),
            )

    await asyncio.gather(*(fill(lane) for lane in range(lanes)))
    await session.notify("end", b"")
    names, incomplete = await arrivals
    assert incomplete == []
    assert sorted(names) == sorted(sent), "each notification comes once"


async def test_a_write_that_fails_is_never_notified(lab: Lab) -> None:
    """Cancelled at random moments, or refused for its addresses."""
    engine, peer = await lab.engine(), await lab.peer(32 * MiB)
    ours = np.ones(32 * MiB, np.uint8)
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    theirs = session.regions["memory"]
    arrivals = asyncio.ensure_future(peer.run(Host.notification_names, "end"))
    rng = np.random.default_rng(0)
    expected, uncertain, failures = [], [], 0

    for index in range(40):
        name = f"write {index}"
        transfer = engine.submit_write(session, region, theirs, region, notify=(name, b""))
        stop_at = int(rng.integers(0, 2 * ours.size))
        await until(lambda t=transfer, b=stop_at: t.done() or t.bytes_done >= min(b, ours.size))
        if stop_at <= ours.size:
            transfer.cancel()
        try:
            await transfer
        except TransferCancelled as error:
            failures += 1
            if error.notify_delivered is None:
                uncertain.append(name)
            else:
                assert error.notify_delivered is False
        else:
            expected.append(name)
        with pytest.raises(RemoteAddressError):
            await engine.write(
                session, region.addr, theirs.addr + theirs.size, 1, notify=("outside", b"")
            )

    await session.notify("end", b"")
    names = await arrivals
    assert failures, "no write was stopped in time"
    assert expected, "no write succeeded"
    assert [name for name in names if name not in uncertain] == expected
    assert len(set(names)) == len(names)


async def test_a_notification_without_data_or_with_none_to_move_is_delivered(lab: Lab) -> None:
    engine, peer = await lab.engine(), await lab.peer()
    session = await lab.connect(engine, peer)
    arrivals = asyncio.ensure_future(peer.run(Host.notifications, "end"))
    await engine.write(session, [], [], [], notify=("empty", b"1"))
    await session.notify("alone", b"x" * MiB)
    await session.notify("end", b"")
    seen = await arrivals
    assert [(one.name, len(one.payload)) for one in seen] == [("empty", 1), ("alone", MiB)]
    assert {one.engine_id for one in seen} == {engine.engine_id}
    assert {one.session_id for one in seen} == {engine.session_id}


async def test_a_full_queue_refuses_the_notification_and_says_so(lab: Lab) -> None:
    engine = await lab.engine()
    peer = await lab.peer(KiB, notification_queue_length=3)
    ours = np.full(KiB, 7, np.uint8)
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    for index in range(3):
        await session.notify(f"{index}", b"")
    with pytest.raises(NotifyRefused) as refused:
        await engine.write(
            session, region, session.regions["memory"], region, notify=("too many", b"")
        )
    assert refused.value.peer == peer.session_id
    assert refused.value.notify_delivered is False
    assert (peer.memory == 7).all(), "the data has landed"


@pytest.mark.arrangements("local-processes", "tcp-processes")
async def test_when_the_peer_dies_between_data_and_notification_the_outcome_is_unknown(
    lab: Lab,
) -> None:
    engine, peer = await lab.engine(), await lab.peer(MiB)
    ours = np.full(MiB, 9, np.uint8)
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    blocked = peer.start_call(Host.block_loop, 60.0)  # its Python can deliver nothing
    transfer = engine.submit_write(
        session, region, session.regions["memory"], region, notify=("never", b"")
    )
    await until(lambda: transfer.bytes_done == MiB)
    for _ in range(3):  # behind it on the same queue pair: once they are there, all of it is
        await engine.write(session, region.addr, peer.at(0), 1)
    assert not transfer.done()
    await peer.kill()
    with pytest.raises(EOFError):
        await blocked
    with pytest.raises(PeerLost) as failed:
        await transfer
    assert failed.value.notify_delivered is None
    assert failed.value.remote_quiet is True
    assert (peer.memory == 9).all()
