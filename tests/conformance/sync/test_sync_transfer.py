"""What the transfers of a blocking engine promise, above all when they are stopped."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
from conformance.devices import Devices
from conformance.sync.fixtures import Engines, Pairs
from conformance.sync.threads_pair import InThread, Pair, blocked_loop, together, until

from aioflagcx.errors import (
    EngineClosed,
    LocalAddressError,
    NotifyRefused,
    PeerLost,
    RemoteAddressError,
    TransferCancelled,
    TransferTimeout,
)
from aioflagcx.flights import Flights
from aioflagcx.link import Link
from aioflagcx.sync import Engine, Transfer


def is_quiet(engine: Engine) -> bool:
    stats = engine.stats()
    return not (stats.transfers_inflight or stats.transfers_pending)


# Results -----------------------------------------------------------------------------------------


def test_write_and_read(pair: Pair) -> None:
    assert pair.write(pair.local.size) == pair.local.size
    assert (pair.src == pair.dst).all()
    pair.dst[:] = 7
    assert pair.ours.read(pair.session, pair.local, pair.remote, 100) == 100
    assert (pair.src[:100] == 7).all()
    assert (pair.src[100:200] != 7).any()
    assert is_quiet(pair.ours)


def test_a_transfer_that_succeeds(pair: Pair) -> None:
    transfer = pair.ours.submit_write(pair.session, pair.local, pair.remote, pair.local)
    assert transfer.result() == transfer.bytes_total == pair.local.size
    assert transfer.done()
    assert transfer.status == "done"
    assert transfer.bytes_done == pair.local.size
    assert transfer.remote_quiet
    assert transfer.exception() is None
    assert not transfer.cancel()
    assert transfer.wait(0)
    assert transfer.result(timeout=0) == pair.local.size  # as often as one likes
    assert (pair.src == pair.dst).all()


def test_a_transfer_that_is_pending(pair: Pair) -> None:
    transfer = pair.submit_long()
    until(lambda: transfer.bytes_done)
    assert not transfer.done()
    assert transfer.status == "pending"
    assert not transfer.remote_quiet
    assert not transfer.wait(timeout=0)
    for look in (transfer.result, transfer.exception):
        with pytest.raises(TimeoutError) as caught:
            look(timeout=0.01)
        assert type(caught.value) is TimeoutError
    assert transfer.status == "pending"  # nobody stopped it
    assert f"with {pair.session.id} pending" in repr(transfer)
    assert transfer.cancel()
    with pytest.raises(TransferCancelled):
        transfer.result()


@pytest.mark.parametrize("bad", [-1, float("nan")])
def test_a_limit_that_is_none(pair: Pair, bad: float) -> None:
    transfer = pair.submit_long()
    for wait in (transfer.result, transfer.exception, transfer.wait):
        with pytest.raises(ValueError, match="0 seconds or more"):
            wait(bad)
        with pytest.raises(TypeError):
            wait("1")  # type: ignore[arg-type]
    transfer.cancel()
    assert transfer.wait()


def test_nothing_to_move_is_a_success(pair: Pair) -> None:
    nowhere = "127.0.0.1:1"  # nobody is asked
    assert pair.ours.write(nowhere, [], [], []) == 0
    transfer = pair.ours.submit_read(nowhere, [1, 2], [3, 4], 0)
    assert transfer.result(0) == 0
    assert transfer.status == "done"
    assert transfer.remote_quiet


def test_the_first_transfer_to_a_peer_connects(engines: Engines) -> None:
    ours, theirs = engines.near(), engines.far()
    memory = np.zeros(64, np.uint8)
    local = ours.register(np.ones(64, np.uint8))
    target = theirs.register(memory)
    transfer = ours.submit_write(theirs.session_id, local, target, 64)
    assert transfer.result() == 64
    assert memory.all()
    assert ours.write(theirs.session_id, local, target, 64) == 64


def test_memory_the_peer_registered_later_is_asked_for(pair: Pair) -> None:
    """Also when the peer's push has not arrived: a miss refreshes the table."""
    for _ in range(20):
        memory = np.zeros(64, np.uint8)
        target = pair.theirs.register(memory)
        assert pair.ours.write(pair.session, pair.local, target, 64) == 64
        assert (memory == pair.src[:64]).all()


def test_a_write_with_a_notification(pair: Pair) -> None:
    assert pair.write(pair.local.size, notify=("filled", b"payload")) == pair.local.size
    note = next(pair.theirs.notifications())
    assert (note.name, note.payload) == ("filled", b"payload")
    assert note.session_id == pair.ours.session_id
    assert (pair.src == pair.dst).all()


def test_index_arrays_are_copied_before_the_call_returns(pair: Pair) -> None:
    src, dst = np.array([pair.local.addr]), np.array([pair.remote.addr])
    lens = np.array([pair.local.size])
    transfer = pair.ours.submit_write(pair.session, src, dst, lens)
    src[0] = dst[0] = lens[0] = 1
    assert transfer.result() == pair.local.size


# Errors ------------------------------------------------------------------------------------------


def test_local_misses_are_raised_at_once(pair: Pair) -> None:
    end = pair.local.addr + pair.local.size
    with pytest.raises(LocalAddressError) as caught:
        pair.ours.submit_write(pair.session, [pair.local.addr, end], [pair.remote.addr] * 2, [1, 1])
    assert caught.value.index == 1
    assert is_quiet(pair.ours)


def test_remote_misses_come_by_the_result(pair: Pair) -> None:
    end = pair.remote.addr + pair.remote.size
    transfer = pair.ours.submit_write(
        pair.session, [pair.local.addr] * 2, [pair.remote.addr, end - 1], [512, 2]
    )
    with pytest.raises(RemoteAddressError) as caught:
        transfer.result()
    assert (caught.value.index, caught.value.address, caught.value.peer) == (
        1,
        end - 1,
        pair.session.id,
    )
    assert isinstance(transfer.exception(), RemoteAddressError)
    assert transfer.status == "failed"
    assert transfer.remote_quiet
    assert not pair.dst.any()


def test_arguments_that_cannot_be(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"\b1\b"):
        pair.ours.write(pair.session, [pair.local.addr, -1], [pair.remote.addr] * 2, 8)
    with pytest.raises(TypeError):
        pair.ours.write(None, pair.local, pair.remote, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="address"):
        pair.ours.write("host", pair.local, pair.remote, 1)
    with pytest.raises(ValueError, match="more than 0"):
        pair.write(timeout=0)
    with pytest.raises(TypeError):
        pair.write(notify="name")
    with pytest.raises(ValueError, match="another engine"):
        pair.theirs.write(pair.session, pair.local, pair.remote, 1)
    assert is_quiet(pair.ours)
    assert pair.write() == 4096


def test_a_refused_notification(pairs: Pairs) -> None:
    pair = pairs(notification_queue_length=1)
    pair.write(notify=("first", b""))
    with pytest.raises(NotifyRefused):
        pair.write(notify=("second", b""))
    with pytest.raises(NotifyRefused):
        pair.session.notify("third", b"")


def test_a_closing_peer_fails_it_with_peer_lost(pair: Pair) -> None:
    transfer = pair.submit_long()
    until(lambda: transfer.bytes_done)
    pair.theirs.close()
    with pytest.raises(PeerLost, match="engine closed"):
        transfer.result()
    assert transfer.status == "failed"
    assert not pair.session.alive


def test_a_peer_that_revokes_the_memory_fails_it(pair: Pair) -> None:
    theirs = pair.theirs.register(pair.dst[:4096], name="part")
    pair.session.refresh()
    pieces = np.zeros(200_000, np.int64)
    transfer = pair.ours.submit_write(
        pair.session, pieces + pair.local.addr, pieces + theirs.addr, 4096, timeout=None
    )
    until(lambda: transfer.bytes_done)
    for region in list(pair.theirs._engine._open.registry._by_range.values()):  # type: ignore[union-attr]
        pair.theirs.deregister(region)
    error = transfer.exception(20)
    assert error is not None
    assert transfer.status == "failed"
    assert type(error).__name__ == "RemoteAccessError"
    assert transfer.remote_quiet == error.remote_quiet  # type: ignore[attr-defined]


# Stopping ----------------------------------------------------------------------------------------


def test_timeout(pair: Pair, devices: Devices) -> None:
    started = time.monotonic()
    with pytest.raises(TransferTimeout, match=r"not done within 0\.1 s") as caught:
        pair.write_long(timeout=0.1)
    assert 0.1 <= time.monotonic() - started <= 0.1 + 1.0 + 0.5 * devices.pace
    assert caught.value.peer == pair.session.id
    assert is_quiet(pair.ours)
    assert pair.write() == 4096


def test_a_timeout_of_a_transfer_that_nobody_waits_for(pair: Pair) -> None:
    transfer = pair.submit_long(timeout=0.1)
    until(transfer.done)
    assert transfer.status == "timed_out"
    assert isinstance(transfer.exception(), TransferTimeout)


def test_timeouts_in_any_order(pair: Pair, devices: Devices) -> None:
    timeouts = [0.6, 0.2, 1.0, 0.4, 0.8]

    def use(index: int) -> float:
        pieces = pair.long_pieces()
        started = time.monotonic()
        with pytest.raises(TransferTimeout):
            pair.ours.write(pair.session, *pieces, timeout=timeouts[index])
        return time.monotonic() - started

    for timeout, took in zip(timeouts, together(len(timeouts), use), strict=True):
        assert timeout <= took <= timeout + 1.0 + 0.5 * devices.pace


def test_timeouts_of_what_the_loop_still_looks_after(pair: Pair) -> None:
    with pytest.raises(TransferTimeout):
        pair.write_long(timeout=0.1, notify=("never", b""))
    assert is_quiet(pair.ours)
    with pytest.raises(TimeoutError):
        pair.theirs.notifications().get(timeout=0)


def test_the_default_timeout_is_that_of_the_configuration(pairs: Pairs) -> None:
    pair = pairs(transfer_timeout=0.1)
    with pytest.raises(TransferTimeout):
        pair.write_long()
    endless = pair.submit_long(timeout=None)
    assert not endless.wait(0.3)  # longer than the default
    endless.cancel()
    assert endless.wait(20)


def test_cancel_ends_it_for_all_who_wait(pair: Pair) -> None:
    transfer = pair.submit_long()
    waiting = [InThread(transfer.result) for _ in range(8)]
    assert transfer.cancel()
    for thread in waiting:
        with pytest.raises(TransferCancelled) as caught:
            thread.result()
        assert caught.value.remote_quiet
    assert transfer.status == "cancelled"
    assert is_quiet(pair.ours)


def test_cancel_at_any_time(pair: Pair) -> None:
    """Just submitted, landing, landed: it is done or cancelled, and everything adds up."""
    rng = np.random.default_rng(3)
    outcomes = []
    for _ in range(300):
        transfer = pair.ours.submit_write(pair.session, pair.local, pair.remote, 256 * 1024)
        spin = time.perf_counter() + float(rng.uniform(0, 200e-6))
        while time.perf_counter() < spin:
            pass
        transfer.cancel()
        error = transfer.exception(20)
        assert error is None or isinstance(error, TransferCancelled)
        assert transfer.status == ("done" if error is None else "cancelled")
        assert transfer.remote_quiet
        outcomes.append(transfer.status)
    assert is_quiet(pair.ours)
    assert set(outcomes) <= {"done", "cancelled"}
    assert pair.write() == 4096


def test_closing_the_session_cancels_it(pair: Pair) -> None:
    transfer = pair.submit_long()
    loop_side = pair.submit_long(notify=("never", b""))
    pair.session.close()
    assert transfer.done()
    assert loop_side.done()
    for stopped in (transfer, loop_side):
        with pytest.raises(TransferCancelled):
            stopped.result()
    pair.session.close()
    assert pair.ours.connect(pair.theirs.session_id) != pair.session
    assert pair.write() == 4096  # by the dead session's id


def test_closing_the_engine_ends_it(pair: Pair) -> None:
    transfer = pair.submit_long()
    pair.ours.close()
    assert transfer.done()
    assert transfer.status == "cancelled"
    with pytest.raises(EngineClosed):
        transfer.result()
    assert not transfer.cancel()


def test_memory_is_not_read_any_more_once_a_write_was_stopped(pair: Pair) -> None:
    """Promise 1: what is in the source afterwards never gets to the peer."""
    for round_ in range(20):
        pair.src[:] = 0x11
        with pytest.raises(TransferTimeout) as caught:
            pair.write_long(timeout=0.01 + 0.003 * round_)
        pair.src[:] = 0x99
        assert caught.value.remote_quiet
        assert (pair.dst != 0x99).all()
    pair.session.close()
    assert (pair.dst != 0x99).all()


# Nobody waits ------------------------------------------------------------------------------------


def test_a_dropped_transfer_runs_on(pair: Pair) -> None:
    for _ in range(500):  # also: what has landed unseen does not pile up
        pair.ours.submit_write(pair.session, pair.local, pair.remote, 64)
    until(lambda: pair.ours.stats().transfers_done == 500)
    assert (pair.src[:64] == pair.dst[:64]).all()
    assert pair.ours.stats().transfers_pending == 0
    flights = pair.ours._engine._open.runtime.flights  # type: ignore[union-attr]
    assert not flights.direct


def test_a_dropped_transfers_error_is_logged_once(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.submit_long(timeout=0.05)
    until(lambda: not pair.ours.stats().transfers_pending)
    until(lambda: (gc.collect() and False) or caplog.records)
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "TransferTimeout" in errors[0].getMessage()


def test_an_error_that_was_seen_is_not_logged(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RemoteAddressError):
        pair.ours.write(pair.session, pair.local, 1, 1)
    transfer: Transfer | None = pair.ours.submit_write(pair.session, pair.local, 1, 1)
    assert transfer is not None
    assert isinstance(transfer.exception(), RemoteAddressError)
    transfer = None
    gc.collect()
    pair.ours.close()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


# Past the event loop -----------------------------------------------------------------------------


def test_eight_threads_write_while_the_loops_are_blocked(pair: Pair) -> None:
    """Promise: on a connected session neither end's event loop has a part in a transfer."""
    part = pair.local.size // 8
    blocks = np.arange(part // 1024, dtype=np.int64) * 1024
    pair.write()  # its deadline is looked after already, and later ones are later

    def work(index: int) -> None:
        own = slice(index * part, (index + 1) * part)
        local, remote = pair.local.at(own.start), pair.remote.at(own.start)
        rng = np.random.default_rng(index)
        for round_ in range(20):
            pair.src[own] = rng.integers(0, 256, part, np.uint8)
            moved = pair.ours.write(
                pair.session, local + blocks, remote + blocks[::-1].copy(), 1024
            )
            assert moved == part
            back = pair.src[own].reshape(-1, 1024)[::-1].reshape(-1)
            assert np.array_equal(pair.dst[own], back), (index, round_)
            pair.src[own] = 0
            assert pair.ours.read(pair.session, local, remote, part) == part
            assert np.array_equal(pair.src[own], back), (index, round_)

    with blocked_loop(pair.ours, pair.theirs):
        together(8, work)


def test_submitted_transfers_land_while_the_loops_are_blocked(pair: Pair) -> None:
    with blocked_loop(pair.ours, pair.theirs):
        transfers = [
            pair.ours.submit_write(pair.session, pair.local, pair.remote, 4096) for _ in range(100)
        ]
        assert [transfer.result(20) for transfer in transfers] == [4096] * 100


def test_a_blocked_loop_stops_what_it_has_to_stop_as_soon_as_it_can(pair: Pair) -> None:
    with blocked_loop(pair.ours):
        transfer = pair.submit_long(timeout=0.05)
        assert not transfer.wait(0.2)
    assert isinstance(transfer.exception(20), TransferTimeout)


def test_an_engine_that_closes_just_before_a_thread_submits(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All transfers have been stopped, this one was not among them yet, sessions are open."""
    add_direct, close = Flights.add_direct, Link.close
    stopped, go_on = threading.Event(), threading.Event()
    closing: list[InThread] = []

    async def close_late(self: Link, farewell: str) -> None:
        stopped.set()
        await asyncio.to_thread(go_on.wait)
        await close(self, farewell)

    def close_just_before(self: Flights, number: int, direct: Any) -> None:
        closing.append(InThread(pair.ours.close))
        assert stopped.wait(20)
        add_direct(self, number, direct)

    monkeypatch.setattr(Link, "close", close_late)
    monkeypatch.setattr(Flights, "add_direct", close_just_before)
    try:
        with pytest.raises(EngineClosed):
            pair.write()
    finally:
        go_on.set()
    closing[0].result()
    assert not pair.dst.any()


@pytest.mark.parametrize("end", ["session", "engine"])
def test_what_is_stopped_while_its_thread_is_about_to_submit_it(
    pair: Pair, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop cannot stop what the native core does not have yet, so it refuses it."""
    add_direct = Flights.add_direct
    closing: list[InThread] = []

    def close_just_then(self: Flights, number: int, direct: Any) -> None:
        monkeypatch.undo()
        add_direct(self, number, direct)
        closing.append(InThread(pair.session.close if end == "session" else pair.ours.close))
        until(lambda: number not in self.direct)

    monkeypatch.setattr(Flights, "add_direct", close_just_then)
    if end == "session":
        assert pair.write() == 4096  # it connects again
        assert (pair.src[:4096] == pair.dst[:4096]).all()
    else:
        with pytest.raises(EngineClosed):
            pair.write()
        assert not pair.dst.any()
    closing[0].result()
