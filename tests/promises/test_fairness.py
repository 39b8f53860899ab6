"""A small write never waits behind gigabytes, nor behind a peer that does not move."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np
import pytest
from promises.lab import ARRANGEMENTS, Lab
from promises.measures import GiB, KiB, MiB, percentile, until
from promises.peers import ChildPeer

from aioflagcx import Engine, Session, Transfer

SMALL = 4 * KiB
BULK_PART, BULK_PARTS = 256 * MiB, 32
BOUND = 0.1
"""Seconds that the 99th percentile of small writes may take. It is milliseconds on an idle
machine; waiting for the gigabytes would take half a second at the very least."""

Report = Callable[[str, float, str], None]


async def small_writes(
    engine: Engine, session: Session, source: int, target: int, enough: Callable[[int], bool]
) -> list[float]:
    """Seconds that each of some small writes, one after the other, took."""
    times: list[float] = []
    while not enough(len(times)):
        started = time.perf_counter()
        await engine.write(session, source, target, SMALL)
        times.append(time.perf_counter() - started)
    return times


def check(report: Report, times: list[float]) -> None:
    report("p50", percentile(times, 50) * 1e3, "ms")
    report("p99", percentile(times, 99) * 1e3, "ms")
    assert percentile(times, 99) < BOUND


def submit_bulk(engine: Engine, session: Session, source: int, target: int) -> list[Transfer]:
    """8 GiB, in transfers that are all submitted before the first has moved much."""
    return [
        engine.submit_write(session, source, target, BULK_PART, timeout=100)
        for _ in range(BULK_PARTS)
    ]


async def test_small_writes_to_b_do_not_wait_while_8_gib_go_to_a(lab: Lab, report: Report) -> None:
    engine = await lab.engine()
    a, b = await lab.peer(BULK_PART), await lab.peer(SMALL)
    ours = np.ones(BULK_PART, np.uint8)
    region = await engine.register(ours)
    to_a, to_b = await lab.connect(engine, a), await lab.connect(engine, b)

    started = time.perf_counter()
    bulk = submit_bulk(engine, to_a, region.addr, a.at(0))
    times = await small_writes(
        engine, to_b, region.addr, b.at(0), lambda _: all(transfer.done() for transfer in bulk)
    )
    seconds = time.perf_counter() - started
    assert sum(await asyncio.gather(*bulk)) == 8 * GiB
    report("bulk", 8 / seconds, "GiB/s")
    report("writes", len(times), "beside it")
    check(report, times)


async def test_small_writes_to_a_do_not_wait_behind_8_gib_to_the_same_peer(
    lab: Lab, report: Report
) -> None:
    engine, a = await lab.engine(), await lab.peer(BULK_PART + SMALL)
    ours = np.ones(BULK_PART, np.uint8)
    region = await engine.register(ours)
    to_a = await lab.connect(engine, a)

    bulk = submit_bulk(engine, to_a, region.addr, a.at(0))
    times = await small_writes(
        engine,
        to_a,
        region.addr,
        a.at(BULK_PART),
        lambda _: all(transfer.done() for transfer in bulk),
    )
    assert sum(await asyncio.gather(*bulk)) == 8 * GiB
    check(report, times)


async def test_transfers_to_the_same_peer_share_its_path_by_turns(lab: Lab) -> None:
    """Of equal transfers under way together, none gets much further than another."""
    count, size, repeats = 8, 32 * MiB, 16
    engine, peer = await lab.engine(), await lab.peer(size)
    region = await engine.register(np.ones(size, np.uint8))
    session = await lab.connect(engine, peer)
    sources, targets = np.full(repeats, region.addr), np.full(repeats, peer.at(0))
    transfers = [engine.submit_write(session, sources, targets, size) for _ in range(count)]

    before = [transfer.bytes_done for transfer in transfers]  # the first has had a head start

    def progress() -> list[int]:
        return [
            transfer.bytes_done - start for transfer, start in zip(transfers, before, strict=True)
        ]

    await until(lambda: max(progress()) > 4 * size)
    assert min(progress()) > 3 * size, [made // MiB for made in progress()]
    await asyncio.gather(*transfers)


@pytest.mark.arrangements("process", "local-processes", "tcp-processes")
async def test_small_writes_to_b_do_not_wait_while_a_is_stopped(lab: Lab, report: Report) -> None:
    """And what was on its way to A goes on when A does: it was stopped for less than the
    keepalive's timeout."""
    engine = await lab.engine(
        lab.config().replace(soft_paths=tuple({lab.arrangement.path, "tcp"}), keepalive_timeout=60)
    )
    a: ChildPeer = await lab.peer(BULK_PART, arrangement=ARRANGEMENTS["tcp-processes"])
    b = await lab.peer(SMALL)
    ours = np.ones(BULK_PART, np.uint8)
    region = await engine.register(ours)
    to_a, to_b = await engine.connect(a.session_id), await lab.connect(engine, b)

    parts = [
        engine.submit_write(to_a, region.addr, a.at(0), BULK_PART, timeout=100) for _ in range(4)
    ]
    await until(lambda: any(transfer.bytes_done for transfer in parts))
    a.stop()
    times = await small_writes(engine, to_b, region.addr, b.at(0), lambda n: n == 1_000)
    assert not all(transfer.done() for transfer in parts)
    check(report, times)
    a.resume()
    assert await asyncio.gather(*parts) == [BULK_PART] * 4
    assert to_a.alive
