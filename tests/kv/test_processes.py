"""Prefill and decode in processes of their own, which are started in any order, stopped, killed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from kv import servers
from kv.servers import Server, blocks_of, group_of
from promises.measures import MiB, until
from promises.peers import ChildPeer

from aioflagcx import Config, Engine
from aioflagcx.errors import HandoverError
from aioflagcx.kv import CacheLayout, KVManager, KVPoll

SIZE = 48 * MiB
LAYERS, BLOCKS = 3, 1024

pytestmark = pytest.mark.parametrize("path", ["local", "tcp"])


def config(path: str, **settings: Any) -> Config:
    return Config(soft_paths=(path,), **settings)


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[contextlib.AsyncExitStack]:
    async with contextlib.AsyncExitStack() as stack:
        yield stack


async def child(
    stack: contextlib.AsyncExitStack, role: str, path: str, *, port: int = 0, **options: Any
) -> ChildPeer:
    """A server of that role in another process; its memory is seen here."""
    peer = await ChildPeer.start(config(path), SIZE, port)
    stack.push_async_callback(peer.close)
    if role == "prefill":
        peer.memory[:] = np.random.default_rng(1).integers(1, 256, SIZE, np.uint8)
    await peer.run(servers.open_manager, role, LAYERS, BLOCKS, options)
    return peer


async def here(stack: contextlib.AsyncExitStack, role: str, path: str, **options: Any) -> Server:
    """A server of that role on the test's own loop."""
    memory = np.zeros(SIZE, np.uint8)
    if role == "prefill":
        memory[:] = np.random.default_rng(1).integers(1, 256, SIZE, np.uint8)
    engine = await stack.enter_async_context(Engine(config=config(path)))
    layout = CacheLayout((group_of(memory, LAYERS, BLOCKS),))
    return await stack.enter_async_context(
        Server.open(role, memory, engine=engine, layout=layout, **options)
    )


def check(src: Any, dst: Any, moves: dict[int, int]) -> None:
    ours, theirs = (blocks_of(memory, LAYERS, BLOCKS) for memory in (src, dst))
    expected = np.zeros_like(theirs)
    for one, other in moves.items():
        expected[:, other] = ours[:, one]
    np.testing.assert_array_equal(theirs, expected)


async def test_prefill_first(stack: contextlib.AsyncExitStack, path: str) -> None:
    prefill = await child(stack, "prefill", path)
    await prefill.run(servers.open_sender, "r")
    sending = prefill.start_call(servers.send, "r", [1, 2, 3], True, b"token")
    decode = await here(stack, "decode", path)
    receiver = decode.manager.receiver("r", prefill.session_id)
    await receiver.start([7, 0, 5])
    assert await receiver.done() == b"token"
    await sending
    check(prefill.memory, decode.memory, {1: 7, 2: 0, 3: 5})


async def test_decode_first(stack: contextlib.AsyncExitStack, path: str) -> None:
    async with Engine() as engine:  # whose port is free then
        port = engine.rpc_port
    decode = await here(stack, "decode", path)
    receiver = decode.manager.receiver("r", f"127.0.0.1:{port}")
    starting = asyncio.create_task(receiver.start([7, 0, 5]))
    await until(lambda: bool(receiver._trouble))
    prefill = await child(stack, "prefill", path, port=port)
    await starting
    await prefill.run(servers.open_sender, "r")
    await prefill.run(servers.send, "r", [1, 2, 3])
    await receiver.done()
    check(prefill.memory, decode.memory, {1: 7, 2: 0, 3: 5})


async def ready(
    stack: contextlib.AsyncExitStack, path: str, **options: Any
) -> tuple[ChildPeer, Server, Any]:
    """A prefill in another process with a sender that is ready, and the receiver here."""
    prefill = await child(stack, "prefill", path)
    decode = await here(stack, "decode", path, **options)
    await prefill.run(servers.open_sender, "r")
    receiver = decode.manager.receiver("r", prefill.session_id)
    await receiver.start(range(BLOCKS))
    await prefill.run(servers.call, "r", "ready")
    return prefill, decode, receiver


async def test_a_prefill_that_dies_fails_the_room_within_a_second(
    stack: contextlib.AsyncExitStack, path: str
) -> None:
    prefill, _, receiver = await ready(stack, path)
    started = time.monotonic()
    await prefill.kill()
    with pytest.raises(HandoverError, match="was lost"):
        await receiver.done()
    assert time.monotonic() - started < 1.0
    assert receiver.quiet


async def test_a_decode_that_dies_fails_the_room_within_a_second(
    stack: contextlib.AsyncExitStack, path: str
) -> None:
    prefill = await here(stack, "prefill", path)
    decode = await child(stack, "decode", path)
    sender = prefill.manager.sender("r")
    await decode.run(servers.open_receiver, "r", prefill.manager.session_id)
    await decode.run(servers.call, "r", "start", [1, 2])
    await sender.ready()
    started = time.monotonic()
    await decode.kill()
    await until(lambda: sender.poll() is KVPoll.Failed)
    assert time.monotonic() - started < 1.0
    with pytest.raises(HandoverError, match="was lost"):
        await sender.send([1, 2])


async def test_another_process_at_the_address_of_a_dead_prefill_is_not_taken_for_it(
    stack: contextlib.AsyncExitStack, path: str
) -> None:
    prefill, decode, receiver = await ready(stack, path)
    await prefill.kill()
    with pytest.raises(HandoverError):
        await receiver.done()
    successor = await child(stack, "prefill", path, port=prefill.rpc_port)
    await successor.run(servers.open_sender, "r")
    receiver = decode.manager.receiver("r", prefill.session_id)
    await receiver.start([1])
    await successor.run(servers.send, "r", [2])
    await receiver.done()
    check(successor.memory, decode.memory, {2: 1})


@pytest.mark.parametrize("state", ["offered", "waiting", "transferring"])
async def test_a_decode_that_is_stopped_when_prefill_gives_up_hears_of_it_when_it_goes_on(
    stack: contextlib.AsyncExitStack, path: str, state: str
) -> None:
    prefill = await here(stack, "prefill", path, fence_timeout=0.2)
    first = prefill.memory.copy()
    decode = await child(stack, "decode", path)
    if state != "offered":
        sender = prefill.manager.sender("r")
    await decode.run(servers.open_receiver, "r", prefill.manager.session_id)
    await decode.run(servers.call, "r", "start", range(BLOCKS))
    if state == "offered":
        decode.stop()
        sender = prefill.manager.sender("r")
    else:
        await sender.ready()
        if state == "transferring":
            await sender.send(range(10), last=False)
        decode.stop()
    await sender.abort("out of memory")
    prefill.memory[:] = REUSED
    decode.resume()
    while await decode.run(servers.poll, "r") is not KVPoll.Failed:
        pass
    with pytest.raises(HandoverError, match="out of memory"):
        await decode.run(servers.call, "r", "done")
    check(first, decode.memory, {i: i for i in range(10 if state == "transferring" else 0)})


REUSED = 0xA5
"""What decode writes into blocks that it has got back."""


async def continue_and_watch(
    prefill: ChildPeer, decode: Server, sending: Any, room: str = "r"
) -> None:
    """Reuse the blocks, let the stopped prefill go on, and see that it changes none of them."""
    decode.memory[:] = REUSED
    prefill.resume()
    with pytest.raises(HandoverError):
        await sending
    # It is through with it all: it has heard of the abort, and of the end of its session.
    while await prefill.run(servers.poll, room) is not KVPoll.Failed:
        assert (decode.memory == REUSED).all()
    for _ in range(20):
        assert (decode.memory == REUSED).all()
        await prefill.run(servers.poll, room)
    # And what it does next works.
    await prefill.run(servers.open_sender, "s")
    receiver = decode.manager.receiver("s", prefill.session_id)
    await receiver.start([3])
    await prefill.run(servers.send, "s", [1])
    await receiver.done()
    expected = np.full_like(decode.memory, REUSED)
    blocks_of(expected, LAYERS, BLOCKS)[:, 3] = blocks_of(prefill.memory, LAYERS, BLOCKS)[:, 1]
    np.testing.assert_array_equal(decode.memory, expected)


async def stopped_in_the_middle(
    prefill: ChildPeer, decode: Server, blocks: range
) -> tuple[str, Any, Any]:
    """A room, its receiver and its send, in the middle of which prefill was stopped, and which
    decode has aborted since. Rounds that were over before are made again."""
    for number in range(100):
        room = f"r{number}"
        await prefill.run(servers.open_sender, room)
        receiver = decode.manager.receiver(room, prefill.session_id)
        await receiver.start(blocks)
        await prefill.run(servers.call, room, "ready")
        first = blocks_of(decode.memory, LAYERS, BLOCKS)[0, blocks.start]
        first[:] = 0
        sending = prefill.start_call(servers.send, room, blocks)
        await until(lambda first=first: bool(first.any()))
        prefill.stop()
        await receiver.abort("the client hung up")
        if receiver.poll() is KVPoll.Failed:
            assert receiver.quiet
            return room, receiver, sending
        prefill.resume()
        await sending
    raise AssertionError("it was never stopped in time")


async def test_abort_while_prefill_is_stopped_in_the_middle_of_a_write(
    stack: contextlib.AsyncExitStack, path: str
) -> None:
    prefill = await child(stack, "prefill", path)
    decode = await here(stack, "decode", path, fence_timeout=0.2)
    room, _, sending = await stopped_in_the_middle(prefill, decode, range(BLOCKS))
    await continue_and_watch(prefill, decode, sending, room)


async def test_abort_while_prefill_is_stopped_before_it_writes(
    stack: contextlib.AsyncExitStack, path: str
) -> None:
    prefill, decode, receiver = await ready(stack, path, fence_timeout=0.2)
    prefill.stop()
    sending = prefill.start_call(servers.send, "r", range(BLOCKS))
    await receiver.abort("the client hung up")
    await continue_and_watch(prefill, decode, sending)


async def test_abort_while_prefill_is_stopped_before_it_has_heard_of_the_blocks(
    stack: contextlib.AsyncExitStack, path: str
) -> None:
    prefill = await child(stack, "prefill", path)
    decode = await here(stack, "decode", path, fence_timeout=0.2)
    await prefill.run(servers.open_sender, "r")
    await decode.manager.engine.connect(prefill.session_id)
    prefill.stop()
    receiver = decode.manager.receiver("r", prefill.session_id)
    starting = asyncio.create_task(receiver.start(range(BLOCKS)))
    await until(lambda: any(source.told for source in receiver._sources.values()))
    await asyncio.sleep(0)  # it is on its way
    await receiver.abort("the client hung up")
    with pytest.raises(HandoverError):
        await starting
    sending = prefill.start_call(servers.send, "r", range(BLOCKS))
    await continue_and_watch(prefill, decode, sending)


async def test_a_failure_of_prefill_is_told_when_it_has_stopped_writing(
    stack: contextlib.AsyncExitStack, path: str
) -> None:
    prefill = await child(stack, "prefill", path)
    decode = await here(stack, "decode", path)
    for number in range(100):  # until it is in the middle of writing
        room = f"r{number}"
        await prefill.run(servers.open_sender, room)
        receiver = decode.manager.receiver(room, prefill.session_id)
        await receiver.start(range(BLOCKS))
        await prefill.run(servers.call, room, "ready")
        sending = prefill.start_call(servers.send_and_abort, room, range(BLOCKS), "enough")
        failed = False
        try:
            await receiver.done()
        except HandoverError as error:
            assert "enough" in str(error)
            failed = bool(decode.memory.any())
        decode.memory[:] = REUSED
        with contextlib.suppress(HandoverError):
            await sending
        assert (decode.memory == REUSED).all()
        if failed:
            return
        decode.memory[:] = 0
    raise AssertionError("it never stopped in the middle")


async def test_other_rooms_survive_that_one_is_fenced_off(
    stack: contextlib.AsyncExitStack, path: str
) -> None:
    prefill = await child(stack, "prefill", path)
    decode = await here(stack, "decode", path, fence_timeout=0.2)
    await prefill.run(servers.open_sender, "other")
    receiver = decode.manager.receiver("other", prefill.session_id)
    await receiver.start(range(900, BLOCKS))
    await prefill.run(servers.call, "other", "ready")
    await prefill.run(servers.send, "other", range(900, 910), False)
    _, _, sending = await stopped_in_the_middle(prefill, decode, range(900))
    other = prefill.start_call(servers.send, "other", range(910, BLOCKS))
    blocks = blocks_of(decode.memory, LAYERS, BLOCKS)
    blocks[:, :900] = REUSED
    prefill.resume()
    with pytest.raises(HandoverError):
        await sending
    await other
    await receiver.done()
    assert (blocks[:, :900] == REUSED).all()
    ours = blocks_of(prefill.memory, LAYERS, BLOCKS)
    np.testing.assert_array_equal(blocks[:, 900:], ours[:, 900:])


async def test_a_server_closes_although_its_peer_is_stopped(
    stack: contextlib.AsyncExitStack, path: str
) -> None:
    prefill, decode, receiver = await ready(stack, path, fence_timeout=0.2)
    manager: KVManager = decode.manager
    prefill.stop()
    await manager.close()
    assert receiver.quiet
    prefill.resume()
    while await prefill.run(servers.poll, "r") is not KVPoll.Failed:
        pass
