"""What an engine knows of its peers' regions."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from conformance.fixtures import Pairs
from conformance.pair import Pair, until

from aioflagcx.errors import PeerLost, RemoteAddressError, TransferTimeout


async def test_regions_by_name_are_a_mapping(pair: Pair) -> None:
    await pair.theirs.register(bytearray(64), name="b", access="read")
    await pair.theirs.register(bytearray(64))
    await pair.session.refresh()
    regions = pair.session.regions
    assert set(regions) == {"dst", "b"}
    assert len(regions) == 2
    assert "b" in regions
    assert "c" not in regions
    assert 5 not in regions
    assert regions.get("c") is None
    assert regions["b"].access == "read"
    assert dict(regions)["dst"] == pair.remote
    with pytest.raises(KeyError):
        regions["c"]
    assert "2 named regions" in repr(regions)


async def test_all_regions_are_a_sequence_in_order_of_address(pair: Pair) -> None:
    memory = np.zeros(1000, np.uint8)
    await pair.theirs.register_many([memory[i : i + 10] for i in range(0, 1000, 10)])
    await pair.session.refresh()
    regions = pair.session.all_regions
    assert len(regions) == 101
    addresses = [region.addr for region in regions]
    assert addresses == sorted(addresses)
    assert regions[-1] == regions[100]
    assert [region.addr for region in regions[3:6]] == addresses[3:6]
    assert pair.remote in regions
    for outside in (101, -102):
        with pytest.raises(IndexError):
            regions[outside]
    assert hash(regions[0]) == hash(regions[0])


async def test_find_gives_the_smallest_region_that_holds_it(pair: Pair) -> None:
    inner = await pair.theirs.register(pair.dst[100:200])
    await pair.session.refresh()
    assert pair.session.find(inner.addr, 100).size == 100
    assert pair.session.find(inner.addr, 101) == pair.remote
    assert pair.session.find(pair.remote.at(0), pair.remote.size) == pair.remote
    for addr, size in ((1, 1), (inner.addr, 1 << 30), (-1, 5), (inner.addr, 0), (2**64, 1)):
        with pytest.raises(RemoteAddressError):
            pair.session.find(addr, size)


async def test_remote_regions_check_their_bounds(pair: Pair) -> None:
    assert pair.remote.at(10) == pair.remote.addr + 10
    with pytest.raises(IndexError):
        pair.remote.at(pair.remote.size)


async def test_changes_are_pushed(pair: Pair) -> None:
    region = await pair.theirs.register(bytearray(64), name="new")
    await until(lambda: "new" in pair.session.regions)
    await pair.theirs.deregister(region)
    await until(lambda: "new" not in pair.session.regions)


async def test_a_miss_asks_the_peer_once_before_it_fails(pair: Pair) -> None:
    """The application's own channel may be faster than the push."""
    for _ in range(20):
        region = await pair.theirs.register(bytearray(64))
        assert await pair.ours.write(pair.session, pair.local, region, 64) == 64


async def test_misses_at_the_same_time_share_a_question(pair: Pair) -> None:
    asked = count_metadata(pair)
    results = await asyncio.gather(
        *(pair.ours.write(pair.session, pair.local, 1, 1) for _ in range(100)),
        return_exceptions=True,
    )
    assert {type(result) for result in results} == {RemoteAddressError}
    assert 1 <= asked[0] <= 3


def count_metadata(pair: Pair) -> list[int]:
    """Counts the metadata requests that the peer answers, in the list's only item."""
    assembly: Any = pair.theirs._open
    handle = assembly.serving.handle
    asked = [0]

    async def counting(connection: Any, message: Any) -> Any:
        asked[0] += type(message).__name__ == "Metadata"
        return await handle(connection, message)

    assembly.serving.handle = counting
    return asked


def hold_metadata(pair: Pair) -> asyncio.Event:
    """The peer answers no metadata request until the event is set."""
    assembly: Any = pair.theirs._open
    handle = assembly.serving.handle
    gate = asyncio.Event()

    async def waiting(connection: Any, message: Any) -> Any:
        if type(message).__name__ == "Metadata":
            await gate.wait()
        return await handle(connection, message)

    assembly.serving.handle = waiting
    return gate


async def test_the_transfers_timeout_covers_the_question(pair: Pair) -> None:
    gate = hold_metadata(pair)
    with pytest.raises(TransferTimeout):
        await pair.ours.write(pair.session, pair.local, 1, 1, timeout=0.05)
    transfer = pair.ours.submit_write(pair.session, pair.local, 1, 1)
    await asyncio.sleep(0)
    transfer.cancel()
    assert transfer.done()
    gate.set()
    with pytest.raises(RemoteAddressError):
        await pair.ours.write(pair.session, pair.local, 1, 1)


async def test_refresh_is_bounded(pairs: Pairs) -> None:
    pair = await pairs(transfer_timeout=0.1)
    gate = hold_metadata(pair)
    with pytest.raises(TransferTimeout):
        await pair.session.refresh()
    gate.set()
    await pair.session.refresh()


async def test_a_peer_that_is_lost_during_the_question(pair: Pair) -> None:
    hold_metadata(pair)
    transfer = pair.ours.submit_write(pair.session, pair.local, 1, 1)
    refresh = asyncio.create_task(pair.session.refresh())
    await asyncio.sleep(0.01)
    await pair.theirs.close()
    with pytest.raises(PeerLost):
        await transfer
    with pytest.raises(PeerLost):
        await refresh


async def test_many_changes_while_peers_read(pair: Pair) -> None:
    memory = np.zeros(64 * 500, np.uint8)
    for start in range(0, 500, 50):
        regions = await pair.theirs.register_many(
            [memory[i * 64 : i * 64 + 64] for i in range(start, start + 50)]
        )
        for region in regions[::2]:
            await pair.theirs.deregister(region)
    await until(lambda: len(pair.session.all_regions) == 251)
    await pair.session.refresh()
    assert len(pair.session.all_regions) == 251
