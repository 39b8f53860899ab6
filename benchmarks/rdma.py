"""Measures writes and reads between two RDMA devices of this machine, beside perftest's.

    make bench-softroce                                 # in a guest with Soft-RoCE devices
    python benchmarks/rdma.py --json figures.json       # where there are such devices

By turns, round by round: perftest's ib_write_bw (or ib_read_bw) with requests of 64 KiB, then an
engine that moves as many bytes in one transfer, cut into slices of the same size. The last line is
the ratio of the writes of one buffer: the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, table
from perftest import bandwidth, latency
from targets import Place, open_target, ordinary_memory

import aioflagcx
from aioflagcx import Config

KiB, MiB = 1 << 10, 1 << 20
SLICE = 64 * KiB
SMALL = 4 * KiB
WHOLE = "one buffer"
LEAST_RATIO = 0.9
"""Of the bandwidth of one buffer to perftest's."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="rxe0", help="default: %(default)s")
    parser.add_argument("--target", default="rxe1", help="its peer; default: %(default)s")
    parser.add_argument("--host", default="10.77.0.1", help="of both; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--size", type=int, default=64, help="MiB; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write all figures there; - is stdout")
    arguments = parser.parse_args()
    bench = Bench(arguments.host, arguments.device, arguments.target, arguments.rounds)
    figures = aioflagcx.run(bench.run(arguments.size * MiB))
    if arguments.json != "-":
        print(table(figures))
    if arguments.json:
        document = json.dumps({"figures": [figure.as_json() for figure in figures]}, indent=2)
        if arguments.json == "-":
            print(document)
        else:
            Path(arguments.json).write_text(document + "\n")
    if arguments.json != "-":
        print(f"write, {WHOLE}, to ib_write_bw, median of {arguments.rounds}: {bench.ratio:.3f}")


class Bench:
    """Two devices, an engine on the one and another process's on the other."""

    def __init__(self, host: str, device: str, target: str, rounds: int) -> None:
        self._names = device, target
        self._near, self._far = (Place(host, Config(devices=name)) for name in self._names)
        self._rounds = rounds
        self.ratio = float("nan")
        """Of the writes of one buffer."""

    async def run(self, size: int) -> list[Figure]:
        """Transfers of `size` bytes, and small ones."""
        pieces = size // SLICE
        places = np.random.default_rng(0).permutation(pieces).astype(np.int64) * SLICE
        memory = ordinary_memory(size)
        async with (
            open_target("rdma", size, place=self._far) as target,
            self._near.engine() as engine,
        ):
            addr = (await engine.register(memory)).addr
            session = await engine.connect(target.session_id)
            cases: dict[str, tuple[Any, Any, int]] = {
                WHOLE: (addr, target.address, size),
                f"{pieces:,} x 64 KiB": (addr + places, target.address + places[::-1], SLICE),
            }
            figures = []
            for move, program in ((engine.write, "ib_write_bw"), (engine.read, "ib_read_bw")):
                await move(session, *cases[WHOLE])
                calls = {
                    case: lambda move=move, what=what: move(session, *what)
                    for case, what in cases.items()
                }
                figures += [one async for one in self._bandwidths(program, calls, size)]
            figures += [
                one
                async for one in self._latencies(
                    lambda: engine.write(session, addr, target.address, SMALL)
                )
            ]
        return figures

    async def _bandwidths(
        self, program: str, calls: dict[str, Callable[[], Awaitable[object]]], size: int
    ) -> AsyncIterator[Figure]:
        ours: dict[str, list[float]] = {case: [] for case in calls}
        theirs = []
        for _ in range(self._rounds):
            theirs.append(
                await asyncio.to_thread(bandwidth, program, *self._names, SLICE, size // SLICE)
            )
            for case, call in calls.items():
                started = time.perf_counter()
                await call()
                ours[case].append(size / MiB / (time.perf_counter() - started))
        name = program.split("_")[1]
        if name == "write":
            self.ratio = statistics.median(
                one / other for one, other in zip(ours[WHOLE], theirs, strict=True)
            )
        for case, values in ours.items():
            least = LEAST_RATIO if (name, case) == ("write", WHOLE) else None
            yield Figure.of(
                name, "rdma", case, "MiB/s", values, theirs, program, size, least_ratio=least
            )

    async def _latencies(self, call: Callable[[], Awaitable[object]]) -> AsyncIterator[Figure]:
        ours, theirs = [], []
        for _ in range(self._rounds):
            theirs.append(
                await asyncio.to_thread(latency, "ib_write_lat", *self._names, SMALL, 200)
            )
            times = []
            for _ in range(200):
                started = time.perf_counter()
                await call()
                times.append((time.perf_counter() - started) * 1e6)
            ours.append(statistics.median(times))
        yield Figure.of("small writes", "rdma", "4 KiB p50", "us", ours, theirs, "ib_write_lat")


if __name__ == "__main__":
    main()
