"""Sessions and engines leave nothing behind: no RDMA objects, descriptors or threads."""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import pytest
from softroce.devices import object_counts
from softroce.engines import Ends, connected, until

from aioflagcx import Engine
from aioflagcx.threads import _MAX_THREADS

CYCLES = 1_000
AT_ONCE = 4
"""Pairs of engines that connect and close side by side."""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


async def fill_executors(engine: Engine) -> None:
    """Have all of the engine's threads for blocking calls, which otherwise come as needed."""
    assert engine._open is not None
    runtime = engine._open.runtime
    for threads in (runtime.threads, runtime.connecting):
        together = threading.Barrier(_MAX_THREADS)
        await asyncio.gather(*(threads.run(together.wait) for _ in range(_MAX_THREADS)))


async def cycle(ends: Ends, count: int) -> None:
    """Connect, write and close so many times."""
    for _ in range(count):
        session = await ends.session()
        await ends.ours.write(session, ends.local, ends.remote, 64)
        await session.close()
    await until(lambda: not ends.theirs.stats().responders)


@pytest.mark.timeout(300)  # an emulated machine took 47 s, and another day 99 s
async def test_a_thousand_sessions_leave_no_objects_descriptors_or_threads() -> None:
    async with connected(size=4096) as ends:
        for engine in (ends.ours, ends.theirs):
            await fill_executors(engine)
        await cycle(ends, 5)
        before = object_counts(), descriptors(), threads()
        await cycle(ends, CYCLES)
        assert object_counts() == before[0]
        gc.collect()
        assert descriptors() <= before[1]
        assert threads() <= before[2]


async def test_engines_leave_nothing_either() -> None:
    async def live_and_end(count: int) -> None:
        for _ in range(count):
            async with connected(size=4096) as ends:
                await ends.write()

    await live_and_end(1)
    before = object_counts(), descriptors(), threads()
    await asyncio.gather(*(live_and_end(3) for _ in range(AT_ONCE)))
    assert object_counts() == before[0]
    gc.collect()
    assert descriptors() <= before[1]
    assert threads() <= before[2]
