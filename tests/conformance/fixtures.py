"""Engines of the asyncio API on the devices of a test. A conftest takes what it needs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import uvloop
from conformance.devices import Devices, End
from conformance.pair import MiB, Pair

from aioflagcx import Engine

__all__ = [
    "Engines",
    "Pairs",
    "engine",
    "engines",
    "pair",
    "pairs",
    "pytest_asyncio_loop_factories",
]


def pytest_asyncio_loop_factories(
    config: pytest.Config,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Both event loops. With RDMA devices only the faster one: the loop's part is the same."""
    loops = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    if config.getoption("rdma"):
        del loops["asyncio"]
    return loops


class Engines:
    """Starts engines, with settings as given, which are closed at the end of the test."""

    def __init__(self, devices: Devices, stack: contextlib.AsyncExitStack) -> None:
        self._devices = devices
        self._stack = stack

    async def near(self, port: int = 0, **settings: Any) -> Engine:
        return await self._start(self._devices.near, port, settings)

    async def far(self, port: int = 0, **settings: Any) -> Engine:
        return await self._start(self._devices.far, port, settings)

    async def _start(self, end: End, port: int, settings: Mapping[str, Any]) -> Engine:
        return await self._stack.enter_async_context(end.engine(port, **settings))


Pairs = Callable[..., Awaitable[Pair]]


@pytest_asyncio.fixture
async def engines(devices: Devices) -> AsyncIterator[Engines]:
    async with contextlib.AsyncExitStack() as stack:
        yield Engines(devices, stack)


@pytest_asyncio.fixture
async def engine(engines: Engines) -> Engine:
    """A near one with default settings."""
    return await engines.near()


@pytest_asyncio.fixture
async def pairs(engines: Engines) -> Pairs:
    """Makes pairs of engines, with settings for both."""

    async def make(size: int = MiB, **settings: Any) -> Pair:
        ours, theirs = await engines.near(**settings), await engines.far(**settings)
        src = np.arange(size, dtype=np.uint32).view(np.uint8)[:size].copy()
        dst = np.zeros(size, np.uint8)
        local = await ours.register(src, name="src")
        await theirs.register(dst, name="dst")
        session = await ours.connect(theirs.session_id)
        return Pair(ours, theirs, src, dst, local, session.regions["dst"], session)

    return make


@pytest_asyncio.fixture
async def pair(pairs: Pairs) -> Pair:
    """A pair with default settings."""
    return await pairs()
