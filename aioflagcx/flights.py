"""An engine's transfers under way: their ids, their deadlines, their end.

Results come from the native core by :meth:`Flights.landed` and :meth:`Flights.failed`. One timer
serves all deadlines: a call costs no timer of its own as long as its deadline is not the next.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ._native import TransferEvent
from .outcomes import Stop

if TYPE_CHECKING:
    from .link import Link
    from .transfer import Transfer

__all__ = ["Flights"]

_NOW_TIME = 200e-6
"""Seconds from the first small transfer of a loop's turn, in which further ones are carried out in
the call; then they take the long way, which gives the loop its turn."""

_GRANULARITY = 0.01
"""Seconds between two looks at the deadlines, however many of them pass in between."""


class Flights:
    """The transfers that are not done."""

    __slots__ = ("_last_id", "_now_until", "_timer", "_timer_at", "active", "drain_timeout", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, drain_timeout: float) -> None:
        self.loop = loop
        self.drain_timeout = drain_timeout
        self.active: dict[int, Transfer] = {}
        self._last_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._now_until = 0.0  # 0: no small transfer in this turn yet

    def may_copy_now(self) -> bool:
        """Whether a small transfer may still be carried out in the call."""
        now = time.monotonic()
        if not self._now_until:
            self._now_until = now + _NOW_TIME
            self.loop.call_soon(self._next_turn)
        return now < self._now_until

    def _next_turn(self) -> None:
        self._now_until = 0.0

    def add(self, transfer: Transfer, deadline: float) -> int:
        """Take a transfer in, to be stopped at ``deadline``, and give it its id."""
        self._last_id = number = self._last_id + 1
        self.active[number] = transfer
        if deadline < self._timer_at:
            self.arm(deadline)
        return number

    def remove(self, number: int) -> None:
        """The transfer is done."""
        self.active.pop(number, None)

    def landed(self, numbers: Iterable[int]) -> None:
        """The native core is through with these, successfully."""
        active = self.active
        for number in numbers:
            transfer = active.get(number)
            if transfer is not None:
                transfer._landed()

    def failed(self, event: TransferEvent) -> None:
        """The native core is through with one, for another reason."""
        transfer = self.active.get(event.id)
        if transfer is not None:
            transfer._failed(event)

    def arm(self, when: float) -> None:
        """Look at the deadlines at ``when``, in the loop's time, if not before."""
        if when < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = when
            self._timer = self.loop.call_at(when, self._expire)

    def _expire(self) -> None:
        self._timer, self._timer_at = None, math.inf
        now = self.loop.time()
        for transfer in list(self.active.values()):
            if transfer._deadline <= now:
                transfer._expired(now)
        nearest = min((t._deadline for t in self.active.values()), default=math.inf)
        if nearest < math.inf:
            self.arm(max(nearest, now + _GRANULARITY))

    async def stop_all(self) -> None:
        """Stop every transfer, since the engine is closing, and wait until all is quiet."""
        transfers = list(self.active.values())
        for transfer in transfers:
            transfer._halt(Stop.CLOSE)
        for transfer in transfers:
            await transfer._quiet()

    async def cancel_on(self, link: Link) -> None:
        """Cancel every transfer on ``link`` and wait until all is quiet."""
        transfers = [t for t in self.active.values() if t._link is link]
        for transfer in transfers:
            transfer.cancel()
        for transfer in transfers:
            await transfer._quiet()

    def close(self) -> None:
        """No deadline will be looked at any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = math.inf
