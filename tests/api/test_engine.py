"""The life of an engine, and the arguments of its calls."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from api.pair import MiB, Pair, silent_peer, until

from aioflagcx import Config, Engine
from aioflagcx.errors import (
    ConfigError,
    EngineClosed,
    LocalAddressError,
    RemoteAddressError,
)


def native_threads() -> int:
    """Threads of this process that are the library's, the native ones included."""
    others = {
        thread.native_id
        for thread in threading.enumerate()
        if not thread.name.startswith("aioflagcx")
    }
    return len({int(name) for name in os.listdir("/proc/self/task")} - others)


async def test_start_and_close_are_idempotent() -> None:
    engine = Engine()
    await engine.start()
    first = engine.engine_id
    await engine.start()
    assert engine.engine_id == first
    await engine.close()
    await engine.close()
    assert engine.session_id  # still tells who it was


async def test_concurrent_starts_and_closes_share_one() -> None:
    engine = Engine()
    await asyncio.gather(*(engine.start() for _ in range(5)))
    await asyncio.gather(*(engine.close() for _ in range(5)))
    await asyncio.gather(engine.start(), engine.close())
    await engine.close()


async def test_an_engine_can_be_started_again_as_another_one() -> None:
    engine = Engine()
    async with engine:
        first = engine.engine_id, engine.rpc_port
    async with engine:
        assert engine.engine_id != first[0]
        region = await engine.register(bytearray(64))
        assert await engine.write(engine.session_id, region, region, 64) == 64


async def test_nothing_of_a_closed_engine_is_left() -> None:
    before = native_threads()
    engine = Engine()
    async with engine:
        memory = np.zeros(4096, np.uint8)
        region = await engine.register(memory)
        await engine.write(engine.session_id, region, region, 4096)
        gone = weakref.ref(memory)
        del memory
        gc.collect()
        assert gone() is not None
    await until(lambda: native_threads() <= before)
    gc.collect()
    assert gone() is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", engine.rpc_port), 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
async def test_session_id_is_host_and_port(host: str) -> None:
    async with Engine(host) as engine:
        shown = "[::1]" if host == "::1" else host
        assert engine.host == host
        assert engine.session_id == f"{shown}:{engine.rpc_port}"
        region = await engine.register(bytearray(64))
        assert await engine.write(engine.session_id, region, region, 64) == 64


async def test_a_port_can_be_asked_for() -> None:
    async with Engine() as first:
        port = first.rpc_port
    async with Engine(port=port) as second:
        assert second.rpc_port == port


async def test_a_wildcard_host_is_advertised_as_something_reachable() -> None:
    async with Engine("0.0.0.0", advertise="127.0.0.1") as engine:
        assert engine.session_id == f"127.0.0.1:{engine.rpc_port}"
    async with Engine("0.0.0.0") as engine, Engine() as other:
        assert not engine.session_id.startswith("0.0.0.0")
        memory = await engine.register(bytearray(64))
        local = await other.register(bytearray(64))
        assert await other.write(engine.session_id, local, memory, 64) == 64


async def test_before_start_and_after_close_calls_are_refused() -> None:
    engine = Engine()
    with pytest.raises(EngineClosed):
        _ = engine.session_id
    with pytest.raises(EngineClosed):
        _ = engine.engine_id
    await engine.start()
    region = await engine.register(bytearray(8))
    await engine.close()
    calls: list[Callable[[], Any]] = [
        lambda: engine.register(bytearray(8)),
        lambda: engine.register_many([bytearray(8)]),
        lambda: engine.deregister(region),
        lambda: engine.connect("127.0.0.1:1"),
        lambda: engine.write("127.0.0.1:1", region, 1, 1),
        lambda: engine.read("127.0.0.1:1", region, 1, 1),
        lambda: engine.quiesce("127.0.0.1:1"),
    ]
    for call in calls:
        with pytest.raises(EngineClosed):
            await call()
    for submit in (engine.submit_write, engine.submit_read):
        with pytest.raises(EngineClosed):
            submit("127.0.0.1:1", region, 1, 1)
    with pytest.raises(EngineClosed):
        engine.stats()
    assert [item async for item in engine.notifications()] == []


async def test_a_start_that_fails_leaves_nothing_and_can_be_repeated() -> None:
    before = native_threads()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        engine = Engine(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot listen"):
            await engine.start()
        await until(lambda: native_threads() <= before)
        await engine.close()
    await engine.start()
    await engine.close()


async def test_a_cancelled_start_leaves_nothing() -> None:
    before = native_threads()
    for turns in range(6):
        engine = Engine()
        task = asyncio.create_task(engine.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        # A machine that is slow to give the loop its turns may have come to the end of the start.
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        await engine.close()
    await until(lambda: native_threads() <= before)


async def test_hosts_and_devices_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="does not resolve"):
        await Engine("no-such-host.invalid").start()
    with pytest.raises(ConfigError, match=r"no device 'mlx5_9'.*soft"):
        await Engine(devices="mlx5_9").start()
    for port in (-1, 65_536):
        with pytest.raises(ConfigError, match=f"port={port}"):
            Engine(port=port)
    with pytest.raises(ConfigError, match=r"no device 'mlx5_9'.*soft"):
        await Engine(config=Config(devices="soft,mlx5_9")).start()
    with pytest.raises(ConfigError, match="devices"):
        Engine(devices=["soft", "soft"])
    for devices in ("soft", ["soft"], "auto", "soft:2"):
        async with Engine(devices=devices):
            pass


async def test_calls_on_another_thread_are_refused(pair: Pair) -> None:
    caught: list[BaseException] = []

    def call() -> None:
        try:
            pair.ours.submit_write(pair.session, pair.local, pair.remote, 1)
        except BaseException as error:
            caught.append(error)

        async def elsewhere() -> None:
            await pair.write()

        try:
            asyncio.run(elsewhere())
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert [type(error) for error in caught] == [RuntimeError, RuntimeError]


async def test_submit_works_from_callbacks(pair: Pair) -> None:
    done = asyncio.get_running_loop().create_future()

    def call() -> None:
        done.set_result(pair.ours.submit_write(pair.session, pair.local, pair.remote, 64))

    asyncio.get_running_loop().call_soon(call)
    assert await (await done) == 64


async def test_a_collected_engine_warns_and_is_freed(path: str) -> None:
    before = native_threads()
    engine = Engine(config=Config(soft_paths=(path,)))
    await engine.start()
    region = await engine.register(bytearray(64))
    await engine.write(engine.session_id, region, region, 64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del engine
        gc.collect()
    assert any(
        w.category is ResourceWarning and "unclosed <Engine" in str(w.message) for w in caught
    )
    await until(lambda: native_threads() <= before)


_ABANDONING = """
import asyncio, gc, sys
import numpy as np
from aioflagcx import Config, Engine

async def main():
    config = Config(soft_paths=(sys.argv[1],))
    ours, theirs = Engine(config=config), Engine(config=config)
    await ours.start()
    await theirs.start()
    local = await ours.register(np.ones(1 << 20, np.uint8))
    remote = await theirs.register(np.ones(1 << 20, np.uint8))
    session = await ours.connect(theirs.session_id)
    src, dst = np.full(200_000, local.addr), np.full(200_000, remote.addr)
    transfer = ours.submit_write(session, src, dst, local.size)
    while not transfer.bytes_done:
        await asyncio.sleep(0)
    return transfer

for _ in range(3):
    transfer = asyncio.run(main())
    gc.collect()
    del transfer
    gc.collect()
"""


def test_memory_is_not_freed_under_an_engine_that_the_loop_did_not_live_to_close(
    path: str,
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _ABANDONING, path]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr


async def test_closing_waits_although_the_caller_is_cancelled(pair: Pair) -> None:
    transfer = pair.submit_long()
    closing = asyncio.create_task(pair.ours.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert transfer.done()
    assert isinstance(transfer.exception(), EngineClosed)
    await pair.ours.close()


async def test_closing_while_others_connect(path: str) -> None:
    engine = Engine(config=Config(soft_paths=(path,)))
    await engine.start()
    region = await engine.register(bytearray(8))
    with silent_peer() as peer:
        write = asyncio.create_task(engine.write(peer, region, 1, 1))
        connect = asyncio.create_task(engine.connect(peer))
        for _ in range(10):
            await asyncio.sleep(0)
        await asyncio.wait_for(engine.close(), 3)
    for task in (write, connect):
        with pytest.raises(EngineClosed):
            await task


async def test_close_during_registration() -> None:
    engine = Engine()
    await engine.start()
    memory = np.zeros(16 * MiB, np.uint8)
    many = [(int(memory.ctypes.data) + i * 64, 64) for i in range(5000)]
    registering = asyncio.create_task(engine.register_many(many))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineClosed):
        await registering


def test_log_level_is_set_only_when_given(path: str) -> None:
    logger = logging.getLogger("aioflagcx")
    before = logger.level

    async def use(**settings: Any) -> int:
        async with Engine(config=Config(**settings)):
            return logger.level

    try:
        assert asyncio.run(use()) == before
        assert asyncio.run(use(log_level="ERROR")) == logging.ERROR
    finally:
        logger.setLevel(before)


async def test_reprs_say_something(pair: Pair) -> None:
    assert pair.ours.session_id in repr(pair.ours)
    assert pair.session.id in repr(pair.session)
    assert "'src'" in repr(pair.local)
    assert "'dst'" in repr(pair.remote)
    assert "1 named region" in repr(pair.session.regions)
    transfer = pair.ours.submit_write(pair.session, pair.local, pair.remote, 65_536)
    assert f"with {pair.session.id} pending" in repr(transfer)
    await transfer
    assert "done 65536 of 65536 bytes" in repr(transfer)
    await pair.ours.close()
    assert "closed" in repr(pair.ours)
    assert "dead" in repr(pair.session)


async def test_stats(pair: Pair) -> None:
    await pair.write(4096)
    await pair.ours.read(pair.session, pair.local, pair.remote, 1024)
    stats = pair.ours.stats()
    assert (stats.bytes_written, stats.bytes_read) == (4096, 1024)
    assert (stats.transfers_submitted, stats.transfers_done, stats.transfers_failed) == (2, 2, 0)
    assert (stats.sessions, stats.regions, stats.transfers_pending) == (1, 1, 0)
    assert pair.theirs.stats().responders == 1


# Arguments of transfers --------------------------------------------------------------------------


async def test_pieces_in_every_form(pair: Pair) -> None:
    a, b = pair.local.addr, pair.remote.addr
    ours, session = pair.ours, pair.session
    assert await ours.write(session, a, b, 100) == 100
    assert await ours.write(session, [a, a + 100], [b + 500, b], [100, 50]) == 150
    assert await ours.write(session, (a, a + 1), np.array([b, b + 1]), 1) == 2
    index = np.arange(8)
    assert (
        await ours.write(session, a + index * 64, b + index[::-1].astype(np.uint64) * 64, 64) == 512
    )
    assert (pair.dst[:512].reshape(8, 64)[::-1] == pair.src[:512].reshape(8, 64)).all()
    assert await ours.write(session, pair.local, pair.remote, pair.remote) == pair.local.size
    assert (pair.src == pair.dst).all()
    assert await ours.write(session.id, pair.local.at(5), pair.remote.at(9), 3) == 3


async def test_reads(pair: Pair) -> None:
    pair.dst[:] = 7
    assert await pair.ours.read(pair.session, pair.local, pair.remote, 100) == 100
    assert (pair.src[:100] == 7).all()
    assert (pair.src[100:200] != 7).any()


async def test_nothing_to_move_is_a_success(pair: Pair) -> None:
    nowhere = "127.0.0.1:1"  # nobody is asked
    assert await pair.ours.write(nowhere, [], [], []) == 0
    assert await pair.ours.write(nowhere, [], [], 4096) == 0
    assert await pair.ours.write(nowhere, [1, 2], [3, 4], 0) == 0
    transfer = pair.ours.submit_read(nowhere, [], [], [])
    assert await transfer == transfer.bytes_total == 0
    assert transfer.status == "done"
    assert transfer.remote_quiet


async def test_zero_lengths_among_others_are_skipped(pair: Pair) -> None:
    a, b = pair.local.addr, pair.remote.addr
    assert await pair.ours.write(pair.session, [a, 1, a], [b, 1, b + 64], [8, 0, 8]) == 16


async def test_index_arrays_are_copied_before_the_call_returns(pair: Pair) -> None:
    src = np.array([pair.local.addr])
    dst = np.array([pair.remote.addr])
    lens = np.array([pair.local.size])
    transfer = pair.ours.submit_write(pair.session, src, dst, lens)
    src[0] = dst[0] = lens[0] = 1
    assert await transfer == pair.local.size


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("src", 1, -1),
        ("dst", 2, -5),
        ("lens", 0, -1),
        ("src", 3, 2**63 + 1),
        ("dst", 2, 2**63 + 1),
        ("lens", 1, 2**63 + 1),
    ],
)
async def test_values_that_cannot_be_are_named_by_index(
    pair: Pair, name: str, index: int, value: int, wide: bool
) -> None:
    pieces = {"src": [pair.local.addr] * 4, "dst": [pair.remote.addr] * 4, "lens": [8] * 4}
    pieces[name][index] = value
    arrays: list[Any] = list(pieces.values())
    if wide:  # checked natively
        arrays = [np.array(v, np.int64 if min(v) < 0 else np.uint64) for v in arrays]
    with pytest.raises(ValueError, match=rf"\b{index}\b"):
        pair.ours.submit_write(pair.session, *arrays)
    assert not pair.ours.stats().transfers_pending


async def test_the_largest_values_are_just_a_miss(pair: Pair) -> None:
    with pytest.raises(LocalAddressError):
        pair.ours.submit_write(pair.session, 2**63, pair.remote, 2**63)
    with pytest.raises(RemoteAddressError):
        await pair.ours.write(pair.session, pair.local, 2**63, 1)


@pytest.mark.parametrize("bad", [1.5, "1", None, [1.5], np.zeros((2, 2), np.int64)])
async def test_what_is_no_integer(pair: Pair, bad: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        pair.ours.submit_write(pair.session, bad, pair.remote, 1)


async def test_local_misses_are_raised_at_once_with_the_piece(pair: Pair) -> None:
    end = pair.local.addr + pair.local.size
    for address, length in ((end, 1), (end - 1, 2), (pair.local.addr - 1, 1), (8, 8)):
        with pytest.raises(LocalAddressError) as caught:
            pair.ours.submit_write(
                pair.session,
                [pair.local.addr, address],
                [pair.remote.addr, pair.remote.addr],
                [1, length],
            )
        error = caught.value
        assert (error.index, error.address, error.length) == (1, address, length)
    assert not pair.dst.any()


async def test_remote_misses_come_by_awaiting_before_a_byte_moves(pair: Pair) -> None:
    end = pair.remote.addr + pair.remote.size
    transfer = pair.ours.submit_write(
        pair.session, [pair.local.addr] * 2, [pair.remote.addr, end - 1], [512, 2]
    )
    with pytest.raises(RemoteAddressError) as caught:
        await transfer
    error = caught.value
    assert (error.index, error.address, error.length) == (1, end - 1, 2)
    assert error.peer == pair.session.id
    assert transfer.status == "failed"
    assert transfer.remote_quiet
    assert not pair.dst.any()


async def test_access_decides(pairs: Callable[..., Any]) -> None:
    pair: Pair = await pairs()
    readable = await pair.theirs.register(bytes(4096), access="read")
    writable = await pair.theirs.register(bytearray(4096), access="write")
    ours, session = pair.ours, pair.session
    assert await ours.read(session, pair.local, readable, 64) == 64
    assert await ours.write(session, pair.local, writable, 64) == 64
    with pytest.raises(RemoteAddressError):
        await ours.write(session, pair.local, readable, 64)
    with pytest.raises(RemoteAddressError):
        await ours.read(session, pair.local, writable, 64)
    read_only = await ours.register(bytes(64), access="read")
    assert await ours.write(session, read_only, writable, 64) == 64
    with pytest.raises(LocalAddressError):
        ours.submit_read(session, read_only, readable, 64)


@pytest.mark.parametrize("bad", [None, 5, b"127.0.0.1:1", object()])
async def test_a_session_of_the_wrong_type(pair: Pair, bad: Any) -> None:
    with pytest.raises(TypeError):
        pair.ours.submit_write(bad, pair.local, pair.remote, 1)
    with pytest.raises(TypeError):
        await pair.ours.connect(bad)


@pytest.mark.parametrize("bad", ["", "host", "host:", "host:0", "host:99999", "::1:5", "a b:1"])
async def test_text_that_is_no_session_id(pair: Pair, bad: str) -> None:
    with pytest.raises(ValueError, match="address"):
        pair.ours.submit_write(bad, pair.local, pair.remote, 1)
    with pytest.raises(ValueError, match="address"):
        await pair.ours.connect(bad)


async def test_a_session_of_another_engine_is_refused(pair: Pair) -> None:
    region = await pair.theirs.register(bytearray(8))
    with pytest.raises(ValueError, match="another engine"):
        pair.theirs.submit_write(pair.session, region, pair.remote, 8)


async def test_8192_pieces_cost_the_caller_less_than_a_millisecond(
    pairs: Callable[..., Any], record_property: Callable[[str, object], None]
) -> None:
    pair: Pair = await pairs(size=32 * MiB)
    rng = np.random.default_rng(7)
    src = pair.local.addr + rng.permutation(8192).astype(np.int64) * 4096
    dst = pair.remote.addr + rng.permutation(8192).astype(np.int64) * 4096
    loop = asyncio.get_running_loop()
    costs = []
    for _ in range(20):
        before = loop.time()
        transfer = pair.ours.submit_write(pair.session, src, dst, 4096)
        costs.append(loop.time() - before)
        assert await transfer == 32 * MiB
    record_property("caller_cost_us", sorted(costs)[10] * 1e6)
    assert sorted(costs)[2] < 0.001  # the best tell what it costs on an idle machine
