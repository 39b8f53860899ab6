"""The initiator's questions whether an attempt's queue pairs can still touch the peer's memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from . import _native
from .errors import AioFlagcxError
from .handshake import ControlConnection
from .handshake.messages import Fence

__all__ = ["Fences"]

_logger = logging.getLogger(__name__)


class Fences:
    """Asks once for each attempt, however many want to know, and remembers the answer.

    A question has no timeout of its own: as long as the peer is alive it may still answer, and
    if it is not, the connection ends.
    """

    def __init__(self, connection: ControlConnection, native: _native.Session) -> None:
        self._connection = connection
        self._native = native
        self._confirmed: set[int] = set()
        self._asking: dict[int, asyncio.Task[None]] = {}

    async def confirm(self, attempts: Iterable[int], timeout: float | None) -> bool:
        """Whether the peer has fenced all ``attempts``, waiting at most ``timeout`` seconds.

        The questions go on when the time is over, so a later call may find them answered.
        """
        open_questions = [
            self._ask(attempt) for attempt in attempts if attempt not in self._confirmed
        ]
        if open_questions:
            await asyncio.wait(open_questions, timeout=timeout)
        return self._confirmed.issuperset(attempts)

    def _ask(self, attempt: int) -> asyncio.Task[None]:
        task = self._asking.get(attempt)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._request(attempt))
            self._asking[attempt] = task
            task.add_done_callback(lambda _: self._asking.pop(attempt))
        return task

    async def _request(self, attempt: int) -> None:
        try:
            reply = await self._connection.request(Fence(attempt=attempt), None)
        except AioFlagcxError as error:
            _logger.info("attempt %d was not fenced: %s", attempt, error)
            return
        if reply.attempt == attempt:
            self._confirmed.add(attempt)
            self._native.fenced(attempt)
