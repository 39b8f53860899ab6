"""Promise 4: after `deregister` has returned, no peer can reach that memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref

import numpy as np
import pytest
from promises.host import Host
from promises.lab import Lab
from promises.measures import SLACK, MiB, until

from aioflagcx.errors import (
    DeregisterTimeout,
    LocalAddressError,
    RegistrationError,
    RemoteAccessError,
    RemoteAddressError,
    TransferError,
)

VALUE, FILL = 0x33, 0x99
SIZE = 8 * MiB


@pytest.mark.arrangements("process", "process-threads", "local-processes", "tcp", "tcp-processes")
async def test_no_byte_changes_after_deregister_while_a_peer_keeps_writing(lab: Lab) -> None:
    """The owner is here, the writer is the peer; many times, at random moments."""
    owner, writer = await lab.engine(), await lab.peer(2 * SIZE, register=False)
    await writer.run(Host.register, "memory", 0, 2 * SIZE)
    memory, witness = np.zeros(SIZE, np.uint8), np.zeros(4096, np.uint8)
    kept = await owner.register(witness, name="kept")
    rng = np.random.default_rng(1)
    failed_on_the_way = 0
    for round_ in range(15):
        memory[:] = 0
        region = await owner.register(memory)
        stream = asyncio.ensure_future(
            writer.run(Host.write_until_refused, owner.session_id, region.addr, SIZE, VALUE)
        )
        stop_at = int(rng.integers(0, SIZE))
        await until(lambda n=stop_at: memory[n] == VALUE)
        await owner.deregister(region)
        memory[:] = FILL
        _, error = await stream
        assert isinstance(error, RemoteAccessError | RemoteAddressError), error
        failed_on_the_way += isinstance(error, RemoteAccessError)
        assert (memory == FILL).all(), "bytes arrived after deregister"
        # The rest goes on: the same peer writes into what is still registered.
        witness[:] = 0
        await writer.run(write_once, owner.session_id, kept.addr, kept.size, round_ + 1)
        assert (witness == round_ + 1).all()
        assert (memory == FILL).all(), "bytes arrived after deregister"
    assert failed_on_the_way, "no write was caught on its way"


async def write_once(host: Host, peer: str, destination: int, size: int, value: int) -> None:
    host.memory[:size] = value
    await host.engine.write(peer, host.base, destination, size)


async def test_nothing_is_read_after_deregister_while_a_peer_keeps_reading(lab: Lab) -> None:
    owner, reader = await lab.engine(), await lab.peer(SIZE)
    memory = np.zeros(SIZE, np.uint8)
    for _ in range(10):
        memory[:] = VALUE
        region = await owner.register(memory)
        stream = asyncio.ensure_future(
            reader.run(read_until_refused, owner.session_id, region.addr, SIZE)
        )
        await until(lambda: bool(reader.memory[0] == VALUE))
        await owner.deregister(region)
        memory[:] = FILL
        error = await stream
        assert isinstance(error, RemoteAccessError | RemoteAddressError), error
        assert not (reader.memory == FILL).any(), "bytes were read after deregister"
        reader.memory[:] = 0


async def read_until_refused(host: Host, peer: str, source: int, size: int) -> Exception:
    await host.refresh(peer)
    try:
        while True:
            await host.engine.read(peer, host.base, source, size)
    except (RemoteAddressError, TransferError) as error:
        return error


async def test_other_transfers_of_the_session_survive_a_deregistration(lab: Lab) -> None:
    """They share its queue pairs with the one that is refused, and lose nothing."""
    engine, peer = await lab.engine(), await lab.peer(5 * SIZE, register=False)
    ours = np.zeros(5 * SIZE, np.uint8)
    base = (await engine.register(ours)).addr
    for index in range(4):
        await peer.run(Host.register, f"kept {index}", index * SIZE, SIZE)
    session = await lab.connect(engine, peer)
    failed_on_the_way = 0
    for round_ in range(1, 16):
        ours[:] = round_
        await peer.run(Host.register, "going", 4 * SIZE, SIZE)
        await session.refresh()
        transfers = [
            engine.submit_write(
                session, np.full(8, base + i * SIZE), np.full(8, peer.at(i * SIZE)), SIZE
            )
            for i in range(5)
        ]
        await until(lambda t=transfers: t[4].bytes_done > 0)
        await peer.run(Host.deregister, "going")
        outcomes = await asyncio.gather(*transfers, return_exceptions=True)
        assert outcomes[:4] == [8 * SIZE] * 4
        assert outcomes[4] == 8 * SIZE or isinstance(outcomes[4], RemoteAccessError)
        failed_on_the_way += isinstance(outcomes[4], RemoteAccessError)
        assert (peer.memory[: 4 * SIZE] == round_).all()
        assert session.alive
    assert failed_on_the_way, "no write was caught on its way"


async def test_deregister_waits_for_own_transfers_and_refuses_new_use_at_once(lab: Lab) -> None:
    engine, peer = await lab.engine(), await lab.peer(256 * MiB)
    memory = np.full(256 * MiB, VALUE, np.uint8)
    region = await engine.register(memory)
    session = await lab.connect(engine, peer)
    transfer = engine.submit_write(session, region, peer.at(0), region)
    deregistration = asyncio.ensure_future(engine.deregister(region, timeout=30))
    await asyncio.sleep(0)
    with pytest.raises(LocalAddressError):
        engine.submit_write(session, region.addr, peer.at(0), 1)
    with pytest.raises(RegistrationError):
        region.view()
    await deregistration
    assert transfer.bytes_done == memory.size, "deregister returned before our own transfer"
    memory[:] = FILL
    assert await transfer == memory.size
    assert (peer.memory == VALUE).all()


async def test_deregister_times_out_in_time_and_finishes_in_the_background(lab: Lab) -> None:
    engine, peer = await lab.engine(), await lab.peer(64 * MiB)
    memory = bytearray(64 * MiB)
    owner = memory_with_an_end(memory)
    released = asyncio.Event()
    weakref.finalize(owner, released.set)
    region = await engine.register(owner)
    del owner
    session = await lab.connect(engine, peer)
    count = 256
    transfer = engine.submit_write(
        session, np.full(count, region.addr), np.full(count, peer.at(0)), region.size, timeout=None
    )

    started = time.monotonic()
    with pytest.raises(DeregisterTimeout) as timed_out:
        await engine.deregister(region, timeout=0.1)
    assert 0.1 <= time.monotonic() - started < 0.1 + SLACK
    assert isinstance(timed_out.value, TimeoutError)
    assert timed_out.value.address == region.addr
    with pytest.raises(LocalAddressError):
        engine.submit_write(session, region.addr, peer.at(0), 1)
    assert not released.is_set(), "its memory was let go while a transfer used it"
    assert engine.stats().transfers_pending == 1

    transfer.cancel()
    with contextlib.suppress(TransferError):
        await transfer
    await asyncio.wait_for(released.wait(), 5)
    assert engine.stats().regions == 0
    # Who was told that it goes on may ask whether it has ended; once, as it then has been told.
    await engine.deregister(region)
    with pytest.raises(RegistrationError):
        await engine.deregister(region)
    # The same memory can be registered anew.
    again = await engine.register(memory)
    assert await engine.write(session, again, peer.at(0), again) == again.size


def memory_with_an_end(memory: bytearray) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """An array, which unlike a bytearray can be told of its end."""
    return np.frombuffer(memory, np.uint8)


async def test_a_region_registered_twice_goes_with_the_second_deregistration(lab: Lab) -> None:
    engine, peer = await lab.engine(), await lab.peer(4096)
    memory = np.full(4096, VALUE, np.uint8)
    region = await engine.register(memory)
    assert await engine.register(memory) is region
    session = await lab.connect(engine, peer)
    await engine.deregister(region)
    assert await engine.write(session, region, peer.at(0), region) == 4096
    await engine.deregister(region)
    with pytest.raises(LocalAddressError):
        await engine.write(session, region, peer.at(0), region)
    with pytest.raises(RegistrationError):
        await engine.deregister(region)
