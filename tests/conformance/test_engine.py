"""The life of an engine."""

from __future__ import annotations

import asyncio
import gc
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
from conformance.devices import Devices
from conformance.pair import MiB, Pair, silent_peer, until

from aioflagcx.errors import ConfigError, EngineClosed


def native_threads() -> int:
    """Threads of this process that are the library's, the native ones included."""
    others = {
        thread.native_id
        for thread in threading.enumerate()
        if not thread.name.startswith("aioflagcx")
    }
    return len({int(name) for name in os.listdir("/proc/self/task")} - others)


async def test_start_and_close_are_idempotent(devices: Devices) -> None:
    engine = devices.near.engine()
    await engine.start()
    first = engine.engine_id
    await engine.start()
    assert engine.engine_id == first
    await engine.close()
    await engine.close()
    assert engine.session_id  # still tells who it was


async def test_concurrent_starts_and_closes_share_one(devices: Devices) -> None:
    engine = devices.near.engine()
    await asyncio.gather(*(engine.start() for _ in range(5)))
    await asyncio.gather(*(engine.close() for _ in range(5)))
    await asyncio.gather(engine.start(), engine.close())
    await engine.close()


async def test_an_engine_can_be_started_again_as_another_one(devices: Devices) -> None:
    engine = devices.near.engine()
    async with engine:
        first = engine.engine_id, engine.rpc_port
    async with engine:
        assert engine.engine_id != first[0]
        region = await engine.register(bytearray(64))
        assert await engine.write(engine.session_id, region, region, 64) == 64


async def test_nothing_of_a_closed_engine_is_left(devices: Devices) -> None:
    before = native_threads()
    engine = devices.near.engine()
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
        socket.create_connection((engine.host, engine.rpc_port), 1)


async def test_before_start_and_after_close_calls_are_refused(devices: Devices) -> None:
    engine = devices.near.engine()
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


async def test_a_start_that_fails_leaves_nothing_and_can_be_repeated(devices: Devices) -> None:
    before = native_threads()
    with socket.socket() as taken:
        taken.bind((devices.near.host, 0))
        taken.listen()
        engine = devices.near.engine(taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot listen"):
            await engine.start()
        await until(lambda: native_threads() <= before)
        await engine.close()
    await engine.start()
    await engine.close()


async def test_a_cancelled_start_leaves_nothing(devices: Devices) -> None:
    before = native_threads()
    for turns in range(6):
        engine = devices.near.engine()
        task = asyncio.create_task(engine.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        # A machine that is slow to give the loop its turns may have come to the end of the start.
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        await engine.close()
    await until(lambda: native_threads() <= before)


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


async def test_a_collected_engine_warns_and_is_freed(devices: Devices) -> None:
    before = native_threads()
    engine = devices.near.engine()
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
from conformance.devices import devices_named

async def main():
    devices = devices_named(sys.argv[1])
    ours, theirs = devices.near.engine(), devices.far.engine()
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
    devices: Devices,
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _ABANDONING, devices.name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
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


async def test_closing_while_others_connect(devices: Devices) -> None:
    engine = devices.near.engine()
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


async def test_close_during_registration(devices: Devices) -> None:
    engine = devices.near.engine()
    await engine.start()
    memory = np.zeros(16 * MiB, np.uint8)
    many = [(int(memory.ctypes.data) + i * 64, 64) for i in range(5000)]
    registering = asyncio.create_task(engine.register_many(many))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineClosed):
        await registering


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
