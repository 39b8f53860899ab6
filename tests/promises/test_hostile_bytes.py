"""Promise 8: hostile or broken bytes on any port cost at most that connection.

While a peer's writes go on, every port at which the engine listens gets what it should not, and so
does the Unix socket of the same-host path.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from promises.host import Host, listeners
from promises.lab import Lab
from promises.measures import MiB, random_bytes, until

from aioflagcx.handshake.codec import LENGTH, encode
from aioflagcx.handshake.messages import Auth, Connect, Fence, Hello, Metadata, Notify

SIZE = 4 * MiB
DATA_HELLO = struct.Struct("<4sHH16s")
"""What begins a data stream or a keepalive connection: magic, version, stream, token."""


LOCAL_HEAD = struct.Struct("<4sHH")
"""What begins a message of the same-host path: magic, version, kind."""
LOCAL_SIZE = 192

Address = int | str
"""A TCP port, or the name of a Unix socket."""


async def addresses_of(host: Host) -> set[Address]:
    """All at which the engine listens: of its handshake, its data paths, its keepalive."""
    return listeners()


def broken_inputs(rng: np.random.Generator) -> Iterator[bytes]:
    """Random bytes, and beginnings of what each port expects that go wrong later."""
    yield b""
    yield b"\0"
    for size in (1, 7, 24, 100, 5_000, 200_000):
        yield rng.bytes(size)
    yield b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    yield b"\0" * 100_000
    yield b"\xff" * 100_000
    for magic in (b"AFCX", b"AFKA"):
        for version in (0, 1, 2, 65_535):
            for stream in (0, 1, 63, 65_535):
                yield DATA_HELLO.pack(magic, version, stream, rng.bytes(16)) + rng.bytes(500)
        yield DATA_HELLO.pack(magic, 1, 0, b"\0" * 16)[:-1]
    for version in (0, 1, 2):
        for kind in range(10):
            yield LOCAL_HEAD.pack(b"AFCL", version, kind) + rng.bytes(LOCAL_SIZE - LOCAL_HEAD.size)
    for length in (0, 1, 4_096, 4_097, 2**31, 2**32 - 1):
        yield LENGTH.pack(length) + rng.bytes(6_000)
    hello = encode(
        Hello(
            versions=(1,),
            engine_id=rng.bytes(16),
            session_id="127.0.0.1:1",
            nonce=rng.bytes(32),
        ),
        1,
    )
    yield hello[:-1]
    yield hello + hello
    for cut in range(0, len(hello), 7):
        broken = bytearray(hello)
        broken[cut] ^= int(rng.integers(1, 256))
        yield bytes(broken)
    # Without authentication, and then with ids that are none.
    yield hello + encode(Fence(attempt=1, rail=0), 2) + encode(Metadata(since=0), 3)
    yield hello + encode(Notify(name="x", payload=b"", imm=0, imm_count=0), 2)


def unconnected(address: Address) -> tuple[socket.socket, Any]:
    """A socket for this address, and the address as the socket wants it."""
    if isinstance(address, int):
        made = socket.socket()
    else:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made, address if isinstance(address, str) else ("127.0.0.1", address)


async def throw(address: Address, data: bytes, *, reset: bool) -> None:
    """Connect, send, and go: by a reset, or by waiting for what the other side does."""
    loop = asyncio.get_running_loop()
    connection, where = unconnected(address)
    step = len(data) or 1
    if isinstance(address, str):  # packets: as long as they should be, or as long as they can be
        step = 60_000 if step % LOCAL_SIZE else LOCAL_SIZE
    with connection, contextlib.suppress(OSError):  # it may end at any moment, which is fine
        await loop.sock_connect(connection, where)
        for start in range(0, len(data), step):
            part = data[start : start + step]
            await asyncio.wait_for(loop.sock_sendall(connection, part), 10)
        if reset:
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        else:
            connection.shutdown(socket.SHUT_WR)
            while await asyncio.wait_for(loop.sock_recv(connection, 65_536), 10):
                pass


@contextlib.asynccontextmanager
async def traffic(lab: Lab, **settings: float) -> AsyncIterator[tuple[set[Address], list[int]]]:
    """Writes to a peer that must all succeed; the peer's ports, and the writes counted so far.

    With both engines in one process these are the ports of both.
    """
    others = listeners()
    engine, peer = await lab.engine(**settings), await lab.peer(SIZE, **settings)
    ours = random_bytes(SIZE, 1).copy()
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    ports = await peer.run(addresses_of) - others
    assert peer.rpc_port in ports
    assert len(ports) >= 2, "handshake and keepalive, at least"
    unix_names = [port for port in ports if isinstance(port, str)]
    assert bool(unix_names) == (session.path == "local")
    writes = [0]
    end = False

    async def write() -> None:
        while not end:
            peer.memory[:] = 0
            await engine.write(session, region, peer.at(0), region, notify=("written", b""))
            assert np.array_equal(peer.memory, ours)
            writes[0] += 1

    writing = asyncio.ensure_future(write())
    try:
        yield ports, writes
    finally:
        end = True
        await writing
    assert session.alive
    await session.notify("end", b"")
    assert len(await peer.run(Host.notification_names, "end")) == writes[0]
    await peer.run(Host.wait_responders, 1)  # what strangers opened goes by itself
    # And newcomers are welcome.
    newcomer = await lab.engine(**settings)
    region = await newcomer.register(ours, name="newcomer")
    assert await newcomer.write(peer.session_id, region, peer.at(0), region) == SIZE


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "wait"])
async def test_broken_bytes_on_any_port_disturb_no_transfer(lab: Lab, reset: bool) -> None:
    rng = np.random.default_rng(1)
    async with traffic(lab) as (ports, writes):
        before = writes[0]
        for port in ports:
            inputs = list(broken_inputs(rng))
            for start in range(0, len(inputs), 8):
                await asyncio.gather(
                    *(throw(port, data, reset=reset) for data in inputs[start : start + 8])
                )
        assert writes[0] > before


async def test_a_crowd_of_silent_connections_on_any_port_disturbs_no_transfer(lab: Lab) -> None:
    """More than any listener keeps waiting, held open all the while."""
    async with traffic(lab) as (ports, writes):
        crowd = []
        try:
            for port in ports:
                for _ in range(300):
                    connection, address = unconnected(port)
                    connection.connect_ex(address)
                    crowd.append(connection)
                seen = writes[0]
                await until(lambda n=seen: writes[0] > n + 5)
        finally:
            for connection in crowd:
                connection.close()


async def test_a_session_that_misbehaves_after_its_handshake_costs_only_itself(lab: Lab) -> None:
    """With a real connection: an engine's own control connection speaks nonsense."""
    async with traffic(lab) as (ports, writes):
        rng = np.random.default_rng(2)
        for port in ports:
            for _ in range(10):
                await throw(port, introduction(rng) + rng.bytes(3_000), reset=False)
                await throw(
                    port,
                    introduction(rng)
                    + encode(
                        Connect(
                            attempt=1,
                            rails=({"rail": 0, "path": "tcp", "num": 1},),
                            since=0,
                            keepalive_interval=1.0,
                            keepalive_timeout=5.0,
                        ),
                        3,
                    )
                    + encode(Fence(attempt=2**63, rail=0), 4)
                    + encode(Metadata(since=2**64 - 1), 5)
                    + encode(Notify(name="written", payload=b"", imm=5, imm_count=2**32 - 1), 6),
                    reset=True,
                )
        before = writes[0]
        await until(lambda: writes[0] > before)


def introduction(rng: np.random.Generator) -> bytes:
    """Hello and auth as they are without a secret, sent without waiting for the answers."""
    hello = Hello(
        versions=(1,), engine_id=rng.bytes(16), session_id="127.0.0.1:1", nonce=rng.bytes(32)
    )
    return encode(hello, 1) + encode(Auth(mac=b""), 2)
