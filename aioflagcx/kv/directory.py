"""What managers ask a bootstrap directory."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .bootstrap import LONGEST_TTL, require_aiohttp

if TYPE_CHECKING:
    import aiohttp

__all__ = ["DirectoryClient"]

_logger = logging.getLogger(__name__)

_WAIT = 20.0
"""Seconds that a question stays open at the directory."""

_ANSWER = 5.0
"""Seconds beyond that in which it must answer."""

_PAUSE = 0.2
"""Seconds after which a directory that is not there is tried again."""


class DirectoryClient:
    """One manager's view of a directory."""

    def __init__(self, address: str) -> None:
        """``address``: "host:port" or a URL. Raises ImportError as ``require_aiohttp`` does."""
        require_aiohttp()
        self._url = address.rstrip("/") if "://" in address else f"http://{address}"
        self._http: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """To be called on the event loop."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=_WAIT + _ANSWER)
        self._http = aiohttp.ClientSession(timeout=timeout)

    async def close(self) -> None:
        """Nothing is asked any more."""
        if self._http is not None:
            await self._http.close()

    async def find(self, room: str) -> tuple[str, ...]:
        """The session ids of all prefill ranks of a room; waits for as long as it takes."""
        while True:
            status, answer = await self._ask("GET", f"/rooms/{quote(room, '')}?wait={_WAIT:g}")
            if status == 200:
                return tuple(map(str, answer["sessions"]))
            if status != 404:
                _logger.warning("%s: room %r: %s", self._url, room, answer)
                await asyncio.sleep(_PAUSE)

    async def announce(self, room: str, rank: int, ranks: int, session: str, ttl: float) -> None:
        """Have decodes find this rank, until cancelled."""
        path = f"/rooms/{quote(room, '')}/{rank}"
        ttl = min(ttl, LONGEST_TTL)
        try:
            while True:
                body = {"ranks": ranks, "session": session, "ttl": ttl}
                status, answer = await self._ask("PUT", path, body)
                if status != 204:
                    _logger.warning("%s does not take room %r: %s", self._url, room, answer)
                await asyncio.sleep(_PAUSE if status != 204 else ttl / 3)
        finally:
            await self._ask("DELETE", f"{path}?session={quote(session, '')}", tries=1)

    async def _ask(
        self, method: str, path: str, body: Any = None, *, tries: int | None = None
    ) -> tuple[int, Any]:
        """Status and answer; a directory that is not there is tried again."""
        import aiohttp

        assert self._http is not None
        while True:
            try:
                async with self._http.request(method, self._url + path, json=body) as response:
                    answer = None if response.status == 204 else await response.json()
                    return response.status, answer
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
                _logger.debug("%s %s: %s", method, self._url, error)
                if tries is not None and (tries := tries - 1) <= 0:
                    return 0, None
                trouble = error
            _logger.info("%s does not answer: %s", self._url, trouble)
            await asyncio.sleep(_PAUSE)
