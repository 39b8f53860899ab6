from __future__ import annotations

import asyncio

import pytest

from aioflagcx import Config, Notification
from aioflagcx.notifications import NotificationQueue, Outgoing


def note(name: str = "n", payload: bytes = b"") -> Notification:
    return Notification(name, payload, "engine", "host:1")


def queue(**limits: int) -> NotificationQueue:
    return NotificationQueue(Config(**limits))


async def collect(source: NotificationQueue, into: list[str]) -> None:
    async for item in source.iterate():
        into.append(item.name)


async def test_in_order_and_waiting() -> None:
    source = queue()
    got: list[str] = []
    task = asyncio.create_task(collect(source, got))
    await asyncio.sleep(0)
    for name in "abc":
        assert source.put(note(name))
    source.close()
    await task
    assert got == ["a", "b", "c"]


async def test_bounded_by_number() -> None:
    source = queue(notification_queue_length=2)
    assert [source.put(note()) for _ in range(3)] == [True, True, False]
    assert source.refused == 1
    await anext(source.iterate())
    assert source.put(note())


async def test_bounded_by_bytes_of_names_and_payloads() -> None:
    source = queue(notification_queue_bytes=100, notification_max_payload=100)
    assert source.put(note("é", bytes(48)))
    assert source.bytes == 50
    assert not source.put(note("n", bytes(50)))
    assert source.put(note("n", bytes(49)))
    await anext(source.iterate())
    assert source.bytes == 50


async def test_several_iterators_share_one_queue() -> None:
    source = queue()
    got: list[list[str]] = [[], [], []]
    tasks = [asyncio.create_task(collect(source, each)) for each in got]
    for number in range(300):
        source.put(note(str(number)))
        if number % 10 == 0:
            await asyncio.sleep(0)
    source.close()
    await asyncio.gather(*tasks)
    assert sorted(int(name) for each in got for name in each) == list(range(300))


async def test_after_close_the_iterators_there_are_get_what_is_queued() -> None:
    source = queue()
    there = source.iterate()
    source.put(note("last"))
    source.close()
    late = source.iterate()
    with pytest.raises(StopAsyncIteration):
        await anext(late)
    assert (await anext(there)).name == "last"
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(there)
    assert not source.put(note())


async def test_an_iterator_cancelled_when_an_item_has_come_leaves_it_to_another() -> None:
    source = queue()
    first = asyncio.ensure_future(anext(source.iterate()))
    second = asyncio.ensure_future(anext(source.iterate()))
    await asyncio.sleep(0)
    source.put(note("kept"))
    first.cancel()
    assert (await second).name == "kept"
    assert first.cancelled()


async def test_what_is_given_back_is_the_next_one_again() -> None:
    source = queue()
    for name in "abc":
        source.put(note(name))
    before = source.bytes
    item = await source.take()
    assert item is not None
    source.give_back(item)
    assert source.bytes == before
    got: list[str] = []
    source.close()
    assert (await source.take()) is item
    source.give_back(item)
    while (rest := source.take_rest()) is not None:
        got.append(rest.name)
    assert got == ["a", "b", "c"]


async def test_what_is_given_back_wakes_who_waits() -> None:
    source = queue()
    source.put(note("a"))
    item = await source.take()
    assert item is not None
    waiting = asyncio.create_task(source.take())
    await asyncio.sleep(0)
    source.give_back(item)
    assert await waiting is item


async def test_a_full_queue_does_not_starve_the_loop() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    source = queue()
    iterator = source.iterate()
    for _ in range(1000):
        source.put(note())
    before = turns
    for _ in range(1000):
        await anext(iterator)
    assert turns - before >= 1000 // 64
    counter.cancel()


def test_what_can_be_sent() -> None:
    config = Config(notification_max_payload=4)
    assert Outgoing.checked("n", bytearray(b"1234"), config).payload == b"1234"
    assert Outgoing.checked("n", memoryview(b"12"), config).payload == b"12"
    with pytest.raises(ValueError, match="at most 4 bytes"):
        Outgoing.checked("n", b"12345", config)
    with pytest.raises(ValueError, match="name"):
        Outgoing.checked("n" * (2**20 + 1), b"", config)
    for name, payload in ((b"n", b""), ("n", "text"), ("n", None), (None, b"")):
        with pytest.raises(TypeError):
            Outgoing.checked(name, payload, config)
    for pair in ("ab", ("a",), ("a", b"", 1), 5):
        with pytest.raises(TypeError):
            Outgoing.from_pair(pair, config)
