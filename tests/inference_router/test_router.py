"""The router, between servers that do what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from inference import model, router
from inference.router import RETRIES, Router
from inference.web import StreamBroken, begin, client, lines, send, serving

PROMPT = list(range(40))
COUNT = 6
TOKENS, CHECKSUM = model.answer(PROMPT, COUNT)
BLOCKS = 4  # of a decode: one request at a time
OFFER = {"grant": "one", "session": "s", "table": [0, 1, 2], "pool": BLOCKS}

Stream = Callable[["Server", web.StreamResponse, dict[str, Any]], Awaitable[None]]


@dataclasses.dataclass
class Server:
    """A decode, or prefill."""

    stream: Stream
    """What a decode answers with, after the offer."""
    jobs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """What it has been asked for."""
    asked: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Whether there has been a job."""
    hung_up: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Whether the router has hung up before the end of an answer."""
    healthy: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Whether it answers /health."""
    prefill_says: dict[str, Any] | None = dataclasses.field(default_factory=dict)
    """None: nothing."""
    url: str = ""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.post("/decode", self.decode),
            web.post("/prefill", self.prefill),
        ]

    async def health(self, request: web.Request) -> web.Response:
        await self.healthy.wait()
        state = {"engine": "an engine", "blocks": BLOCKS, "free": BLOCKS}
        return web.json_response(state)

    async def decode(self, request: web.Request) -> web.StreamResponse:
        job = await request.json()
        self.jobs.append(job)
        self.asked.set()
        response = await begin(request)
        try:
            await send(response, OFFER)
            await self.stream(self, response, job)
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        return response

    async def prefill(self, request: web.Request) -> web.Response:
        self.jobs.append(await request.json())
        self.asked.set()
        try:
            if self.prefill_says is None:
                await asyncio.Event().wait()
            return web.json_response(self.prefill_says)
        except asyncio.CancelledError:
            self.hung_up.set()
            raise


async def all_of_it(server: Server, response: web.StreamResponse, job: dict[str, Any]) -> None:
    for token in TOKENS[COUNT - job["max_tokens"] :]:
        await send(response, {"token": token})
    await send(response, {"checksum": CHECKSUM})


async def breaks_off(server: Server, response: web.StreamResponse, job: dict[str, Any]) -> None:
    for token in TOKENS[COUNT - job["max_tokens"] :][:2]:
        await send(response, {"token": token})


async def nothing(server: Server, response: web.StreamResponse, job: dict[str, Any]) -> None:
    await asyncio.Event().wait()


@dataclasses.dataclass
class Setting:
    url: str
    prefill: Server
    decodes: list[Server]
    http: aiohttp.ClientSession

    @contextlib.asynccontextmanager
    async def asked(self, count: int = COUNT) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        job = {"prompt": PROMPT, "max_tokens": count}
        async with self.http.post(f"{self.url}/generate", json=job) as response:
            response.raise_for_status()
            yield lines(response)

    async def answer(self) -> list[dict[str, Any]]:
        async with self.asked() as messages:
            return [message async for message in messages]

    async def stats(
        self, condition: Callable[[dict[str, Any]], bool] = lambda stats: True
    ) -> dict[str, Any]:
        """What the router counts, once the condition holds for it."""
        while True:
            async with self.http.get(f"{self.url}/stats") as response:
                stats: dict[str, Any] = await response.json()
                if condition(stats):
                    return stats
            await asyncio.sleep(0.01)


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[Setting]]]:
    """Starts a router to a prefill and to decodes that answer with these streams."""
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context

        async def started(*streams: Stream) -> Setting:
            prefill, *decodes = servers = [Server(stream) for stream in (nothing, *streams)]
            for server in servers:
                server.healthy.set()
                server.url = await enter(serving("127.0.0.1", 0, server.routes()))
            urls = {f"decode-{n}": server.url for n, server in enumerate(decodes)}
            routes = (await enter(Router.open(prefill.url, urls))).routes()
            url = await enter(serving("127.0.0.1", 0, routes))
            setting = Setting(url, prefill, decodes, await enter(client(60)))
            await setting.stats(lambda stats: all(one["up"] for one in stats["decodes"].values()))
            return setting

        yield started


Start = Callable[..., Awaitable[Setting]]


def complete(*names: str, attempts: int, each: int = COUNT) -> list[dict[str, Any]]:
    """A right answer, of which each decode but the last gave `each` tokens."""
    messages: list[dict[str, Any]] = []
    tokens = iter(TOKENS)
    for name in names[:-1]:
        messages += [{"decode": name}, *({"token": next(tokens)} for _ in range(each))]
    messages += [{"decode": names[-1]}, *({"token": token} for token in tokens)]
    return [*messages, {"checksum": CHECKSUM, "attempts": attempts}]


async def test_prefill_and_decode_are_told_what_they_need(start: Start) -> None:
    setting = await start(all_of_it)
    assert await setting.answer() == complete("decode-0", attempts=1)
    prefill = {"prefill": setting.prefill.url, "engine": "an engine"}
    assert setting.decodes[0].jobs == [{"tokens": len(PROMPT), "max_tokens": COUNT, **prefill}]
    assert setting.prefill.jobs == [{**OFFER, "engine": "an engine", "tokens": PROMPT}]


async def test_another_decode_goes_on_where_a_stream_broke_off(start: Start) -> None:
    setting = await start(breaks_off, all_of_it)
    assert await setting.answer() == complete("decode-0", "decode-1", attempts=2, each=2)
    assert setting.prefill.jobs[1]["tokens"] == PROMPT + TOKENS[:2]
    assert setting.decodes[1].jobs[0]["max_tokens"] == COUNT - 2
    stats = await setting.stats()
    assert (stats["retried"], stats["failed_attempts"]) == (1, 1)
    assert {one["outstanding"] for one in stats["decodes"].values()} == {0}


async def test_attempts_are_limited(start: Start) -> None:
    async def breaks_off_at_once(*_: Any) -> None:
        pass

    setting = await start(breaks_off_at_once, breaks_off_at_once)
    *_, last = await setting.answer()
    assert f"{RETRIES + 1} attempts failed" in last["error"]
    assert sum(len(server.jobs) for server in setting.decodes) == RETRIES + 1


async def test_a_cache_that_arrived_wrong_is_told_and_not_covered_up(start: Start) -> None:
    async def wrong(server: Server, response: web.StreamResponse, job: dict[str, Any]) -> None:
        await send(response, {"error": "it is wrong"})

    setting = await start(wrong, all_of_it)
    *_, last = await setting.answer()
    assert last == {"error": "decode-0: it is wrong"}
    assert not setting.decodes[1].jobs


async def test_an_attempt_ends_when_prefill_fails(start: Start) -> None:
    setting = await start(nothing, nothing)
    setting.prefill.prefill_says = {"error": "no room", "lost": True}
    *_, last = await setting.answer()
    assert "no room" in last["error"]
    for server in setting.decodes:
        await server.hung_up.wait()


async def test_the_work_of_a_decode_that_stops_goes_elsewhere(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "HEALTH_SECONDS", 0.5)
    monkeypatch.setattr(router, "HEALTH_INTERVAL", 0.01)

    async def stops(server: Server, response: web.StreamResponse, job: dict[str, Any]) -> None:
        await breaks_off(server, response, job)
        server.healthy.clear()
        await nothing(server, response, job)

    setting = await start(stops, all_of_it)
    assert await setting.answer() == complete("decode-0", "decode-1", attempts=2, each=2)
    await setting.decodes[0].hung_up.wait()


async def test_a_client_that_hangs_up_takes_its_request_back_everywhere(start: Start) -> None:
    setting = await start(nothing)
    setting.prefill.prefill_says = None
    async with setting.asked() as messages:
        assert await anext(messages) == {"decode": "decode-0"}
        await setting.prefill.asked.wait()
    await setting.decodes[0].hung_up.wait()
    await setting.prefill.hung_up.wait()
    stats = await setting.stats(lambda stats: not stats["decodes"]["decode-0"]["outstanding"])
    assert (stats["hung_up"], stats["answered"]) == (1, 0)


async def test_a_request_waits_for_room(start: Start) -> None:
    go_on = asyncio.Event()

    async def held(server: Server, response: web.StreamResponse, job: dict[str, Any]) -> None:
        await go_on.wait()
        await all_of_it(server, response, job)

    setting = await start(held)
    answers = [asyncio.create_task(setting.answer()) for _ in range(3)]
    await setting.stats(lambda stats: stats["waited"] == 2)
    await setting.decodes[0].asked.wait()
    assert len(setting.decodes[0].jobs) == 1
    go_on.set()
    assert await asyncio.gather(*answers) == [complete("decode-0", attempts=1)] * 3


async def test_a_request_that_fits_into_no_decode_is_refused(start: Start) -> None:
    setting = await start(all_of_it)
    with pytest.raises(aiohttp.ClientResponseError, match="Bad Request") as caught:
        async with setting.asked(BLOCKS * model.BLOCK_TOKENS):
            pass
    assert caught.value.status == 400


async def test_a_request_is_not_answered_for_ever(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "REQUEST_SECONDS", 0.2)
    setting = await start(nothing)
    *_, last = await setting.answer()
    assert "not done within 0.2 s" in last["error"]
    await setting.decodes[0].hung_up.wait()


async def test_the_end_of_the_router_is_told_to_its_clients(start: Start) -> None:
    async with contextlib.AsyncExitStack() as stack:
        setting = await start(nothing)
        urls = {"decode-0": setting.decodes[0].url}
        routes = (await stack.enter_async_context(Router.open(setting.prefill.url, urls))).routes()
        own = contextlib.AsyncExitStack()
        setting.url = await own.enter_async_context(serving("127.0.0.1", 0, routes))
        async with setting.asked() as messages:
            await anext(messages)
            await own.aclose()
            with pytest.raises((StreamBroken, StopAsyncIteration)):
                await anext(messages)
