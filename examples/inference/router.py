"""The router: picks a decode for each request, tells prefill, streams the answer.

    POST /generate  {"prompt": [tokens], "max_tokens": m}
        answers with a stream of JSON lines: {"decode": name} when one has room and prefill sets
        to work, and again for another attempt; each token as {"token": number}; at the end
        {"checksum": of the KV cache, "attempts": n}, or {"error": words}
    GET /stats      what has happened, and how the decodes are

A request goes to the decode with the fewest blocks in use by requests; while none has room it
waits. When an attempt fails, another decode goes on where it stopped: what has been answered is
part of the prompt then. A decode gets no new work

- once its stream breaks, or prefill loses its session with it, until it answers /health again;
- once it does not answer /health in time. Then what it is working on goes elsewhere, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from . import model
from .web import HungUp, StreamBroken, begin, client, lines, send

RETRIES = 3
"""Attempts at one request after the first."""

REQUEST_SECONDS = 120.0
"""That a request may take in all, waiting for room included."""

HEALTH_INTERVAL = 0.5
HEALTH_SECONDS = 5.0
"""Without an answer for this long a server counts as stopped: as ``Config.keepalive_timeout``."""


_logger = logging.getLogger("inference_router")


class AttemptFailed(Exception):
    """Another attempt, at another decode, may succeed."""


class CacheCorrupted(Exception):
    """The KV cache arrived, and was not what had been sent. That must not be papered over."""


class Decode:
    """A decode server, as the router knows it."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.blocks = 0
        """Of its cache in all; 0 until it has been heard of."""
        self.outstanding = 0
        """Of these, promised to requests."""
        self.up = False
        """Whether it gets new work."""
        self.stopped = asyncio.Event()
        """Set when the work it has is to go elsewhere."""


class Fleet:
    """The decodes, and the requests that wait for room in one."""

    def __init__(self, decodes: Mapping[str, str]) -> None:
        self.decodes = [Decode(name, url) for name, url in decodes.items()]
        self.waited = 0
        """Requests that found no room at once."""
        self._waiting: deque[tuple[int, asyncio.Future[Decode]]] = deque()

    async def reserve(self, blocks: int, *, first: bool = False) -> Decode:
        """A decode with room for ``blocks``, once there is one; ``first``: before all others."""
        granted: asyncio.Future[Decode] = asyncio.get_running_loop().create_future()
        if first:
            self._waiting.appendleft((blocks, granted))
        else:
            self._waiting.append((blocks, granted))
        self._grant()
        self.waited += not granted.done()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._grant()
            else:
                self.release(granted.result(), blocks)
            raise

    def release(self, decode: Decode, blocks: int) -> None:
        """What was reserved is not needed any more."""
        decode.outstanding -= blocks
        self._grant()

    def healthy(self, decode: Decode, blocks: int) -> None:
        """It has answered, and has a cache of ``blocks`` blocks."""
        if decode.stopped.is_set():
            decode.stopped = asyncio.Event()
        decode.blocks = blocks
        decode.up = True
        self._grant()

    def suspect(self, decode: Decode) -> None:
        """No new work for it until it is healthy."""
        decode.up = False

    def stopped(self, decode: Decode) -> None:
        """It does nothing: the work that it has goes elsewhere."""
        decode.up = False
        decode.stopped.set()

    def _grant(self) -> None:
        while self._waiting:
            blocks, granted = self._waiting[0]
            if not granted.cancelled():
                able = [one for one in self.decodes if one.up]
                able = [one for one in able if one.outstanding + blocks <= one.blocks]
                if not able:
                    return
                decode = min(able, key=lambda one: one.outstanding)
                decode.outstanding += blocks
                granted.set_result(decode)
            self._waiting.popleft()


class Router:
    """The module's docstring has what it answers; made by :meth:`open`."""

    def __init__(self, prefill: str, decodes: Mapping[str, str], http: aiohttp.ClientSession):
        self._prefill = prefill
        self._http = http
        self._fleet = Fleet(decodes)
        self._counts = Counter(requests=0, answered=0, hung_up=0, retried=0, failed_attempts=0)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, prefill: str, decodes: Mapping[str, str]) -> AsyncIterator[Router]:
        """A router to the decodes at these URLs, by name."""
        async with client(REQUEST_SECONDS) as http:
            router = cls(prefill, decodes, http)
            watchers = [asyncio.create_task(router._watch(one)) for one in router._fleet.decodes]
            try:
                yield router
            finally:
                for watcher in watchers:
                    watcher.cancel()
                await asyncio.wait(watchers)

    def routes(self) -> list[web.RouteDef]:
        """For a web server."""
        return [web.post("/generate", self.generate), web.get("/stats", self.stats)]

    async def stats(self, request: web.Request) -> web.Response:
        """Counters, and what the servers say of themselves."""

        async def health(url: str) -> dict[str, Any] | None:
            try:
                return await self._health(url)
            except (aiohttp.ClientError, asyncio.TimeoutError):
                return None

        up = [one for one in self._fleet.decodes if one.up]
        prefill, *states = await asyncio.gather(
            *map(health, [self._prefill, *(one.url for one in up)])
        )
        said = dict(zip(up, states, strict=True))
        return web.json_response(
            {
                **self._counts,
                "waited": self._fleet.waited,
                "prefill": prefill,
                "decodes": {
                    one.name: {
                        "up": one.up,
                        "outstanding": one.outstanding,
                        "health": said.get(one),
                    }
                    for one in self._fleet.decodes
                },
            }
        )

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """One request, from the prompt to the last token; cancelled when the client hangs up."""
        asked = await request.json()
        blocks = model.blocks_for(len(asked["prompt"]) + asked["max_tokens"])
        most = max(one.blocks for one in self._fleet.decodes)
        if blocks > most > 0:
            raise web.HTTPBadRequest(text=f"{blocks} blocks are more than any decode's {most}")
        self._counts["requests"] += 1
        response = await begin(request)
        answering = self._answer(asked["prompt"], asked["max_tokens"], blocks, response)
        try:
            await send(response, await asyncio.wait_for(answering, REQUEST_SECONDS))
            self._counts["answered"] += 1
        except (AttemptFailed, CacheCorrupted) as error:
            await send(response, {"error": str(error)})
        except (asyncio.CancelledError, HungUp):
            self._counts["hung_up"] += 1
            raise
        except asyncio.TimeoutError:
            await send(response, {"error": f"not done within {REQUEST_SECONDS:g} s"})
        return response

    async def _answer(
        self, prompt: list[int], count: int, blocks: int, response: web.StreamResponse
    ) -> dict[str, Any]:
        """Attempt after attempt; what is to be sent after the last token."""
        answered: list[int] = []
        for attempt in range(1, RETRIES + 2):
            decode = await self._fleet.reserve(blocks, first=attempt > 1)
            try:
                left = count - len(answered)
                checksum = await self._attempt(decode, prompt, left, answered, response)
                return {"checksum": checksum, "attempts": attempt}
            except AttemptFailed as error:
                failure = error
                _logger.info("attempt %d of a request failed: %s", attempt, error)
                self._counts["failed_attempts"] += 1
                self._counts["retried"] += attempt == 1
            finally:
                self._fleet.release(decode, blocks)
        raise AttemptFailed(f"{RETRIES + 1} attempts failed, the last one so: {failure}")

    async def _attempt(
        self,
        decode: Decode,
        prompt: list[int],
        left: int,
        answered: list[int],
        response: web.StreamResponse,
    ) -> str:
        """One decode's part: tokens to the client and to ``answered``; the cache's checksum.

        When it returns or raises, we have hung up on prefill and decode if they are not done:
        prefill stops writing then, and decode finds out when its blocks can be reused.
        """
        known = prompt + answered
        job = {"tokens": len(known), "max_tokens": left, **await self._writer()}
        url = f"{decode.url}/decode"

        async def stream() -> str:
            async with self._http.post(url, json=job) as opened:
                opened.raise_for_status()
                messages = lines(opened)
                offer = await anext(messages, None)
                if offer is None:
                    raise StreamBroken("there was no offer")
                await send(response, {"decode": decode.name})
                return await guarded(
                    self._relay(messages, decode.name, answered, response),
                    self._tell_prefill(decode, {**offer, "engine": job["engine"]}, known),
                )

        try:
            return await guarded(stream(), self._stopped(decode))
        except (StreamBroken, aiohttp.ClientError, asyncio.TimeoutError) as error:
            self._fleet.suspect(decode)
            raise AttemptFailed(f"{decode.name}: {type(error).__name__}: {error}") from error

    async def _writer(self) -> dict[str, str]:
        """Who is to be let write: by the id of its engine, which a restarted one has not."""
        try:
            return {
                "prefill": self._prefill,
                "engine": (await self._health(self._prefill))["engine"],
            }
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise AttemptFailed(f"prefill: {type(error).__name__}: {error}") from error

    async def _relay(
        self,
        messages: AsyncIterator[dict[str, Any]],
        name: str,
        answered: list[int],
        response: web.StreamResponse,
    ) -> str:
        """Hand the tokens on to the client; the checksum after the last one."""
        async for message in messages:
            if "error" in message:
                raise CacheCorrupted(f"{name}: {message['error']}")
            if "checksum" in message:
                return str(message["checksum"])
            answered.append(message["token"])
            await send(response, message)
        raise StreamBroken("the stream ended early")

    async def _tell_prefill(self, decode: Decode, offer: dict[str, Any], known: list[int]) -> None:
        """Have prefill write the cache of the ``known`` tokens into the decode's offer."""
        job = {**offer, "tokens": known}
        try:
            async with self._http.post(f"{self._prefill}/prefill", json=job) as answer:
                answer.raise_for_status()
                result = await answer.json()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise AttemptFailed(f"prefill: {type(error).__name__}: {error}") from error
        if "error" in result:
            if result["lost"]:
                self._fleet.suspect(decode)
            raise AttemptFailed(f"prefill: {result['error']}")

    async def _stopped(self, decode: Decode) -> None:
        await decode.stopped.wait()
        raise AttemptFailed(f"{decode.name}: no answer to /health within {HEALTH_SECONDS:g} s")

    async def _health(self, url: str) -> dict[str, Any]:
        async with self._http.get(
            f"{url}/health", timeout=aiohttp.ClientTimeout(HEALTH_SECONDS)
        ) as answer:
            answer.raise_for_status()
            health: dict[str, Any] = await answer.json()
            return health

    async def _watch(self, decode: Decode) -> None:
        while True:
            try:
                health = await self._health(decode.url)
            except (aiohttp.ClientError, asyncio.TimeoutError):
                self._fleet.stopped(decode)
            else:
                self._fleet.healthy(decode, health["blocks"])
            await asyncio.sleep(HEALTH_INTERVAL)


async def guarded(main: Coroutine[Any, Any, str], other: Coroutine[Any, Any, None]) -> str:
    """``main``, given up when ``other`` raises; neither is left running."""
    result = asyncio.ensure_future(main)
    tasks: set[asyncio.Task[Any]] = {result, asyncio.ensure_future(other)}
    try:
        pending = tasks
        while not result.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return result.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
