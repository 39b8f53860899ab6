"""An idle engine uses no CPU, however many sessions it has."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import numpy as np
from promises.host import Host
from promises.lab import Lab
from promises.measures import KiB

SECONDS = 2.0
BOUND = 0.05
"""Share of one core. It is about a thousandth; a single thread that spins takes a whole one."""


async def test_open_sessions_without_transfers_use_next_to_no_cpu(
    lab: Lab, report: Callable[[str, float, str], None]
) -> None:
    peer = await lab.peer()
    engines = [await lab.engine() for _ in range(10)]
    for engine in engines:
        region = await engine.register(np.ones(4 * KiB, np.uint8))
        session = await lab.connect(engine, peer)
        await engine.write(session, region, session.regions["memory"].addr, region)

    async def used() -> float:
        """By both processes, where there are two."""
        theirs = 0.0 if peer.pid == os.getpid() else await peer.run(Host.cpu_time)
        return time.process_time() + theirs

    before = await used()
    await asyncio.sleep(SECONDS)  # what is measured is this time
    share = (await used() - before) / SECONDS
    report("share of a core", share * 100, "%")
    assert share < BOUND
