"""Small transfers on paths that copy: done inside the call, without starving the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from conformance.devices import Devices, devices_named
from conformance.pair import Pair

from aioflagcx import Transfer
from aioflagcx.errors import (
    LocalAddressError,
    RemoteAccessError,
    RemoteAddressError,
    TransferCancelled,
)

LIMIT = 16_384


@pytest.fixture(params=["process", "local"])
def devices(request: pytest.FixtureRequest) -> Devices:
    return devices_named(request.param)


async def in_the_call(submit: Callable[[], Transfer]) -> Transfer:
    """The first of some transfers that is done as soon as it is submitted: one that finds the
    worker still awake takes the long way."""
    for _ in range(100):
        await asyncio.sleep(0)  # a turn of its own
        transfer = submit()
        if transfer.done():
            return transfer
        await transfer
    raise AssertionError("none was done in the call")


async def test_a_small_write_and_read_are_done_in_the_call(pair: Pair) -> None:
    write = await in_the_call(
        lambda: pair.ours.submit_write(pair.session, pair.local, pair.remote, LIMIT)
    )
    assert write.status == "done" and write.remote_quiet
    assert write.bytes_done == LIMIT and write.exception() is None
    assert np.array_equal(pair.dst[:LIMIT], pair.src[:LIMIT])
    assert await write == LIMIT
    pair.src[:LIMIT] = 0
    await in_the_call(lambda: pair.ours.submit_read(pair.session, pair.local, pair.remote, LIMIT))
    assert np.array_equal(pair.dst[:LIMIT], pair.src[:LIMIT])
    stats = pair.ours.stats()
    assert stats.bytes_written >= LIMIT and stats.bytes_read >= LIMIT
    assert stats.transfers_done == stats.transfers_submitted
    assert stats.transfers_inflight == 0 and stats.bytes_inflight == 0


async def test_pieces_are_small_together(pair: Pair) -> None:
    offsets = np.arange(8) * 4096
    await in_the_call(
        lambda: pair.ours.submit_write(
            pair.session, pair.local.addr + offsets[:4], pair.remote.addr + offsets[:4][::-1], 4096
        )
    )
    for i in range(4):
        assert np.array_equal(pair.dst[i * 4096 :][:4096], pair.src[(3 - i) * 4096 :][:4096])
    many = pair.ours.submit_write(
        pair.session, pair.local.addr + offsets, pair.remote.addr + offsets, 4096
    )
    assert not many.done()
    await many


async def test_one_byte_more_goes_to_a_worker(pair: Pair) -> None:
    transfer = pair.ours.submit_write(pair.session, pair.local, pair.remote, LIMIT + 1)
    assert not transfer.done()
    await transfer
    assert np.array_equal(pair.dst[: LIMIT + 1], pair.src[: LIMIT + 1])


async def test_it_does_not_overtake_what_is_under_way(pair: Pair) -> None:
    long = pair.submit_long()
    small = pair.ours.submit_write(pair.session, pair.local, pair.remote, 64)
    assert not small.done()
    long.cancel()
    await small
    with pytest.raises(TransferCancelled):
        await long


async def test_with_a_notification_it_takes_the_ordered_way(pair: Pair) -> None:
    transfer = pair.ours.submit_write(
        pair.session, pair.local, pair.remote, 64, notify=("note", b"payload")
    )
    assert not transfer.done()
    await transfer
    assert (await anext(aiter(pair.theirs.notifications()))).name == "note"


async def test_a_tight_loop_of_small_writes_gives_the_loop_its_turns(pair: Pair) -> None:
    loop = asyncio.get_running_loop()
    turns: list[float] = []

    def turn() -> None:
        turns.append(loop.time())
        handle[0] = loop.call_soon(turn)

    handle = [loop.call_soon(turn)]
    started = loop.time()
    for _ in range(5000):
        await pair.write(4096)
    elapsed = loop.time() - started
    handle[0].cancel()
    # Each turn is at most 200 us of writes long, so there are at least as many as fit; half of
    # them, as the machine may have other things to do in the middle of one.
    assert len(turns) > elapsed / 400e-6 / 2
    assert pair.ours.stats().transfers_done == 5000


async def test_bad_pieces_are_refused_as_ever(pair: Pair) -> None:
    with pytest.raises(LocalAddressError):
        pair.ours.submit_write(pair.session, pair.local.addr - 1, pair.remote, 64)
    with pytest.raises(RemoteAddressError):
        await pair.ours.write(pair.session, pair.local, pair.remote.addr - 1, 64)


async def test_a_region_that_was_taken_away_is_not_touched(pair: Pair) -> None:
    await pair.write(64)
    region = next(r for r in pair.theirs._assembly().registry._by_range.values())
    await pair.theirs.deregister(region)
    pair.dst[:64] = 0
    # Its table may not have come yet: then the peer's own says no.
    with pytest.raises((RemoteAddressError, RemoteAccessError)):
        await pair.write(64)
    assert not pair.dst[:64].any()
