"""Which decode gets a request, and who waits."""

from __future__ import annotations

import asyncio

import pytest

from inference.router import Fleet


def fleet_of(*blocks: int) -> Fleet:
    fleet = Fleet({f"decode-{n}": "" for n in range(len(blocks))})
    for decode, count in zip(fleet.decodes, blocks, strict=True):
        fleet.healthy(decode, count)
    return fleet


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_decode_with_the_fewest_outstanding_blocks_is_taken() -> None:
    fleet = fleet_of(10, 20)
    one, other = fleet.decodes
    assert await fleet.reserve(4) is one
    assert await fleet.reserve(3) is other
    assert await fleet.reserve(3) is other
    assert await fleet.reserve(6) is one
    assert (one.outstanding, other.outstanding) == (10, 6)


async def test_requests_wait_while_all_are_full() -> None:
    fleet = fleet_of(4, 4)
    one, _ = fleet.decodes
    for _ in range(2):
        await fleet.reserve(3)
    waiting = [asyncio.create_task(fleet.reserve(2)) for _ in range(2)]
    await turn()
    assert not any(task.done() for task in waiting)
    assert fleet.waited == 2
    fleet.release(one, 3)
    assert [await task for task in waiting] == [one, one]


async def test_a_repeated_request_goes_before_the_others() -> None:
    fleet = fleet_of(2)
    await fleet.reserve(2)
    later = asyncio.create_task(fleet.reserve(2))
    await turn()
    again = asyncio.create_task(fleet.reserve(2, first=True))
    await turn()
    fleet.release(fleet.decodes[0], 2)
    await again
    assert not later.done()
    later.cancel()


@pytest.mark.parametrize("how", ["suspect", "stopped"])
async def test_a_decode_in_trouble_gets_nothing_until_it_is_healthy(how: str) -> None:
    fleet = fleet_of(4)
    [decode] = fleet.decodes
    getattr(fleet, how)(decode)
    assert decode.stopped.is_set() == (how == "stopped")
    waiting = asyncio.create_task(fleet.reserve(1))
    await turn()
    assert not waiting.done()
    fleet.healthy(decode, 4)
    assert await waiting is decode
    assert not decode.stopped.is_set()


async def test_a_client_that_hangs_up_while_waiting_makes_way_and_keeps_no_room() -> None:
    fleet = fleet_of(4)
    [decode] = fleet.decodes
    await fleet.reserve(2)
    large, small = (asyncio.create_task(fleet.reserve(n)) for n in (4, 2))
    await turn()
    large.cancel()
    assert await small is decode
    both = [asyncio.create_task(fleet.reserve(4)) for _ in range(2)]
    await turn()
    fleet.release(decode, 2)
    fleet.release(decode, 2)
    both[0].cancel()  # it has been granted by now
    assert await both[1] is decode
    assert decode.outstanding == 4
