"""How rooms and managers end: cancelled at any point, closed underneath, asked again."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from kv.servers import Server, group_of, handed_over, is_goodbye_lost
from promises.measures import until

from aioflagcx import Config, Engine
from aioflagcx.errors import (
    DeregisterTimeout,
    HandoverError,
    HandshakeRejected,
    NotifyRefused,
)
from aioflagcx.kv import KVManager, KVPoll, lobby, manager, messages
from aioflagcx.kv.wire import NAME

LAYERS, BLOCKS, BLOCK = 3, 32, 16 * 1024


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[tuple[Server, Server]]:
    """A prefill and a decode, whose blocks take a moment to write."""
    memories = [np.zeros(LAYERS * BLOCKS * BLOCK, np.uint8) for _ in range(2)]
    layouts = [group_of(memory, LAYERS, BLOCKS) for memory in memories]
    async with (
        Server.open("prefill", memories[0], layout=layouts[0]) as prefill,
        Server.open("decode", memories[1], layout=layouts[1]) as decode,
    ):
        yield prefill, decode


Pair = tuple[Server, Server]


async def started(pair: Pair, room: str = "r", block: int = 4) -> tuple[Any, Any]:
    """Both halves of a room, ready to send one block."""
    prefill, decode = pair
    sender = prefill.manager.sender(room)
    receiver = decode.manager.receiver(room, prefill.manager.session_id)
    await receiver.start([block])
    await sender.ready()
    return sender, receiver


# Cancellation --------------------------------------------------------------------------------


async def test_whenever_it_is_cancelled_nothing_is_on_its_way_afterwards(pair: Pair) -> None:
    prefill, decode = pair
    chance = random.Random(5)
    ends = set()
    for turn in range(150):
        prefill.memory[:] = turn + 1
        decode.memory[:] = 0
        sender = prefill.manager.sender("r")
        receiver = decode.manager.receiver("r", prefill.manager.session_id)

        async def send(sender: Any = sender) -> None:
            try:
                await sender.send(range(BLOCKS // 2), last=False)
                await sender.send(range(BLOCKS // 2, BLOCKS))
            finally:
                prefill.memory[:] = 0xEE  # ours again, whatever has happened

        async def receive(receiver: Any = receiver) -> None:
            await receiver.start(range(BLOCKS))
            await receiver.done()

        tasks = [asyncio.create_task(send()), asyncio.create_task(receive())]
        for _ in range(chance.choice([0, 1, 2, 4, 8, 16, 32, 64, 128])):
            await asyncio.sleep(0)
        for task in chance.choice([tasks[:1], tasks[1:], tasks, tasks[::-1]]):
            task.cancel()
        await receiver.abort()
        await sender.abort()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, HandoverError | asyncio.CancelledError)
        ends.add((sender.poll(), receiver.poll()))
        assert receiver.quiet
        assert not any(target.transfers for target in sender._targets.values())
        if receiver.poll() is KVPoll.Success:
            assert (decode.memory == turn + 1).all()
        else:
            decode.memory[:] = 0xA5
            await handed_over(prefill.manager, decode.manager, "next", [0], [0])
            decode.cache.reshape(LAYERS, BLOCKS, BLOCK)[:, 0] = 0xA5
            assert (decode.memory == 0xA5).all()
    assert (KVPoll.Failed, KVPoll.Failed) in ends
    for server in pair:
        assert not server.manager._rooms and not server.manager._receivers


async def test_a_send_that_is_cancelled_while_it_waits_for_decode_gives_the_room_up(
    pair: Pair,
) -> None:
    sender = pair[0].manager.sender("r")
    sending = asyncio.create_task(sender.send([1]))
    await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert "sending was cancelled" in str(sender.error)


async def test_a_cancelled_start_is_over_when_the_blocks_may_be_reused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    receiver = decode.manager.receiver("r", prefill.manager.session_id)
    fencing, fenced = asyncio.Event(), asyncio.Event()

    async def silence(*_: Any) -> None:
        fencing.set()
        await fenced.wait()

    monkeypatch.setattr(receiver, "_silence", silence)
    starting = asyncio.create_task(receiver.start([1]))
    await until(lambda: bool(receiver._sources))
    starting.cancel()
    await fencing.wait()
    assert not starting.done()
    fenced.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert receiver.quiet


async def test_an_abort_that_is_cancelled_goes_on(pair: Pair) -> None:
    sender, receiver = await started(pair)
    for half in (receiver, sender):
        aborting = asyncio.create_task(half.abort())
        await asyncio.sleep(0)
        aborting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await aborting
    await receiver.abort()
    assert receiver.quiet


async def test_send_does_not_wait_for_a_decode_that_does_not_answer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    sender, _ = await started(pair)
    await decode.manager.engine.quiesce(prefill.manager.engine.engine_id)
    asking = asyncio.Event()

    async def never(*_: Any) -> None:
        asking.set()
        await asyncio.Event().wait()

    [target] = sender._targets.values()
    await until(lambda: not target.session.alive)
    monkeypatch.setattr(target.wire, "session", never)
    sending = asyncio.create_task(sender.send([1]))
    await asking.wait()
    await sender.abort("enough")
    with pytest.raises(HandoverError, match="enough"):
        await sending


# Both sides agree ----------------------------------------------------------------------------


async def test_prefill_does_not_succeed_when_decode_has_given_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it has not heard of that yet."""
    prefill, decode = pair
    sender, receiver = await started(pair)
    monkeypatch.setattr(prefill.manager, "_heard_abort", lambda *_: None)
    decode.manager.fence_timeout = None
    aborting = asyncio.create_task(receiver.abort("too slow"))
    await until(lambda: receiver.poll() is KVPoll.Failed)
    with pytest.raises(HandoverError, match=r"decode has given it up: .*too slow"):
        await sender.send([1])
    await aborting
    assert receiver.quiet
    assert decode.manager.engine.stats().responders == 1  # its word was enough: all has landed


async def test_aborts_of_both_sides_at_once_end_the_room(pair: Pair) -> None:
    for room in range(20):
        sender, receiver = await started(pair, str(room))
        sending = asyncio.create_task(sender.send([room]))
        await asyncio.gather(sender.abort("mine"), receiver.abort("yours"))
        await asyncio.gather(sending, return_exceptions=True)
        assert receiver.quiet
        # Prefill may not know that its last word has come through, but not the other way round.
        assert sender.poll() is KVPoll.Failed or receiver.poll() is KVPoll.Success


async def test_whoever_has_missed_the_end_learns_of_it_when_connected_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it was stopped until its sessions were lost."""
    decode = pair[1]

    async def silent(*_: Any) -> None:
        """What is said is lost on the way."""

    for given_up, fence in ((0, None), (1, 0.01)):
        halves = await started(pair)
        left = halves[1 - given_up]
        decode.manager.fence_timeout = fence or 1.0
        with monkeypatch.context() as patch:
            patch.setattr(pair[given_up].manager, "_try_to_tell", silent)
            await halves[given_up].abort("long ago")
        assert left.poll() is KVPoll.WaitingForInput
        other = pair[given_up].manager.engine
        await other.quiesce(pair[1 - given_up].manager.engine.engine_id)
        await until(lambda left=left: left.poll() is KVPoll.Failed)
        assert "long ago" in str(left.error) or "is through with the room" in str(left.error)
        await left.abort()  # it has settled


class Fencing:
    """Each kind of message that decode hears is the last thing its session brings, once: it is
    fenced then, and the message not taken."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        prefill, self._decode = pair
        self._prefill_id = prefill.manager.engine.engine_id
        self._heard = self._decode.manager._heard
        self.kinds: set[type[Any]] = set()
        self._under_way: list[asyncio.Future[None]] = []
        monkeypatch.setitem(self._decode.manager._queue._routes, NAME, self._take)

    def _take(self, notification: Any) -> Any:
        kind = type(messages.decode(notification.payload))
        if kind in self.kinds:
            return self._heard(notification)
        self.kinds.add(kind)
        engine = self._decode.manager.engine
        for guest in engine._assembly().serving._guests.values():
            guest._gone = True
        self._under_way.append(asyncio.ensure_future(engine.quiesce(self._prefill_id)))
        raise HandshakeRejected("the session has ended")

    async def over(self) -> None:
        await asyncio.gather(*self._under_way)


async def test_a_room_whose_session_is_fenced_for_another_one_while_it_asks_is_none_the_worse(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    fencing = Fencing(pair, monkeypatch)
    await handed_over(pair[0].manager, pair[1].manager, "r", [1], [2])
    await fencing.over()
    assert {messages.Hello, messages.Done} <= fencing.kinds


async def test_the_word_of_an_end_comes_through_although_its_session_is_fenced(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = await started(pair)
    fencing = Fencing(pair, monkeypatch)
    await sender.abort("out of memory")
    with pytest.raises(HandoverError, match="out of memory"):
        await receiver.done()
    await fencing.over()
    assert messages.Failed in fencing.kinds


async def test_rooms_that_are_fenced_off_are_no_trouble_for_the_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = pair[1]
    decode.manager.fence_timeout = 1e-4
    fences: list[str] = []
    quiesce = decode.manager.engine.quiesce

    async def count(peer: str, **options: Any) -> None:
        fences.append(peer)
        await quiesce(peer, **options)

    monkeypatch.setattr(decode.manager.engine, "quiesce", count)

    async def one(room: int) -> bool:
        try:
            sender, receiver = await started(pair, str(room), room % BLOCKS)
            for _ in range(room % 7):
                await asyncio.sleep(0)
            if room % 2:
                await receiver.abort()
            await sender.send([room % BLOCKS])
            await receiver.done()
        except HandoverError as error:
            assert room % 2 or is_goodbye_lost(error)
            return False
        return True

    handed_over = await asyncio.gather(*map(one, range(100)))
    assert fences
    assert any(handed_over) and not any(handed_over[1::2])


# Managers ------------------------------------------------------------------------------------


async def test_who_closes_it_again_waits_for_the_end_as_well(pair: Pair) -> None:
    _, receiver = await started(pair)
    closing = asyncio.create_task(pair[1].manager.close())
    await asyncio.sleep(0)
    await pair[1].manager.close()
    assert receiver.quiet
    assert pair[1].manager.engine._open is None
    await closing


async def test_closing_that_is_cancelled_closes_nevertheless(pair: Pair) -> None:
    _, receiver = await started(pair)
    closing = asyncio.create_task(pair[1].manager.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert receiver.quiet
    assert pair[1].manager.engine._open is None


async def test_starting_at_once_is_starting_once(pair: Pair) -> None:
    memory = np.zeros(LAYERS * BLOCKS * BLOCK, np.uint8)
    async with KVManager("decode", group_of(memory)) as one:
        await one.close()
        await asyncio.gather(one.start(), one.start())
        assert one.engine.stats().regions == LAYERS
        await handed_over(pair[0].manager, one, "r", [1], [2])


async def test_closing_ends_the_engine_although_a_pool_cannot_be_deregistered(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = pair[1].manager.engine
    deregistered = []

    async def stuck(region: Any) -> None:
        deregistered.append(region)
        raise DeregisterTimeout("a peer is stopped")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "deregister", stuck)
        with pytest.raises(DeregisterTimeout):
            await pair[1].manager.close()
    assert len(deregistered) == LAYERS
    assert engine._open is None


async def test_an_engine_closed_underneath_is_closed_when_the_blocks_are_given_back(
    pair: Pair,
) -> None:
    _, receiver = await started(pair)
    closing = asyncio.create_task(pair[1].manager.engine.close())
    with pytest.raises(HandoverError):
        await receiver.done()
    assert receiver.quiet
    assert closing.done()
    sender = pair[0].manager._rooms.get("r")
    if sender is not None:
        await until(lambda: sender.poll() is KVPoll.Failed)
    await pair[1].manager.close()


async def test_who_waits_for_a_sender_hears_that_the_server_closes(pair: Pair) -> None:
    _, decode = pair
    async with Engine() as engine:
        async with Server.open("prefill", engine=engine) as prefill:
            receiver = decode.manager.receiver("r", prefill.manager.session_id)
            await receiver.start([0])
            await until(lambda: len(prefill.manager._lobby) == 1)
        with pytest.raises(HandoverError, match="the server is closing"):
            await receiver.done()


async def test_a_decode_that_waits_for_longer_than_prefill_does_is_not_forgotten(
    pair: Pair,
) -> None:
    _, decode = pair
    memory = np.zeros(LAYERS * BLOCKS * BLOCK, np.uint8)
    async with Server.open("prefill", memory, bootstrap_timeout=1.0) as prefill:
        receiver = decode.manager.receiver("r", prefill.manager.session_id)
        await receiver.start([5])
        await until(lambda: len(prefill.manager._lobby) == 1)
        offers = prefill.manager._lobby._offers["r"]
        for _ in range(2):  # it is looked for, and found
            look = offers.expiry
            await until(lambda look=look: offers.expiry is not look)
        sender = prefill.manager.sender("r")
        await sender.send([2])
        await receiver.done()


async def test_a_decode_that_has_died_while_it_waited_is_forgotten(pair: Pair) -> None:
    layout = pair[1].manager.layout
    async with Server.open("prefill", bootstrap_timeout=0.02) as prefill:
        async with Engine() as engine:
            session = await engine.connect(prefill.manager.session_id)
            start = messages.Start(bytes(16), "r", 0, 1, layout, (np.zeros(1, np.int64),), b"")
            await session.notify(NAME, messages.encode(start))
            await until(lambda: len(prefill.manager._lobby) == 1)
            port = int(engine.session_id.rpartition(":")[2])
        async with Engine(port=port):  # another one at the same address
            await until(lambda: len(prefill.manager._lobby) == 0)
        assert prefill.manager._lobby._bytes == 0


async def test_a_thousand_rooms_leave_nothing_behind(pair: Pair) -> None:
    prefill, decode = pair
    decode.manager.fence_timeout = None  # however long a thousand answers take
    await handed_over(prefill.manager, decode.manager, "connected", [0], [0])

    async def one(room: int) -> None:
        sender = prefill.manager.sender(room)
        receiver = decode.manager.receiver(room, prefill.manager.session_id)
        await receiver.start([room % BLOCKS])
        await sender.ready()
        if room % 3 == 0:
            await sender.send([room % BLOCKS])
            await receiver.done()
        else:
            await (sender if room % 3 == 1 else receiver).abort()
            for waiting in (sender.ready(), receiver.done()):
                with contextlib.suppress(HandoverError):
                    await waiting

    await asyncio.gather(*map(one, range(1000)))
    for server in pair:
        await until(lambda manager=server.manager: not manager._tasks)
        assert not server.manager._rooms and not server.manager._receivers
        assert not len(server.manager._lobby)
        assert not any(wire._watchers for wire in server.manager._wires._wires.values())


# What strangers say --------------------------------------------------------------------------


async def test_a_decode_server_that_is_taken_for_prefill_says_so_at_once(pair: Pair) -> None:
    _, decode = pair
    async with Server.open("decode") as other:
        receiver = decode.manager.receiver("r", other.manager.session_id)
        with pytest.raises(HandoverError, match="this is a decode server, not prefill"):
            await receiver.start([0])
            await receiver.done()


async def test_a_prefill_of_another_version_is_not_asked_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    monkeypatch.setattr(messages._CODEC, "_version", 2)
    encode = messages.encode
    monkeypatch.setattr(
        "aioflagcx.kv.receiver.encode", lambda message: b"\x93\x01" + encode(message)[2:]
    )
    receiver = decode.manager.receiver("r", prefill.manager.session_id)
    with pytest.raises(HandoverError, match="no message of a hand-over"):
        await receiver.start([0])


async def test_blocks_that_prefill_takes_no_message_for_fail_the_room_at_once(pair: Pair) -> None:
    async with (
        Engine(config=Config(notification_max_payload=1024)) as engine,
        Server.open("prefill", engine=engine) as prefill,
    ):
        receiver = pair[1].manager.receiver("r", prefill.manager.session_id)
        with pytest.raises(HandoverError, match="takes notifications of 1024 bytes"):
            await receiver.start([0], aux=bytes(1024))


async def test_what_waits_for_a_sender_is_bounded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    session = await decode.manager.engine.connect(prefill.manager.session_id)

    async def offer(room: str, size: int) -> None:
        blocks = np.zeros(size, np.int64)
        start = messages.Start(bytes(16), room, 0, 1, decode.manager.layout, (blocks,), b"")
        await session.notify(NAME, messages.encode(start))

    monkeypatch.setattr(lobby, "MAX_BYTES", 100_000)
    await offer("a", 10_000)
    with pytest.raises(NotifyRefused, match="1 rooms wait for their senders"):
        await offer("b", 10_000)
    monkeypatch.setattr(lobby, "MAX_ROOMS", 1)
    with pytest.raises(NotifyRefused, match="1 rooms wait for their senders"):
        await offer("b", 1)
    prefill.manager.sender("a")
    await offer("b", 10_000)  # there is room again
    assert prefill.manager._lobby._bytes < 100_000


async def test_answers_to_those_who_are_not_there_are_bounded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    monkeypatch.setattr(manager, "_MAX_ANSWERS", 1)
    waiting = asyncio.Event()

    async def slow(*_: Any) -> None:
        await waiting.wait()

    monkeypatch.setattr(prefill.manager, "_try_to_tell", slow)
    session = await decode.manager.engine.connect(prefill.manager.session_id)
    abort = messages.encode(messages.Abort(bytes(16), "r", 0, 0, "no"))
    await session.notify(NAME, abort)
    with pytest.raises(NotifyRefused, match="1 answers are on their way already"):
        await session.notify(NAME, abort)
    waiting.set()
    await until(lambda: not prefill.manager._answers)
    await session.notify(NAME, abort)


async def test_the_end_of_a_room_is_forgotten_when_nobody_can_wait_for_it(pair: Pair) -> None:
    memory = np.zeros(LAYERS * BLOCKS * BLOCK, np.uint8)
    async with Server.open("prefill", memory, bootstrap_timeout=0.05) as prefill:
        sender = prefill.manager.sender("r")
        with pytest.raises(HandoverError):
            await sender.ready()
        time = asyncio.get_running_loop().time
        await until(lambda: prefill.manager._lobby._ends["r"].forgotten_at < time())
        receiver = pair[1].manager.receiver("r", prefill.manager.session_id)
        await receiver.start([0])  # of a new request
        await until(lambda: len(prefill.manager._lobby) == 1)
