"""What managers ask a bootstrap directory."""

from __future__ import annotations

import asyncio
import logging
import weakref
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..handshake import format_address, parse_address
from .bootstrap import LONGEST_TTL, require_aiohttp

if TYPE_CHECKING:
    import aiohttp

__all__ = ["DirectoryClient"]

_logger = logging.getLogger(__name__)

_WAIT = 20.0
"""Seconds that a question stays open at the directory."""

_CONNECTIONS = 500
"""With the directory. Where more rooms are looked for, they take turns."""

_TURN = 1.0
"""Seconds that a question stays open then."""

_ANSWER = 5.0
"""Seconds beyond that in which it must answer."""

_PAUSE = 0.2
"""Seconds after which a directory that is not there is tried again."""

_LEAVE = 1.0
"""Seconds that a directory may take to forget a room; then its registration expires."""


class DirectoryClient:
    """One manager's view of a directory."""

    def __init__(self, address: str) -> None:
        """``address``: "host:port" or a URL. Raises ImportError as ``require_aiohttp`` does."""
        require_aiohttp()
        self._url = address.rstrip("/") if "://" in address else f"http://{address}"
        self._http: aiohttp.ClientSession | None = None
        self._finding = 0
        """Rooms that are looked for."""
        # By room: of two senders that follow each other the first leaves before the second comes.
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def open(self) -> None:
        """To be called on the event loop."""
        import aiohttp

        # Without the time of waiting for a connection.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER, sock_read=_WAIT + _ANSWER)
        connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
        self._http = aiohttp.ClientSession(timeout=timeout, connector=connector)

    async def close(self) -> None:
        """Nothing is asked any more."""
        if self._http is not None:
            await self._http.close()

    async def find(self, room: str) -> tuple[str, ...]:
        """The session ids of all prefill ranks of a room; waits for as long as it takes."""
        self._finding += 1
        try:
            return await self._find(room)
        finally:
            self._finding -= 1

    async def _find(self, room: str) -> tuple[str, ...]:
        while True:
            # Some connections are left for those that have something to announce.
            wait = _WAIT if self._finding < _CONNECTIONS * 0.9 else _TURN
            status, answer = await self._ask("GET", f"{_path(room)}?wait={wait:g}")
            if status == 200:
                try:
                    return tuple(_address(one) for one in answer["sessions"])
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    answer = f"{answer!r:.200} is not what a directory says: {error}"
            if status != 404 or not _has(answer, "missing"):
                _logger.warning("%s: room %r: %s", self._url, room, answer)
            await asyncio.sleep(_PAUSE)

    async def announce(self, room: str, rank: int, ranks: int, session: str, ttl: float) -> None:
        """Have decodes find this rank, until cancelled."""
        path = f"{_path(room)}/{rank}"
        ttl = min(ttl, LONGEST_TTL)
        turn = self._turns.setdefault(room, asyncio.Lock())
        async with turn:
            try:
                while True:
                    body = {"ranks": ranks, "session": session, "ttl": ttl}
                    status, answer = await self._ask("PUT", path, body)
                    if status != 204:
                        _logger.warning("%s does not take room %r: %s", self._url, room, answer)
                    await asyncio.sleep(_PAUSE if status != 204 else ttl / 3)
            finally:
                await self._leave(f"{path}?session={quote(session, '')}")

    async def _leave(self, path: str) -> None:
        try:
            await asyncio.wait_for(self._ask("DELETE", path), _LEAVE)
        except asyncio.TimeoutError:
            _logger.info("%s did not forget %s in time", self._url, path)

    async def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and answer; a directory that is not there is tried again."""
        import aiohttp
        import yarl

        assert self._http is not None
        url = yarl.URL(self._url + path, encoded=True)  # as it is: "." is a room like another
        while True:
            try:
                async with self._http.request(method, url, json=body) as response:
                    answer = None if response.status == 204 else await response.json()
                    return response.status, answer
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
                _logger.info("%s %s: %s", method, self._url, error)
            await asyncio.sleep(_PAUSE)


def _path(room: str) -> str:
    return "/rooms/" + quote(room, "")


def _address(session: Any) -> str:
    return format_address(*parse_address(session))


def _has(answer: Any, key: str) -> bool:
    return isinstance(answer, dict) and key in answer
