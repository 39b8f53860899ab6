"""Two engines at the ends of the guest's cables, with a session between them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from softroce.devices import Device

from aioflagcx import Config, Engine, Region, RemoteRegion, Session, Transfer

__all__ = ["Ends", "MiB", "connected", "until"]

MiB = 1 << 20

_seeds = itertools.count(1)


@dataclasses.dataclass
class Ends:
    """`ours` has a session with `theirs`; both are in this process, on one event loop."""

    ours: Engine
    theirs: Engine
    source: npt.NDArray[np.uint8]
    target: npt.NDArray[np.uint8]
    local: Region
    remote: RemoteRegion

    @property
    def peer(self) -> str:
        return self.theirs.session_id

    async def session(self) -> Session:
        """The one that there is, or a fresh one."""
        return await self.ours.connect(self.peer)

    async def write(self, timeout: float = 60.0) -> None:
        """Write random bytes, which must arrive."""
        self.source[:] = np.frombuffer(
            np.random.default_rng(next(_seeds)).bytes(self.source.size), np.uint8
        )
        await self.ours.write(self.peer, self.local, self.remote, self.local, timeout=timeout)
        assert np.array_equal(self.target, self.source)

    async def read(self, timeout: float = 60.0) -> None:
        """Read random bytes, which must arrive."""
        self.target[:] = np.frombuffer(
            np.random.default_rng(next(_seeds)).bytes(self.target.size), np.uint8
        )
        await self.ours.read(self.peer, self.local, self.remote, self.local, timeout=timeout)
        assert np.array_equal(self.target, self.source)

    def submit(self, passes: int, **options: Any) -> Transfer:
        """Write all of `source` over `target` so many times."""
        here, there = np.full(passes, self.local.addr), np.full(passes, self.remote.addr)
        return self.ours.submit_write(self.peer, here, there, self.local.size, **options)

    async def submit_in_the_middle(self, passes: int = 1_000, **options: Any) -> Transfer:
        """The same, and some of it has been moved. By default it lasts for minutes."""
        transfer = self.submit(passes, **options)
        await until(lambda: transfer.bytes_done > 0)
        return transfer


@contextlib.asynccontextmanager
async def connected(
    ours: str = "rxe0", theirs: str = "rxe1", size: int = MiB, **settings: Any
) -> AsyncIterator[Ends]:
    """Engines on these devices, "rxe0,rxe2" say, with regions of `size` bytes."""
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for address, devices in ((Device(0).address, ours), (Device(1).address, theirs)):
            config = Config(**{"devices": devices, **settings})
            engines.append(await stack.enter_async_context(Engine(address, config=config)))
        here, there = engines
        source, target = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        local = await here.register(source)
        await there.register(target, name="target")
        session = await here.connect(there.session_id)
        assert session.path == "ibverbs"
        yield Ends(here, there, source, target, local, session.regions["target"])


async def until(condition: Callable[[], object], limit: float = 30.0) -> None:
    """Let the loop run until `condition()`: for what gives no event to wait for."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"did not come about within {limit} s"
        await asyncio.sleep(0.005)
