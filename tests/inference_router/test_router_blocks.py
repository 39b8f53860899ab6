"""Who gets blocks, and when."""

from __future__ import annotations

import asyncio

import pytest

from inference.blocks import BlockPool


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_blocks_are_nobody_elses_until_they_are_given_back() -> None:
    pool = BlockPool(5)
    first, second = await pool.take(2), await pool.take(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.free == 0
    pool.give_back(second)
    assert sorted(await pool.take(3)) == sorted(second)


async def test_who_finds_too_few_waits_in_the_order_of_asking() -> None:
    pool = BlockPool(4)
    blocks = await pool.take(3)
    large = asyncio.create_task(pool.take(2))
    small = asyncio.create_task(pool.take(1))
    await turn()
    assert not large.done()
    assert not small.done()  # or the large one might never have its turn
    pool.give_back(blocks[:1])
    assert len(await large) == 2
    pool.give_back(blocks[1:])
    assert len(await small) == 1


async def test_who_gives_up_waiting_makes_way() -> None:
    pool = BlockPool(3)
    await pool.take(2)
    large = asyncio.create_task(pool.take(2))
    small = asyncio.create_task(pool.take(1))
    await turn()
    large.cancel()
    assert len(await small) == 1
    assert large.cancelled()


async def test_blocks_granted_to_who_has_just_given_up_are_not_lost() -> None:
    pool = BlockPool(2)
    blocks = await pool.take(2)
    waiting = asyncio.create_task(pool.take(2))
    await turn()
    pool.give_back(blocks)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert pool.free == 2


async def test_what_there_never_is_is_refused() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks of 2"):
        await pool.take(3)


async def test_giving_back_twice_is_an_error() -> None:
    pool = BlockPool(2)
    blocks = await pool.take(1)
    pool.give_back(blocks)
    with pytest.raises(ValueError, match="not taken"):
        pool.give_back(blocks)
