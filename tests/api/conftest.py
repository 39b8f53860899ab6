"""Engines to try the public API on: each test runs on both event loops and, where data moves,
on every path of the soft device."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import uvloop
from api.pair import MiB, Pair

from aioflagcx import Config, Engine


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(params=["process", "local", "tcp"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Start = Callable[..., Any]


@pytest_asyncio.fixture
async def engines(path: str) -> AsyncIterator[Start]:
    """Starts engines, with settings as given, which are closed at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(host: str = "127.0.0.1", port: int = 0, **settings: Any) -> Engine:
            config = Config(**{"soft_paths": (path,), **settings})
            return await stack.enter_async_context(Engine(host, port, config=config))

        yield start


@pytest_asyncio.fixture
async def pairs(engines: Start) -> Callable[..., Any]:
    """Makes pairs of engines, with settings for both."""

    async def make(size: int = MiB, **settings: Any) -> Pair:
        ours, theirs = await engines(**settings), await engines(**settings)
        src = np.arange(size, dtype=np.uint32).view(np.uint8)[:size].copy()
        dst = np.zeros(size, np.uint8)
        local = await ours.register(src, name="src")
        await theirs.register(dst, name="dst")
        session = await ours.connect(theirs.session_id)
        return Pair(ours, theirs, src, dst, local, session.regions["dst"], session)

    return make


@pytest_asyncio.fixture
async def pair(pairs: Callable[..., Any]) -> Pair:
    """A pair with default settings."""
    made: Pair = await pairs()
    return made
