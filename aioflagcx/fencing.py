"""The initiator's questions whether an epoch's queue pairs can still touch the peer's memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from . import _native
from .errors import AioFlagcxError
from .handshake import ControlConnection
from .handshake.messages import Fence

__all__ = ["Fences"]

_logger = logging.getLogger(__name__)


class Fences:
    """Asks once for each epoch, however many want to know, and remembers the answer.

    A question has no timeout of its own: as long as the peer is alive it may still answer, and
    if it is not, the connection ends. A peer that ends it on purpose has fenced all before, and
    its goodbye says so.
    """

    def __init__(self, connection: ControlConnection, native: _native.Session) -> None:
        self._connection = connection
        self._native = native
        # By rail, the latest attempt that is fenced. Those before it are as well: a rail is
        # connected anew only when its last epoch has been fenced.
        self._confirmed: dict[int, int] = {}
        self._asking: dict[_native.Epoch, asyncio.Task[None]] = {}

    async def confirm(self, epochs: Sequence[_native.Epoch], timeout: float | None) -> bool:
        """Whether the peer has fenced all ``epochs``, waiting at most ``timeout`` seconds.

        The questions go on when the time is over, so a later call may find them answered.
        """
        open_questions = [self._ask(epoch) for epoch in epochs if not self._is_confirmed(epoch)]
        if open_questions:
            await asyncio.wait(open_questions, timeout=timeout)
        return self._connection.is_fenced or all(map(self._is_confirmed, epochs))

    def _is_confirmed(self, epoch: _native.Epoch) -> bool:
        return epoch.attempt <= self._confirmed.get(epoch.rail, 0)

    def _ask(self, epoch: _native.Epoch) -> asyncio.Task[None]:
        task = self._asking.get(epoch)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._request(epoch))
            self._asking[epoch] = task
            task.add_done_callback(lambda _: self._asking.pop(epoch))
        return task

    async def _request(self, epoch: _native.Epoch) -> None:
        try:
            request = Fence(attempt=epoch.attempt, rail=epoch.rail)
            reply = await self._connection.request(request, None)
        except AioFlagcxError as error:
            _logger.info(
                "attempt %d of rail %d was not fenced: %s", epoch.attempt, epoch.rail, error
            )
            return
        if (reply.attempt, reply.rail) == epoch:
            self._confirmed[epoch.rail] = max(epoch.attempt, self._confirmed.get(epoch.rail, 0))
            self._native.fenced(epoch.attempt, epoch.rail)
