"""The measurements. Each takes turns with its reference, round by round, on a warm engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
from figures import Figure
from references import BlockingStream, memcpy_seconds, python_loop_seconds
from targets import Target, config, open_target

from aioflagcx import Engine, Session

__all__ = ["MEASUREMENTS", "Setting"]

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

SMALL = 4 * KiB
PIECES = 8_192
SIZES = (4 * KiB, 64 * KiB, MiB, 16 * MiB, 256 * MiB)
BLOCK = 32 * KiB
LARGEST = PIECES * BLOCK  # 256 MiB
REGIONS = 30_000
SESSIONS = 100
IDLE_SECONDS = 20.0
PERCENTILES = (50.0, 99.0, 99.9)


@dataclasses.dataclass(frozen=True)
class Setting:
    """How thoroughly to measure."""

    rounds: int
    seconds: float
    """Of one round."""


def size_name(size: int) -> str:
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


@dataclasses.dataclass(frozen=True)
class Pair:
    """A connected engine with memory, and its target."""

    engine: Engine
    session: Session
    target: Target
    source: int


@contextlib.asynccontextmanager
async def connected(path: str, size: int) -> AsyncIterator[Pair]:
    memory = np.ones(size, np.uint8)
    async with open_target(path, size) as target, Engine(config=config(path)) as engine:
        region = await engine.register(memory)
        session = await engine.connect(target.session_id)
        assert session.path == path
        await engine.write(session, region.addr, target.address, size)
        yield Pair(engine, session, target, region.addr)


async def throughput(path: str, setting: Setting) -> AsyncIterator[Figure]:
    """One write after the other, by size; and the scattered pieces of a KV cache in one."""
    stream = BlockingStream(LARGEST) if path == "tcp" else None
    reference_name = "one blocking socket stream" if stream else "memcpy in one thread"
    reference = stream.seconds if stream else memcpy_seconds
    places = np.random.default_rng(0).permutation(PIECES).astype(np.int64) * BLOCK
    try:
        async with connected(path, LARGEST) as pair:
            for size in (*SIZES, None):
                total = size or LARGEST
                source, target = pair.source, pair.target.address
                arguments: tuple[Any, Any, int]
                if size is None:
                    arguments = (source + places, target + places[::-1], BLOCK)
                else:
                    arguments = (source, target, size)
                ours, theirs = [], []
                for _ in range(setting.rounds):
                    count, started = 0, time.perf_counter()
                    while (elapsed := time.perf_counter() - started) < setting.seconds:
                        await pair.engine.write(pair.session, *arguments)
                        count += 1
                    ours.append(count * total / elapsed / GiB)
                    theirs.append(count * total / reference(total, count) / GiB)
                case = f"{PIECES:,} x {size_name(BLOCK)}" if size is None else size_name(total)
                yield Figure.of(
                    "throughput", path, case, "GiB/s", ours, theirs, reference_name, size or 0
                )
    finally:
        if stream:
            stream.close()


async def latency(path: str, setting: Setting) -> AsyncIterator[Figure]:
    """Of small writes, one after the other."""
    stream = BlockingStream(MiB) if path == "tcp" else None
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    try:
        async with connected(path, MiB) as pair:
            for _ in range(setting.rounds):
                times = []
                end = time.perf_counter() + setting.seconds
                while (started := time.perf_counter()) < end:
                    await pair.engine.write(pair.session, pair.source, pair.target.address, SMALL)
                    times.append(time.perf_counter() - started)
                ours.append(times)
                if stream:
                    theirs.append(stream.each(SMALL, len(times)))
                else:
                    theirs.append(await event_loop_turns(len(times)))
    finally:
        if stream:
            stream.close()
    for percent in PERCENTILES:
        yield Figure.of(
            f"latency of {size_name(SMALL)} writes",
            path,
            f"p{percent:g}",
            "us",
            [float(np.percentile(times, percent)) * 1e6 for times in ours],
            [float(np.percentile(times, percent)) * 1e6 for times in theirs],
            "blocking socket there and back" if stream else "call_soon and back",
        )


async def event_loop_turns(count: int) -> list[float]:
    """Seconds that the event loop takes to resolve a future: the least any await can take."""
    loop = asyncio.get_running_loop()
    times = []
    for _ in range(count):
        started = time.perf_counter()
        future = loop.create_future()
        loop.call_soon(future.set_result, None)
        await future
        times.append(time.perf_counter() - started)
    return times


async def submit_cost(path: str, setting: Setting) -> AsyncIterator[Figure]:
    """Of a write of many pieces, for the caller: what the event loop stands still."""
    block = 64
    places = np.random.default_rng(0).permutation(PIECES).astype(np.int64) * block
    lens = np.full(PIECES, block, np.int64)
    ours: list[list[float]] = []
    theirs = []
    async with connected(path, PIECES * block) as pair:
        source, target = pair.source + places, pair.target.address + places[::-1].copy()
        for _ in range(setting.rounds):
            times = []
            end = time.perf_counter() + setting.seconds
            while (started := time.perf_counter()) < end:
                transfer = pair.engine.submit_write(pair.session, source, target, lens)
                times.append(time.perf_counter() - started)
                await transfer
            ours.append(times)
            theirs.append(python_loop_seconds([source, target, lens]) * 1e6)
    for percent in PERCENTILES[:2]:
        yield Figure.of(
            f"submit of {PIECES:,} pieces",
            path,
            f"p{percent:g}",
            "us",
            [float(np.percentile(times, percent)) * 1e6 for times in ours],
            theirs,
            "an empty Python loop over the pieces",
        )


async def ticker_delays(path: str, setting: Setting) -> AsyncIterator[Figure]:
    """Of a task that wants to run every millisecond, beside what could hold it up."""
    block = 4 * KiB
    places = np.random.default_rng(0).permutation(PIECES) * block

    async def nothing() -> None:
        await asyncio.sleep(setting.seconds)

    async with connected(path, PIECES * block) as pair:

        async def pieces() -> None:
            await pair.engine.write(
                pair.session,
                pair.source + places,
                pair.target.address + places[::-1],
                block,
            )

        async def small() -> None:
            await pair.engine.write(pair.session, pair.source, pair.target.address, SMALL)

        loads = [(f"{PIECES:,}-piece writes", pieces), (f"{size_name(SMALL)} writes", small)]
        for case, load in loads:
            async for figure in _ticker(path, setting, case, _again(load, setting), nothing):
                yield figure

    async with open_target(path, REGIONS * 64, REGIONS) as target:

        async def handshake() -> None:
            async with Engine(config=config(path)) as engine:
                session = await engine.connect(target.session_id)
                assert len(session.all_regions) == REGIONS

        case = f"{REGIONS:,}-region handshakes"
        async for figure in _ticker(path, setting, case, _again(handshake, setting), nothing):
            yield figure


def _again(load: Callable[[], Awaitable[None]], setting: Setting) -> Callable[[], Awaitable[None]]:
    """`load` for the time of a round, at least once."""

    async def repeat() -> None:
        end = time.perf_counter() + setting.seconds
        while True:
            await load()
            if time.perf_counter() > end:
                return

    return repeat


async def _ticker(
    path: str,
    setting: Setting,
    case: str,
    load: Callable[[], Awaitable[None]],
    nothing: Callable[[], Awaitable[None]],
) -> AsyncIterator[Figure]:
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    for _ in range(setting.rounds):
        ours.append(await _delays(load))
        theirs.append(await _delays(nothing))
    for name, measure in (("p99", lambda times: np.percentile(times, 99)), ("worst", max)):
        yield Figure.of(
            "delay of a 1 ms ticker",
            path,
            f"{name}, {case}",
            "ms",
            [float(measure(times)) * 1e3 for times in ours],
            [float(measure(times)) * 1e3 for times in theirs],
            "the ticker alone",
        )


async def _delays(work: Callable[[], Awaitable[None]]) -> list[float]:
    """How late the ticker came, each time, while `work` ran and once more after it."""
    interval = 0.001
    delays = []
    task = asyncio.ensure_future(work())
    done = False
    while not done:
        done = task.done()
        due = time.perf_counter() + interval
        await asyncio.sleep(interval)
        delays.append(time.perf_counter() - due)
    await task
    return delays


async def idle_cpu(path: str, setting: Setting) -> AsyncIterator[Figure]:
    """Of an engine with many sessions, and of the engines at their other ends."""
    seconds = max(IDLE_SECONDS, setting.seconds)
    async with open_target(path, SMALL) as target, contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(Engine(config=config(path))) for _ in range(SESSIONS)
        ]

        async def shares() -> tuple[float, float]:
            """Of the target's process and of ours, in percent of a core."""
            theirs, ours = await target.cpu_seconds(), time.process_time()
            await asyncio.sleep(seconds)
            used = await target.cpu_seconds() - theirs, time.process_time() - ours
            return used[0] / seconds * 100, used[1] / seconds * 100

        alone = await shares()
        sessions = [await engine.connect(target.session_id) for engine in engines]
        figures = [("opened to it", await shares())]
        for session in sessions:
            await session.close()
        await target.connect([engine.session_id for engine in engines])
        figures.append(("that it opened", await shares()))
    for opened, used in figures:
        case = f"{SESSIONS} sessions {opened}"
        if path == "process":  # and in one process, so that they cannot be told apart
            yield _idle("CPU of both ends", path, case, sum(used), sum(alone))
        else:
            yield _idle("CPU of an idle engine", path, case, used[0], alone[0])
            name = f"CPU of the {SESSIONS} at the other ends"
            yield _idle(name, path, case, used[1], alone[1])


def _idle(name: str, path: str, case: str, value: float, reference: float) -> Figure:
    return Figure.of(name, path, case, "% of a core", [value], [reference], "without sessions")


MEASUREMENTS: dict[str, Callable[[str, Setting], AsyncIterator[Figure]]] = {
    "throughput": throughput,
    "latency": latency,
    "submit": submit_cost,
    "ticker": ticker_delays,
    "idle": idle_cpu,
}
"""By the names that --only takes."""
