"""One half of the connector, and a peer that says what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from integrations.processes import until
from integrations.vllm.servers import Group, Server, child, free_ports

from aioflagcx import Engine
from aioflagcx.integrations.vllm import channel
from aioflagcx.integrations.vllm import decode as halves
from aioflagcx.integrations.vllm.channel import Clients, Reply
from aioflagcx.integrations.vllm.messages import (
    Accepted,
    Ask,
    Check,
    Done,
    Failed,
    Fetch,
    Grant,
    Message,
    Stop,
)
from aioflagcx.integrations.vllm.scheduler import Source, Step
from aioflagcx.kv import CacheLayout
from aioflagcx.kv.messages import Start

ID = bytes(16)


class FakePrefill:
    """A side channel, and an engine that never writes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.heard: asyncio.Queue[tuple[Message, Reply]] = asyncio.Queue()
        self.server = channel.Server(lambda *heard: self.heard.put_nowait(heard))
        self.port = self.server.open("127.0.0.1", 0)

    async def accepted(self) -> tuple[bytes, Reply]:
        """The id of a fetch that is accepted, and how to answer."""
        fetch, reply = await self.heard.get()
        assert isinstance(fetch, Fetch)
        reply(Accepted(fetch.start.id, self.engine.session_id, self.engine.engine_id))
        return fetch.start.id, reply

    async def answer(self, reply: Reply, message: Message) -> Message:
        """What decode says to it."""
        reply(message)
        return (await self.heard.get())[0]


@pytest.fixture
async def prefill() -> AsyncIterator[FakePrefill]:
    async with Engine() as engine:
        fake = FakePrefill(engine)
        yield fake
        await fake.server.close()


@pytest.fixture
def decode() -> Iterator[Server]:
    # Nobody is fenced off: a prefill that does not say that it has stopped is waited for.
    with contextlib.closing(Server("decode", fence_timeout=None)) as server:
        yield server


async def test_who_asks_after_a_load_was_given_up_may_not_write(
    prefill: FakePrefill, decode: Server
) -> None:
    decode.load("r", Source("r", "127.0.0.1", prefill.port, 1), [1])
    id, reply = await prefill.accepted()
    ask = Ask(id, prefill.engine.engine_id, 3)
    assert await prefill.answer(reply, ask) == Grant(id, 3)
    decode.step(Step(aborts=[("r", "test")]))
    assert (await prefill.heard.get())[0] == Stop(id, "test")
    assert await prefill.answer(reply, ask) == Stop(id, "it was given up")
    decode.look()
    assert not decode.received  # prefill has not said that it has stopped
    reply(Failed(id, "as told", True))
    await asyncio.to_thread(decode.wait_received, "r")
    assert await prefill.answer(reply, ask) == Stop(id, "it was given up")


async def test_a_load_that_was_never_granted_to_anybody_is_given_up_at_once(
    prefill: FakePrefill, decode: Server
) -> None:
    decode.load("r", Source("r", "127.0.0.1", prefill.port, 1), [1])
    id, reply = await prefill.accepted()
    decode.step(Step(aborts=[("r", "test")]))
    assert (await prefill.heard.get())[0] == Stop(id, "test")
    await asyncio.to_thread(decode.wait_received, "r")
    reply(Done(id))  # late, and of no meaning
    decode.look()
    assert decode.received == ["r"]


async def test_who_failed_and_may_not_be_quiet_is_fenced_off(
    prefill: FakePrefill, decode: Server
) -> None:
    """Decode does it, and not prefill: its session is gone when the load is reported."""
    decode.load("r", Source("r", "127.0.0.1", prefill.port, 1), [1])
    id, reply = await prefill.accepted()
    session = await prefill.engine.connect(decode.identity()[0])
    assert await prefill.answer(reply, Ask(id, prefill.engine.engine_id, 1)) == Grant(id, 1)
    reply(Failed(id, "a reason", False))
    await asyncio.to_thread(decode.wait_received, "r")
    assert decode.invalid == {1}
    assert "a reason" in decode.reasons()[0][2]
    await asyncio.to_thread(until, lambda: not session.alive)


@pytest.fixture
async def ask() -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Has a prefill fetched from; gives what to send with, and what was heard."""
    heard: asyncio.Queue[Message] = asyncio.Queue()
    clients = Clients(lambda message, reply: heard.put_nowait(message))

    async def begin(
        port: int,
        identity: tuple[str, str, CacheLayout],
        blocks: list[int],
        group: Group,
        id: bytes = ID,
    ) -> tuple[Callable[[Message], None], asyncio.Queue[Message]]:
        session, engine_id, layout = identity
        start = Start(id, id.hex(), 0, 1, layout, (np.array(blocks, np.int64),), b"")
        fetch = Fetch(start, session, engine_id, "r", (group.names(0),), 1)
        address = f"127.0.0.1:{port}"
        clients.send(address, fetch)
        assert isinstance(await heard.get(), Accepted)
        return (lambda message: clients.send(address, message)), heard

    yield begin
    await clients.close()


async def test_another_engine_at_decodes_address_gets_nothing(
    ask: Callable[..., Awaitable[Any]], decode: Server
) -> None:
    with contextlib.closing(Server("prefill", port := free_ports())) as prefill:
        session, _, layout = decode.identity()
        _, heard = await ask(port, (session, "0" * 32, layout), [1], Group())
        prefill.offer("r", [1], transfer=ID.hex())
        failed = await heard.get()
        assert isinstance(failed, Failed) and failed.quiet
        assert "another engine answers" in failed.reason
        await asyncio.to_thread(prefill.wait_sent, "r")


async def test_who_is_not_answered_gives_up(
    ask: Callable[..., Awaitable[Any]], decode: Server
) -> None:
    port = free_ports()
    with contextlib.closing(Server("prefill", port, answer_timeout=0.05)) as prefill:
        send, heard = await ask(port, decode.identity(), [1], Group())
        prefill.offer("r", [1], transfer=ID.hex())
        question = await heard.get()
        assert isinstance(question, Ask)
        send(Grant(ID, question.number + 1))  # of another question
        failed = await heard.get()
        assert isinstance(failed, Failed) and failed.quiet
        assert f"decode at {decode.identity()[0]} did not answer within 0.05 s" in failed.reason


async def test_a_prefill_that_closes_says_so(
    ask: Callable[..., Awaitable[Any]], decode: Server
) -> None:
    with contextlib.closing(Server("prefill", port := free_ports())) as prefill:
        _, heard = await ask(port, decode.identity(), [1], Group())
        await asyncio.to_thread(prefill.close)
        failed = await heard.get()
    assert isinstance(failed, Failed) and failed.quiet
    assert failed.reason == "prefill's worker is closing"


async def test_who_checks_hears_again_what_was_said(
    ask: Callable[..., Awaitable[Any]], decode: Server
) -> None:
    with contextlib.closing(Server("prefill", port := free_ports())) as prefill:
        send, heard = await ask(port, decode.identity(), [1], Group())
        send(Check(ID))
        assert isinstance(await heard.get(), Accepted)
        prefill.offer("r", [1], transfer=ID.hex())
        question = await heard.get()
        assert isinstance(question, Ask)
        send(Check(ID))
        assert isinstance(await heard.get(), Accepted)
        assert await heard.get() == question
        send(Grant(ID, question.number))
        assert await heard.get() == Done(ID)
        send(Check(ID))
        assert await heard.get() == Done(ID)
        send(Check(bytes(15) + b"x"))
        failed = await heard.get()
        assert isinstance(failed, Failed) and not failed.quiet
        assert "prefill does not know of this fetch" in failed.reason
        prefill.wait_sent("r")


async def test_decode_checks_on_what_it_waits_for(
    prefill: FakePrefill, decode: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "_CHECK", 0.01)
    decode.load("r", Source("r", "127.0.0.1", prefill.port, 1), [1])
    id, _ = await prefill.accepted()
    check, reply = await prefill.heard.get()
    assert check == Check(id)
    reply(Done(id))
    await asyncio.to_thread(decode.wait_received, "r")
    assert not decode.invalid


async def test_decode_says_again_what_may_have_been_lost(
    prefill: FakePrefill, decode: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "_CHECK", 0.01)
    decode.load("r", Source("r", "127.0.0.1", prefill.port, 1), [1])
    (first, _), (again, reply) = [await prefill.heard.get() for _ in range(2)]
    assert isinstance(first, Fetch) and isinstance(again, Fetch)
    assert first.start.id == again.start.id
    reply(Ask(first.start.id, prefill.engine.engine_id, 1))
    while not isinstance((await prefill.heard.get())[0], Grant):
        pass
    decode.step(Step(aborts=[("r", "test")]))
    stops = 0
    while stops < 2:
        stops += isinstance((await prefill.heard.get())[0], Stop)
    while not isinstance((await prefill.heard.get())[0], Check):
        pass
    reply(Failed(first.start.id, "as told", True))
    await asyncio.to_thread(decode.wait_received, "r")


async def test_prefill_is_who_it_says_it_is(prefill: FakePrefill, decode: Server) -> None:
    decode.load("r", Source("r", "127.0.0.1", prefill.port, 1), [1])
    fetch, reply = await prefill.heard.get()
    assert isinstance(fetch, Fetch)
    reply(Accepted(fetch.start.id, prefill.engine.session_id, "0" * 32))
    await asyncio.to_thread(decode.wait_received, "r")
    assert "another engine answers at" in decode.reasons()[0][2]


async def test_prefill_does_not_call_quiet_what_a_stopped_decode_has_not_confirmed(
    ask: Callable[..., Awaitable[Any]],
) -> None:
    group = Group(layers=4, blocks=4096, heads=64)
    blocks, size = list(range(group.blocks)), int(np.prod(group.shape(1)))
    port = free_ports()
    prefill = Server("prefill", port, groups=(group,))
    with contextlib.closing(prefill), child(size, "decode", groups=(group,)) as decode:
        prefill.caches[0][:] = 1
        identity = decode.ask("identity")
        for number in itertools.count():  # rounds that are over too early are made again
            id = number.to_bytes(16, "big")
            decode.memory[:] = 0
            send, heard = await ask(port, identity, blocks, group, id)
            prefill.offer(id.hex(), blocks)
            assert isinstance(await heard.get(), Ask)
            send(Grant(id, 1))
            await asyncio.to_thread(until, lambda: decode.memory[0])
            decode.stop()
            if not decode.memory.all():
                break
            decode.resume()
            assert await heard.get() == Done(id)
        send(Stop(id, "test"))
        failed = await heard.get()
        assert isinstance(failed, Failed) and not failed.quiet
        assert "decode has given it up: test" in failed.reason
        await asyncio.to_thread(prefill.wait_for, id.hex())
