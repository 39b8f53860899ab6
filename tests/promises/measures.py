"""What tests of promises measure and compare."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

SLACK = 1.5
"""Seconds that a busy machine may add to what is promised: much less than any time limit that is
not the one a test is about."""


def random_bytes(size: int, seed: int) -> Bytes:
    """Bytes of which no part is like another."""
    return np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)


def number_words(memory: Bytes, salt: int = 0) -> None:
    """Fill `memory`, a multiple of 8 bytes, so that every 8-byte word tells where it belongs."""
    words = memory.view(np.uint64)
    step = 8 * MiB
    for start in range(0, len(words), step):
        part = words[start : start + step]
        part[:] = np.arange(start, start + len(part), dtype=np.uint64) ^ np.uint64(salt)


def misplaced_words(memory: Bytes, salt: int = 0) -> int:
    """How many words of `memory` are not what `number_words` put there."""
    words = memory.view(np.uint64)
    step = 8 * MiB
    wrong = 0
    for start in range(0, len(words), step):
        part = words[start : start + step]
        expected = np.arange(start, start + len(part), dtype=np.uint64) ^ np.uint64(salt)
        wrong += int(np.count_nonzero(part != expected))
    return wrong


def percentile(samples: Sequence[float], percent: float) -> float:
    return float(np.percentile(np.asarray(samples), percent))


async def until(condition: Callable[[], bool], limit: float = 20.0) -> None:
    """Give way to the event loop until `condition` holds; for what signals nothing."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"did not come about within {limit} s"
        await asyncio.sleep(0)


class Ticker:
    """A task that wants to run every millisecond, and how late it came each time."""

    INTERVAL = 0.001

    def __init__(self) -> None:
        self.delays: list[float] = []
        """Seconds."""

    @property
    def worst(self) -> float:
        return max(self.delays)

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        # One more tick, so that a blocked loop just before the end is seen too.
        ticks = len(self.delays)
        await until(lambda: len(self.delays) > ticks)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + self.INTERVAL
            await asyncio.sleep(self.INTERVAL)
            self.delays.append(time.perf_counter() - due)
