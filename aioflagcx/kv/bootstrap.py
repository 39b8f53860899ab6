"""A directory of rooms: which prefill ranks send a room's cache, and where they are.

For decode servers that are told a room but not who its prefill is. Prefill ranks register the rooms
for which they wait, with a time to live, and renew that as long as they wait.

    PUT    /rooms/ROOM/RANK   {"ranks": N, "session": "host:port", "ttl": SECONDS}
    DELETE /rooms/ROOM/RANK?session=host:port
    GET    /rooms/ROOM?wait=SECONDS
        {"sessions": [...]} of all ranks in order, as soon as all have registered; 404 with
        {"missing": [ranks]} when that has not come about within the wait
    GET    /health            {"rooms": N}

It needs aiohttp: ``pip install "aioflagcx[kv]"``. It trusts whoever reaches its port, so it belongs
into the network of the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..handshake import format_address, parse_address
from .messages import MAX_RANKS, MAX_ROOM

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["Directory", "add_command", "app", "require_aiohttp", "serve"]

DEFAULT_PORT = 8998

LONGEST_TTL = 86_400.0
"""Seconds."""

LONGEST_WAIT = 60.0
"""Seconds that a question may stay open."""

MOST_ROOMS = 1_000_000
"""More are refused: a prefill that never stops registering must not take all memory."""


def require_aiohttp() -> None:
    """Raise ImportError, saying what to install, unless aiohttp is there."""
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise ImportError(
            'the bootstrap directory needs aiohttp: pip install "aioflagcx[kv]"'
        ) from error


class _Room:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.sessions: dict[int, tuple[str, float]] = {}
        """By rank, where it is and until when that holds."""


class Directory:
    """What is registered. No I/O; belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rooms: dict[str, _Room] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._swept = clock()
        self._closed = False

    def __len__(self) -> int:
        self._sweep(0.0)
        return len(self._rooms)

    def register(self, room: str, rank: int, ranks: int, session: str, ttl: float) -> None:
        """A prefill rank waits for ``room``; forgotten after ``ttl`` seconds unless repeated.

        A room that is registered with another number of ranks begins anew. ValueError for values
        that cannot be, OverflowError when the directory is full.
        """
        if not 0 < len(room.encode()) <= MAX_ROOM:
            raise ValueError(f"a room's name has 1 to {MAX_ROOM} bytes")
        if not 0 <= rank < ranks <= MAX_RANKS:
            raise ValueError(f"rank {rank} of {ranks} ranks")
        if not 0 < ttl <= LONGEST_TTL:
            raise ValueError(f"ttl = {ttl} is not in 0 to {LONGEST_TTL:g} seconds")
        session = format_address(*parse_address(session))
        self._sweep(1.0)
        entry = self._rooms.get(room)
        if entry is None or entry.ranks != ranks:
            if entry is None and len(self._rooms) >= MOST_ROOMS:
                raise OverflowError(f"{MOST_ROOMS} rooms are registered")
            entry = self._rooms[room] = _Room(ranks)
        entry.sessions[rank] = session, self._clock() + ttl
        for waiter in self._waiting.get(room, ()):
            if not waiter.done():
                waiter.set_result(None)

    def remove(self, room: str, rank: int, session: str) -> None:
        """It waits no more. Nothing happens when somebody else has taken its place."""
        entry = self._rooms.get(room)
        if entry is None or entry.sessions.get(rank, ("", 0.0))[0] != session:
            return
        del entry.sessions[rank]
        if not entry.sessions:
            del self._rooms[room]

    def find(self, room: str) -> tuple[list[str], list[int]]:
        """The sessions of all ranks in order, or none of them; the ranks that are missing."""
        entry = self._rooms.get(room)
        if entry is None:
            return [], [0]
        now = self._clock()
        valid = {rank: name for rank, (name, until) in entry.sessions.items() if until > now}
        missing = [rank for rank in range(entry.ranks) if rank not in valid]
        return ([] if missing else [valid[rank] for rank in range(entry.ranks)]), missing

    async def wait(self, room: str, seconds: float) -> tuple[list[str], list[int]]:
        """:meth:`find`, waiting at most so long for all ranks. ValueError for no number."""
        if math.isnan(seconds):
            raise ValueError("wait must be a number of seconds")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        waiting = self._waiting.setdefault(room, set())
        try:
            while True:
                found = self.find(room)
                left = deadline - loop.time()
                if not found[1] or left <= 0 or self._closed:
                    return found
                waiter = loop.create_future()
                waiting.add(waiter)
                try:
                    await asyncio.wait((waiter,), timeout=left)
                finally:
                    waiting.discard(waiter)
        finally:
            if not waiting and self._waiting.get(room) is waiting:
                del self._waiting[room]

    def close(self) -> None:
        """Who waits gets the answer of this moment, and who comes later, too."""
        self._closed = True
        for waiter in (one for waiting in self._waiting.values() for one in waiting):
            if not waiter.done():
                waiter.set_result(None)

    def _sweep(self, interval: float) -> None:
        """Forget what has expired, unless that was done a moment ago."""
        now = self._clock()
        if now - self._swept < interval:
            return
        self._swept = now
        for room, entry in list(self._rooms.items()):
            for rank, (_, until) in list(entry.sessions.items()):
                if until <= now:
                    del entry.sessions[rank]
            if not entry.sessions:
                del self._rooms[room]


def app(directory: Directory | None = None) -> web.Application:
    """The directory as an application for :func:`aiohttp.web.run_app`, or part of another one.

    Raises ImportError, saying what to install, without aiohttp.
    """
    require_aiohttp()
    from aiohttp import web

    known = Directory() if directory is None else directory

    async def put(request: web.Request) -> web.Response:
        try:
            body = await request.json()
            ranks, session, ttl = body["ranks"], body["session"], body["ttl"]
            if type(ranks) is not int or type(ttl) not in (int, float):
                raise ValueError("ranks must be an integer, ttl a number")
            rank = int(request.match_info["rank"])
            known.register(request.match_info["room"], rank, ranks, session, ttl)
        except OverflowError as error:
            return problem(503, str(error))
        except KeyError as error:
            return problem(400, f"{error} is missing")
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            return problem(400, f"{type(error).__name__}: {error}")
        return web.Response(status=204)

    async def delete(request: web.Request) -> web.Response:
        rank = int(request.match_info["rank"])
        known.remove(request.match_info["room"], rank, request.query.get("session", ""))
        return web.Response(status=204)

    async def get(request: web.Request) -> web.Response:
        room = request.match_info["room"]
        try:
            seconds = float(request.query.get("wait", "0"))
            sessions, missing = await known.wait(room, min(seconds, LONGEST_WAIT))
        except ValueError:
            return problem(400, "wait must be a number of seconds")
        if missing:
            return web.json_response({"missing": missing}, status=404)
        return web.json_response({"sessions": sessions})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"rooms": len(known)})

    def problem(status: int, words: str) -> web.Response:
        return web.json_response({"error": words}, status=status)

    async def shut_down(_: web.Application) -> None:
        known.close()

    application = web.Application(client_max_size=4096)
    application.on_shutdown.append(shut_down)
    application.add_routes(
        [
            web.put(r"/rooms/{room}/{rank:\d{1,9}}", put),
            web.delete(r"/rooms/{room}/{rank:\d{1,9}}", delete),
            web.get("/rooms/{room}", get),
            web.get("/health", health),
        ]
    )
    return application


async def serve(host: str, port: int, ready: Callable[[str], object]) -> None:
    """Answer until SIGINT or SIGTERM; ``ready`` is called with the address once it listens."""
    require_aiohttp()
    from aiohttp import web

    runner = web.AppRunner(app(), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound = runner.addresses[0]
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        ready(format_address(bound[0], bound[1]))
        await stopped.wait()
    finally:
        await runner.cleanup()


def add_command(commands: Any) -> None:
    """``aioflagcx bootstrap``, for the parser of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bootstrap",
        help="a directory of rooms for aioflagcx.kv",
        description="Tells decode servers which prefill ranks have a room and where they are. "
        "Prints its address when it is ready.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="0 takes a free one; default: %(default)s"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    def ready(address: str) -> None:
        print(json.dumps({"address": address}), flush=True)

    try:
        asyncio.run(serve(options.host, options.port, ready))
    except (ImportError, OSError) as error:
        print(f"aioflagcx bootstrap: {error}", file=sys.stderr)
        return 1
    return 0
