"""Where an engine listens, and what it is told of devices and logging."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from aioflagcx import Config, Engine
from aioflagcx.errors import ConfigError


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


def test_log_level_is_set_only_when_given() -> None:
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
