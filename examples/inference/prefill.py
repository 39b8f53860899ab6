"""The prefill server: computes the KV cache of a prompt and writes it into a decode's blocks.

    POST /prefill   {"grant": id, "engine": ours, "session": decode's, "table": blocks, "pool": n,
                     "tokens": [...]}
        answers {} once everything has landed and decode has been notified, else {"error": words,
        "lost": whether the session with decode is the reason}
    POST /cancel    {"grant": id, "engine": ours, "age": seconds since it was given}
        stops that write, or refuses it if it has not been asked for yet; answers {"quiet": ...}:
        true when nothing of it can change decode's blocks any more
    GET /health     {"engine": id, ...}

A grant is a decode's permission to write to some of its blocks, for one attempt at one request. It
is asked for by the router, and taken back by the decode, in whatever order that arrives here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.web import HTTPConflict, json_response

from aioflagcx import Engine, Region, Transfer
from aioflagcx.errors import AioFlagcxError, ConnectError, PeerLost

from . import model
from .blocks import BlockPool
from .model import PIECE_BYTES, PagedCache

NOTIFICATION = "kv"
"""Its payload is JSON: the grant, and the checksum of the keys and values."""

WRITE_TRIES = 3
"""How often a write is started when its session is lost though decode is there."""

FORGET_SECONDS = 600.0
"""After which a grant's end is forgotten: longer than a router can take to ask for it."""


class Refused(Exception):
    """A write that was taken back before it began."""


@dataclasses.dataclass
class Write:
    """What has become of a grant."""

    cancelled: bool = False
    transfers: list[Transfer] = dataclasses.field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """No further transfer is started, and the one under way is stopped."""
        self.cancelled = True
        for transfer in self.transfers:
            transfer.cancel()


def _ended(task: asyncio.Task[None]) -> None:
    """Look at how a write ended, since its router may be gone."""
    if not task.cancelled():
        task.exception()


class PrefillServer:
    """The module's docstring has what it answers; made by :meth:`open`."""

    def __init__(self, engine: Engine, cache: PagedCache, region: Region) -> None:
        self._engine = engine
        self._cache = cache
        self._region = region
        self._pool = BlockPool(cache.blocks)
        self._writes: dict[str, Write] = {}
        self._paths: set[str] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, engine: Engine, blocks: int) -> AsyncIterator[PrefillServer]:
        """A server with a cache of ``blocks`` blocks; at the end, nothing is written any more."""
        cache = PagedCache(blocks)
        server = cls(engine, cache, await engine.register(cache.pool, access="read"))
        try:
            yield server
        finally:
            tasks = [write.task for write in server._writes.values() if write.task]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def routes(self) -> list[web.RouteDef]:
        """For a web server."""
        return [
            web.post("/prefill", self.prefill),
            web.post("/cancel", self.cancel),
            web.get("/health", self.health),
        ]

    async def health(self, request: web.Request) -> web.Response:
        """That we are there, and who we are."""
        return json_response(
            {
                "engine": self._engine.engine_id,
                "blocks": self._pool.count,
                "free": self._pool.free,
                "waiting": self._pool.waiting,
                "bytes": self._engine.stats().bytes_written,
                "paths": sorted(self._paths),
            }
        )

    async def prefill(self, request: web.Request) -> web.Response:
        """Compute and write one prompt's cache; cancelled, and so stopped, by a hang-up."""
        job = await request.json()
        if job["engine"] != self._engine.engine_id:
            raise HTTPConflict(text="the grant is for another engine: decode could not fence us")
        if job["grant"] in self._writes:
            raise HTTPConflict(text="the grant has been used or taken back")
        write = self._remember(job["grant"])
        write.task = asyncio.create_task(self._run(write, job))
        write.task.add_done_callback(_ended)
        try:
            await asyncio.shield(write.task)
        except asyncio.CancelledError:
            write.cancel()
            raise
        except (AioFlagcxError, Refused) as error:
            lost = isinstance(error, ConnectError | PeerLost)
            return json_response({"error": str(error), "lost": lost})
        return json_response({})

    async def cancel(self, request: web.Request) -> web.Response:
        """Take a grant back; the answer comes when nothing of it is under way here."""
        asked = await request.json()
        write = self._writes.get(asked["grant"])
        if write is None:
            self._remember(asked["grant"]).cancel()
            # Known not to have been here, unless that was another process or has been forgotten.
            ours = asked["engine"] == self._engine.engine_id
            return json_response({"quiet": ours and asked["age"] < FORGET_SECONDS})
        write.cancel()
        if write.transfers and write.task is not None:
            await asyncio.wait([write.task])
        # Without a transfer nothing has been sent, and nothing will be.
        return json_response({"quiet": all(one.remote_quiet for one in write.transfers)})

    def _remember(self, grant: str) -> Write:
        write = self._writes[grant] = Write()
        asyncio.get_running_loop().call_later(FORGET_SECONDS, self._writes.pop, grant)
        return write

    async def _run(self, write: Write, job: dict[str, Any]) -> None:
        tokens = job["tokens"]
        session = await self._engine.connect(job["session"])
        target = session.regions["kv"].addr
        blocks = await self._pool.take(model.blocks_for(len(tokens)))
        try:
            if write.cancelled:
                raise Refused("taken back before it began")
            table = np.array(blocks)
            checksum = await asyncio.to_thread(self._compute, table, tokens)
            theirs = np.array(job["table"][: len(blocks)])
            source = model.piece_addresses(self._region.addr, self._cache.blocks, table)
            message = json.dumps({"grant": job["grant"], "checksum": checksum}).encode()
            for tries_left in range(WRITE_TRIES - 1, -1, -1):
                if write.cancelled:
                    raise Refused("taken back before anything was written")
                transfer = self._engine.submit_write(
                    session,  # connected again if it has been lost meanwhile
                    source,
                    model.piece_addresses(target, job["pool"], theirs),
                    PIECE_BYTES,
                    notify=(NOTIFICATION, message),
                )
                write.transfers.append(transfer)
                try:
                    await transfer
                    self._paths.add(session.path)
                    return
                except PeerLost as error:
                    # It may be just this session: decode fences us for another grant's sake. But
                    # if decode may have been notified, these blocks may be another request's by
                    # now.
                    if not tries_left or error.notify_delivered is not False:
                        raise
        finally:
            # However a transfer ends, when its await returns nothing of it is posted any more:
            # our own blocks can be reused at once.
            self._pool.give_back(blocks)

    def _compute(self, table: model.Integers, tokens: list[int]) -> str:
        """What the accelerator does; the last block is filled up with zeros."""
        kv = model.prefill(tokens)
        padding = len(table) * model.BLOCK_TOKENS - len(tokens)
        self._cache.store(table, 0, np.pad(kv, ((0, 0), (0, padding), (0, 0))))
        return model.digest(kv)
