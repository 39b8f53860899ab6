"""HTTP as these servers use it: JSON requests, and answers that are streams of JSON lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import aiohttp
from aiohttp import web

_SHUTDOWN_SECONDS = 0.01
"""For handlers to end by themselves; to aiohttp, 0 means no limit."""


class StreamBroken(Exception):
    """A server did not answer to the end: it is gone, cut off, or in trouble."""


class HungUp(ConnectionError):
    """Our client is gone, and nobody reads what we still say."""


@web.middleware
async def _ignore_hung_up(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except HungUp:
        return web.Response()


@contextlib.asynccontextmanager
async def serving(host: str, port: int, routes: Iterable[web.RouteDef]) -> AsyncIterator[str]:
    """Serve ``routes`` for the time of the ``async with`` block; the URL to reach them by.

    The handler of a request is cancelled when its client hangs up.
    """
    app = web.Application(middlewares=[_ignore_hung_up])
    app.add_routes(routes)
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound_host, bound_port, *_ = runner.addresses[0]
        yield f"http://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}"
    finally:
        await runner.cleanup()


def client(seconds: float) -> aiohttp.ClientSession:
    """For any number of requests at once, each of which takes at most ``seconds``."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=seconds),
    )


async def begin(request: web.Request) -> web.StreamResponse:
    """Begin to answer with a stream of JSON lines. Raises :class:`HungUp`."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    try:
        await response.prepare(request)
    except ConnectionError as error:
        raise HungUp(str(error)) from error
    return response


async def send(response: web.StreamResponse, message: dict[str, Any]) -> None:
    """Send one line; waits for a client that reads slowly. Raises :class:`HungUp`."""
    try:
        await response.write(json.dumps(message).encode() + b"\n")
    except ConnectionError as error:
        raise HungUp(str(error)) from error


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The lines of an answer as they come. Raises :class:`StreamBroken`."""
    try:
        async for line in response.content:
            yield json.loads(line)
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
        raise StreamBroken(f"{type(error).__name__}: {error}") from error
