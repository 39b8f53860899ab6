"""What figures are compared with: the least that the machine itself takes for the same."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["RAW", "Timing", "event_loop_turns", "memcpy", "python_loop_seconds", "raw"]

RAW = Path(__file__).parent.parent / "build/raw"
"""Where ``make build/raw/NAME`` puts the programs of benchmarks/raw."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Of the same thing done a number of times, one after the other; all in seconds."""

    count: int
    seconds: float
    """Of all of them."""
    p50: float
    p99: float
    p999: float

    @classmethod
    def of(cls, times: list[float]) -> Timing:
        """From the seconds that each took."""
        p50, p99, p999 = np.percentile(times, [50, 99, 99.9]).tolist()
        return cls(len(times), sum(times), p50, p99, p999)


class Raw:
    """A program of benchmarks/raw, which measures when it is told to; made by :func:`raw`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def measure(self, *order: object) -> Timing:
        """What the program's source says of orders; waits for it without giving way."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, order)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._process.args!r} ended with status {self._process.wait()}")
        return Timing(**json.loads(answer))


@contextmanager
def raw(name: str) -> Iterator[Raw]:
    """The program ``name`` of benchmarks/raw, for the time of a ``with`` block."""
    program = RAW / name
    if not program.exists():
        raise FileNotFoundError(f"{program} is not built: run `make build/raw/{name}`")
    with subprocess.Popen(
        [program, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Raw(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it ends then


def memcpy(size: int, seconds: float) -> Timing:
    """One thread copies `size` bytes again and again, between two buffers that it knows."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    np.copyto(target, source)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (started := time.perf_counter()) < end or not times:
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return Timing.of(times)


async def event_loop_turns(seconds: float) -> Timing:
    """The event loop resolves a future: the least that any await can take."""
    loop = asyncio.get_running_loop()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        future = loop.create_future()
        loop.call_soon(future.set_result, None)
        await future
        times.append(time.perf_counter() - started)
    return Timing.of(times)


def python_loop_seconds(arrays: list[npt.NDArray[np.int64]]) -> float:
    """Seconds of a Python loop over pieces that does nothing with them."""
    started = time.perf_counter()
    for _ in zip(*arrays, strict=True):
        pass
    return time.perf_counter() - started
