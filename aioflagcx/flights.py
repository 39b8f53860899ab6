"""An engine's transfers under way: their ids, their deadlines, their end.

Results come from the native core by :meth:`Flights.landed` and :meth:`Flights.failed`. One timer
serves all deadlines: a call costs no timer of its own as long as its deadline is not the next.

Threads can post transfers past the event loop; these are in :attr:`Flights.direct` until they have
landed or the loop takes them over. All else here belongs to the loop's thread, except for single
operations on the dict, the counter and the two attributes that :class:`Direct` names: each is one
step of the interpreter, which the GIL makes atomic.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from ._native import TransferEvent
from .outcomes import Stop

if TYPE_CHECKING:
    from .link import Link
    from .transfer import Transfer

__all__ = ["Direct", "Flights"]

_NOW_TIME = 200e-6
"""Seconds from the first small transfer of a loop's turn, in which further ones are carried out in
the call; then they take the long way, which gives the loop its turn."""

_GRANULARITY = 0.01
"""Seconds between two looks at the deadlines, however many of them pass in between."""


_SWEEP_AT_LEAST = 64
"""Transfers in :attr:`Flights.direct` before anybody looks which of them have landed unseen."""


class Direct(Protocol):
    """A transfer that a thread posts by itself, past the event loop.

    The thread puts it into :attr:`Flights.direct`, looks whether :attr:`Flights.closed` is set,
    submits it, and has the loop :meth:`~Flights.arm` its deadline if :attr:`Flights.timer_at` is
    later. In this order, so that what the loop does to all of them misses none.
    """

    @property
    def _deadline(self) -> float:
        """In the loop's time."""

    @property
    def _link(self) -> Link | None:
        """What it is posted on, or is about to be."""

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""

    def _take_over(self) -> Transfer | None:
        """Have the loop see to the rest, on its thread.

        None: there is nothing to see to, as it has landed; or its thread has yet to submit it,
        which will be refused.
        """


class Flights:
    """The transfers that are not done."""

    __slots__ = (
        "_ids",
        "_now_until",
        "_sweep_at",
        "_timer",
        "active",
        "closed",
        "direct",
        "drain_timeout",
        "loop",
        "timer_at",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, drain_timeout: float) -> None:
        self.loop = loop
        self.drain_timeout = drain_timeout
        self.active: dict[int, Transfer] = {}
        self.direct: dict[int, Direct] = {}
        """Those that threads have posted; a few that have landed may still be among them."""
        self.closed = False
        """Whether the engine is closing; nothing new must be posted."""
        self.timer_at = math.inf
        """When the deadlines are looked at next, in the loop's time."""
        self._ids = itertools.count(1)
        self._sweep_at = _SWEEP_AT_LEAST
        self._timer: asyncio.TimerHandle | None = None
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

    def next_id(self) -> int:
        """A number for a transfer; from any thread."""
        return next(self._ids)

    def add(self, transfer: Transfer, deadline: float, number: int | None = None) -> int:
        """Take a transfer in, to be stopped at ``deadline``; returns its id, new if None."""
        if number is None:
            number = next(self._ids)
        self.active[number] = transfer
        if deadline < self.timer_at:
            self.arm(deadline)
        return number

    def add_direct(self, number: int, direct: Direct) -> None:
        """Take in what a thread is about to post; from any thread."""
        self.direct[number] = direct
        if len(self.direct) >= self._sweep_at:
            self._sweep_at = max(2 * len(self._unlanded()), _SWEEP_AT_LEAST)

    def _unlanded(self) -> list[Direct]:
        """Those in :attr:`direct` that are not done; the others are dropped."""
        for number in list(self.direct):
            direct = self.direct.get(number)
            if direct is not None and direct.done():
                self.direct.pop(number, None)
        return list(self.direct.values())

    def pending(self) -> int:
        """How many transfers are not done; from any thread."""
        return len(self.active) + len(self._unlanded())

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
        if transfer is None:
            direct = self.direct.get(event.id)
            transfer = None if direct is None else direct._take_over()
        if transfer is not None:
            transfer._failed(event)

    def arm(self, when: float) -> None:
        """Look at the deadlines at ``when``, in the loop's time, if not before."""
        if when < self.timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self.timer_at = when
            self._timer = self.loop.call_at(when, self._expire)

    def _expire(self) -> None:
        self._timer, self.timer_at = None, math.inf
        now = self.loop.time()
        for direct in self._unlanded():
            if direct._deadline <= now:
                direct._take_over()
        for transfer in list(self.active.values()):
            if transfer._deadline <= now:
                transfer._expired(now)
        deadlines = [transfer._deadline for transfer in self.active.values()]
        deadlines += [direct._deadline for direct in list(self.direct.values())]
        nearest = min(deadlines, default=math.inf)
        if nearest < math.inf:
            self.arm(max(nearest, now + _GRANULARITY))

    async def stop_all(self) -> None:
        """Stop every transfer, since the engine is closing, and wait until all is quiet."""
        self.closed = True
        for direct in list(self.direct.values()):
            direct._take_over()
        transfers = list(self.active.values())
        for transfer in transfers:
            transfer._halt(Stop.CLOSE)
        for transfer in transfers:
            await transfer._quiet()

    async def cancel_on(self, link: Link) -> None:
        """Cancel every transfer on ``link`` and wait until all is quiet."""
        for direct in list(self.direct.values()):
            if direct._link is link:
                direct._take_over()
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
        self.timer_at = math.inf
