"""An engine and memory of its own, with what tests ask of it. Runs in any process or thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from promises.measures import Bytes, until

from aioflagcx import Engine, Notification, Region, _native
from aioflagcx.errors import AioFlagcxError


class Host:
    """All methods run on the engine's event loop."""

    def __init__(self, engine: Engine, memory: Bytes) -> None:
        self.engine = engine
        self.memory = memory
        self.base: int = memory.ctypes.data
        self.regions: dict[str, Region] = {}

    def describe(self) -> dict[str, Any]:
        """What a handle of this host must know."""
        return {
            "pid": os.getpid(),
            "base": self.base,
            "session_id": self.engine.session_id,
            "engine_id": self.engine.engine_id,
            "rpc_port": self.engine.rpc_port,
        }

    async def register(self, name: str, offset: int, size: int, access: str = "read_write") -> None:
        """Register a part of the memory."""
        memory = self.memory[offset : offset + size]
        self.regions[name] = await self.engine.register(memory, name=name, access=access)

    async def register_blocks(self, count: int, size: int) -> None:
        """Register `count` adjoining regions of `size` bytes, named "block-0" and so on."""
        blocks = [self.memory[i * size : (i + 1) * size] for i in range(count)]
        names = [f"block-{i}" for i in range(count)]
        regions = await self.engine.register_many(blocks, names=names)
        self.regions.update(zip(names, regions, strict=True))

    async def deregister(self, name: str, timeout: float = 5.0) -> None:
        await self.engine.deregister(self.regions.pop(name), timeout=timeout)

    async def quiesce(self, peer: str) -> None:
        await self.engine.quiesce(peer)

    async def unplug(self, device: int) -> None:
        """Take one of the engine's soft devices away, as if a NIC died."""
        await unplug(self.engine, device)

    async def plug(self, device: int) -> None:
        await plug(self.engine, device)

    async def notifications(self, last: str) -> list[Notification]:
        """Those that come until one is named `last`, which is not among them."""
        seen = []
        async for notification in self.engine.notifications():
            if notification.name == last:
                break
            seen.append(notification)
        return seen

    async def notification_names(self, last: str) -> list[str]:
        return [notification.name for notification in await self.notifications(last)]

    async def block_loop(self, seconds: float) -> None:
        """Do what a model load does to an event loop."""
        time.sleep(seconds)  # noqa: ASYNC251

    async def responders(self) -> int:
        return self.engine.stats().responders

    async def wait_responders(self, count: int) -> None:
        """Until peers have no more than `count` sessions with this engine."""
        await until(lambda: self.engine.stats().responders <= count)

    async def cpu_time(self) -> float:
        """Seconds of CPU that this process has used."""
        return time.process_time()

    async def wakeups(self) -> int:
        """How often the engine has had something to do, as it counts itself."""
        stats = self.engine.stats()
        return stats.wakeups + stats.worker_sleeps + stats.keepalive_wakeups

    async def write_to(self, peer: str, size: int) -> None:
        """Connect, and fill the beginning of the peer's region "memory"."""
        session = await self.engine.connect(peer)
        await self.engine.write(session, self.base, session.regions["memory"].addr, size)

    async def write_until_refused(
        self, peer: str, destination: int, size: int, value: int
    ) -> tuple[int, AioFlagcxError]:
        """Fill [destination, +size) of `peer` with `value` again and again; how often it worked
        and what ended it. Nothing of it is under way any more."""
        self.memory[:size] = value
        await self.refresh(peer)
        rounds = 0
        try:
            while True:
                await self.engine.write(peer, self.base, destination, size)
                rounds += 1
        except AioFlagcxError as error:
            return rounds, error

    async def write_without_end(
        self, peer: str, destination: int, size: int, value: int
    ) -> AioFlagcxError:
        """Like write_until_refused, as one write of 1,000 times `size`: what ended it."""
        self.memory[:size] = value
        try:
            await self.engine.write(
                peer, np.full(20_000, self.base), np.full(20_000, destination), size, timeout=None
            )
        except AioFlagcxError as error:
            return error
        raise AssertionError("it was over before anything happened to it")

    async def read_without_end(self, peer: str, source: int, size: int) -> AioFlagcxError:
        """Read [source, +size) of `peer` 20,000 times, as one read: what ended it."""
        try:
            await self.engine.read(
                peer, np.full(20_000, self.base), np.full(20_000, source), size, timeout=None
            )
        except AioFlagcxError as error:
            return error
        raise AssertionError("it was over before anything happened to it")

    async def refresh(self, peer: str) -> None:
        """Learn the regions that `peer` has now."""
        await (await self.engine.connect(peer)).refresh()

    async def fork_idle(self) -> int:
        """The pid of a forked child, which does nothing with what it has of this process."""
        pid = os.fork()
        if pid == 0:
            while True:
                signal.pause()
        return pid

    async def become_another_program(self) -> None:
        """Closing nothing, as a server does that restarts itself."""
        os.execv("/bin/sleep", ["sleep", "1000"])

    async def close(self) -> None:
        await self.engine.close()


async def thread_wakeups(_: Host) -> int:
    """How often the threads of this process, all together, have gone to sleep."""
    return sum(map(voluntary_switches, os.listdir("/proc/self/task")))


def voluntary_switches(thread: str) -> int:
    """Of one thread of this process; 0 when it has ended meanwhile."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/status") as lines:
        return int(dict(line.split(":", 1) for line in lines)["voluntary_ctxt_switches"])
    return 0


async def unplug(engine: Engine, device: int) -> None:
    """Take a soft device of `engine` away; it waits for copies under way."""
    assert engine._open is not None
    await asyncio.to_thread(_native.testing_unplug, engine._open.runtime.native, device)


async def plug(engine: Engine, device: int) -> None:
    assert engine._open is not None
    await asyncio.to_thread(_native.testing_plug, engine._open.runtime.native, device)


def listeners() -> set[int | str]:
    """Where this process listens, whatever for: TCP ports, and names of Unix sockets."""
    ports = {
        int(local.rpartition(":")[2], 16) for local, _, state in tcp_sockets() if state == LISTEN
    }
    inodes = socket_inodes()
    with open("/proc/self/net/unix") as lines:
        sockets = [line.split() for line in list(lines)[1:]]
    names = {
        name[0].replace("@", "\0", 1)
        for _, _, _, flags, _, _, inode, *name in sockets
        if inode in inodes and name and int(flags, 16) & ACCEPTS
    }
    return ports | names


def connections() -> set[tuple[str, str]]:
    """Both addresses of the TCP connections of this process, in whatever state they are."""
    return {(local, remote) for local, remote, state in tcp_sockets() if state != LISTEN}


async def wait_disconnected(_: Host) -> None:
    """Until this process has no TCP connections."""
    await until(lambda: not connections())


LISTEN = "0A"
"""As /proc/net/tcp says it."""

ACCEPTS = 0x10000
"""The flag of a listening socket in /proc/net/unix."""


def socket_inodes() -> set[str]:
    """Of all sockets of this process."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    return inodes


def tcp_sockets() -> Iterator[tuple[str, str, str]]:
    """Local address, remote address and state of each of this process, in hexadecimal."""
    inodes = socket_inodes()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as lines:
            for line in list(lines)[1:]:
                _, local, remote, state, *rest = line.split()
                if rest[5] in inodes:
                    yield local, remote, state
