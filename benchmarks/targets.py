"""The engine that is written to: in this process, or in another one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import mmap
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import aioflagcx
from aioflagcx import Config, Engine

__all__ = ["PATHS", "Place", "Target", "config", "open_target", "ordinary_memory"]

PATHS = ("process", "local", "alloc", "tcp")
"""Paths of the soft device; "alloc" is `local` into memory that the target's engine owns."""


@dataclasses.dataclass(frozen=True)
class Place:
    """What an engine is started with."""

    host: str
    config: Config

    def engine(self) -> Engine:
        """Not yet entered."""
        return Engine(self.host, config=self.config)


@dataclasses.dataclass(frozen=True)
class Target:
    """Where to write to."""

    session_id: str
    address: int
    """Of its memory's first byte."""

    _where: Engine | multiprocessing.connection.Connection

    async def cpu_seconds(self) -> float:
        """CPU time of its process so far, or 0 when that is ours."""
        if isinstance(self._where, Engine):
            return 0.0
        return float(await self._ask(None))

    async def connect(self, session_ids: Sequence[str]) -> None:
        """Open a session with each of these engines."""
        if isinstance(self._where, Engine):
            await _connect(self._where, session_ids)
        else:
            await self._ask(session_ids)

    async def _ask(self, question: Sequence[str] | None) -> Any:
        assert not isinstance(self._where, Engine)
        self._where.send(question)
        return await asyncio.to_thread(self._where.recv)


@contextlib.asynccontextmanager
async def open_target(
    path: str, size: int, regions: int = 1, place: Place | None = None
) -> AsyncIterator[Target]:
    """A target with `size` bytes in `regions` equal regions, reached by `path`.

    Another process opens its engine at `place`: by default at 127.0.0.1, with that path alone.
    """
    if path == "process":
        async with Engine(config=config(path)) as engine:
            yield Target(engine.session_id, await _register(engine, path, size, regions), engine)
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    place = place or Place("127.0.0.1", config(path))
    arguments = (theirs, path, size, regions, place)
    process = context.Process(target=_main, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        session_id, address = await asyncio.to_thread(ours.recv)
        yield Target(session_id, address, ours)
    finally:
        ours.close()
        await asyncio.to_thread(process.join)


def config(path: str) -> Config:
    """Defaults, with one path alone."""
    return Config(soft_paths=("local" if path == "alloc" else path,))


def ordinary_memory(size: int) -> npt.NDArray[np.uint8]:
    """As the programs in raw/ take it: no huge pages are asked for, and every page is there."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1
    return array


async def _connect(engine: Engine, session_ids: Sequence[str]) -> None:
    for session_id in session_ids:
        await engine.connect(session_id)


async def _register(engine: Engine, path: str, size: int, regions: int) -> int:
    if path == "alloc":
        assert regions == 1
        region = await engine.alloc(size)
        region.numpy()[:] = 1
        return region.addr
    memory = ordinary_memory(size)
    part = size // regions
    await engine.register_many([memory[i * part : (i + 1) * part] for i in range(regions)])
    return memory.ctypes.data


def _main(
    pipe: multiprocessing.connection.Connection, path: str, size: int, regions: int, place: Place
) -> None:
    async def serve() -> None:
        async with place.engine() as engine:
            pipe.send((engine.session_id, await _register(engine, path, size, regions)))
            with contextlib.suppress(EOFError):
                while True:
                    await _connect(engine, await asyncio.to_thread(pipe.recv) or ())
                    pipe.send(time.process_time())

    aioflagcx.run(serve())
