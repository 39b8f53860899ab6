"""A decode server: offers blocks of its KV cache, and generates tokens from what lands there.

    POST /decode    {"tokens": n, "max_tokens": m, "prefill": URL, "engine": prefill's}
        waits for blocks, then answers with a stream of JSON lines: the offer {"grant": id,
        "session": ours, "table": blocks, "pool": n}; when the cache of the n tokens has landed
        there, each of the m tokens {"token": number}; at the end {"checksum": of the cache}.
        Or {"error": words} when what has landed is not what was sent.
    GET /health     {"blocks": n, "free": n, ...}

**When blocks may be given to another request.** While a grant is out, prefill may write to its
blocks at any time. That is over

- when the notification has come: everything has landed, and nothing comes late;
- else, when prefill says that it has stopped and that the engine has confirmed that nothing is on
  its way any more (``Transfer.remote_quiet``);
- else, when prefill says that it has stopped, or is dead, and we have fenced its engine off
  (:meth:`aioflagcx.Engine.quiesce`).

Until one of these is known the blocks stay out of use, whether or not anybody waits for tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import aiohttp
import numpy as np
from aiohttp import web

from aioflagcx import Engine
from aioflagcx.errors import QuiesceTimeout

from . import model
from .blocks import BlockPool
from .model import PagedCache
from .prefill import NOTIFICATION
from .web import begin, client, send

CANCEL_SECONDS = 10.0
"""How long prefill may take to stop a write: its drain_timeout, and then some."""

ASK_AGAIN_SECONDS = 1.0
"""Between two times that prefill is asked for the end of a write and does not answer."""

_T = TypeVar("_T")


@dataclasses.dataclass
class Grant:
    """Blocks that an engine may write to, once."""

    id: str
    table: model.Integers
    prefill: str
    """URL of the server that may write."""

    engine: str
    """Id of its engine."""

    given: float = dataclasses.field(default_factory=time.monotonic)
    """When, by time.monotonic."""

    landed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    checksum: str = ""
    """Of what was sent, once it has landed."""

    working: asyncio.Future[Any] | None = None
    """A thread of ours that is at these blocks."""


class DecodeServer:
    """The module's docstring has what it answers; made by :meth:`open`."""

    def __init__(self, engine: Engine, cache: PagedCache, http: aiohttp.ClientSession) -> None:
        self._engine = engine
        self._cache = cache
        self._http = http
        self._pool = BlockPool(cache.blocks)
        self._numbers = itertools.count(1)
        self._grants: dict[str, Grant] = {}
        self._unknown: asyncio.Queue[Grant] = asyncio.Queue()
        self._reclaiming: set[asyncio.Task[None]] = set()
        self.ends: Counter[str] = Counter()
        """How grants have ended: "landed", "quiet" by prefill's word, "fenced" by us."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, engine: Engine, blocks: int) -> AsyncIterator[DecodeServer]:
        """A server with a cache of ``blocks`` blocks, which takes the engine's notifications."""
        cache = PagedCache(blocks)
        await engine.register(cache.pool, name="kv", access="write")
        async with client(CANCEL_SECONDS) as http:
            server = cls(engine, cache, http)
            tasks = [asyncio.create_task(server._hear()), asyncio.create_task(server._fence())]
            try:
                yield server
            finally:
                tasks += server._reclaiming
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    def routes(self) -> list[web.RouteDef]:
        """For a web server."""
        return [web.post("/decode", self.decode), web.get("/health", self.health)]

    async def health(self, request: web.Request) -> web.Response:
        """That we are there, and what we have."""
        pool = self._pool
        return web.json_response(
            {
                "blocks": pool.count,
                "free": pool.free,
                "waiting": pool.waiting,
                "ends": self.ends,
            }
        )

    async def decode(self, request: web.Request) -> web.StreamResponse:
        """One attempt at one request; cancelled when the router hangs up."""
        job = await request.json()
        tokens, count = job["tokens"], job["max_tokens"]
        blocks = await self._pool.take(model.blocks_for(tokens + count))
        grant = Grant(
            f"{self._engine.engine_id[:8]}-{next(self._numbers)}",
            np.array(blocks),
            job["prefill"],
            job["engine"],
        )
        self._grants[grant.id] = grant
        try:
            response = await begin(request)
            offer = {"grant": grant.id, "session": self._engine.session_id}
            await send(response, {**offer, "table": blocks, "pool": self._cache.blocks})
            await grant.landed.wait()
            if await self._in_thread(grant, self._checksum, grant.table, tokens) != grant.checksum:
                await send(response, {"error": "the KV cache is not what prefill sent"})
                return response
            for position in range(tokens, tokens + count):
                token = await self._in_thread(grant, self._cache.step, grant.table, position)
                await send(response, {"token": token})
            checksum = await self._in_thread(grant, self._checksum, grant.table, tokens + count)
            await send(response, {"checksum": checksum})
        finally:
            # Not here: a handler can be cancelled, and more than once.
            reclaiming = asyncio.create_task(self._reclaim(grant))
            self._reclaiming.add(reclaiming)
            reclaiming.add_done_callback(self._reclaiming.discard)
        return response

    def _checksum(self, table: model.Integers, tokens: int) -> str:
        return model.digest(self._cache.load(table, tokens))

    async def _in_thread(self, grant: Grant, function: Callable[..., _T], *arguments: Any) -> _T:
        """What the accelerator does; it goes on when this is cancelled, and is waited for later."""
        work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
        grant.working = work
        return await asyncio.shield(work)

    async def _hear(self) -> None:
        async for notification in self._engine.notifications():
            if notification.name != NOTIFICATION:
                continue
            message = json.loads(notification.payload)
            grant = self._grants.get(message["grant"])
            if grant is not None and notification.engine_id == grant.engine:
                grant.checksum = message["checksum"]
                grant.landed.set()

    async def _reclaim(self, grant: Grant) -> None:
        """Give a grant's blocks back, as soon as nobody can write to them."""
        if grant.working is not None:
            await asyncio.wait([grant.working])
        if grant.landed.is_set():
            self._end(grant, "landed")
        elif await self._known_quiet(grant):
            self._end(grant, "quiet")
        else:
            self._unknown.put_nowait(grant)

    async def _known_quiet(self, grant: Grant) -> bool:
        """Have prefill stop; whether it knows, then, that nothing is on its way any more."""
        while True:
            try:
                url = f"{grant.prefill}/cancel"
                age = time.monotonic() - grant.given
                job = {"grant": grant.id, "engine": grant.engine, "age": age}
                async with self._http.post(url, json=job) as answer:
                    answer.raise_for_status()
                    return bool((await answer.json())["quiet"])
            except aiohttp.ClientConnectorError as error:
                if isinstance(error.os_error, ConnectionRefusedError):
                    return False  # it is dead, and starts nothing any more
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError):
                pass
            # Cut off, or stopped. It may go on some time, and write: these blocks stay out of use.
            await asyncio.sleep(ASK_AGAIN_SECONDS)

    async def _fence(self) -> None:
        """Fence off the engines that may still be writing to blocks that they have given up.

        That ends what else they are writing to us, so one fence serves all that wait for it.
        """
        while True:
            grants = [await self._unknown.get()]
            while not self._unknown.empty():
                grants.append(self._unknown.get_nowait())
            for engine in {grant.engine for grant in grants}:
                theirs = [grant for grant in grants if grant.engine == engine]
                try:
                    await self._engine.quiesce(engine)
                except QuiesceTimeout:  # stopped in the middle of a copy, on this host: once more
                    for grant in theirs:
                        self._unknown.put_nowait(grant)
                else:
                    for grant in theirs:
                        self._end(grant, "fenced")

    def _end(self, grant: Grant, how: str) -> None:
        del self._grants[grant.id]
        self.ends[how] += 1
        self._pool.give_back(grant.table.tolist())
