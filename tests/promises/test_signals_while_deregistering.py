"""Promise 4 on the same-host path, where a peer copies into our memory by itself: it may be killed
or stopped at any instruction while the memory is taken away from it.

A killed peer never prevents a deregistration. A stopped one does not either, where its copies are
guarded. Where they are not, it may, if it stopped inside a copy: then the memory is its until it
goes on or is ended, and the deregistration ends by itself. So it is with `quiesce`.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from promises.host import Host
from promises.lab import Lab
from promises.measures import Bytes, MiB, until
from promises.nursery import Nursery
from promises.peers import ChildPeer

from aioflagcx import Engine, Region
from aioflagcx.errors import (
    DeregisterTimeout,
    PeerLost,
    QuiesceTimeout,
    RemoteAccessError,
    RemoteAddressError,
)

pytestmark = pytest.mark.arrangements("local-processes")

VALUE, FILL = 0x33, 0x99
SIZE = 2 * MiB
ROUNDS = {"killed": 38, "stopped": 19}
"""Of each kind; there are four kinds of the one and eight of the other."""

TIMEOUT = 0.05
"""Seconds that a deregistration may take: a hundred times what a running peer needs."""

PROMPT = 4.0
"""Seconds within which things happen that nothing prevents, on a busy machine."""

moment = np.random.default_rng(1).uniform
"""A moment to act, in seconds from when a copy is known to be under way."""


class Copier:
    """A process that writes into our memory, or reads it, until it may not any more."""

    def __init__(
        self, lab: Lab, nursery: Nursery, owner: Engine, reads: bool = False, alloc: bool = False
    ) -> None:
        self._lab, self._nursery, self._owner = lab, nursery, owner
        self._reads, self._alloc = reads, alloc
        self.guarded = nursery.guarded
        self._ordinary = np.zeros(SIZE, np.uint8)
        self._peer: ChildPeer | None = None

    peer: ChildPeer
    call: asyncio.Future[Exception]
    memory: Bytes
    """Ours, of the region that it copies into or from."""

    async def start(self) -> Region:
        """Give it a region to copy to; returns when it is at it."""
        if self._peer is None:
            self._peer = await self._lab.peer(SIZE, placement={"nursery": self._nursery})
        peer = self.peer = self._peer
        if self._alloc:
            region = await self._owner.alloc(SIZE)
            self.memory = region.numpy()
        else:
            self.memory = self._ordinary
            region = await self._owner.register(self.memory)
        self.memory[:] = VALUE if self._reads else 0
        peer.memory[:] = 0 if self._reads else VALUE
        peer_id = self._owner.session_id
        await peer.run(Host.refresh, peer_id)
        if self._reads:
            self.call = peer.start_call(Host.read_without_end, peer_id, region.addr, SIZE)
            await until(lambda: bool(peer.memory[-1] == VALUE))
        else:
            self.call = peer.start_call(Host.write_without_end, peer_id, region.addr, SIZE, VALUE)
            await until(lambda: bool(self.memory[-1] == VALUE))
        return region

    async def kill(self) -> None:
        """The next start() begins with another process."""
        await self.peer.kill()
        await asyncio.gather(self.call, return_exceptions=True)
        self._peer = None

    def check(self) -> None:
        """The memory has been filled since it was deregistered."""
        assert (self.memory == FILL).all(), "bytes arrived after the memory was taken away"
        if self._reads:
            assert not (self.peer.memory == FILL).any(), "bytes were read that were not for it"


def soon(action: Callable[[], object]) -> threading.Thread:
    """Do it on another thread, before, while or after the memory is taken away."""

    def run() -> None:
        time.sleep(seconds)
        action()

    seconds = moment(0, 0.005)
    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("reads", [False, True], ids=["writes", "reads"])
@pytest.mark.parametrize("alloc", [False, True], ids=["ordinary", "alloc"])
async def test_a_peer_killed_at_any_moment_prevents_nothing_and_nothing_comes_late(
    lab: Lab, nursery: Nursery, reads: bool, alloc: bool
) -> None:
    owner = await lab.engine()
    copier = Copier(lab, nursery, owner, reads, alloc)
    for _ in range(ROUNDS["killed"]):
        region = await copier.start()
        killing = soon(copier.peer.process.kill)
        await asyncio.sleep(moment(0, 0.003))
        await owner.deregister(region, timeout=PROMPT)
        copier.memory[:] = FILL
        killing.join()
        await copier.kill()
        copier.check()


async def stop_and_take_away(
    copier: Copier,
    take_away: Callable[[Region, float], Awaitable[None]],
    too_late: type[Exception],
) -> None:
    """`take_away(region, timeout)` from a peer that is stopped at that moment."""
    outcomes = collections.Counter[str]()
    for round_ in range(ROUNDS["stopped"]):
        region = await copier.start()
        stopping = soon(copier.peer.stop)
        await asyncio.sleep(moment(0, 0.003))
        started = time.monotonic()
        waiting: asyncio.Future[None] | None = None
        try:
            await take_away(region, PROMPT if copier.guarded else TIMEOUT)
            outcomes["in time"] += 1
        except too_late:
            outcomes["inside a copy"] += 1
            waiting = asyncio.ensure_future(take_away(region, PROMPT))
        assert time.monotonic() - started < TIMEOUT + PROMPT
        stopping.join()
        if waiting is None:
            copier.memory[:] = FILL
        # It goes on, or it ends: either sets the memory free.
        ends = round_ % 4 == 0
        if ends:
            await copier.kill()
        else:
            copier.peer.resume()
        if waiting is not None:
            await waiting
            copier.memory[:] = FILL
        if not ends:
            assert isinstance(await copier.call, RemoteAccessError | RemoteAddressError | PeerLost)
        copier.check()
    assert outcomes["in time"], "no peer was stopped elsewhere"
    if copier.guarded:  # its copy ends where it is stopped
        assert not outcomes["inside a copy"]
    else:
        assert outcomes["inside a copy"], "no peer was stopped in the middle"


@pytest.fixture(params=[True, False], ids=["guarded", "unguarded"])
def either_nursery(
    request: pytest.FixtureRequest, nursery: Nursery, unguarded_nursery: Nursery
) -> Nursery:
    return nursery if request.param else unguarded_nursery


@pytest.mark.parametrize("reads", [False, True], ids=["writes", "reads"])
@pytest.mark.parametrize("alloc", [False, True], ids=["ordinary", "alloc"])
async def test_a_peer_stopped_at_any_moment_delays_at_most_the_memory_it_copies_to(
    lab: Lab, either_nursery: Nursery, reads: bool, alloc: bool
) -> None:
    owner = await lab.engine()

    async def deregister(region: Region, timeout: float) -> None:
        try:
            await owner.deregister(region, timeout=timeout)
        except DeregisterTimeout as error:
            assert error.address == region.addr
            raise

    copier = Copier(lab, either_nursery, owner, reads, alloc)
    await stop_and_take_away(copier, deregister, DeregisterTimeout)
    assert owner.stats().regions == 0


async def test_quiesce_says_whether_a_stopped_peer_is_inside_a_copy(
    lab: Lab, either_nursery: Nursery
) -> None:
    owner = await lab.engine()
    copier = Copier(lab, either_nursery, owner)

    async def quiesce(_: Region, timeout: float) -> None:
        try:
            await owner.quiesce(copier.peer.engine_id, timeout=timeout)
        except QuiesceTimeout as error:
            assert copier.peer.engine_id in str(error)
            raise

    await stop_and_take_away(copier, quiesce, QuiesceTimeout)


async def stop_inside(copier: Copier, owner: Engine) -> Region:
    """Have the peer stopped inside a copy; its region."""
    while True:
        region = await copier.start()
        copier.peer.stop()
        try:
            await owner.quiesce(copier.peer.engine_id, timeout=TIMEOUT)
        except QuiesceTimeout:
            return region
        await copier.kill()
        await owner.deregister(region)


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = (line.split()[0].split("-") for line in lines)
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


@pytest.mark.parametrize("alloc", [False, True], ids=["ordinary", "alloc"])
async def test_closing_does_not_wait_for_a_stopped_peer_and_keeps_the_memory_it_copies_to(
    lab: Lab, unguarded_nursery: Nursery, caplog: pytest.LogCaptureFixture, alloc: bool
) -> None:
    owner = await lab.engine()
    copier = Copier(lab, unguarded_nursery, owner, alloc=alloc)
    region = await stop_inside(copier, owner)
    address = region.addr
    kept = weakref.ref(copier.memory)
    started = time.monotonic()
    await owner.close()
    assert time.monotonic() - started < 2.0 + 1.0
    [error] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "stopped while it copied" in error.getMessage()
    assert hex(address) in error.getMessage()
    # Nobody here holds the memory any more, but it is there when the peer goes on.
    peer, call = copier.peer, copier.call
    del copier, region, owner
    if not alloc:
        assert kept() is not None
    peer.resume()
    assert isinstance(await call, PeerLost)
    assert is_mapped(address)


async def test_a_peer_that_becomes_another_program_prevents_nothing(
    lab: Lab, nursery: Nursery
) -> None:
    """The process lives on, and what it said it was doing is never taken back."""
    owner = await lab.engine()
    copier = Copier(lab, nursery, owner)
    for _ in range(8):
        region = await copier.start()
        await copier.peer.run_last(Host.become_another_program)
        await owner.deregister(region, timeout=PROMPT)
        copier.memory[:] = FILL
        await copier.kill()
        copier.check()


@pytest.mark.parametrize("dies", ["writer", "owner"])
async def test_a_forked_child_with_copies_of_all_descriptors_keeps_no_dead_session_alive(
    lab: Lab, nursery: Nursery, dies: str
) -> None:
    config = {"keepalive_interval": 0.2, "keepalive_timeout": 1.5, "drain_timeout": 0.5}
    placement = {"nursery": nursery}
    owner = await lab.peer(SIZE, placement=placement, **config)
    writer = await lab.peer(SIZE, placement=placement, **config)
    stream = writer.start_call(Host.write_without_end, owner.session_id, owner.at(0), SIZE, VALUE)
    await until(lambda: bool(owner.memory[-1] == VALUE))
    heir = await {"writer": writer, "owner": owner}[dies].run(Host.fork_idle)
    try:
        if dies == "writer":
            # At once, by the end of the process; the session follows when its keepalive is missed.
            await writer.kill()
            await owner.run(Host.deregister, "memory", PROMPT)
            owner.memory[:] = FILL
            await asyncio.wait_for(owner.run(Host.wait_responders, 0), 1.5 + PROMPT)
            assert (owner.memory == FILL).all()
            stream.cancel()  # its answer would come by a pipe that the child holds open
        else:
            await owner.kill()
            assert isinstance(await asyncio.wait_for(stream, 1.5 + 0.5 + PROMPT), PeerLost)
    finally:
        os.kill(heir, signal.SIGKILL)
