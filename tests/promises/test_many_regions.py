"""A table of 30,000 regions comes with one handshake and is searched without mistakes."""

from __future__ import annotations

import numpy as np
import pytest
from promises.host import Host
from promises.lab import Lab
from promises.measures import random_bytes

from aioflagcx.errors import RemoteAccessError, RemoteAddressError

REGIONS, SIZE = 30_000, 512


async def test_30000_regions_come_with_one_handshake_and_each_is_found(lab: Lab) -> None:
    peer = await lab.peer(REGIONS * SIZE, register=False)
    await peer.run(Host.register_blocks, REGIONS, SIZE)
    engine = await lab.engine()
    ours = random_bytes(REGIONS * SIZE, 1).copy()
    await engine.register(ours)
    session = await lab.connect(engine, peer)

    assert len(session.all_regions) == REGIONS
    assert len(session.regions) == REGIONS
    for index in range(0, REGIONS, 97):
        region = session.regions[f"block-{index}"]
        assert (region.addr, region.size) == (peer.at(index * SIZE), SIZE)
        assert session.find(region.addr, SIZE) == region
        assert session.find(region.addr + SIZE - 1, 1) == region
    with pytest.raises(RemoteAddressError):
        session.find(peer.at(0), SIZE + 1)  # no single region holds it
    with pytest.raises(RemoteAddressError):
        session.find(peer.at(REGIONS * SIZE), 1)

    order = np.random.default_rng(1).permutation(REGIONS)
    await engine.write(session, ours.ctypes.data + order * SIZE, peer.at(0) + order * SIZE, SIZE)
    assert np.array_equal(peer.memory, ours)

    # A piece that crosses from one region into the next belongs to none, and nothing moves.
    crossing = peer.at(0) + order * SIZE
    crossing[4_321] = peer.at(17 * SIZE + 1)
    peer.memory[:] = 0
    with pytest.raises(RemoteAddressError) as refused:
        await engine.write(session, ours.ctypes.data + order * SIZE, crossing, SIZE)
    assert (refused.value.index, refused.value.address) == (4_321, peer.at(17 * SIZE + 1))
    assert not peer.memory.any()


async def test_regions_that_come_and_go_are_known_when_they_are_used(lab: Lab) -> None:
    peer = await lab.peer(REGIONS * SIZE, register=False)
    await peer.run(Host.register_blocks, REGIONS - 1, SIZE)
    engine = await lab.engine()
    ours = random_bytes(SIZE, 2).copy()
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    last = slice((REGIONS - 1) * SIZE, REGIONS * SIZE)

    with pytest.raises(RemoteAddressError):
        await engine.write(session, region, peer.at(last.start), SIZE)
    for name in ("first life", "second life"):
        await peer.run(Host.register, name, last.start, SIZE)
        peer.memory[last] = 0
        await engine.write(session, region, peer.at(last.start), SIZE)
        assert np.array_equal(peer.memory[last], ours)
        assert session.find(peer.at(last.start), SIZE).name == name
        await peer.run(Host.deregister, name)
        with pytest.raises((RemoteAddressError, RemoteAccessError)):  # told yet, or not
            await engine.write(session, region, peer.at(last.start), SIZE)
        await session.refresh()
        with pytest.raises(RemoteAddressError):
            await engine.write(session, region, peer.at(last.start), SIZE)
