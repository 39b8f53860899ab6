"""The life of a blocking engine, on many threads."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conformance.devices import Devices
from conformance.pair import silent_peer
from conformance.sync.fixtures import Engines
from conformance.sync.threads_pair import InThread, Pair, blocked_loop, together, until

import aioflagcx
from aioflagcx.errors import (
    ConfigError,
    ConnectRefused,
    ConnectTimeout,
    DeregisterTimeout,
    EngineClosed,
    PeerLost,
    RegistrationError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from aioflagcx.sync import Engine


def library_threads() -> int:
    """Threads of this process that are the library's, the native ones included."""
    others = {
        thread.native_id
        for thread in threading.enumerate()
        if not thread.name.startswith("aioflagcx")
    }
    return len({int(name) for name in os.listdir("/proc/self/task")} - others)


def test_start_and_close_are_idempotent(devices: Devices) -> None:
    engine = devices.near.sync_engine()
    engine.start()
    first = engine.engine_id
    engine.start()
    assert engine.engine_id == first
    engine.close()
    engine.close()
    assert engine.session_id == f"{engine.host}:{engine.rpc_port}"  # still tells who it was


def test_closing_leaves_no_thread_and_no_descriptor(devices: Devices) -> None:
    with devices.near.sync_engine():
        pass  # whatever is made once
    gc.collect()
    threads, descriptors = library_threads(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with devices.near.sync_engine() as engine:
            region = engine.register(bytearray(64))
            assert engine.write(engine.session_id, region, region, 64) == 64
    until(lambda: library_threads() <= threads)  # the executor does not wait for its own
    del engine, region
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_starts_and_closes_on_many_threads_share_one(devices: Devices) -> None:
    engine = devices.near.sync_engine()
    together(8, lambda _: engine.start())
    together(8, lambda _: engine.close())
    together(8, lambda index: engine.start() if index % 2 else engine.close())
    engine.close()


def test_an_engine_can_be_started_again_as_another_one(devices: Devices) -> None:
    engine = devices.near.sync_engine()
    with engine:
        first = engine.engine_id
        ended = engine.notifications()
    with engine:
        assert engine.engine_id != first
        assert list(ended) == []
        with pytest.raises(TimeoutError):
            engine.notifications().get(0)


def test_every_call_before_start_and_after_close_is_refused(devices: Devices) -> None:
    engine = devices.near.sync_engine()
    for _ in range(2):
        calls: list[Callable[[], object]] = [
            lambda: engine.register(bytearray(8)),
            lambda: engine.register_many([]),
            lambda: engine.deregister(None),  # type: ignore[arg-type]
            lambda: engine.connect("127.0.0.1:1"),
            lambda: engine.quiesce("127.0.0.1:1"),
            lambda: engine.write("127.0.0.1:1", 1, 1, 1),
            lambda: engine.read("127.0.0.1:1", 1, 1, 1),
            lambda: engine.submit_write("127.0.0.1:1", 1, 1, 1),
            lambda: engine.submit_read("127.0.0.1:1", 1, 1, 1),
            engine.stats,
        ]
        for call in calls:
            with pytest.raises(EngineClosed):
                call()
        with engine:
            pass
    assert list(engine.notifications()) == []


def test_what_is_known_only_once_started(devices: Devices) -> None:
    engine = devices.near.sync_engine()
    for look in (lambda: engine.session_id, lambda: engine.engine_id, engine.notifications):
        with pytest.raises(EngineClosed, match="not been started"):
            look()


def test_a_start_that_fails_leaves_nothing_and_can_be_repeated(devices: Devices) -> None:
    before = library_threads()
    with socket.socket() as taken:
        taken.bind((devices.near.host, 0))
        taken.listen()
        engine = devices.near.sync_engine(taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot listen"):
            engine.start()
        until(lambda: library_threads() <= before)
        engine.close()
    engine.start()
    engine.close()


def test_registering(pair: Pair) -> None:
    memory = bytearray(4096)
    region = pair.theirs.register(memory, name="more")
    assert pair.theirs.register(memory, name="more") is region
    many = pair.theirs.register_many([bytearray(8), bytearray(9)], names=["a", None])
    assert [one.size for one in many] == [8, 9]
    pair.session.refresh()
    assert set(pair.session.regions) == {"dst", "more", "a"}
    assert len(pair.session.all_regions) == 4
    assert pair.session.find(region.addr, 10).name == "more"
    pair.theirs.deregister(region)
    assert pair.ours.write(pair.session, pair.local, region, 8) == 8
    pair.theirs.deregister(region)
    with pytest.raises(RegistrationError):
        pair.theirs.deregister(region)
    with pytest.raises(RegistrationError, match="access"):
        pair.theirs.register(memory, access="none")
    with pytest.raises(TypeError):
        pair.theirs.deregister(memory)  # type: ignore[arg-type]


def test_memory_of_the_engine(pair: Pair) -> None:
    ours = pair.ours.alloc(4096, access="read")
    pair.theirs.alloc(8192, name="owned")
    pair.session.refresh()
    ours.numpy()[:] = 9
    assert pair.ours.write(pair.session, ours, pair.session.regions["owned"], 4096) == 4096
    assert pair.ours.read(pair.session, pair.local, pair.session.regions["owned"], 4096) == 4096
    assert (pair.src[:4096] == 9).all()
    pair.ours.deregister(ours)
    with pytest.raises(RegistrationError):
        pair.ours.alloc(0)


def test_deregistering_waits_for_transfers(pair: Pair) -> None:
    transfer = pair.submit_long()
    with pytest.raises(DeregisterTimeout):
        pair.ours.deregister(pair.local, timeout=0.05)
    transfer.cancel()
    pair.ours.deregister(pair.local)
    assert isinstance(transfer.exception(20), TransferCancelled)


def test_connecting(engines: Engines) -> None:
    ours, theirs = engines.near(), engines.far()
    sessions = together(8, lambda _: ours.connect(theirs.session_id))
    assert len(set(sessions)) == 1
    assert theirs.stats().responders == ours.stats().sessions == 1
    session = sessions[0]
    assert (session.id, session.peer_engine_id) == (theirs.session_id, theirs.engine_id)
    assert session.alive
    assert session.id in repr(session)
    assert session != session.id
    with pytest.raises(ConnectRefused):
        ours.connect("127.0.0.1:1")
    with pytest.raises(ValueError, match="address"):
        ours.connect("nowhere")
    with silent_peer() as peer, pytest.raises(ConnectTimeout):
        ours.connect(peer, timeout=0.1)
    theirs.close()
    until(lambda: not session.alive)


def test_quiesce(pair: Pair) -> None:
    transfer = pair.submit_long()
    until(lambda: transfer.bytes_done)
    pair.theirs.quiesce(pair.ours.engine_id)
    pair.dst[:] = 7
    with pytest.raises(PeerLost):
        transfer.result()
    assert (pair.dst == 7).all()
    with pytest.raises(ValueError, match="address"):
        pair.theirs.quiesce("nobody")


def test_a_blocking_and_an_asyncio_engine_are_peers(devices: Devices) -> None:
    memory = np.zeros(4096, np.uint8)

    async def serve(ready: list[str], done: threading.Event) -> str:
        async with devices.far.engine() as theirs:
            await theirs.register(memory, name="dst")
            ready.append(theirs.session_id)
            note = await anext(theirs.notifications())
            back = await theirs.connect(note.session_id)
            await back.notify("thanks", b"")
            await asyncio.to_thread(done.wait)
            return note.name

    ready: list[str] = []
    done = threading.Event()
    serving = InThread(lambda: aioflagcx.run(serve(ready, done)))
    until(lambda: ready)
    with devices.near.sync_engine() as ours:
        region = ours.register(np.full(4096, 5, np.uint8))
        session = ours.connect(ready[0])
        ours.write(session, region, session.regions["dst"], region, notify=("full", b""))
        assert next(ours.notifications()).name == "thanks"
        done.set()
        assert serving.result() == "full"
    assert (memory == 5).all()


def test_stats(pair: Pair) -> None:
    pair.write(4096)
    pair.ours.read(pair.session, pair.local, pair.remote, 1024)
    stats = pair.ours.stats()
    assert (stats.bytes_written, stats.bytes_read) == (4096, 1024)
    assert (stats.transfers_submitted, stats.transfers_done, stats.transfers_failed) == (2, 2, 0)
    assert (stats.sessions, stats.regions, stats.transfers_pending) == (1, 1, 0)
    assert stats.wakeups == 0  # the loop heard of none of them
    transfer = pair.submit_long()
    assert pair.ours.stats().transfers_pending == 1
    transfer.cancel()
    transfer.wait()


# Closing while others are inside ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["past the loop", "on the loop"])
def test_closing_while_eight_threads_are_inside(pair: Pair, kind: str) -> None:
    options: dict[str, Any] = {} if kind == "past the loop" else {"notify": ("never", b"")}
    pair.src[:] = 0x11
    pair.write(pair.local.size)
    inside = [InThread(pair.write_long, **options) for _ in range(8)]
    until(lambda: pair.ours.stats().transfers_pending == 8)
    closing = [InThread(pair.ours.close) for _ in range(3)]
    for thread in closing:
        thread.result()
    pair.src[:] = 0x99  # nothing reads it any more
    for thread in inside:
        with pytest.raises(EngineClosed):
            thread.result()
    pair.theirs.close()
    assert (pair.dst == 0x11).all()


def test_closing_while_threads_write_in_a_row(pair: Pair) -> None:
    """Each gets results until it gets EngineClosed, wherever in a write that comes."""
    stop = threading.Event()

    def work(_: int) -> int:
        count = 0
        while not stop.is_set():
            try:
                assert pair.write(64) == 64
            except EngineClosed:
                stop.set()
                return count
            count += 1
        return count

    threads = [InThread(work, index) for index in range(8)]
    until(lambda: pair.ours.stats().transfers_done > 200)
    pair.ours.close()
    assert stop.wait(20)
    for thread in threads:
        thread.result()


def test_closing_while_others_wait_for_everything_else(engines: Engines) -> None:
    ours, theirs = engines.near(), engines.far()
    region = ours.register(bytearray(8))
    session = ours.connect(theirs.session_id)
    notes = ours.notifications()
    with silent_peer() as peer:
        calls = [
            InThread(ours.connect, peer),
            InThread(ours.write, peer, region, 1, 1),
            InThread(notes.get),
        ]
        iterating = InThread(lambda: list(notes))
        until(lambda: ours.stats().transfers_pending == 1)
        ours.close()
        for call in calls:
            with pytest.raises(EngineClosed):
                call.result()
        assert iterating.result() == []
    with pytest.raises(EngineClosed):
        session.refresh()
    with pytest.raises(EngineClosed):
        session.notify("late", b"")
    session.close()  # is done


def test_a_session_outlives_its_close(pair: Pair) -> None:
    pair.session.close()
    with pytest.raises((PeerLost, TransferError)):
        pair.session.refresh()
    with pytest.raises(PeerLost):
        pair.session.notify("late", b"")
    assert "dead" in repr(pair.session)


# Where it must not be called, or nobody does ------------------------------------------------------


def test_calls_on_the_engines_own_loop_are_refused(pair: Pair) -> None:
    engine, long = pair.ours, pair.submit_long()
    calls: list[Callable[[], object]] = [
        engine.start,
        engine.close,
        lambda: engine.register(bytearray(8)),
        lambda: engine.connect(pair.theirs.session_id),
        lambda: engine.quiesce(engine.engine_id),
        pair.write,
        lambda: engine.read(pair.session, pair.local, pair.remote, 1),
        lambda: next(engine.notifications()),
        lambda: pair.session.notify("name", b""),
        pair.session.refresh,
        pair.session.close,
        long.result,
        long.wait,
        long.exception,
    ]
    errors: list[BaseException] = []

    def on_the_loop() -> None:
        for call in calls:
            try:
                call()
            except BaseException as error:
                errors.append(error)
        long.cancel()  # this waits for nothing

    assert engine._loop is not None
    engine._loop.post(on_the_loop)
    assert long.wait(20)
    assert [type(error) for error in errors] == [RuntimeError] * len(calls)
    assert long.status == "cancelled"
    assert pair.write() == 4096


def test_a_callback_that_raises_does_not_end_the_loop(pair: Pair) -> None:
    def fail() -> None:
        raise SystemExit(3)

    assert pair.ours._loop is not None
    logging.getLogger("aioflagcx").setLevel(logging.CRITICAL)
    try:
        pair.ours._loop.post(fail)
        pair.session.refresh()
    finally:
        logging.getLogger("aioflagcx").setLevel(logging.NOTSET)


def test_a_dropped_engine_warns_and_is_freed(devices: Devices) -> None:
    before = library_threads()
    engine = devices.near.sync_engine()
    engine.start()
    region = engine.register(bytearray(1 << 20))
    pieces = np.zeros(200_000, np.int64) + region.addr
    transfer = engine.submit_write(engine.session_id, pieces, pieces, region)
    session = engine.connect(engine.session_id)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del engine
        gc.collect()
    assert [str(w.message)[:16] for w in caught if w.category is ResourceWarning] == [
        "unclosed <Engine"
    ]
    with pytest.raises(EngineClosed):
        transfer.result()
    until(lambda: library_threads() <= before)
    assert not session.alive
    with pytest.raises(EngineClosed):
        session.refresh()


def test_an_engine_that_was_never_started_is_dropped_silently() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine()
        gc.collect()


def test_a_refresh_takes_the_time_it_is_given(pair: Pair) -> None:
    with blocked_loop(pair.theirs):
        started = time.monotonic()
        with pytest.raises(TransferTimeout):
            pair.session.refresh(timeout=0.1)
        assert 0.1 <= time.monotonic() - started < 5
    pair.session.refresh(timeout=20)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        pair.session.refresh(timeout=0)
