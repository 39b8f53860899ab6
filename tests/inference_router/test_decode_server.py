"""A decode server: what it makes of a cache that lands, and when it reuses blocks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from aioflagcx import Engine
from aioflagcx.errors import QuiesceTimeout
from inference import decode, model
from inference.decode import DecodeServer
from inference.model import PagedCache
from inference.prefill import NOTIFICATION
from inference.web import client, lines, serving

PROMPT = list(range(40))  # 3 blocks, and a token more does not need another
ANSWER = 8


class Writer:
    """Stands for the prefill server: writes when it is told to, and says what it is told to."""

    def __init__(self, engine: Engine, cache: PagedCache, base: int) -> None:
        self.engine = engine
        self.cache = cache
        self._base = base
        self.url = ""
        self.cancels: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        """What decode has asked to be cancelled."""
        self.verdicts: asyncio.Queue[web.Response] = asyncio.Queue()
        """The answers to that."""

    async def cancel(self, request: web.Request) -> web.Response:
        self.cancels.put_nowait(await request.json())
        return await self.verdicts.get()

    def say(self, quiet: bool) -> None:
        self.verdicts.put_nowait(web.json_response({"quiet": quiet}))

    async def write(self, offer: dict[str, Any], kv: model.Words, checksum: str) -> None:
        """Put `kv` into the offered blocks and notify."""
        table = np.arange(model.blocks_for(kv.shape[1]))
        self.cache.store(table, 0, kv)
        session = await self.engine.connect(offer["session"])
        await self.engine.write(
            session,
            model.piece_addresses(self._base, self.cache.blocks, table),
            model.piece_addresses(
                session.regions["kv"].addr, offer["pool"], np.array(offer["table"][: len(table)])
            ),
            model.PIECE_BYTES,
            notify=(NOTIFICATION, json.dumps({**offer, "checksum": checksum}).encode()),
        )


@dataclasses.dataclass
class Setting:
    server: DecodeServer
    engine: Engine
    url: str
    writer: Writer
    http: aiohttp.ClientSession

    @contextlib.asynccontextmanager
    async def asked(self, **changes: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The lines that a request is answered with; it hangs up at the end."""
        job = {"tokens": len(PROMPT), "max_tokens": ANSWER, "prefill": self.writer.url}
        job |= {"engine": self.writer.engine.engine_id, **changes}
        async with self.http.post(f"{self.url}/decode", json=job) as response:
            response.raise_for_status()
            yield lines(response)

    async def health(self) -> dict[str, Any]:
        async with self.http.get(f"{self.url}/health") as response:
            health: dict[str, Any] = await response.json()
            return health

    async def until_free(self, blocks: int) -> dict[str, Any]:
        """What the server says of itself once so many blocks are free."""
        while True:
            health = await self.health()
            if health["free"] == blocks:
                return health
            await asyncio.sleep(0.01)


BLOCKS = 4
"""Of the decode server: room for one request."""


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        theirs, ours = await enter(Engine()), await enter(Engine())
        cache = PagedCache(4)
        writer = Writer(theirs, cache, (await theirs.register(cache.pool)).addr)
        writer.url = await enter(serving("127.0.0.1", 0, [web.post("/cancel", writer.cancel)]))
        server = await enter(DecodeServer.open(ours, BLOCKS))
        url = await enter(serving("127.0.0.1", 0, server.routes()))
        http = await enter(client(60))
        yield Setting(server, ours, url, writer, http)


async def test_it_answers_from_what_has_landed(setting: Setting) -> None:
    kv = model.prefill(PROMPT)
    async with setting.asked() as messages:
        offer = await anext(messages)
        assert offer["session"] == setting.engine.session_id
        await setting.writer.write(offer, kv, model.digest(kv))
        tokens, checksum = model.answer(PROMPT, ANSWER)
        assert [message async for message in messages] == [
            *({"token": token} for token in tokens),
            {"checksum": checksum},
        ]
    assert (await setting.until_free(BLOCKS))["ends"] == {"landed": 1}


async def test_a_cache_that_is_not_what_was_sent_is_not_decoded(setting: Setting) -> None:
    kv = model.prefill(PROMPT)
    checksum = model.digest(kv)
    kv[5, 39, 127] ^= np.uint64(1)
    async with setting.asked() as messages:
        await setting.writer.write(await anext(messages), kv, checksum)
        [message] = [message async for message in messages]
        assert "not what prefill sent" in message["error"]
    await setting.until_free(BLOCKS)


async def test_a_request_waits_until_there_are_blocks(setting: Setting) -> None:
    kv = model.prefill(PROMPT)
    async with setting.asked() as first:
        offer = await anext(first)
        async with contextlib.AsyncExitStack() as stack:
            waiting = asyncio.create_task(stack.enter_async_context(setting.asked()))
            while not (await setting.health())["waiting"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await setting.writer.write(offer, kv, model.digest(kv))
            assert len([message async for message in first]) == ANSWER + 1
            assert set((await anext(await waiting))["table"]) <= set(range(BLOCKS))
            setting.writer.say(quiet=True)
    await setting.until_free(BLOCKS)


async def test_a_notification_of_another_engine_is_not_believed(setting: Setting) -> None:
    async with setting.asked() as messages, Engine() as stranger:
        offer = await anext(messages)
        session = await stranger.connect(offer["session"])
        payload = json.dumps({**offer, "checksum": ""}).encode()
        await session.notify(NOTIFICATION, payload)
        kv = model.prefill(PROMPT)
        await setting.writer.write(offer, kv, model.digest(kv))
        assert await anext(messages) == {"token": model.answer(PROMPT, 1)[0][0]}


async def test_blocks_are_not_reused_before_prefill_has_stopped(setting: Setting) -> None:
    async with setting.asked() as messages:
        offer = await anext(messages)
    asked = await setting.writer.cancels.get()
    assert (asked["grant"], asked["engine"]) == (offer["grant"], setting.writer.engine.engine_id)
    assert 0 <= asked["age"] < 60
    assert (await setting.health())["free"] == 1
    setting.writer.say(quiet=True)
    assert (await setting.until_free(BLOCKS))["ends"] == {"quiet": 1}


async def test_an_engine_whose_write_has_an_unknown_end_is_fenced_off_first(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await setting.writer.engine.connect(setting.engine.session_id)
    fenced: list[tuple[str, int]] = []
    quiesce = setting.engine.quiesce

    async def watched(peer: str) -> None:
        await quiesce(peer)
        fenced.append((peer, (await setting.health())["free"]))

    monkeypatch.setattr(setting.engine, "quiesce", watched)
    async with setting.asked() as messages:
        await anext(messages)
    await setting.writer.cancels.get()
    setting.writer.say(quiet=False)
    assert (await setting.until_free(BLOCKS))["ends"] == {"fenced": 1}
    assert fenced == [(setting.writer.engine.engine_id, 1)]
    assert not session.alive


async def test_blocks_stay_out_of_use_until_a_fence_succeeds(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiesce = setting.engine.quiesce
    free_at_failure: list[int] = []

    async def at_the_third_time(peer: str) -> None:
        if len(free_at_failure) < 2:
            free_at_failure.append((await setting.health())["free"])
            raise QuiesceTimeout("stopped in a copy")
        await quiesce(peer)

    monkeypatch.setattr(setting.engine, "quiesce", at_the_third_time)
    async with setting.asked() as messages:
        await anext(messages)
    setting.writer.say(quiet=False)
    assert (await setting.until_free(BLOCKS))["ends"] == {"fenced": 1}
    assert free_at_failure == [1, 1]


async def test_blocks_stay_out_of_use_while_prefill_does_not_answer(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "ASK_AGAIN_SECONDS", 0.01)
    async with setting.asked() as messages:
        await anext(messages)
    for _ in range(5):
        await setting.writer.cancels.get()
        assert (await setting.health())["free"] == 1
        setting.writer.verdicts.put_nowait(web.Response(status=503))
    setting.writer.say(quiet=True)
    await setting.until_free(BLOCKS)


async def test_a_dead_prefill_is_fenced_off(setting: Setting) -> None:
    async with serving("127.0.0.1", 0, []) as nobody:
        pass
    async with setting.asked(prefill=nobody) as messages:
        await anext(messages)
    assert (await setting.until_free(BLOCKS))["ends"] == {"fenced": 1}


async def test_blocks_are_not_reused_while_our_own_thread_is_at_them(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work, go_on = threading.Event(), threading.Event()
    step = PagedCache.step

    def slow_step(self: PagedCache, table: model.Integers, tokens: int) -> int:
        at_work.set()
        assert go_on.wait(60)
        return step(self, table, tokens)

    monkeypatch.setattr(PagedCache, "step", slow_step)
    kv = model.prefill(PROMPT)
    async with setting.asked() as messages:
        await setting.writer.write(await anext(messages), kv, model.digest(kv))
        assert await asyncio.to_thread(at_work.wait, 60)
    async with setting.asked(tokens=1, max_tokens=1) as messages:  # the one block that is free
        await anext(messages)
        assert (await setting.health())["free"] == 0
        setting.writer.say(quiet=True)
    assert (await setting.until_free(1))["ends"] == {"quiet": 1}
    go_on.set()
    assert (await setting.until_free(BLOCKS))["ends"] == {"quiet": 1, "landed": 1}


async def test_one_fence_serves_all_that_wait_for_it(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    fencing, go_on = asyncio.Event(), asyncio.Event()

    async def slow(peer: str) -> None:
        nonlocal calls
        calls += 1
        fencing.set()
        await go_on.wait()

    monkeypatch.setattr(setting.engine, "quiesce", slow)
    for number in range(4):  # one block each
        async with setting.asked(tokens=1, max_tokens=1) as messages:
            await anext(messages)
        await setting.writer.cancels.get()
        setting.writer.say(quiet=False)
        if number == 0:
            await fencing.wait()
    while setting.server._unknown.qsize() < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    go_on.set()
    assert (await setting.until_free(BLOCKS))["ends"] == {"fenced": 4}
    assert calls == 2
