from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from aioflagcx.waiting import DEFAULT, outlast, seconds


def test_timeouts() -> None:
    assert seconds(DEFAULT, 5.0) == 5.0
    assert seconds(DEFAULT, None) is None
    assert seconds(None, 5.0) is None
    assert seconds(2, 5.0) == 2.0
    assert seconds(math.inf, 5.0) is None
    assert seconds(np.float32(2), 5.0) == 2.0
    assert type(seconds(np.int64(2), 5.0)) is float


@pytest.mark.parametrize("timeout", [0, -1, -math.inf, math.nan])
def test_timeouts_that_are_over_already(timeout: float) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        seconds(timeout, 5.0)


@pytest.mark.parametrize("timeout", ["1", True, [], 1j])
def test_timeouts_of_the_wrong_type(timeout: Any) -> None:
    with pytest.raises(TypeError):
        seconds(timeout, 5.0)


async def test_outlast_gives_the_result_or_the_error() -> None:
    loop = asyncio.get_running_loop()
    good, bad = loop.create_future(), loop.create_future()
    loop.call_soon(good.set_result, 5)
    loop.call_soon(bad.set_exception, KeyError())
    assert await outlast(good) == 5
    with pytest.raises(KeyError):
        await outlast(bad)


@pytest.mark.parametrize("fails", [False, True])
async def test_outlast_raises_cancellations_only_at_the_end(fails: bool) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()
    task = asyncio.create_task(outlast(future))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    assert not future.cancelled()
    if fails:
        future.set_exception(KeyError())
    else:
        future.set_result(1)
    with pytest.raises(asyncio.CancelledError):
        await task
