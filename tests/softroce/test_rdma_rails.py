"""Several RDMA devices in one engine: which are joined, what each carries, that one may fail."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

import pytest
from softroce.devices import Device, run
from softroce.engines import Ends, MiB, connected, until
from softroce.faults import link_down, netem

from aioflagcx import Config, Engine
from aioflagcx.errors import ConnectError

FIRST, SECOND = "rxe0->rxe1", "rxe2->rxe3"


def carried(ends: Ends, before: dict[str, int]) -> dict[str, int]:
    """Bytes by rail since `before`, a copy of Stats.rails."""
    return {rail: total - before.get(rail, 0) for rail, total in ends.ours.stats().rails.items()}


WINDOW = MiB // 2
"""Bytes that a rail may have under way: so few that what these tests move is many times as much."""


@contextlib.asynccontextmanager
async def two_rails(theirs: str = "rxe1,rxe3", size: int = 4 * MiB) -> AsyncIterator[Ends]:
    window = {"max_inflight_bytes_per_endpoint": WINDOW}
    async with connected("rxe0,rxe2", theirs, size, **window) as ends:
        await until(lambda: not ends.ours.stats().rails_down)
        yield ends


@pytest.mark.parametrize("theirs", ["rxe1,rxe3", "rxe3,rxe1"])
async def test_devices_of_one_cable_are_joined_in_whatever_order_they_are_named(
    theirs: str,
) -> None:
    async with two_rails(theirs) as ends:
        for _ in range(3):
            await ends.write()
            await ends.read()
        rails = ends.ours.stats().rails
        assert set(rails) == {FIRST, SECOND}
        assert all(rails.values()), "both carry a part"
        assert sum(rails.values()) == 6 * ends.local.size


@pytest.mark.parametrize(
    ("ours", "theirs", "rails"),
    [
        ("rxe2", "rxe1,rxe3", {SECOND}),
        ("rxe2,rxe0", "rxe1", {FIRST}),
    ],
)
async def test_a_device_without_a_counterpart_takes_no_part(
    ours: str, theirs: str, rails: set[str]
) -> None:
    async with connected(ours, theirs) as ends:
        await ends.write()
        assert set(ends.ours.stats().rails) == rails
        assert ends.ours.stats().rails_down == 0


async def test_a_slow_rail_carries_little() -> None:
    async with connected("rxe0,rxe2", "rxe1,rxe3", 16 * MiB) as ends:
        await until(lambda: not ends.ours.stats().rails_down)
        with netem(Device(0), "rate", "40mbit"):
            before = dict(ends.ours.stats().rails)
            await ends.write()
            moved = carried(ends, before)
        assert moved[FIRST] + moved[SECOND] == ends.local.size
        assert moved[SECOND] > 3 * moved[FIRST] > 0, moved
        assert ends.ours.stats().slices_reposted == 0


@pytest.mark.parametrize("lost", [Device(0), Device(3)], ids=["ours", "theirs"])
async def test_a_device_lost_in_the_middle_leaves_its_part_to_the_other(
    lost: Device, caplog: pytest.LogCaptureFixture
) -> None:
    failing, healthy = (FIRST, SECOND) if lost.number < 2 else (SECOND, FIRST)
    caplog.set_level(logging.INFO, "aioflagcx")
    async with two_rails() as ends:
        transfer = await ends.submit_in_the_middle(passes=48, timeout=90)
        await until(lambda: ends.ours.stats().rails.get(failing, 0) > 0)
        with link_down(lost):
            assert not transfer.done()
            before = dict(ends.ours.stats().rails)
            assert await transfer == 48 * ends.local.size
            moved = carried(ends, before)
            assert moved[healthy] > 0
            assert moved[failing] <= WINDOW, "what had been on its way"
            await until(lambda: ends.ours.stats().rails_down == 1)
            await ends.write()
            session = await ends.session()
            assert session.alive
        await until(lambda: ends.ours.stats().rails_down == 0)
        before = dict(ends.ours.stats().rails)
        for _ in range(3):
            await ends.write()
        assert carried(ends, before)[failing] > 0, "it is used again"
        assert await ends.session() is session
        told = [record for record in caplog.records if f"rail {failing} is" in record.message]
        assert [record.levelname for record in told] == ["WARNING", "INFO"]
        device = lost if lost.number % 2 == 0 else lost.peer
        assert f"the port of {device.name} is down" in told[0].message


@contextlib.contextmanager
def ipv6(device: Device) -> Iterator[None]:
    """The device has a global IPv6 address too."""
    address = ("fd77::1/64", "dev", device.netdev)
    run("ip", "address", "add", *address)
    try:
        yield
    finally:
        run("ip", "address", "delete", *address)


async def test_gid_types_that_do_not_fit_are_told_by_the_connect() -> None:
    near, far = Device(0), Device(1)
    with ipv6(far):
        theirs = Config(devices=far.name, gid_index=far.gid_index("fd77::1"))
        async with (
            Engine(near.address, devices=near.name) as engine,
            Engine(far.address, config=theirs) as peer,
        ):
            with pytest.raises(ConnectError, match="GID types do not fit") as caught:
                await asyncio.wait_for(engine.connect(peer.session_id), 30)
            assert f"{near.address} (RoCE v2 over IPv4)" in str(caught.value)
            assert "fd77::1 (RoCE v2 over IPv6)" in str(caught.value)
            assert caught.value.rail == "rxe0->rxe1"
