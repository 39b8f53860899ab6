"""Notifications between applications, with and without data before them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conformance.devices import Devices
from conformance.fixtures import Engines, Pairs
from conformance.pair import Pair, until

from aioflagcx import Notification
from aioflagcx.errors import (
    NotifyRefused,
    PeerLost,
    RemoteAddressError,
    TransferCancelled,
    TransferTimeout,
)


async def take(pair: Pair, count: int) -> list[Notification]:
    iterator = pair.theirs.notifications()
    return [await asyncio.wait_for(anext(iterator), 10) for _ in range(count)]


async def test_with_a_write_after_its_data(pair: Pair) -> None:
    size = pair.local.size
    assert await pair.write(size, notify=("filled", b"\0payload")) == size
    [note] = await take(pair, 1)
    assert (note.name, note.payload) == ("filled", b"\0payload")
    assert note.engine_id == pair.ours.engine_id
    assert note.session_id == pair.ours.session_id
    assert (pair.src == pair.dst).all()


async def test_the_first_write_to_a_peer_can_notify(engines: Engines) -> None:
    ours, theirs = await engines.near(), await engines.far()
    local = await ours.register(bytearray(64))
    target = await theirs.register(bytearray(64))
    await ours.write(theirs.session_id, local, target, 64, notify=("first", b""))
    assert (await anext(theirs.notifications())).name == "first"


async def test_without_data(pair: Pair) -> None:
    assert await pair.ours.write(pair.session, [], [], [], notify=("empty", b"1")) == 0
    await pair.session.notify("plain", b"2")
    assert [note.name for note in await take(pair, 2)] == ["empty", "plain"]


async def test_an_answer_can_be_sent_to_where_it_came_from(pair: Pair) -> None:
    await pair.session.notify("ping", b"")
    [note] = await take(pair, 1)
    back = await pair.theirs.connect(note.session_id)
    await back.notify("pong", note.payload)
    assert (await anext(pair.ours.notifications())).engine_id == pair.theirs.engine_id


async def test_many_at_once_arrive_once_each(pair: Pair) -> None:
    writes = [pair.write(64, notify=(str(i), b"x" * i)) for i in range(300)]
    assert await asyncio.gather(*writes) == [64] * 300
    notes = await take(pair, 300)
    assert sorted(int(note.name) for note in notes) == list(range(300))
    assert all(len(note.payload) == int(note.name) for note in notes)


@pytest.mark.parametrize("size", [0, 1, 1 << 20])
async def test_sizes(pair: Pair, size: int) -> None:
    await pair.write(64, notify=("n" * size, b"p" * size))
    [note] = await take(pair, 1)
    assert (len(note.name), len(note.payload)) == (size, size)


async def test_arguments(pair: Pair) -> None:
    for notify in (("n", b"x" * ((1 << 20) + 1)), ("n" * ((1 << 20) + 1), b"")):
        with pytest.raises(ValueError, match="at most"):
            pair.ours.submit_write(pair.session, pair.local, pair.remote, 1, notify=notify)
        with pytest.raises(ValueError, match="at most"):
            await pair.session.notify(*notify)
    bad: Any
    for bad in ("name", ("name",), ("name", "text"), (b"name", b""), 5):
        with pytest.raises(TypeError):
            pair.ours.submit_write(pair.session, pair.local, pair.remote, 1, notify=bad)
    assert not pair.ours.stats().transfers_pending


async def test_none_when_the_write_fails(pair: Pair) -> None:
    with pytest.raises(RemoteAddressError):
        await pair.ours.write(pair.session, pair.local, 1, 1, notify=("never", b""))
    transfer = pair.submit_long(notify=("never", b""))
    transfer.cancel()
    with pytest.raises(TransferCancelled) as caught:
        await transfer
    assert caught.value.notify_delivered is False
    await pair.write(notify=("last", b""))
    assert [note.name for note in await take(pair, 1)] == ["last"]


async def test_a_full_queue_refuses(pairs: Pairs) -> None:
    pair = await pairs(notification_queue_length=2)
    for _ in range(2):
        await pair.write(notify=("kept", b""))
    with pytest.raises(NotifyRefused, match="full") as caught:
        await pair.write(notify=("refused", b""))
    assert caught.value.remote_quiet
    assert caught.value.notify_delivered is False
    with pytest.raises(NotifyRefused):
        await pair.session.notify("refused", b"")
    assert pair.theirs.stats().notifications_refused == 2
    await take(pair, 1)
    await pair.session.notify("fits again", b"")
    assert [note.name for note in await take(pair, 2)] == ["kept", "fits again"]


async def test_more_than_the_peer_takes_is_refused_before_a_byte_moves(
    engines: Engines,
) -> None:
    ours, theirs = await engines.near(), await engines.far(notification_max_payload=8)
    local = await ours.register(b"x" * 64, access="read")
    memory = bytearray(64)
    target = await theirs.register(memory)
    for _ in range(2):  # connecting, connected
        with pytest.raises(NotifyRefused, match="at most 8"):
            await ours.write(theirs.session_id, local, target, 64, notify=("n", bytes(9)))
    assert not any(memory)
    session = await ours.connect(theirs.session_id)
    with pytest.raises(NotifyRefused, match="at most 8"):
        await session.notify("n", bytes(9))


def hold_notifies(pair: Pair) -> asyncio.Event:
    """The peer answers no notification until the event is set."""
    assembly: Any = pair.theirs._open
    handle = assembly.serving.handle
    gate = asyncio.Event()

    async def waiting(connection: Any, message: Any) -> Any:
        if type(message).__name__ == "Notify":
            await gate.wait()
        return await handle(connection, message)

    assembly.serving.handle = waiting
    return gate


async def test_a_session_that_dies_after_the_data_leaves_it_unknown(pair: Pair) -> None:
    hold_notifies(pair)
    write = asyncio.ensure_future(pair.write(notify=("lost", b"")))
    notify = asyncio.ensure_future(pair.session.notify("lost", b""))
    await until(lambda: pair.ours.stats().transfers_done)
    await pair.theirs.close()
    for task in (write, notify):
        with pytest.raises(PeerLost) as caught:
            await task
        assert caught.value.notify_delivered is None
        assert caught.value.remote_quiet is (task is write)  # of which the data has landed
    assert (pair.dst[:4096] == pair.src[:4096]).all()


async def test_a_session_that_the_peer_has_ended_takes_none_and_says_so(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wants to can say it again, on another one."""
    monkeypatch.setattr("aioflagcx.link._FAREWELL", 0.01)  # the goodbye is lost
    assembly: Any = pair.theirs._open
    for notifying in (
        lambda: pair.session.notify("late", b""),
        lambda: pair.write(notify=("late", b"")),
    ):
        for guest in assembly.serving._guests.values():
            guest._gone = True
        with pytest.raises(PeerLost) as caught:
            await notifying()
        assert caught.value.notify_delivered is False
        assert caught.value.remote_quiet
        assert not pair.session.alive
        pair.session = await pair.ours.connect(pair.theirs.session_id)
    await pair.session.notify("again", b"")
    assert [note.name for note in await take(pair, 1)] == ["again"]


async def test_stopped_between_data_and_answer_it_is_unknown(pair: Pair) -> None:
    gate = hold_notifies(pair)
    with pytest.raises(TransferTimeout) as timed_out:
        await pair.write(notify=("late", b""), timeout=0.1)
    assert timed_out.value.notify_delivered is None
    assert timed_out.value.remote_quiet
    transfer = pair.ours.submit_write(
        pair.session, pair.local, pair.remote, 64, notify=("late", b"")
    )
    await until(lambda: transfer._helper)  # which asks the peer
    assert transfer.bytes_done == 64
    assert transfer.cancel()
    assert transfer.done()
    with pytest.raises(TransferCancelled) as cancelled:
        await transfer
    assert cancelled.value.notify_delivered is None
    gate.set()


def test_shutting_the_loop_down_before_the_answer(devices: Devices) -> None:
    """Every task is cancelled, the one that waits for the peer's answer included."""

    async def use(asked: asyncio.Event) -> None:
        async with devices.near.engine() as ours, devices.far.engine() as theirs:
            region = await ours.register(bytearray(64))
            target = await theirs.register(bytearray(64))
            transfer = ours.submit_write(
                theirs.session_id, region, target, 64, notify=("never", b"")
            )
            assembly: Any = theirs._open

            async def hold(connection: Any, message: Any) -> None:
                asked.set()
                await asyncio.get_running_loop().create_future()

            session = await ours.connect(theirs.session_id)
            assembly.serving.handle = hold
            try:
                # Nobody awaits the transfer, so nothing but that task's end can end it.
                await asyncio.get_running_loop().create_future()
            finally:
                assert session.alive
                await until(transfer.done)
                assert isinstance(transfer.exception(), TransferCancelled)

    async def main() -> asyncio.Task[None]:
        asked = asyncio.Event()
        task = asyncio.create_task(use(asked))
        await asked.wait()
        return task

    assert asyncio.run(main()).cancelled()


async def test_iteration_ends_when_the_engine_closes(pair: Pair) -> None:
    got: list[str] = []

    async def consume() -> None:
        async for note in pair.theirs.notifications():
            got.append(note.name)

    consumers = [asyncio.create_task(consume()) for _ in range(3)]
    for i in range(10):
        await pair.session.notify(str(i), b"")
    await pair.theirs.close()
    await asyncio.gather(*consumers)
    assert sorted(got) == [str(i) for i in range(10)]


async def test_iterators_of_before_the_start(devices: Devices) -> None:
    engine = devices.near.engine()
    iterator = engine.notifications()
    first = asyncio.ensure_future(anext(iterator))
    async with engine:
        session = await engine.connect(engine.session_id)
        await session.notify("a", b"")
        assert (await first).name == "a"
