"""The measurements. Each takes turns with its reference, round by round, on a warm engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
from figures import Figure
from references import Timing, event_loop_turns, memcpy, python_loop_seconds, raw
from targets import Target, config, open_target, ordinary_memory

from aioflagcx import BlockLayout, BlockSpan, Engine, Session

__all__ = ["MEASUREMENTS", "OF_ALLOC", "Setting"]

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

SMALL = 4 * KiB
PIECES = 8_192
SIZES = (4 * KiB, 64 * KiB, MiB, 4 * MiB, 16 * MiB, 256 * MiB)
LARGEST = max(SIZES)
BLOCKS, BLOCK = 4_096, 16 * KiB  # of a KV cache, scattered
LAYERS = 61
REGIONS = 30_000
SESSIONS = 100
IDLE_SECONDS = 20.0
PERCENTILES = {"p50": "p50", "p99": "p99", "p99.9": "p999"}
"""By name: the attribute of a Timing."""

LEAST_RATIO = {"local": 0.95, "alloc": 0.9, "tcp": 1.0}
"""Throughput of 1 MiB and more, as a multiple of the reference's."""

MOST_LATENCY = {"local": 6.0}
"""Microseconds of the median small write."""

MOST_BLOCK_COST = 1000.0
"""Microseconds that a write of LAYERS times BLOCKS blocks costs its caller."""

MOST_IDLE = 0.1
"""Per cent of a core, of one engine with SESSIONS sessions."""


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
    memory = ordinary_memory(size)
    async with open_target(path, size) as target, Engine(config=config(path)) as engine:
        region = await engine.register(memory)
        session = await engine.connect(target.session_id)
        assert (session.path,) == engine_paths(path)
        await engine.write(session, region.addr, target.address, size)
        yield Pair(engine, session, target, region.addr)


def engine_paths(path: str) -> tuple[str, ...]:
    """The paths that the engines may take."""
    return config(path).soft_paths


Reference = Callable[[int, int, float], Timing]
"""Moves so many bytes in so many pieces, again and again, for so many seconds."""


@contextlib.contextmanager
def bare(path: str) -> Iterator[tuple[str, Reference]]:
    """What moves bytes like `path` with nothing around it, and what that is called."""
    if path == "process":
        yield "memcpy in one thread", lambda size, _, seconds: memcpy(size, seconds)
    elif path == "tcp":
        with raw("stream") as stream:
            yield "blocking stream in C", lambda size, _, seconds: stream.measure(size, seconds)
    else:
        method = {"local": "writev", "alloc": "memcpy"}[path]
        with raw("copy") as copy:
            yield (
                {"writev": "process_vm_writev", "memcpy": "memcpy to shared memory"}[method],
                lambda size, pieces, seconds: copy.measure(method, size, pieces, seconds),
            )


async def by_turns(
    setting: Setting,
    ours: Callable[[float], Awaitable[Timing]],
    theirs: Callable[[float], Awaitable[Timing]],
) -> tuple[list[Timing], list[Timing]]:
    """Both, round by round; who is first changes, too."""
    timings: tuple[list[Timing], list[Timing]] = ([], [])
    for number in range(setting.rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            timings[which].append(await (ours, theirs)[which](setting.seconds))
    return timings


async def writes(pair: Pair, arguments: tuple[Any, Any, int], seconds: float) -> Timing:
    """One write after the other."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (started := time.perf_counter()) < end or not times:
        await pair.engine.write(pair.session, *arguments)
        times.append(time.perf_counter() - started)
    return Timing.of(times)


async def throughput(path: str, setting: Setting) -> AsyncIterator[Figure]:
    """One write after the other, by size; and the scattered blocks of a KV cache in one."""
    places = np.random.default_rng(0).permutation(BLOCKS).astype(np.int64) * BLOCK
    with bare(path) as (reference_name, reference):
        async with connected(path, LARGEST) as pair:
            for size in (*SIZES, None):
                total, pieces = (size, 1) if size else (BLOCKS * BLOCK, BLOCKS)
                source, target = pair.source, pair.target.address
                arguments: tuple[Any, Any, int] = (source, target, total)
                if size is None:
                    arguments = (source + places, target + places[::-1], BLOCK)

                async def ours(seconds: float, arguments: Any = arguments) -> Timing:
                    return await writes(pair, arguments, seconds)

                async def theirs(
                    seconds: float, total: int = total, pieces: int = pieces
                ) -> Timing:
                    return reference(total, pieces, seconds)

                our_rates, their_rates = (
                    [one.count * total / one.seconds / GiB for one in timings]
                    for timings in await by_turns(setting, ours, theirs)
                )
                yield Figure.of(
                    "throughput",
                    path,
                    size_name(size) if size else f"{BLOCKS:,} x {size_name(BLOCK)}",
                    "GiB/s",
                    our_rates,
                    their_rates,
                    reference_name,
                    size or 0,
                    least_ratio=LEAST_RATIO.get(path) if total >= MiB else None,
                )


async def latency(path: str, setting: Setting) -> AsyncIterator[Figure]:
    """Of small writes, one after the other."""
    with bare(path) as (reference_name, reference):
        async with connected(path, MiB) as pair:

            async def ours(seconds: float) -> Timing:
                return await writes(pair, (pair.source, pair.target.address, SMALL), seconds)

            async def theirs(seconds: float) -> Timing:
                if path == "process":
                    return await event_loop_turns(seconds)
                return reference(SMALL, 1, seconds)

            our_timings, their_timings = await by_turns(setting, ours, theirs)
    for name, attribute in PERCENTILES.items():
        yield Figure.of(
            f"latency of {size_name(SMALL)} writes",
            path,
            name,
            "us",
            [getattr(one, attribute) * 1e6 for one in our_timings],
            [getattr(one, attribute) * 1e6 for one in their_timings],
            "call_soon and back" if path == "process" else reference_name,
            most=MOST_LATENCY.get(path) if name == "p50" else None,
        )


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
    for percent in (50, 99):
        yield Figure.of(
            f"submit of {PIECES:,} pieces",
            path,
            f"p{percent}",
            "us",
            [float(np.percentile(times, percent)) * 1e6 for times in ours],
            theirs,
            "an empty Python loop over the pieces",
        )


async def block_cost(path: str, setting: Setting) -> AsyncIterator[Figure]:
    """Of a write of a whole KV cache by block ids, for the caller."""
    block = 64
    generator = np.random.default_rng(0)
    source, target = generator.permutation(BLOCKS), generator.permutation(BLOCKS)
    ours: list[list[float]] = []
    theirs = []
    async with connected(path, LAYERS * BLOCKS * block) as pair:
        pools = [layer * BLOCKS * block for layer in range(LAYERS)]
        layout = BlockLayout(
            [
                BlockSpan(pair.source + pool, pair.target.address + pool, block, block, block)
                for pool in pools
            ],
            src_blocks=BLOCKS,
            dst_blocks=BLOCKS,
        )
        for _ in range(setting.rounds):
            times = []
            end = time.perf_counter() + setting.seconds
            while (started := time.perf_counter()) < end:
                transfer = pair.engine.submit_write_blocks(pair.session, layout, source, target)
                times.append(time.perf_counter() - started)
                await transfer
            ours.append(times)
            theirs.append(python_loop_seconds([source, target]) * 1e6)
    yield Figure.of(
        f"submit of {LAYERS} layers x {BLOCKS:,} blocks",
        path,
        "p50",
        "us",
        [float(np.percentile(times, 50)) * 1e6 for times in ours],
        theirs,
        "an empty Python loop over the ids",
        most=MOST_BLOCK_COST,
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
            yield _idle("CPU of an idle engine", path, case, used[0], alone[0], most=MOST_IDLE)
            name = f"CPU of the {SESSIONS} at the other ends"
            yield _idle(name, path, case, used[1], alone[1])


def _idle(
    name: str, path: str, case: str, value: float, reference: float, most: float | None = None
) -> Figure:
    unit = "% of a core"
    return Figure.of(name, path, case, unit, [value], [reference], "without sessions", most=most)


MEASUREMENTS: dict[str, Callable[[str, Setting], AsyncIterator[Figure]]] = {
    "throughput": throughput,
    "latency": latency,
    "submit": submit_cost,
    "blocks": block_cost,
    "ticker": ticker_delays,
    "idle": idle_cpu,
}
"""By the names that --only takes."""

OF_ALLOC = ("throughput", "latency")
"""Of these, those that `alloc` is of interest for; the others are what they are for `local`."""
