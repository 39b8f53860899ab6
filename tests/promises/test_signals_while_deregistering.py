"""Promise 4 on the same-host path, where a peer copies into our memory by itself: it may be killed
or stopped at any instruction while the memory is taken away from it.

A killed peer never prevents a deregistration. A stopped one may, if it stopped inside a copy: then
the memory is its until it goes on or is ended, and the deregistration ends by itself.
"""

from __future__ import annotations

import asyncio
import collections
import platform
import threading
import time

import numpy as np
import pytest
from promises.host import Host
from promises.lab import Lab
from promises.measures import MiB, until
from promises.nursery import Nursery
from promises.peers import ChildPeer

from aioflagcx import Engine, Region
from aioflagcx.errors import DeregisterTimeout, RemoteAccessError, RemoteAddressError

VALUE, FILL = 0x33, 0x99
SIZE = 2 * MiB
ROUNDS = 38
"""Of each kind; there are eight kinds."""

TIMEOUT = 0.05
"""Seconds that a deregistration may take: a hundred times what a running peer needs."""

PROMPT = 2.0
"""Seconds within which things happen that nothing prevents, on a busy machine."""


class Copier:
    """A process that writes into our memory, or reads it, until it may not any more."""

    def __init__(self, lab: Lab, nursery: Nursery, owner: Engine, reads: bool) -> None:
        self._lab, self._nursery, self._owner = lab, nursery, owner
        self._reads = reads
        self.peer: ChildPeer | None = None

    async def start(self, region: Region) -> None:
        """Returns when it is at it."""
        if self.peer is None:
            self.peer = await self._lab.peer(SIZE, placement={"nursery": self._nursery})
        peer, session_id = self.peer, self._owner.session_id
        peer.memory[:] = 0 if self._reads else VALUE
        await peer.run(Host.refresh, session_id)
        if self._reads:
            self.call = peer.start_call(Host.read_without_end, session_id, region.addr, SIZE)
            await until(lambda: bool(peer.memory[-1] == VALUE))
        else:
            self.call = peer.start_call(
                Host.write_without_end, session_id, region.addr, SIZE, VALUE
            )
            await until(lambda: bool(memory_of(region)[-1] == VALUE))

    async def kill(self) -> None:
        assert self.peer is not None
        await self.peer.kill()
        await asyncio.gather(self.call, return_exceptions=True)
        self.peer = None


def memory_of(region: Region) -> np.ndarray:
    return np.frombuffer(region.view(), np.uint8)


def in_a_moment(seconds: float, action: object) -> threading.Thread:
    """Do it on another thread, `seconds` from now, exactly."""

    def run() -> None:
        while time.perf_counter() < due:
            pass
        action()

    due = time.perf_counter() + seconds
    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.arrangements("local-processes")
@pytest.mark.parametrize("reads", [False, True], ids=["writes", "reads"])
async def test_a_peer_killed_at_any_moment_prevents_nothing_and_nothing_comes_late(
    lab: Lab, nursery: Nursery, reads: bool
) -> None:
    owner = await lab.engine()
    memory = np.zeros(SIZE, np.uint8)
    rng = np.random.default_rng(1)
    copier = Copier(lab, nursery, owner, reads)
    for _ in range(ROUNDS):
        memory[:] = VALUE if reads else 0
        region = await owner.register(memory)
        await copier.start(region)
        peer = copier.peer
        killing = in_a_moment(float(rng.uniform(0, 0.002)), peer.process.kill)
        await asyncio.sleep(float(rng.uniform(0, 0.002)))
        await owner.deregister(region, timeout=PROMPT)
        memory[:] = FILL
        killing.join()
        await copier.kill()
        check(memory, peer, reads)


@pytest.mark.arrangements("local-processes")
@pytest.mark.parametrize("reads", [False, True], ids=["writes", "reads"])
async def test_a_peer_stopped_at_any_moment_delays_at_most_its_own_deregistration(
    lab: Lab, nursery: Nursery, reads: bool
) -> None:
    owner = await lab.engine()
    memory = np.zeros(SIZE, np.uint8)
    rng = np.random.default_rng(2)
    copier = Copier(lab, nursery, owner, reads)
    outcomes = collections.Counter[str]()
    for round_ in range(ROUNDS):
        memory[:] = VALUE if reads else 0
        region = await owner.register(memory)
        await copier.start(region)
        peer = copier.peer
        stopping = in_a_moment(float(rng.uniform(0, 0.002)), peer.stop)
        await asyncio.sleep(float(rng.uniform(0, 0.002)))
        started = time.monotonic()
        try:
            await owner.deregister(region, timeout=TIMEOUT)
        except DeregisterTimeout as error:
            assert error.address == region.addr
            outcomes["inside a copy"] += 1
            waiting = asyncio.ensure_future(owner.deregister(region, timeout=PROMPT))
            assert not waiting.done()
        else:
            outcomes["in time"] += 1
            waiting = None
        assert time.monotonic() - started < TIMEOUT + PROMPT
        stopping.join()
        if waiting is None:
            memory[:] = FILL
        # It goes on, or it ends: either ends the deregistration.
        if round_ % 4 == 0:
            await copier.kill()
        else:
            peer.resume()
        if waiting is not None:
            await waiting
            memory[:] = FILL
        if round_ % 4 != 0:
            assert isinstance(await copier.call, RemoteAccessError | RemoteAddressError)
        check(memory, peer, reads)
    assert outcomes["in time"]
    if platform.machine() == "x86_64":  # where a copy ends when its thread is stopped
        assert not outcomes["inside a copy"]


def check(memory: np.ndarray, peer: ChildPeer, reads: bool) -> None:
    assert (memory == FILL).all(), "bytes arrived after deregister"
    if reads:
        assert not (peer.memory == FILL).any(), "bytes were read after deregister"
