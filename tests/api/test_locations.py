"""Locations mean nothing to soft devices."""

from __future__ import annotations

from aioflagcx import Engine


async def test_a_location_that_this_host_does_not_have() -> None:
    async with Engine(devices="soft") as engine:
        region = await engine.register(bytearray(64), location="cuda:3")
        assert region.location == "cuda:3"
        assert await engine.write(engine.session_id, region, region, 64) == 64
