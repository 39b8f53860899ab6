"""A prefill server: what it writes, and what it says of writes that are taken back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest

from aioflagcx import Config, Engine
from aioflagcx.errors import PeerLost
from inference import model
from inference.model import PagedCache
from inference.prefill import FORGET_SECONDS, NOTIFICATION, PrefillServer
from inference.web import client, serving

PROMPT = list(range(40))
TABLE = [6, 1, 4, 0]  # the last one for the answer
BLOCKS = 8


@dataclasses.dataclass
class Setting:
    engine: Engine
    url: str
    decode: Engine
    cache: PagedCache
    http: aiohttp.ClientSession

    async def post(self, path: str, **job: Any) -> tuple[int, Any]:
        async with self.http.post(f"{self.url}{path}", json=job) as response:
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())

    def job(self, **changes: Any) -> dict[str, Any]:
        job = {"grant": "one", "engine": self.engine.engine_id, "tokens": PROMPT}
        job |= {"session": self.decode.session_id, "table": TABLE, "pool": BLOCKS}
        return {**job, **changes}

    async def until(self, **state: int) -> None:
        """Until the server says that this is how it is."""
        while True:
            async with self.http.get(f"{self.url}/health") as response:
                if state.items() <= (await response.json()).items():
                    return
            await asyncio.sleep(0.01)

    def landed(self) -> bool:
        kv = self.cache.load(np.array(TABLE), len(PROMPT))
        return np.array_equal(kv, model.prefill(PROMPT))


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        decode = await enter(Engine())
        engine = await enter(Engine(config=Config(connect_timeout=60, transfer_timeout=60)))
        cache = PagedCache(BLOCKS)
        await decode.register(cache.pool, name="kv")
        server = await enter(PrefillServer.open(engine, BLOCKS))
        url = await enter(serving("127.0.0.1", 0, server.routes()))
        yield Setting(engine, url, decode, cache, await enter(client(60)))


async def test_a_prompts_cache_is_written_where_it_belongs(setting: Setting) -> None:
    assert await setting.post("/prefill", **setting.job()) == (200, {})
    notification = await anext(setting.decode.notifications())
    assert notification.name == NOTIFICATION
    assert json.loads(notification.payload) == {
        "grant": "one",
        "checksum": model.digest(model.prefill(PROMPT)),
    }
    assert setting.landed()
    others = np.setdiff1d(np.arange(BLOCKS), TABLE[:3])
    assert not setting.cache.pool[:, others].any()
    await setting.until(free=BLOCKS)


async def test_a_grant_taken_back_before_it_is_used_is_refused_later(setting: Setting) -> None:
    grant = {"grant": "one", "engine": setting.engine.engine_id}
    assert await setting.post("/cancel", **grant, age=1.0) == (200, {"quiet": True})
    assert (await setting.post("/prefill", **setting.job()))[0] == 409
    assert not setting.cache.pool.any()


async def test_it_does_not_claim_to_know_of_grants_that_it_may_have_forgotten(
    setting: Setting,
) -> None:
    ours = setting.engine.engine_id
    for grant, engine, age in [("old", ours, FORGET_SECONDS), ("other", "0" * 32, 1.0)]:
        said = await setting.post("/cancel", grant=grant, engine=engine, age=age)
        assert said == (200, {"quiet": False})


async def test_a_grant_for_another_engine_is_refused(setting: Setting) -> None:
    status, words = await setting.post("/prefill", **setting.job(engine="0" * 32))
    assert (status, "another engine" in words) == (409, True)
    assert not setting.cache.pool.any()


async def test_a_grant_is_used_once(setting: Setting) -> None:
    assert (await setting.post("/prefill", **setting.job()))[0] == 200
    assert (await setting.post("/prefill", **setting.job()))[0] == 409


async def test_what_has_landed_is_quiet(setting: Setting) -> None:
    await setting.post("/prefill", **setting.job())
    said = await setting.post("/cancel", grant="one", engine=setting.engine.engine_id, age=1.0)
    assert said == (200, {"quiet": True})


async def test_a_decode_that_is_not_there_is_told(setting: Setting) -> None:
    gone = setting.decode.session_id
    await setting.decode.close()
    status, said = await setting.post("/prefill", **setting.job(session=gone))
    assert (status, said["lost"]) == (200, True)
    assert gone in said["error"]
    await setting.until(free=BLOCKS)


@pytest.fixture
async def silent() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """The session id of a peer that does not answer, and whether it has been reached."""
    reached = asyncio.Event()
    writers = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        reached.set()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"{host}:{port}", reached
    server.close()
    for writer in writers:
        writer.close()


async def test_a_write_that_is_taken_back_before_it_starts_is_quiet_at_once(
    setting: Setting, silent: tuple[str, asyncio.Event]
) -> None:
    session, reached = silent
    writing = asyncio.create_task(setting.post("/prefill", **setting.job(session=session)))
    await reached.wait()
    said = await setting.post("/cancel", grant="one", engine=setting.engine.engine_id, age=1.0)
    assert said == (200, {"quiet": True})
    writing.cancel()


class Submitted:
    """Records the transfers of an engine, and has some fail after they have landed."""

    def __init__(self, engine: Engine, errors: list[PeerLost]) -> None:
        self._submit = engine.submit_write
        self._errors = errors
        self.count = 0

    def submit_write(self, *args: Any, **named: Any) -> Any:
        self.count += 1
        if not self._errors:
            return self._submit(*args, **named)
        return Lost(self._errors.pop(0))


class Lost:
    """A transfer that has failed."""

    def __init__(self, error: PeerLost) -> None:
        self._error = error
        self.remote_quiet = error.remote_quiet

    def cancel(self) -> bool:
        return False

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        raise self._error


async def test_a_write_whose_session_was_fenced_off_is_repeated(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = Submitted(setting.engine, [PeerLost("quiesced", notify_delivered=False)] * 2)
    monkeypatch.setattr(setting.engine, "submit_write", submitted.submit_write)
    assert await setting.post("/prefill", **setting.job()) == (200, {})
    assert submitted.count == 3
    assert setting.landed()
    # Nobody has said that the first two cannot come late.
    said = await setting.post("/cancel", grant="one", engine=setting.engine.engine_id, age=1.0)
    assert said == (200, {"quiet": False})


@pytest.mark.parametrize(
    "errors",
    [
        [PeerLost("lost", notify_delivered=None)],
        [PeerLost("lost", notify_delivered=False)] * 3,
    ],
    ids=["notified perhaps", "again and again"],
)
async def test_a_write_is_not_repeated_for_ever_or_when_it_may_have_been_taken(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, errors: list[PeerLost]
) -> None:
    submitted = Submitted(setting.engine, list(errors))
    monkeypatch.setattr(setting.engine, "submit_write", submitted.submit_write)
    _, said = await setting.post("/prefill", **setting.job())
    assert (said["lost"], submitted.count) == (True, len(errors))


class Held:
    """A transfer that lasts until it is let go."""

    remote_quiet = True

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    def cancel(self) -> bool:
        return False

    def __await__(self) -> Any:
        return self.go_on.wait().__await__()


async def test_requests_wait_for_blocks_of_prefill(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [Held(), Held()]
    transfers = iter(held)
    monkeypatch.setattr(setting.engine, "submit_write", lambda *_, **__: next(transfers))
    large = setting.job(tokens=[1] * 16 * 6, table=list(range(BLOCKS)))
    first = asyncio.create_task(setting.post("/prefill", **large))
    await setting.until(free=2)
    second = asyncio.create_task(setting.post("/prefill", **setting.job(grant="two")))
    await setting.until(waiting=1, free=2)
    held[0].go_on.set()
    assert await first == (200, {})
    await setting.until(waiting=0, free=BLOCKS - 3)
    held[1].go_on.set()
    assert await second == (200, {})
    await setting.until(free=BLOCKS)
