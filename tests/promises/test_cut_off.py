"""Promise 5: a peer that is cut off, so that nothing of it or to it arrives, counts as lost."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from promises.host import Host
from promises.lab import Lab
from promises.measures import SLACK, MiB, until
from promises.peers import ChildPeer
from promises.two_hosts import TwoHosts

from aioflagcx.errors import ConnectError, ConnectTimeout, PeerLost

SIZE, VALUE, FILL = 8 * MiB, 0x44, 0x66


async def write_timed(
    host: Host, peer: str, destination: int, size: int
) -> tuple[float, Exception | int]:
    """A write, how long it took, and how it ended."""
    started = time.monotonic()
    outcome: Exception | int
    try:
        outcome = await host.engine.write(peer, host.base, destination, size)
    except Exception as error:
        outcome = error
    return time.monotonic() - started, outcome


@pytest.mark.netns
@pytest.mark.arrangements("tcp-processes")
async def test_a_peer_that_is_cut_off_is_lost_in_time_on_both_sides_and_found_again(
    lab: Lab, two_hosts: TwoHosts
) -> None:
    config = {
        "keepalive_interval": 0.2,
        "keepalive_timeout": 1.5,
        "drain_timeout": 0.5,
        "connect_timeout": 1.0,
    }
    writer: ChildPeer = await lab.peer(SIZE, placement=two_hosts.placement(0), **config)
    owner: ChildPeer = await lab.peer(SIZE, placement=two_hosts.placement(1), **config)
    stream = writer.start_call(Host.write_without_end, owner.session_id, owner.at(0), SIZE, VALUE)
    await until(lambda: bool(owner.memory[-1] == VALUE))

    two_hosts.cut()
    started = time.monotonic()
    error = await asyncio.wait_for(stream, 20)
    assert time.monotonic() - started < 1.5 + 0.5 + SLACK
    assert isinstance(error, PeerLost)
    assert error.peer == owner.session_id
    assert error.remote_quiet is False
    elapsed, outcome = await writer.run(write_timed, owner.session_id, owner.at(0), SIZE)
    assert isinstance(outcome, ConnectError)
    assert isinstance(outcome, ConnectTimeout) or elapsed < 1.0
    assert elapsed < 1.0 + SLACK

    # The owner has noticed as well, and fenced what may still be on its way.
    await asyncio.wait_for(owner.run(Host.wait_responders, 0), 10)
    owner.memory[:] = FILL
    two_hosts.mend()
    elapsed, outcome = await writer.run(write_timed, owner.session_id, owner.at(0), SIZE // 2)
    assert outcome == SIZE // 2
    half = SIZE // 2
    assert (owner.memory[:half] == VALUE).all()
    assert (owner.memory[half:] == FILL).all(), "bytes arrived from before the cut"
    assert np.count_nonzero(owner.memory == VALUE) == half
