"""Application messages between engines: one on its way, and those waiting to be consumed."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import AsyncIterator, Callable

from .config import Config
from .handshake.fields import MAX_NAME

__all__ = ["Notification", "NotificationQueue", "Outgoing"]

Route = Callable[["Notification"], str | None]
"""Takes a notification at once; says why it refuses it, or None."""

RESERVED = "aioflagcx."
"""What the names begin with of notifications that are for this library's own upper layers."""

_TURN = 32
"""Notifications one iterator takes without suspending, before it lets others run: a full queue
must not keep the event loop busy for as long as it takes to empty it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Notification:
    """A message from a peer's application."""

    name: str
    """What it is about, at most 1 MiB in UTF-8."""

    payload: bytes = dataclasses.field(repr=False)
    """Its content."""

    engine_id: str
    """The sending engine's id."""

    session_id: str
    """Where the sending engine can be reached: "host:port"."""


class Outgoing:
    """A notification on its way to a peer."""

    __slots__ = ("imm", "imm_count", "name", "payload")

    def __init__(self, name: str, payload: bytes) -> None:
        self.name = name
        self.payload = payload
        self.imm = 0
        """The immediate that the data before it ends with; 0: there is no data before it."""
        self.imm_count = 0
        """How many such immediates were sent."""

    @classmethod
    def from_pair(cls, notify: object, config: Config) -> Outgoing:
        """From a write's ``notify``; see :meth:`checked`."""
        if not isinstance(notify, tuple | list) or len(notify) != 2:
            raise TypeError("notify must be (name, payload), a str and bytes")
        name, payload = notify
        return cls.checked(name, payload, config)

    @classmethod
    def checked(cls, name: object, payload: object, config: Config) -> Outgoing:
        """From a caller's arguments; TypeError and ValueError say what is wrong with them."""
        if not isinstance(name, str):
            raise TypeError(f"a notification's name must be str, not {type(name).__name__}")
        if not isinstance(payload, bytes | bytearray | memoryview):
            raise TypeError(f"a notification's payload must be bytes, not {type(payload).__name__}")
        if len(name.encode()) > MAX_NAME:
            raise ValueError(f"a notification's name has at most {MAX_NAME} bytes in UTF-8")
        payload = bytes(payload)
        if len(payload) > config.notification_max_payload:
            raise ValueError(
                f"a notification's payload has at most {config.notification_max_payload} bytes "
                f"(notification_max_payload), not {len(payload)}"
            )
        return cls(name, payload)


class NotificationQueue:
    """Notifications waiting to be consumed, bounded in number and bytes.

    Each goes to one of the iterators. After :meth:`close` the iterators that are there get what
    is queued and end; later ones end at once.
    """

    def __init__(self, config: Config) -> None:
        self._max_length = config.notification_queue_length
        self._max_bytes = config.notification_queue_bytes
        self._items: collections.deque[Notification] = collections.deque()
        self._waiters: collections.deque[asyncio.Future[None]] = collections.deque()
        self._closed = False
        self._routes: dict[str, Route] = {}
        self.bytes = 0
        """Bytes of names and payloads in the queue."""
        self.received = 0
        """Notifications that were put in, ever."""
        self.refused = 0
        """Notifications for which there was no room, ever."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def closed(self) -> bool:
        """Whether iteration has ended, or will with what is queued."""
        return self._closed

    def route(self, name: str, take: Route) -> None:
        """Notifications of this name go to ``take`` instead of into the queue.

        ValueError when they have a taker already, or the name is not one that begins as
        ``RESERVED``: those are the application's.
        """
        if not name.startswith(RESERVED):
            raise ValueError(f"the name {name!r} does not begin with {RESERVED!r}")
        if name in self._routes:
            raise ValueError(f"notifications named {name!r} have a taker already")
        self._routes[name] = take

    def unroute(self, name: str) -> None:
        """Whoever took them does so no more."""
        del self._routes[name]

    def deliver(self, notification: Notification) -> str | None:
        """Hand it to its taker, or put it into the queue; why it is refused, or None.

        A reserved name without a taker is refused, as the application would not know it: its
        taker may come yet, and the sender try again.
        """
        name = notification.name
        if name.startswith(RESERVED):
            take = self._routes.get(name)
            return f"nobody takes {name!r} here" if take is None else take(notification)
        return None if self.put(notification) else "the notification queue is full"

    def put(self, notification: Notification) -> bool:
        """Add one; False when there is no room for it, or the queue is closed."""
        size = _size(notification)
        if (
            self._closed
            or len(self._items) >= self._max_length
            or self.bytes + size > self._max_bytes
        ):
            self.refused += 1
            return False
        self._items.append(notification)
        self.bytes += size
        self.received += 1
        self._wake_one()
        return True

    def give_back(self, notification: Notification) -> None:
        """It was taken for someone who is not there any more: it is the next one again."""
        self._items.appendleft(notification)
        self.bytes += _size(notification)
        self._wake_one()

    def take_rest(self) -> Notification | None:
        """The next one or None, without waiting; on any thread once the loop has ended."""
        try:
            return self._items.popleft()
        except IndexError:
            return None

    def close(self) -> None:
        """End the iterators once they have taken what is queued."""
        self._closed = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def iterate(self) -> AsyncIterator[Notification]:
        """A new iterator."""
        return _Iterator(self, ended=self._closed)

    async def take(self) -> Notification | None:
        """The next one, waiting for it; None when the queue is closed and empty."""
        while not self._items:
            if self._closed:
                return None
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                # Woken for an item and cancelled at once: the item is for someone else.
                if waiter.done() and not waiter.cancelled():
                    self._wake_one()
                raise
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        item = self._items.popleft()
        self.bytes -= _size(item)
        return item

    def _wake_one(self) -> None:
        while self._waiters and self._items:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


class _Iterator:
    def __init__(self, queue: NotificationQueue, ended: bool) -> None:
        self._queue = queue
        self._ended = ended
        self._turn = _TURN

    def __aiter__(self) -> _Iterator:
        return self

    async def __anext__(self) -> Notification:
        if self._turn == 0:
            self._turn = _TURN
            await asyncio.sleep(0)
        self._turn -= 1
        item = None if self._ended else await self._queue.take()
        if item is None:
            self._ended = True
            raise StopAsyncIteration
        return item


def _size(notification: Notification) -> int:
    return len(notification.name.encode()) + len(notification.payload)
