"""Promise 7: every failure is a typed exception that names peer, rail, address and cause."""

from __future__ import annotations

import asyncio
import pickle
import socket

import numpy as np
import pytest
from promises.host import Host
from promises.lab import Lab
from promises.measures import KiB, MiB, until

from aioflagcx import Config
from aioflagcx.errors import (
    AioFlagcxError,
    ConnectError,
    ConnectRefused,
    ConnectTimeout,
    HostUnreachable,
    LocalAddressError,
    ProtocolError,
    RemoteAccessError,
    RemoteAddressError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)

SIZE = 64 * KiB


def check(error: AioFlagcxError, *, peer: str | None, address: int | None = None) -> None:
    """It says in its attributes and its words whom and what it is about, also when pickled."""
    assert error.peer == peer
    if peer is not None:
        assert peer in str(error)
    if address is not None:
        assert error.address == address
        assert f"{address:#x}" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))


async def test_addresses_outside_every_region_are_named_with_their_index(lab: Lab) -> None:
    engine, peer = await lab.engine(), await lab.peer(SIZE)
    region = await engine.register(np.ones(SIZE, np.uint8))
    session = await lab.connect(engine, peer)
    for transfer in (engine.write, engine.read):
        with pytest.raises(RemoteAddressError) as remote:
            await transfer(session, [region.addr] * 3, [peer.at(0), peer.at(0), 4_096], [1, 0, 2])
        check(remote.value, peer=peer.session_id, address=4_096)
        assert (remote.value.index, remote.value.length) == (2, 2)
        with pytest.raises(LocalAddressError) as local:
            await transfer(session, [region.addr, 4_096], [peer.at(0)] * 2, 3)
        check(local.value, peer=None, address=4_096)
        assert (local.value.index, local.value.length) == (1, 3)
    assert not peer.memory.any()


async def test_access_that_a_region_does_not_grant_is_refused_before_a_byte_moves(
    lab: Lab,
) -> None:
    engine, peer = await lab.engine(), await lab.peer(3 * SIZE, register=False)
    for index, access in enumerate(("read", "write", "read_write")):
        await peer.run(Host.register, access, index * SIZE, SIZE, access)
    region = await engine.register(np.ones(SIZE, np.uint8))
    session = await lab.connect(engine, peer)
    for name, writable, readable in (
        ("read", False, True),
        ("write", True, False),
        ("read_write", True, True),
    ):
        theirs = session.regions[name]
        assert theirs.access == name
        for transfer, granted in ((engine.write, writable), (engine.read, readable)):
            if granted:
                assert await transfer(session, region, theirs, region) == SIZE
            else:
                with pytest.raises(RemoteAddressError) as refused:
                    await transfer(session, region, theirs, region)
                check(refused.value, peer=peer.session_id, address=theirs.addr)
    assert not peer.memory[:SIZE].any()


async def test_a_refusal_by_the_peers_device_names_rail_address_and_cause(lab: Lab) -> None:
    engine, peer = await lab.engine(), await lab.peer(MiB, register=False)
    region = await engine.register(np.ones(MiB, np.uint8))
    session = await lab.connect(engine, peer)
    count = 20_000
    while True:
        await peer.run(Host.register, "memory", 0, MiB)
        await session.refresh()
        transfer = engine.submit_write(
            session, np.full(count, region.addr), np.full(count, peer.at(0)), MiB, timeout=None
        )
        await until(lambda t=transfer: t.bytes_done > 0)
        await peer.run(Host.deregister, "memory")
        with pytest.raises(RemoteAccessError) as refused:
            await transfer
        break
    error = refused.value
    assert error.address is not None
    assert peer.at(0) <= error.address < peer.at(MiB)
    check(error, peer=peer.session_id, address=error.address)
    assert error.rail == "soft0->soft0"
    assert error.rail in str(error)
    assert "REM_ACCESS" in str(error.cause)
    assert transfer.status == "failed"
    assert transfer.exception() is error


async def test_a_stopped_transfer_says_how_far_it_came(lab: Lab) -> None:
    engine, peer = await lab.engine(), await lab.peer(MiB)
    region = await engine.register(np.ones(MiB, np.uint8))
    session = await lab.connect(engine, peer)
    sources, targets = np.full(20_000, region.addr), np.full(20_000, peer.at(0))
    with pytest.raises(TransferTimeout) as timed_out:
        await engine.write(session, sources, targets, MiB, timeout=0.05)
    check(timed_out.value, peer=peer.session_id)
    assert isinstance(timed_out.value, TimeoutError)
    assert "0.05" in str(timed_out.value)
    transfer = engine.submit_write(session, sources, targets, MiB, timeout=None)
    assert transfer.cancel()
    with pytest.raises(TransferCancelled) as cancelled:
        await transfer
    check(cancelled.value, peer=peer.session_id)
    assert not transfer.cancel()
    for error in (timed_out.value, cancelled.value):
        assert isinstance(error, TransferError)
        assert isinstance(error.remote_quiet, bool)


@pytest.mark.arrangements("tcp")
async def test_a_connect_that_fails_says_why_and_with_whom(lab: Lab) -> None:
    engine = await lab.engine(connect_timeout=0.5)
    region = await engine.register(np.ones(SIZE, np.uint8))

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        for call in (engine.connect(nobody), engine.write(nobody, region, 1, 1)):
            with pytest.raises(ConnectRefused) as refused:
                await call
            check(refused.value, peer=nobody)

    with pytest.raises(HostUnreachable) as unknown:
        await engine.connect("no-such-host.invalid:1")
    check(unknown.value, peer="no-such-host.invalid:1")

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        mute = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectTimeout) as timed_out:
            await engine.connect(mute)
        check(timed_out.value, peer=mute)
        assert isinstance(timed_out.value, TimeoutError)
        with pytest.raises(ConnectTimeout) as timed_out:
            await engine.connect(mute, timeout=0.1)
        assert "0.1" in str(timed_out.value)

    async def speak_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(speak_http, "127.0.0.1", 0) as server:
        stranger = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ProtocolError) as foreign:
            await engine.connect(stranger)
        check(foreign.value, peer=stranger)
    assert issubclass(ProtocolError, ConnectError)


async def test_engines_without_a_path_in_common_say_so(lab: Lab) -> None:
    other_path = "tcp" if lab.arrangement.path == "process" else "process"
    engine = await lab.engine(Config(soft_paths=(other_path,)))
    peer = await lab.peer()
    with pytest.raises(ConnectError) as refused:
        await engine.connect(peer.session_id)
    check(refused.value, peer=peer.session_id)
    assert other_path in str(refused.value)
