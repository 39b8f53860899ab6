"""Waiting for notifications on threads."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import EngineClosed
from ..notifications import Notification, NotificationQueue
from .loop_thread import Call, LoopThread, patience

__all__ = ["Notifications"]


class Notifications:
    """An iterator over what peers' applications send; made by :meth:`Engine.notifications`.

    Any number of threads may use one, or several: each notification goes to one of them. Iteration
    ends when the engine is closed and what was queued has been taken.
    """

    def __init__(self, queue: NotificationQueue, loop: LoopThread | None) -> None:
        self._queue = queue
        self._loop = loop
        self._ended = queue.closed

    def __iter__(self) -> Iterator[Notification]:
        return self

    def __next__(self) -> Notification:
        try:
            return self.get()
        except EngineClosed:
            raise StopIteration from None

    def get(self, timeout: float | None = None) -> Notification:
        """The next one, waiting for it at most ``timeout`` seconds.

        0 only looks, None: no limit. Raises TimeoutError when there is none by then, and
        :class:`~aioflagcx.errors.EngineClosed` where iteration ends.
        """
        limit = patience(timeout)
        item = None if self._ended else self._next(limit)
        if item is None:
            self._ended = True
            raise EngineClosed("the engine is closed: there will be no more notifications")
        return item

    def get_all(self) -> list[Notification]:
        """Those that are queued, without waiting for more; none when iteration has ended."""
        queue, loop = self._queue, self._loop
        if self._ended or loop is None:
            return []

        async def take_all() -> list[Notification]:
            items = []
            while len(queue):
                item = await queue.take()  # does not suspend
                assert item is not None
                items.append(item)
            return items

        def give_back(items: list[Notification]) -> None:
            for item in reversed(items):
                queue.give_back(item)

        try:
            return loop.run(take_all, give_back)
        except EngineClosed:
            rest = iter(queue.take_rest, None)
            return list(rest)

    def _next(self, limit: float | None) -> Notification | None:
        """The next one; None when the queue is closed and empty."""
        queue, loop = self._queue, self._loop
        assert loop is not None  # for a queue that is not closed
        loop.check_caller()
        call = Call(loop, queue.take)
        try:
            try:
                call.begin()
                if not call.waiter.wait(limit):
                    call.stop()
                    if not call.has_result():
                        raise TimeoutError(f"no notification came within {limit} s")
                return call.result()
            except BaseException:
                call.stop()
                raise
        except EngineClosed:
            return queue.take_rest()
        except BaseException:
            call.abandon(self._give_back)  # stops it, too: another signal may have come on the way
            raise
        finally:
            del call

    def _give_back(self, item: Notification | None) -> None:
        if item is not None:
            self._queue.give_back(item)
