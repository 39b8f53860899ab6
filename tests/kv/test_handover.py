"""A request's cache from prefill to decode, and what each side learns of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from kv.servers import BLOCK, BLOCKS, LAYERS, Server, group_of, handed_over
from promises.measures import until

from aioflagcx import Config, Engine
from aioflagcx.errors import HandoverError, HandoverTimeout, NotifyRefused
from aioflagcx.kv import CacheGroup, CacheLayout, KVManager, KVPoll, messages
from aioflagcx.kv.layout import held
from aioflagcx.kv.wire import NAME


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[tuple[Server, Server]]:
    """A prefill and a decode."""
    async with Server.open("prefill") as prefill, Server.open("decode") as decode:
        yield prefill, decode


Pair = tuple[Server, Server]


def expect(pair: Pair, moves: dict[int, int]) -> None:
    """Decode's cache has these blocks of prefill's, and nothing else."""
    prefill, decode = pair
    expected = np.zeros_like(decode.cache)
    for src, dst in moves.items():
        expected[:, dst] = prefill.cache[:, src]
    np.testing.assert_array_equal(decode.cache, expected)


class Tensor:
    """Of one element and one dimension; those of PyTorch pass for integers as well."""

    ndim = 1

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return iter((np.int64(7),))

    def __index__(self) -> int:
        return 7

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.array([7])


# Success -------------------------------------------------------------------------------------


async def test_blocks_arrive_where_decode_wants_them(pair: Pair) -> None:
    prefill, decode = pair
    await handed_over(prefill.manager, decode.manager, 7, [3, 4, 5, 30], np.array([9, 8, 0, 31]))
    expect(pair, {3: 9, 4: 8, 5: 0, 30: 31})


@pytest.mark.parametrize("path", ["local", "tcp"])
async def test_other_paths_do_the_same(path: str) -> None:
    async with (
        Server.open("prefill", path=path) as prefill,
        Server.open("decode", path=path) as decode,
    ):
        await handed_over(prefill.manager, decode.manager, 7, range(32), range(31, -1, -1))
        expect((prefill, decode), {i: 31 - i for i in range(32)})


async def test_decode_may_come_before_the_sender_is_made(pair: Pair) -> None:
    prefill, decode = pair
    receiver = decode.manager.receiver("r", prefill.manager.session_id)
    await receiver.start([1, 2], aux=b"question")
    assert receiver.poll() is KVPoll.Bootstrapping
    sender = prefill.manager.sender("r")
    await sender.ready()
    assert sender.aux == b"question"
    assert sender.blocks == (2,)
    await sender.send([5, 6])
    await receiver.done()
    expect(pair, {5: 1, 6: 2})


async def test_the_sender_may_come_before_decode(pair: Pair) -> None:
    prefill, decode = pair
    sender = prefill.manager.sender("r")
    sending = asyncio.create_task(sender.send([5, 6]))
    await asyncio.sleep(0)
    assert sender.poll() is KVPoll.Bootstrapping
    receiver = decode.manager.receiver("r", prefill.manager.session_id)
    await receiver.start([1, 2])
    await receiver.done()
    await sending
    expect(pair, {5: 1, 6: 2})


async def test_decode_may_come_before_there_is_a_prefill_server() -> None:
    async with Server.open("decode") as decode:
        async with Engine() as engine:
            address = engine.session_id
        receiver = decode.manager.receiver("r", address)
        starting = asyncio.create_task(receiver.start([1, 2]))
        await until(lambda: bool(receiver._trouble))  # nobody answers there
        host, _, port = address.rpartition(":")
        async with Engine(host, int(port)) as engine:
            trouble = receiver._trouble
            await until(lambda: receiver._trouble != trouble)  # an engine without a manager
            assert "nobody takes 'aioflagcx.kv' here" in receiver._trouble
            async with Server.open("prefill", engine=engine) as prefill:
                await prefill.manager.sender("r").send([5, 6])
                await starting
                await receiver.done()
                expect((prefill, decode), {5: 1, 6: 2})


async def test_states_only_advance_and_both_sides_see_them(pair: Pair) -> None:
    prefill, decode = pair
    sender = prefill.manager.sender("r")
    receiver = decode.manager.receiver("r", prefill.manager.session_id)
    assert sender.poll() is receiver.poll() is KVPoll.Bootstrapping
    await receiver.start([1, 2])
    await sender.ready()
    await until(lambda: receiver.poll() is not KVPoll.Bootstrapping)
    assert sender.poll() is receiver.poll() is KVPoll.WaitingForInput
    await sender.send([3], last=False)
    await until(lambda: receiver.poll() is not KVPoll.WaitingForInput)
    assert sender.poll() is receiver.poll() is KVPoll.Transferring
    assert not receiver.quiet
    await sender.send([4])
    await receiver.done()
    assert sender.poll() is receiver.poll() is KVPoll.Success
    assert receiver.quiet
    assert [int(state) for state in KVPoll] == [0, 1, 2, 3, 4]
    await sender.abort()
    await receiver.abort()
    assert sender.poll() is receiver.poll() is KVPoll.Success
    assert sender.error is receiver.error is None


async def test_what_goes_along_with_the_last_chunk_arrives_behind_it(pair: Pair) -> None:
    prefill, decode = pair
    sender = prefill.manager.sender("r")
    receiver = decode.manager.receiver("r", prefill.manager.session_id)
    await receiver.start(range(10))
    for first in range(0, 10, 3):
        last = first == 9
        ids = list(range(first, min(first + 3, 10)))
        await sender.send(ids, last=last, aux=b"first token" if last else b"not this")
    assert await receiver.done() == b"first token"
    assert receiver.aux == b"first token"
    expect(pair, {i: i for i in range(10)})


async def test_chunks_may_be_layers_and_overlap(pair: Pair) -> None:
    prefill, decode = pair
    sender = prefill.manager.sender("r")
    receiver = decode.manager.receiver("r", prefill.manager.session_id)
    await receiver.start([20, 21, 22])
    layers = [range(1), range(1, 3)]
    chunks = [([7, 8], which) for which in layers] + [([9], layers[1])]
    await asyncio.gather(
        *(sender.send(ids, layers=which, last=False) for ids, which in chunks),
        sender.send([9], layers=layers[0]),
    )
    await receiver.done()
    expect(pair, {7: 20, 8: 21, 9: 22})


async def test_any_number_of_rooms_at_a_time(pair: Pair) -> None:
    prefill, decode = pair
    order = np.random.default_rng(0).permutation(BLOCKS)
    await asyncio.gather(
        *(
            handed_over(prefill.manager, decode.manager, room, [room], [order[room]])
            for room in range(BLOCKS)
        )
    )
    expect(pair, dict(enumerate(order)))
    for server in pair:
        assert not server.manager._rooms and not server.manager._receivers


async def test_a_room_can_be_used_again(pair: Pair) -> None:
    prefill, decode = pair
    for block in range(3):
        await handed_over(prefill.manager, decode.manager, "again", [block], [block])
    with pytest.raises(HandoverError):
        sender = prefill.manager.sender("again")
        await sender.abort("no")
        await sender.ready()
    await handed_over(prefill.manager, decode.manager, "again", [3], [3])
    expect(pair, {block: block for block in range(4)})


async def test_a_request_without_blocks_is_a_success(pair: Pair) -> None:
    prefill, decode = pair
    await handed_over(prefill.manager, decode.manager, "r", [], [])
    expect(pair, {})


async def test_the_engine_is_shared_with_its_other_users(pair: Pair) -> None:
    prefill, _ = pair
    async with Engine() as engine:
        heard = engine.notifications()
        async with Server.open("decode", engine=engine) as decode:
            session = await prefill.manager.engine.connect(engine.session_id)
            await session.notify("mine", b"1")
            await handed_over(prefill.manager, decode.manager, "r", [0], [1])
            await session.notify("mine", b"2")
            assert [(await anext(heard)).payload for _ in range(2)] == [b"1", b"2"]
            assert engine.stats().regions == LAYERS
            with pytest.raises(ValueError, match="have a taker already"):
                await KVManager("decode", group_of(decode.memory), engine=engine).start()
        assert engine.stats().regions == 0


async def test_groups_have_their_own_blocks() -> None:
    generator = np.random.default_rng(5)
    shapes = [(2, 16, 512), (3, 64, 96)]
    ours = [generator.integers(1, 256, shape, np.uint8) for shape in shapes]
    theirs = [np.zeros(shape, np.uint8) for shape in shapes]

    def layout(pools: list[Any]) -> CacheLayout:
        return CacheLayout(
            tuple(
                CacheGroup(tuple((layer.ctypes.data,) for layer in pool), *pool.shape[1:])
                for pool in pools
            )
        )

    async with (
        Server.open("prefill", layout=layout(ours)) as prefill,
        Server.open("decode", layout=layout(theirs)) as decode,
    ):
        src = [[3, 4], [60, 1, 2]]
        dst = [[0, 15], [5, 6, 7]]
        await handed_over(prefill.manager, decode.manager, "r", src, dst)
        for one, other, from_, to in zip(ours, theirs, src, dst, strict=True):
            expected = np.zeros_like(other)
            expected[:, to] = one[:, from_]
            np.testing.assert_array_equal(other, expected)
        with pytest.raises(ValueError, match="1 lists of blocks for 2 groups"):
            await decode.manager.receiver("s", "127.0.0.1:1").start([[0]])


# Several ranks -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def ranks_of(role: Any, caches: list[Any], heads: int) -> AsyncIterator[list[KVManager]]:
    """A server a rank; a cache is [layer, block, repeat, head, byte]."""
    async with contextlib.AsyncExitStack() as stack:
        managers = []
        for rank, cache in enumerate(caches):
            group = CacheGroup(
                tuple((layer.ctypes.data,) for layer in cache),
                cache.shape[1],
                cache[0, 0].nbytes,
                heads=heads,
                repeats=cache.shape[2],
            )
            layout = CacheLayout((group,), rank, len(caches))
            managers.append(await stack.enter_async_context(KVManager(role, layout)))
        yield managers


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize(("src_ranks", "dst_ranks"), [(1, 2), (2, 1), (2, 4), (4, 2), (8, 1)])
async def test_tensor_parallel_ranks_hand_over_what_each_has(
    heads: int, src_ranks: int, dst_ranks: int
) -> None:
    whole = np.random.default_rng(2).integers(1, 256, (2, 8, 4, heads, 16), np.uint8)

    def part(rank: int, ranks: int) -> Any:
        mine = held(heads, rank, ranks)
        return np.ascontiguousarray(whole[..., mine.start : mine.stop, :])

    ours = [part(rank, src_ranks) for rank in range(src_ranks)]
    theirs = [np.zeros_like(part(rank, dst_ranks)) for rank in range(dst_ranks)]
    async with (
        ranks_of("prefill", ours, heads) as prefills,
        ranks_of("decode", theirs, heads) as decodes,
    ):
        sessions = [manager.session_id for manager in prefills]
        receivers = [manager.receiver("r", sessions) for manager in decodes]
        senders = [manager.sender("r") for manager in prefills]
        starts = [receiver.start([6, 1]) for receiver in receivers]
        sends = [sender.send([0, 7], aux=b"token") for sender in senders]
        await asyncio.gather(*starts, *sends)
        assert [await receiver.done() for receiver in receivers] == [b"token"] * dst_ranks
        written = [manager.engine.stats().bytes_written for manager in prefills]
    for rank, cache in enumerate(theirs):
        expected = np.zeros_like(cache)
        expected[:, [6, 1]] = part(rank, dst_ranks)[:, [0, 7]]
        np.testing.assert_array_equal(cache, expected)
    assert sum(written) == sum(cache[:, [6, 1]].nbytes for cache in theirs)


async def test_one_rank_that_fails_ends_the_room_for_all() -> None:
    caches = [np.zeros((1, 4, 1, 2, 16), np.uint8) for _ in range(2)]
    others = [np.zeros((1, 4, 1, 2, 16), np.uint8) for _ in range(2)]
    async with ranks_of("prefill", caches, 4) as prefills, ranks_of("decode", others, 4) as decodes:
        sessions = [manager.session_id for manager in prefills]
        receivers = [manager.receiver("r", sessions[::-1]) for manager in decodes]
        senders = [manager.sender("r") for manager in prefills]
        for receiver in receivers:
            await receiver.start([0])
        for half in (*senders, *receivers):
            await until(lambda half=half: half.poll() is KVPoll.Failed)
        assert "list the session ids of all ranks, in order" in str(senders[0].error)
        for receiver in receivers:
            with pytest.raises(HandoverError, match="in order"):
                await receiver.done()


async def test_caches_that_do_not_fit_are_refused_on_both_sides(pair: Pair) -> None:
    prefill, _ = pair
    memory = np.zeros(BLOCKS * BLOCK, np.uint8)
    async with Server.open("decode", memory, layout=group_of(memory, layers=1)) as decode:
        sender = prefill.manager.sender("r")
        receiver = decode.manager.receiver("r", prefill.manager.session_id)
        with pytest.raises(HandoverError, match="layers: 3 on prefill, 1 on decode"):
            await receiver.start([0])
            await receiver.done()
        with pytest.raises(HandoverError, match="layers: 3 on prefill, 1 on decode"):
            await sender.send([0])


# Mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[0, BLOCKS], [-1], np.array([1, 2**40])])
async def test_blocks_that_are_not_there_are_refused_at_once(pair: Pair, ids: Any) -> None:
    prefill, decode = pair
    receiver = decode.manager.receiver("r", prefill.manager.session_id)
    with pytest.raises(ValueError, match=rf"is not one of the {BLOCKS} blocks of groups\[0\]"):
        await receiver.start(ids)
    await receiver.start([0] * len(ids))
    sender = prefill.manager.sender("r")
    with pytest.raises(ValueError, match=r"block_ids\[0\]"):
        await sender.send(ids)
    assert sender.poll() is KVPoll.WaitingForInput
    assert prefill.manager.engine.stats().bytes_written == 0


@pytest.mark.parametrize(
    "ids",
    [[7], (7,), range(7, 8), np.array([[7]])[0], *(np.array([7], kind) for kind in "bBhHiIlL"),
     np.array([7], ">u8"), np.array([7, 0])[::2], [np.uint8(7)], [[7]], [np.array([7])], Tensor()],
)  # fmt: skip
async def test_block_ids_may_be_any_integers(pair: Pair, ids: Any) -> None:
    prefill, decode = pair
    await handed_over(prefill.manager, decode.manager, "r", ids, ids)
    expect(pair, {7: 7})


@pytest.mark.parametrize(
    "ids", [3, ["a"], [1.5], None, "12", b"1", {7}, [True], [[7], [8]], (7.0,)]
)
async def test_what_are_no_block_ids_is_refused(pair: Pair, ids: Any) -> None:
    prefill, decode = pair
    receiver = decode.manager.receiver("r", prefill.manager.session_id)
    with pytest.raises((TypeError, ValueError)):
        await receiver.start(ids)
    assert receiver.poll() is KVPoll.Bootstrapping


async def test_unequal_lists_are_refused_before_a_byte_moves(pair: Pair) -> None:
    prefill, decode = pair
    sender = prefill.manager.sender("r")
    receiver = decode.manager.receiver("r", prefill.manager.session_id)
    await receiver.start([0, 1, 2])
    with pytest.raises(ValueError, match="2 blocks of layer 0 would have been sent, decode has 3"):
        await sender.send([5, 6])
    with pytest.raises(ValueError, match="0 blocks have been sent and 4 are to be, decode has 3"):
        await sender.send([5, 6, 7, 8], last=False)
    assert prefill.manager.engine.stats().bytes_written == 0
    await sender.send([5], last=False, layers=range(1))
    with pytest.raises(ValueError, match="different blocks"):
        await sender.send([6], last=False)
    with pytest.raises(ValueError, match="not in the group's 3"):
        await sender.send([6], last=False, layers=range(4))
    with pytest.raises(ValueError, match="1 blocks of layer 0 would have been sent"):
        await sender.send([6], layers=range(1, 3))
    await sender.send([5], last=False, layers=range(1, 3))
    await sender.send([6, 7])
    await receiver.done()
    expect(pair, {5: 0, 6: 1, 7: 2})
    with pytest.raises(RuntimeError, match="the last chunk has been sent already"):
        await sender.send([8])


async def test_misuse_is_told_from_failure(pair: Pair) -> None:
    prefill, decode = pair
    with pytest.raises(RuntimeError, match="no decode has come yet"):
        prefill.manager.sender("q").blocks  # noqa: B018
    with pytest.raises(ValueError, match="this is the manager of a prefill server"):
        prefill.manager.receiver("r", "127.0.0.1:1")
    with pytest.raises(ValueError, match="this is the manager of a decode server"):
        decode.manager.sender("r")
    with pytest.raises(ValueError, match="without a directory, prefill must be given"):
        decode.manager.receiver("r")
    with pytest.raises(ValueError, match="no prefill rank"):
        decode.manager.receiver("r", [])
    with pytest.raises(ValueError, match="nonsense"):
        decode.manager.receiver("r", "nonsense")
    with pytest.raises(TypeError, match="a room is a str or an int"):
        prefill.manager.sender(1.5)  # type: ignore[arg-type]
    for room in ("r" * 1025, ""):
        with pytest.raises(ValueError, match="1 to 1024 bytes"):
            prefill.manager.sender(room)
    prefill.manager.sender(7)
    with pytest.raises(ValueError, match="room '7' is in use"):
        prefill.manager.sender("7")
    receiver = decode.manager.receiver("r", prefill.manager.session_id)
    with pytest.raises(RuntimeError, match="has not been started"):
        await receiver.done()
    with pytest.raises(TypeError, match="aux must be bytes"):
        await receiver.start([0], aux="text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="aux of 1048576 bytes"):
        await receiver.start([0], aux=bytes(1 << 20))
    await receiver.start([0])
    with pytest.raises(RuntimeError, match="has been started already"):
        await receiver.start([0])
    with pytest.raises(ValueError, match='role must be "prefill" or "decode"'):
        KVManager("both", group_of(decode.memory))  # type: ignore[arg-type]


async def test_nonsense_is_refused_and_changes_nothing(pair: Pair) -> None:
    prefill, decode = pair
    session = await prefill.manager.engine.connect(decode.manager.session_id)
    back = await decode.manager.engine.connect(prefill.manager.session_id)
    for payload in (b"", b"\xc1", b"\x90", b"\x93\x01\x03\xc4\x01a", bytes(1000), b"\x92\x02\x03"):
        for one in (session, back):
            with pytest.raises(Exception, match="no message of a hand-over"):
                await one.notify(NAME, payload)
    await handed_over(prefill.manager, decode.manager, "r", [0], [1])
    expect(pair, {0: 1})


# Failure -------------------------------------------------------------------------------------


async def started(pair: Pair, **options: Any) -> tuple[Any, Any]:
    """Both halves of a room, ready to send one block."""
    prefill, decode = pair
    sender = prefill.manager.sender("r")
    receiver = decode.manager.receiver("r", prefill.manager.session_id)
    await receiver.start([4], **options)
    await sender.ready()
    return sender, receiver


async def test_decode_that_gives_up_tells_prefill_why(pair: Pair) -> None:
    sender, receiver = await started(pair)
    await receiver.abort("the client hung up")
    assert receiver.quiet
    assert receiver.poll() is KVPoll.Failed
    assert pair[0].manager.engine.stats().responders == 1  # nobody had to be fenced
    await until(lambda: sender.poll() is KVPoll.Failed)
    for failed in (sender.ready(), sender.send([1]), receiver.done()):
        with pytest.raises(HandoverError, match="the client hung up"):
            await failed
    expect(pair, {})


async def test_prefill_that_gives_up_tells_decode_why(pair: Pair) -> None:
    sender, receiver = await started(pair)
    await sender.send([], last=False)
    await sender.abort("out of memory")
    with pytest.raises(HandoverError, match="prefill rank 0 has stopped: out of memory"):
        await receiver.done()
    assert receiver.quiet
    assert receiver.poll() is sender.poll() is KVPoll.Failed
    assert "out of memory" in str(sender.error)


async def test_a_sender_that_failed_before_decode_came_tells_it_then(pair: Pair) -> None:
    prefill, decode = pair
    await prefill.manager.sender("r").abort("too busy")
    receiver = decode.manager.receiver("r", prefill.manager.session_id)
    with pytest.raises(HandoverError, match="too busy"):
        await receiver.start([0])
        await receiver.done()
    # It has been told: the next time it is another request.
    await handed_over(prefill.manager, decode.manager, "r", [1], [2])
    expect(pair, {1: 2})


async def test_a_decode_that_gave_up_before_the_sender_came_tells_it_then(pair: Pair) -> None:
    prefill, decode = pair
    receiver = decode.manager.receiver("r", prefill.manager.session_id)
    await receiver.start([0])
    await receiver.abort("too slow")
    await until(lambda: prefill.manager._lobby._offers["r"].aborted is not None)
    sender = prefill.manager.sender("r")
    with pytest.raises(HandoverError, match="decode rank 0 has given it up: too slow"):
        await sender.ready()
    await handed_over(prefill.manager, decode.manager, "r", [1], [2])


async def test_a_receiver_that_gives_up_before_it_has_reached_prefill(pair: Pair) -> None:
    _, decode = pair
    async with Engine() as engine:
        address = engine.session_id
    receiver = decode.manager.receiver("r", address)
    starting = asyncio.create_task(receiver.start([0]))
    await until(lambda: bool(receiver._trouble))
    await receiver.abort("never mind")
    with pytest.raises(HandoverError, match="never mind"):
        await starting
    never = decode.manager.receiver("r", address)
    await never.abort()
    with pytest.raises(HandoverError, match="aborted"):
        await never.start([0])


async def test_what_is_late_and_of_an_earlier_use_of_a_room_is_ignored(pair: Pair) -> None:
    prefill, decode = pair
    first_sender, first = await started(pair)
    await first.abort("first")
    await until(lambda: "r" not in prefill.manager._rooms)
    sender, receiver = await started(pair)
    session = await prefill.manager.engine.connect(decode.manager.session_id)
    back = await decode.manager.engine.connect(prefill.manager.session_id)
    for late in (
        messages.Begin(first._id, 0),
        messages.Failed(first._id, 0, "late", True),
    ):
        await session.notify(NAME, messages.encode(late))
    for refused in (messages.Hello(first._id, 0), messages.Done(first._id, 0, b"late")):
        with pytest.raises(NotifyRefused, match="decode is through with the room"):
            await session.notify(NAME, messages.encode(refused))
    await back.notify(NAME, messages.encode(messages.Abort(first._id, "r", 0, 0, "late")))
    assert sender.poll() is receiver.poll() is KVPoll.WaitingForInput
    await sender.send([9])
    await receiver.done()
    expect(pair, {9: 4})
    assert first_sender.poll() is KVPoll.Failed


async def test_each_side_waits_for_the_other_only_so_long() -> None:
    async with (
        Server.open("prefill", bootstrap_timeout=0.2, waiting_timeout=0.2) as prefill,
        Server.open("decode", bootstrap_timeout=0.2, waiting_timeout=0.2) as decode,
    ):
        with pytest.raises(HandoverTimeout, match=r"no decode has come for it within 0\.2 s"):
            await prefill.manager.sender("a").ready()
        receiver = decode.manager.receiver("b", prefill.manager.session_id)
        await receiver.start([0])
        with pytest.raises(HandoverTimeout, match=r"prefill did not answer within 0\.2 s"):
            await receiver.done()
        async with Engine() as engine:
            address = engine.session_id
        receiver = decode.manager.receiver("c", address)
        with pytest.raises(HandoverTimeout, match=r"the last attempt: .*nothing accepts"):
            await receiver.start([0])
        sender, receiver = await started((prefill, decode))
        with pytest.raises(HandoverError, match=r"(was sent|sent everything) within 0\.2 s"):
            await receiver.done()
        with pytest.raises(HandoverError, match=r"(was sent|sent everything) within 0\.2 s"):
            await sender.send([0])
        assert isinstance(sender.error, HandoverTimeout) or isinstance(
            receiver.error, HandoverTimeout
        )
        assert not len(prefill.manager._lobby)  # those of nobody have expired, too


async def test_no_limit_is_possible(pair: Pair) -> None:
    async with Server.open("prefill", bootstrap_timeout=None, waiting_timeout=None) as prefill:
        sender, receiver = await started((prefill, pair[1]))
        assert sender._timer is None
        await sender.send([0])
        await receiver.done()


async def test_pools_that_prefill_cannot_reach_fail_the_room_on_both_sides(pair: Pair) -> None:
    prefill, _ = pair
    async with Server.open("decode", register=False) as decode:
        sender, receiver = await started((prefill, decode))
        with pytest.raises(HandoverError, match="lies in no single region"):
            await sender.send([0])
        with pytest.raises(HandoverError, match="lies in no single region"):
            await receiver.done()


async def test_pools_at_addresses_that_cannot_be_fail_the_room_on_both_sides(pair: Pair) -> None:
    layout = CacheGroup([2**62] * LAYERS, 2**32 - 1, BLOCK, stride=2**32)
    async with Server.open("decode", layout=layout, register=False) as decode:
        sender, receiver = await started((pair[0], decode))
        with pytest.raises(HandoverError, match="reaches over"):
            await sender.send([0])
        with pytest.raises(HandoverError, match="reaches over"):
            await receiver.done()


async def test_more_blocks_than_a_notification_holds_are_refused(pair: Pair) -> None:
    memory = np.zeros(LAYERS * 300_000, np.uint8)
    layout = group_of(memory, blocks=300_000)
    async with Server.open("decode", memory, layout=layout) as decode:
        receiver = decode.manager.receiver("r", pair[0].manager.session_id)
        with pytest.raises(ValueError, match=r"300000 blocks.* Raise it on both sides"):
            await receiver.start(range(300_000))
        assert not decode.manager.engine.stats().sessions  # nobody has been told anything
        assert receiver.poll() is KVPoll.Bootstrapping
        await receiver.start(range(250_000))


async def test_peers_that_are_gone_are_forgotten(pair: Pair) -> None:
    prefill, _ = pair
    async with Server.open("decode") as decode:
        await handed_over(prefill.manager, decode.manager, "r", [0], [1])
        assert len(prefill.manager._wires._wires) == 1
    gc.collect()
    await until(lambda: not prefill.manager._wires._wires)


async def test_a_server_that_closes_gives_its_rooms_up() -> None:
    async with Server.open("prefill") as prefill:
        async with Server.open("decode") as decode:
            sender, receiver = await started((prefill, decode))
        with pytest.raises(HandoverError, match="the server is closing"):
            await receiver.done()
        with pytest.raises(HandoverError, match="the server is closing"):
            await sender.send([0])
    async with Server.open("decode") as decode:
        async with Server.open("prefill") as prefill:
            sender, receiver = await started((prefill, decode))
        with pytest.raises(HandoverError, match="the server is closing"):
            await receiver.done()


async def test_a_send_that_is_cancelled_gives_the_room_up(pair: Pair) -> None:
    sender, receiver = await started(pair)
    sending = asyncio.create_task(sender.send([1]))
    await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    with pytest.raises(HandoverError, match="sending was cancelled"):
        await receiver.done()
    assert not any(target.transfers for target in sender._targets.values())


async def test_a_start_that_is_cancelled_gives_the_room_up(pair: Pair) -> None:
    prefill, decode = pair
    receiver = decode.manager.receiver("r", prefill.manager.session_id)
    starting = asyncio.create_task(receiver.start([1]))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(HandoverError, match="was cancelled"):
        await receiver.done()


async def test_waiting_can_be_cancelled_without_harm(pair: Pair) -> None:
    sender, receiver = await started(pair)
    waiting = asyncio.create_task(receiver.done())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await sender.send([1])
    await receiver.done()
    expect(pair, {1: 4})


async def test_a_session_that_decode_ends_for_another_room_is_connected_again(pair: Pair) -> None:
    prefill, decode = pair
    sender, receiver = await started(pair)
    await decode.manager.engine.quiesce(prefill.manager.engine.engine_id)
    await sender.send([1], last=False)
    await decode.manager.engine.quiesce(prefill.manager.engine.engine_id)
    await sender.send([])
    await receiver.done()
    expect(pair, {1: 4})


async def test_prefill_that_decode_no_longer_wants_cannot_connect_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an abort does to a prefill that does not hear of it."""
    prefill, decode = pair
    sender, receiver = await started(pair)
    decode.manager.fence_timeout = 0.01
    monkeypatch.setattr(prefill.manager, "_heard_abort", lambda *_: None)
    await receiver.abort()
    decode.memory[:] = 7
    with pytest.raises(HandoverError, match="decode is through with the room"):
        await sender.send([1])
    assert (decode.memory == 7).all()


@pytest.mark.parametrize(
    "setting", ["bootstrap_timeout", "waiting_timeout", "fence_timeout", "transfer_timeout"]
)
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), ("1", TypeError)])
def test_limits_that_cannot_be_are_refused(
    setting: str, value: Any, error: type[Exception]
) -> None:
    make: Callable[..., Any] = KVManager
    with pytest.raises(error, match="timeout"):
        make("decode", CacheGroup(((4096,),), 1, 1), config=Config(), **{setting: value})
