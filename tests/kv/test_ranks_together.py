"""A prefill rank that writes to several decode ranks: it succeeds for all of them or for none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from kv.servers import is_goodbye_lost
from promises.measures import until

from aioflagcx import Engine
from aioflagcx.errors import HandoverError, NotifyRefused
from aioflagcx.handshake import CloseReason
from aioflagcx.kv import CacheGroup, CacheLayout, KVManager, KVPoll, messages
from aioflagcx.kv.wire import NAME

HEADS, BLOCKS = 4, 8


class Ranks:
    """One prefill rank with all heads, and two decode ranks with half of them each."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self.ours = np.random.default_rng(3).integers(1, 256, (1, BLOCKS, HEADS, 64), np.uint8)
        self.theirs = [np.zeros((1, BLOCKS, HEADS // 2, 64), np.uint8) for _ in range(2)]

    prefill: KVManager
    decodes: list[KVManager]

    async def open(self, role: Any, cache: Any, rank: int, ranks: int, **options: Any) -> KVManager:
        group = CacheGroup([cache.ctypes.data], BLOCKS, cache[0, 0].nbytes, heads=HEADS)
        layout = CacheLayout(group, rank, ranks)
        return await self._stack.enter_async_context(KVManager(role, layout, **options))

    async def start(self) -> tuple[Any, list[Any]]:
        """A sender that is ready, and the receivers of both ranks."""
        sender = self.prefill.sender("r")
        receivers = [one.receiver("r", self.prefill.session_id) for one in self.decodes]
        for receiver in receivers:
            await receiver.start([5, 6])
        await sender.ready()
        return sender, receivers


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[contextlib.AsyncExitStack]:
    async with contextlib.AsyncExitStack() as stack:
        yield stack


@pytest_asyncio.fixture
async def ranks(stack: contextlib.AsyncExitStack) -> Ranks:
    found = Ranks(stack)
    found.prefill = await found.open("prefill", found.ours, 0, 1)
    found.decodes = [
        await found.open("decode", cache, rank, 2) for rank, cache in enumerate(found.theirs)
    ]
    return found


async def test_no_rank_hears_of_success_when_another_cannot_be_written_to(ranks: Ranks) -> None:
    await ranks.decodes[1].close()
    ranks.decodes[1] = await ranks.open("decode", ranks.theirs[1], 1, 2, register=False)
    sender, receivers = await ranks.start()
    with pytest.raises(HandoverError, match="lies in no single region"):
        await sender.send([1, 2])
    for receiver in receivers:
        with pytest.raises(HandoverError, match="lies in no single region"):
            await receiver.done()
        assert receiver.quiet


async def test_success_is_told_when_all_ranks_have_everything(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[bool] = []
    for receiver_of in ranks.decodes:
        queue: Any = receiver_of._queue
        take = queue._routes[NAME]

        def listen(notification: Any, take: Any = take) -> Any:
            if isinstance(messages.decode(notification.payload), messages.Done):
                heard.append(all(cache[:, [5, 6]].all() for cache in ranks.theirs))
            return take(notification)

        monkeypatch.setitem(queue._routes, NAME, listen)
    sender, receivers = await ranks.start()
    await sender.send([1, 2], aux=b"token")
    assert [await receiver.done() for receiver in receivers] == [b"token"] * 2
    assert heard == [True, True]
    for rank, cache in enumerate(ranks.theirs):
        half = ranks.ours[:, :, 2 * rank : 2 * rank + 2]
        np.testing.assert_array_equal(cache[:, [5, 6]], half[:, [1, 2]])


async def test_a_rank_that_gives_up_takes_the_others_along(ranks: Ranks) -> None:
    sender, receivers = await ranks.start()
    await sender.send([1], last=False)
    await receivers[0].abort("too slow")
    with pytest.raises(HandoverError, match="decode rank 0 has given it up: too slow"):
        await receivers[1].done()
    with pytest.raises(HandoverError, match="decode rank 0 has given it up: too slow"):
        await sender.send([2])


async def test_a_rank_that_dies_before_another_has_come_fails_the_room(ranks: Ranks) -> None:
    sender = ranks.prefill.sender("r")
    await ranks.decodes[0].receiver("r", ranks.prefill.session_id).start([0, 1])
    await until(lambda: any(one.session is not None for one in sender._targets.values()))
    assert sender.poll() is KVPoll.Bootstrapping  # rank 1 is missing
    await ranks.decodes[0].engine.close()
    with pytest.raises(HandoverError, match="was lost"):
        await sender.ready()


async def test_a_rank_that_comes_late_hears_why_as_often_as_it_asks(ranks: Ranks) -> None:
    sender, late = ranks.prefill.sender("r"), ranks.decodes[1]
    first = ranks.decodes[0].receiver("r", ranks.prefill.session_id)
    await first.start([0, 1])
    await first.abort("too slow")
    await until(lambda: sender.poll() is KVPoll.Failed)
    second = late.receiver("r", ranks.prefill.session_id)
    with pytest.raises(HandoverError, match="too slow"):
        await second.start([0, 1])
        await second.done()
    # It asks again, as after the end of its session: that is no new use of the room.
    [source] = second._sources.values()
    await (await late.engine.connect(ranks.prefill.session_id)).notify(
        NAME, messages.encode(source.start)
    )
    assert not len(ranks.prefill._lobby)
    # And all of them may use the room again.
    sender, receivers = await ranks.start()
    await sender.send([1, 2])
    for receiver in receivers:
        await receiver.done()


async def test_only_the_engine_that_said_hello_speaks_for_prefill(ranks: Ranks) -> None:
    sender, receivers = await ranks.start()
    async with Engine() as stranger:
        session = await stranger.connect(ranks.decodes[0].session_id)
        for message in (
            messages.Hello(receivers[0]._id, 0),
            messages.Begin(receivers[0]._id, 0),
            messages.Done(receivers[0]._id, 0, b"forged"),
            messages.Failed(receivers[0]._id, 0, "forged", True),
        ):
            with pytest.raises(NotifyRefused, match="another engine"):
                await session.notify(NAME, messages.encode(message))
    assert receivers[0].poll() is KVPoll.WaitingForInput
    await asyncio.gather(sender.send([1, 2]), *(receiver.done() for receiver in receivers))


async def test_fences_for_the_sake_of_other_rooms_cost_nobody_anything(ranks: Ranks) -> None:
    """Also those that follow each other, whatever they end: a connect, a greeting, a word."""
    engine_id = ranks.prefill.engine.engine_id
    unharmed = 0
    for turn in range(40):
        for cache in ranks.theirs:
            cache[:] = 0
        sender = ranks.prefill.sender("r")
        receivers = [one.receiver("r", ranks.prefill.session_id) for one in ranks.decodes]
        sending = asyncio.create_task(sender.send([1, 2]))
        starts = [asyncio.create_task(receiver.start([5, 6])) for receiver in receivers]
        for fence in range(1 + turn % 3):
            for _ in range(turn):
                await asyncio.sleep(0)
            await ranks.decodes[(turn + fence) % 2].engine.quiesce(engine_id)
        ends = await asyncio.gather(sending, *starts, return_exceptions=True)
        failed = [end for end in ends if isinstance(end, BaseException)]
        if any(map(is_goodbye_lost, failed)):
            await asyncio.gather(sender.abort(), *(receiver.abort() for receiver in receivers))
            continue
        assert not failed
        await asyncio.gather(*(receiver.done() for receiver in receivers))
        unharmed += 1
        for rank, cache in enumerate(ranks.theirs):
            half = ranks.ours[:, :, 2 * rank : 2 * rank + 2]
            np.testing.assert_array_equal(cache[:, [5, 6]], half[:, [1, 2]])
    assert unharmed


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("count", [1, 2])
async def test_the_last_word_is_said_again_when_nobody_knows_whether_it_was_heard(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch, taken: bool, count: int
) -> None:
    ranks = Ranks(stack)
    ranks.prefill = await ranks.open("prefill", ranks.ours, 0, 1)
    halves = ranks.theirs if count == 2 else [np.zeros_like(ranks.ours)]
    ranks.decodes = [
        await ranks.open("decode", cache, rank, count) for rank, cache in enumerate(halves)
    ]
    queue: Any = ranks.decodes[-1]._queue
    take = queue._routes[NAME]
    lost: list[str | None] = []

    def lose_the_answer(notification: Any) -> Any:
        if lost or not isinstance(messages.decode(notification.payload), messages.Done):
            return take(notification)
        lost.append(take(notification) if taken else None)
        for connection in ranks.decodes[-1].engine._assembly().serving._guests:
            connection.abort(CloseReason("lost", "the cable was pulled"))
        return None

    monkeypatch.setitem(queue._routes, NAME, lose_the_answer)
    sender, receivers = await ranks.start()
    await sender.send([1, 2], aux=b"token")
    assert [await receiver.done() for receiver in receivers] == [b"token"] * count
    assert lost == [None]


async def test_a_rank_that_had_not_been_told_yet_hears_of_the_abort_as_well(
    stack: contextlib.AsyncExitStack,
) -> None:
    ranks = Ranks(stack)
    decode = await ranks.open("decode", np.zeros_like(ranks.ours), 0, 1)
    prefills = [await ranks.open("prefill", one, rank, 2) for rank, one in enumerate(ranks.theirs)]
    senders = [prefill.sender("r") for prefill in prefills]
    receiver = decode.receiver("r", [prefill.session_id for prefill in prefills])
    starting = asyncio.create_task(receiver.start([1]))
    await asyncio.sleep(0)
    assert not any(source.told for source in receiver._sources.values())
    await receiver.abort("never mind")
    for sender in senders:
        with pytest.raises(HandoverError, match="never mind"):
            await sender.ready()
    with pytest.raises(HandoverError, match="never mind"):
        await starting
