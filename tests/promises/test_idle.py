"""An idle engine uses no CPU, however many sessions it has."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import numpy as np
import pytest
from promises.host import Host, thread_wakeups
from promises.lab import Lab
from promises.measures import KiB
from promises.peers import Peer

from aioflagcx import Engine

SECONDS = 2.0
BOUND = 0.01
"""Share of one core. It is about a twentieth of that; one thread that spins takes a whole one."""


async def test_open_sessions_without_transfers_use_next_to_no_cpu(
    lab: Lab, report: Callable[[str, float, str], None]
) -> None:
    peer = await lab.peer()
    for _ in range(10):
        await use(lab, await lab.engine(), peer)

    async def used() -> float:
        """By both processes, where there are two."""
        theirs = 0.0 if peer.pid == os.getpid() else await peer.run(Host.cpu_time)
        return time.process_time() + theirs

    before = await used()
    await asyncio.sleep(SECONDS)  # what is measured is this time
    share = (await used() - before) / SECONDS
    report("share of a core", share * 100, "%")
    assert share < BOUND


@pytest.mark.arrangements("tcp-processes")
@pytest.mark.parametrize("sessions", ["opened", "accepted"])
async def test_an_idle_engine_wakes_up_once_an_interval_however_many_sessions_it_has(
    lab: Lab, sessions: str, report: Callable[[str, float, str], None]
) -> None:
    interval, count = 0.1, 20
    keepalive = {"keepalive_interval": interval, "keepalive_timeout": 60}
    hub = await lab.peer(**keepalive)
    others = [await lab.engine(**keepalive) for _ in range(count)]
    for other in others:
        if sessions == "accepted":
            await use(lab, other, hub)
        else:
            await other.register(np.ones(4 * KiB, np.uint8), name="memory")
            await hub.run(Host.write_to, other.session_id, 4 * KiB)

    before, threads_before = await hub.run(Host.wakeups), await hub.run(thread_wakeups)
    started = time.monotonic()
    await asyncio.sleep(SECONDS)  # what is measured is this time
    ticks = (time.monotonic() - started) / interval
    counted = await hub.run(Host.wakeups) - before
    of_threads = await hub.run(thread_wakeups) - threads_before
    report("counted", counted, "wake-ups")
    report("of all threads", of_threads, "wake-ups")
    # Every session's own beat would be twenty times as many.
    assert ticks / 2 < counted < ticks * 1.5
    # The questions wake the event loop, and the interpreter hands its lock to and fro.
    assert of_threads < ticks * 3


async def use(lab: Lab, engine: Engine, peer: Peer) -> None:
    """Write once, so that everything is there that a session needs."""
    region = await engine.register(np.ones(4 * KiB, np.uint8))
    session = await lab.connect(engine, peer)
    await engine.write(session, region, session.regions["memory"].addr, region)
