"""Two engines with a session between them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from aioflagcx import Engine, Region, RemoteRegion, Session, Transfer

Bytes = npt.NDArray[np.uint8]

MiB = 1 << 20


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until `condition()`: for what gives no event to wait for."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "did not come about within 20 s"
        await asyncio.sleep(0.001)


@contextlib.contextmanager
def silent_peer() -> Iterator[str]:
    """The session id of a port that accepts connections and never says anything."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@dataclasses.dataclass
class Pair:
    """Two engines on one loop: `ours` has a session with `theirs`."""

    ours: Engine
    theirs: Engine
    src: Bytes
    dst: Bytes
    local: Region
    remote: RemoteRegion
    session: Session

    async def write(self, length: int = 4096, **options: Any) -> int:
        """Write from the beginning of `src` to the beginning of `dst`."""
        return await self.ours.write(self.session, self.local, self.remote, length, **options)

    def submit_long(self, **options: Any) -> Transfer:
        """A write that takes many seconds if it is not stopped, with little memory."""
        pieces = np.zeros(200_000, np.int64)
        size = self.local.size
        return self.ours.submit_write(
            self.session, pieces + self.local.addr, pieces + self.remote.addr, size, **options
        )
