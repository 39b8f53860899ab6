"""A peer in a process of its own, which is killed, stopped and continued.

A NIC goes on answering for a process that is stopped, and so does rxe: it needs no code of the
target, and what an initiator has posted goes on without it. So what a stop must not do is let
memory change that its owner has been told is quiet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from promises.host import Host
from promises.nursery import Nursery
from promises.peers import ChildPeer
from softroce.devices import Device
from softroce.engines import MiB, until

from aioflagcx import Config, Engine, Region
from aioflagcx.errors import AioFlagcxError, PeerLost, TransferError

SIZE = 4 * MiB
VALUE, FILL = 0x33, 0x99
KEEPALIVE = {"keepalive_interval": 0.3, "keepalive_timeout": 2.0, "drain_timeout": 1.0}
SLACK = 4.0
"""Seconds that an emulated machine may add to what is promised."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest_asyncio.fixture
async def peer(nursery: Nursery) -> AsyncIterator[ChildPeer]:
    """An engine on rxe1 in a process of its own, with a region named "memory"."""
    far = Device(1)
    config = Config(devices=far.name, **KEEPALIVE)
    peer = await ChildPeer.start(config, SIZE, host=far.address, nursery=nursery)
    try:
        await peer.run(Host.register, "memory", 0, SIZE)
        yield peer
    finally:
        await peer.close()


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[Engine]:
    """An engine on rxe0 in this process."""
    near = Device(0)
    async with Engine(near.address, config=Config(devices=near.name, **KEEPALIVE)) as engine:
        yield engine


@pytest_asyncio.fixture
async def region(engine: Engine) -> Region:
    return await engine.register(np.full(SIZE, VALUE, np.uint8))


async def submit_endless(engine: Engine, peer: ChildPeer, region: Region) -> list[Any]:
    """A write and a read that take minutes, and are under way."""
    here, there = np.full(5_000, region.addr), np.full(5_000, peer.at(0))
    transfers = [
        engine.submit_write(peer.session_id, here, there, SIZE, timeout=None),
        engine.submit_read(peer.session_id, here, there, SIZE, timeout=None),
    ]
    await until(lambda: all(transfer.bytes_done for transfer in transfers))
    return transfers


async def test_a_killed_peer_fails_what_is_under_way_in_time_and_its_successor_is_connected(
    engine: Engine, peer: ChildPeer, region: Region, nursery: Nursery
) -> None:
    transfers = await submit_endless(engine, peer, region)
    await peer.kill()
    started = time.monotonic()
    for transfer in transfers:
        with pytest.raises(PeerLost) as caught:
            await asyncio.wait_for(transfer, 30)
        assert caught.value.peer == peer.session_id
    assert time.monotonic() - started < KEEPALIVE["keepalive_timeout"] + SLACK
    config = Config(devices=Device(1).name)
    successor = await ChildPeer.start(
        config, SIZE, peer.rpc_port, host=Device(1).address, nursery=nursery
    )
    try:
        await successor.run(Host.register, "memory", 0, SIZE)
        await engine.write(successor.session_id, region, successor.at(0), region)
        assert (successor.memory == VALUE).all()
    finally:
        await successor.close()


async def test_a_stopped_peer_is_given_up_in_time_and_is_connected_afresh_when_it_goes_on(
    engine: Engine, peer: ChildPeer, region: Region
) -> None:
    transfers = await submit_endless(engine, peer, region)
    peer.stop()
    started = time.monotonic()
    moved = transfers[0].bytes_done
    await until(lambda: transfers[0].bytes_done > moved + SIZE)  # its device needs no process
    for transfer in transfers:
        with pytest.raises(PeerLost) as caught:
            await asyncio.wait_for(transfer, 30)
        assert not caught.value.remote_quiet, "nobody there has confirmed anything"
    assert time.monotonic() - started < KEEPALIVE["keepalive_timeout"] + 1.0 + SLACK
    # Nothing is posted here any more, whoever confirms it: memory has come to rest.
    peer.memory[:] = FILL
    await asyncio.sleep(0.3)
    assert (peer.memory == FILL).all()
    peer.resume()
    await engine.write(peer.session_id, region, peer.at(0), region)
    assert (peer.memory == VALUE).all()


@pytest.mark.parametrize("how", ["deregister", "quiesce"])
async def test_no_byte_of_a_stopped_writer_comes_late(
    engine: Engine, peer: ChildPeer, how: str
) -> None:
    """The memory's owner is here, and takes it back while the writer is stopped in the middle."""
    for _ in range(3):
        memory = np.zeros(SIZE, np.uint8)
        region = await engine.register(memory)
        writing = peer.start_call(
            Host.write_without_end, engine.session_id, region.addr, SIZE, VALUE
        )
        await until(lambda memory=memory: memory[-1] == VALUE)
        peer.stop()
        if how == "deregister":
            await engine.deregister(region)
        else:
            await engine.quiesce(peer.engine_id)
        memory[:] = FILL
        peer.resume()
        error = await asyncio.wait_for(writing, 30)
        assert isinstance(error, TransferError), error
        assert (memory == FILL).all(), f"bytes arrived after {how}"
        if how == "quiesce":
            await engine.deregister(region)


async def test_a_stopped_reader_reads_nothing_that_was_taken_back(
    engine: Engine, peer: ChildPeer
) -> None:
    memory = np.full(SIZE, VALUE, np.uint8)
    region = await engine.register(memory)
    reading = peer.start_call(Host.read_without_end, engine.session_id, region.addr, SIZE)
    await until(lambda: peer.memory[-1] == VALUE)
    peer.stop()
    await engine.deregister(region)
    memory[:] = FILL
    peer.resume()
    error = await asyncio.wait_for(reading, 30)
    assert isinstance(error, AioFlagcxError), error
    assert not (peer.memory == FILL).any()
