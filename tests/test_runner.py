from __future__ import annotations

import asyncio

import pytest
import uvloop

import aioflagcx


async def which_loop() -> type[asyncio.AbstractEventLoop]:
    return type(asyncio.get_running_loop())


def test_runs_on_uvloop_and_returns_the_result() -> None:
    assert issubclass(aioflagcx.run(which_loop()), uvloop.Loop)


def test_leaves_asyncio_as_it_was() -> None:
    aioflagcx.run(which_loop())
    assert not issubclass(asyncio.run(which_loop()), uvloop.Loop)


def test_raises_what_the_coroutine_raises() -> None:
    async def fail() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        aioflagcx.run(fail())


def test_is_refused_inside_a_running_loop() -> None:
    async def nested() -> None:
        coroutine = which_loop()
        try:
            aioflagcx.run(coroutine)
        finally:
            coroutine.close()

    with pytest.raises(RuntimeError):
        asyncio.run(nested())
