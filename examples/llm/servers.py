"""The two servers.

POST /prefill   {"room": id, "tokens": [...]}
    computes the prompt's cache and hands it over; {} then, or {"error": words}
POST /decode    {"room": id, "tokens": how many the prompt has, "count": to be generated,
                 "prefill": session id, "corrupt": whether to spoil a block}
    a stream of lines {"token": id}, or {"error": words}
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from aioflagcx.errors import HandoverError
from aioflagcx.kv import KVManager, KVReceiver, KVSender
from inference.blocks import BlockPool
from inference.web import begin, send

from .model import Model, PagedCache, blocks_for


class PrefillServer:
    """Computes caches of prompts."""

    def __init__(self, manager: KVManager, cache: PagedCache, model: Model) -> None:
        self._manager = manager
        self._cache = cache
        self._model = model
        self._pool = BlockPool(cache.blocks)

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/prefill", self.prefill)]

    async def prefill(self, request: web.Request) -> web.Response:
        """Cancelled when the front hangs up, which gives the room up on both sides."""
        job = await request.json()
        sender = self._manager.sender(job["room"])
        try:
            await self._hand_over(sender, job["tokens"])
        except (HandoverError, ValueError) as error:
            return web.json_response({"error": str(error)})
        finally:
            await sender.abort("prefill was given up")  # nothing after success
        return web.json_response({})

    async def _hand_over(self, sender: KVSender, tokens: list[int]) -> None:
        blocks = await self._pool.take(blocks_for(len(tokens)))
        computing = asyncio.create_task(asyncio.to_thread(self._compute, tokens, blocks))
        try:
            first = await asyncio.shield(computing)
            await sender.send(blocks, aux=json.dumps({"first": first}).encode())
        finally:
            # Nothing is sent from them any more, however send() ended; but what the accelerator
            # has begun it goes on with when the request is given up.
            if computing.done():
                self._pool.give_back(blocks)
            else:
                computing.add_done_callback(lambda _: self._pool.give_back(blocks))

    def _compute(self, tokens: list[int], blocks: list[int]) -> int:
        """What the accelerator does."""
        cache = self._model.new_cache()
        first = self._model.step(tokens, cache)
        self._cache.store(blocks, cache)
        return first


class DecodeServer:
    """Generates from caches that prefill has computed."""

    def __init__(self, manager: KVManager, cache: PagedCache, model: Model) -> None:
        self._manager = manager
        self._cache = cache
        self._model = model
        self._pool = BlockPool(cache.blocks)
        self._reclaiming: set[asyncio.Task[None]] = set()

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/decode", self.decode)]

    async def decode(self, request: web.Request) -> web.StreamResponse:
        """One request; cancelled when the front hangs up."""
        job = await request.json()
        response = await begin(request)
        try:
            async for token in self._generate(job):
                await send(response, {"token": token})
        except (HandoverError, ValueError) as error:
            await send(response, {"error": str(error)})
        return response

    async def _generate(self, job: dict[str, Any]) -> Any:
        blocks = await self._pool.take(blocks_for(job["tokens"]))
        try:
            receiver = self._manager.receiver(job["room"], job["prefill"])
        except ValueError:
            self._pool.give_back(blocks)
            raise
        try:
            await receiver.start(blocks)
            first = json.loads(await receiver.done())["first"]
            if job["corrupt"]:
                self._cache.corrupt(blocks[0])
            cache = self._cache.load(blocks, job["tokens"])
        finally:
            # Not here: this can be cancelled more than once.
            task = asyncio.create_task(self._reclaim(receiver, blocks))
            self._reclaiming.add(task)
            task.add_done_callback(self._reclaiming.discard)
        tokens = self._model.generate(first, cache, job["count"])
        while (token := await asyncio.to_thread(_next, tokens)) is not None:
            yield token

    async def _reclaim(self, receiver: KVReceiver, blocks: list[int]) -> None:
        """Give blocks back when nobody can write to them: after success that is at once."""
        await receiver.abort("the client hung up")
        self._pool.give_back(blocks)


def _next(tokens: Iterator[int]) -> int | None:
    return next(tokens, None)
