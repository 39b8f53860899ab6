"""Promise 5: a peer that is cut off, so that nothing of it or to it arrives, counts as lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import numpy as np
import pytest
from promises.host import Host
from promises.lab import Lab
from promises.measures import MiB, until
from promises.peers import ChildPeer

from aioflagcx.errors import ConnectError, ConnectTimeout, PeerLost

ADDRESSES = ("10.78.0.1", "10.78.0.2")
SIZE, VALUE, FILL = 8 * MiB, 0x44, 0x66


class TwoHosts:
    """Two network namespaces with a cable between them, which can be pulled."""

    def __init__(self, ip: str) -> None:
        self._ip = ip
        self._names = [f"promises-{os.getpid()}-{end}" for end in "ab"]

    def configure(self, *words: str) -> None:
        subprocess.run([self._ip, *words], check=True)

    @contextlib.contextmanager
    def up(self) -> Iterator[TwoHosts]:
        with contextlib.ExitStack() as stack:
            for name in self._names:
                self.configure("netns", "add", name)
                stack.callback(self.configure, "netns", "del", name)
            peer = ["peer", "name", "eth0", "netns", self._names[1]]
            self.configure("link", "add", "eth0", "netns", self._names[0], "type", "veth", *peer)
            for name, address in zip(self._names, ADDRESSES, strict=True):
                self.configure("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                self.configure("-n", name, "link", "set", "eth0", "up")
            yield self

    def placement(self, index: int) -> dict[str, object]:
        """For Lab.peer: run it on the one host or the other."""
        command = (self._ip, "netns", "exec", self._names[index])
        return {"host": ADDRESSES[index], "command": command}

    def cut(self) -> None:
        """No packet passes any more, and nobody is told."""
        self.configure("-n", self._names[1], "link", "set", "eth0", "down")

    def mend(self) -> None:
        self.configure("-n", self._names[1], "link", "set", "eth0", "up")


@pytest.fixture
def two_hosts() -> Iterator[TwoHosts]:
    ip = shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        pytest.fail("network namespaces need root and iproute2")
    with TwoHosts(ip).up() as hosts:
        yield hosts


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
    assert time.monotonic() - started < 1.5 + 0.5 + 1.5
    assert isinstance(error, PeerLost)
    assert error.peer == owner.session_id
    assert error.remote_quiet is False
    elapsed, outcome = await writer.run(write_timed, owner.session_id, owner.at(0), SIZE)
    assert isinstance(outcome, ConnectError)
    assert isinstance(outcome, ConnectTimeout) or elapsed < 1.0
    assert elapsed < 1.0 + 1.5

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
