"""Faults between two engines on RDMA devices: survived, or the typed error in time, and then the
next call connects afresh."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import numpy as np
import pytest
from softroce.devices import Device
from softroce.devices import until as until_sync
from softroce.engines import Ends, MiB, connected, until
from softroce.faults import flap, link_down, netem, no_address

from aioflagcx.errors import (
    ConnectError,
    PeerLost,
    RemoteAccessError,
    RemoteAddressError,
    RetryExceeded,
)

RAIL = "rxe0->rxe1"
QUICK = {"qp_timeout": 12, "retry_count": 1}
"""Seven retransmissions after 17 ms each, and two attempts: how long a path may be silent."""


def in_region(ends: Ends, address: int | None) -> bool:
    return address is not None and 0 <= address - ends.remote.addr < ends.remote.size


@pytest.mark.parametrize(
    "settings",
    [
        ("loss", "0.1%"),
        ("loss", "1%"),
        ("corrupt", "0.5%"),
        ("delay", "20ms"),
        ("duplicate", "1%"),
        ("rate", "200mbit"),
    ],
    ids=" ".join,
)
async def test_a_bad_line_is_survived(settings: tuple[str, ...], near: Device) -> None:
    async with connected(size=2 * MiB, qp_timeout=14) as ends:
        with netem(near, *settings):
            await ends.write()
            await ends.read()
        assert ends.ours.stats().endpoints_failed == 0


@pytest.mark.parametrize(
    "settings",
    [("loss", "5%"), ("loss", "30%"), ("delay", "10ms", "reorder", "50%", "50%")],
    ids=" ".join,
)
async def test_a_line_that_is_too_bad_is_survived_or_told(
    settings: tuple[str, ...], near: Device
) -> None:
    async with connected(**QUICK) as ends:
        started = time.monotonic()
        with netem(near, *settings):
            try:
                await ends.write(timeout=60)
            except (RetryExceeded, PeerLost) as error:
                assert "IBV_WC_RETRY_EXC_ERR" in str(error)
                assert error.peer == ends.peer
        assert time.monotonic() - started < 30
        await ends.write()
        await ends.read()


async def test_silence_is_told_with_status_rail_and_slice(near: Device) -> None:
    async with connected(**QUICK) as ends:
        started = time.monotonic()
        with netem(near, "loss", "100%"):
            with pytest.raises(RetryExceeded) as caught:
                await ends.write()
            assert time.monotonic() - started < 10
        error = caught.value
        assert error.cause == "IBV_WC_RETRY_EXC_ERR"
        assert (error.rail, error.peer) == (RAIL, ends.peer)
        assert in_region(ends, error.address)
        for words in ("IBV_WC_RETRY_EXC_ERR", RAIL, f"{error.address:#x}+65536"):
            assert words in str(error)
        assert error.remote_quiet, "the peer has fenced what may still be on its way"
        await ends.write()


def responders(ends: Ends) -> list[Any]:
    """The peer's native ends of our session."""
    assembly: Any = ends.theirs._open
    return [guest._responder for guest in assembly.serving._guests.values()]


async def destroy_responders(ends: Ends) -> None:
    """The peer's queue pairs are gone, and it tells nobody."""
    for responder in responders(ends):
        assert await asyncio.to_thread(responder.fence_all, 1.0)


@pytest.mark.parametrize("in_the_middle", [True, False])
async def test_a_queue_pair_that_the_peer_destroyed_is_replaced(in_the_middle: bool) -> None:
    async with connected(**QUICK) as ends:
        session = await ends.session()
        if in_the_middle:
            transfer = await ends.submit_in_the_middle(passes=32, timeout=60)
            await destroy_responders(ends)
            assert await transfer == 32 * ends.local.size
        else:
            await destroy_responders(ends)
        await ends.write()
        assert ends.ours.stats().endpoints_failed == 1
        assert await ends.session() is session


async def test_a_destroyed_queue_pair_without_a_second_try_is_an_error() -> None:
    async with connected(qp_timeout=12, retry_count=0) as ends:
        transfer = await ends.submit_in_the_middle()
        await destroy_responders(ends)
        with pytest.raises(RetryExceeded, match="IBV_WC_RETRY_EXC_ERR") as caught:
            await asyncio.wait_for(transfer, 20)
        assert caught.value.rail == RAIL
        assert caught.value.remote_quiet
        await ends.write()


async def test_a_link_that_stays_down_ends_in_an_error_and_then_works_again(
    near: Device, far: Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aioflagcx")
    async with connected(connect_timeout=1.5) as ends:
        session = await ends.session()
        transfer = await ends.submit_in_the_middle(timeout=None)
        started = time.monotonic()
        with link_down(near):
            with pytest.raises(PeerLost, match="the port of rxe0 is down") as caught:
                await asyncio.wait_for(transfer, 30)
            assert time.monotonic() - started < 10
            assert "IBV_WC_" in str(caught.value), "how the queue pairs had failed"
            assert caught.value.remote_quiet
            assert not session.alive
            with pytest.raises(ConnectError, match="the port of rxe0 is down"):
                await ends.session()
        assert until_sync(lambda: near.state == far.state == "ACTIVE")
        await until(lambda: "port active" in caplog.text)
        await ends.write()
        for device in (near, far):
            told = [r for r in caplog.records if f"device {device.name}: port " in r.message]
            assert [r.levelname for r in told][:2] == ["WARNING", "INFO"], device.name


async def test_a_link_that_flaps_is_survived(near: Device) -> None:
    async with connected(size=2 * MiB) as ends:
        session = await ends.session()
        for _ in range(3):
            transfer = await ends.submit_in_the_middle(passes=64, timeout=60)
            await asyncio.to_thread(flap, near, 1, 0.05)
            assert await transfer == 64 * ends.local.size
        await ends.write()
        assert await ends.session() is session


async def test_a_lost_address_ends_in_an_error_and_its_return_is_enough(
    near: Device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aioflagcx")
    async with connected(connect_timeout=1.5, qp_timeout=12) as ends:
        transfer = await ends.submit_in_the_middle(timeout=None)
        # A link-local address is left, which the peer's does not fit.
        with no_address(near), pytest.raises(PeerLost, match="GID types do not fit"):
            await asyncio.wait_for(transfer, 30)
        name = f"device {near.name}: GID table change"
        await until(lambda: len([r for r in caplog.records if name in r.message]) >= 2)
        await ends.write()
        told = [record for record in caplog.records if name in record.message]
        assert told[0].levelname == "WARNING"
        assert f"its address is ::ffff:{near.address} " in told[-1].message


async def test_a_region_deregistered_under_a_write_is_an_access_error() -> None:
    async with connected() as ends:
        doomed = np.zeros(4 * MiB, np.uint8)
        region = await ends.theirs.register(doomed, name="doomed")
        session = await ends.session()
        await session.refresh()
        source = await ends.ours.register(np.ones(4 * MiB, np.uint8))
        transfers = []
        for _ in range(3):
            here, there = np.full(100, source.addr), np.full(100, region.addr)
            transfers.append(ends.ours.submit_write(session, here, there, 4 * MiB, timeout=60))
        await until(lambda: transfers[0].bytes_done > 0)
        await ends.theirs.deregister(region)
        doomed[:] = 7
        for transfer in transfers:
            with pytest.raises((RemoteAccessError, RemoteAddressError)) as caught:
                await asyncio.wait_for(transfer, 30)
            error = caught.value
            if isinstance(error, RemoteAccessError):
                assert "IBV_WC_REM_ACCESS_ERR" in str(error)
                assert error.rail == RAIL
                assert error.address is not None
                assert 0 <= error.address - region.addr < 4 * MiB
        assert isinstance(transfers[0].exception(), RemoteAccessError)
        assert (doomed == 7).all(), "bytes arrived after deregister"
        await ends.write()
        assert await ends.session() is session, "a fresh queue pair, not a fresh session"
