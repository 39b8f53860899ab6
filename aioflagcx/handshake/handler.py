"""What the owner of control connections implements, and what it is told."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Literal, Protocol

from .limits import Limits
from .messages import Message

if TYPE_CHECKING:
    from .connection import ControlConnection

__all__ = ["CloseReason", "Handler", "HandlerTasks"]


@dataclasses.dataclass(frozen=True)
class CloseReason:
    """Why a connection ended."""

    kind: Literal["local", "goodbye", "lost", "protocol", "handshake", "timeout", "unread"]
    """"local": closed here; "goodbye": closed by the peer on purpose; "lost": TCP ended;
    "protocol": broken bytes or an error of the whole connection; "handshake": version or
    authentication; "timeout": not authenticated in time; "unread": the peer does not read."""

    detail: str
    """More about it, for a human."""

    fenced: bool = False
    """The peer's goodbye said that none of our queue pairs can touch its memory any more."""

    def __str__(self) -> str:
        return self.detail


class Handler(Protocol):
    """What the owner of connections does with what arrives on them."""

    def connected(self, connection: ControlConnection) -> None:
        """Both sides have authenticated; called before any message of the peer is handled."""

    async def handle(self, connection: ControlConnection, message: Message) -> Message | None:
        """Answer a request with its reply, or take a push and return None.

        Runs as a task of its own, started in order of arrival: up to its first real wait it is
        ordered with the other messages. Runs on when the connection ends. It must not wait
        for a request on the same connection, since at ``max_handlers`` no reply is read.

        :class:`~aioflagcx.errors.HandshakeRejected` becomes an error reply "rejected",
        :class:`~aioflagcx.errors.ProtocolError` "protocol", anything else "internal" and a log
        record.
        """

    def disconnected(self, connection: ControlConnection, reason: CloseReason) -> None:
        """The connection has ended; called once, and only after ``connected``."""


class HandlerTasks:
    """The handlers of one connection that are running, bounded in number and in bytes."""

    def __init__(self, limits: Limits, resume: Callable[[], None]) -> None:
        self._limits = limits
        self._resume = resume
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def full(self) -> bool:
        """No other handler may start; ``resume`` will be called when one may."""
        return (
            len(self._tasks) >= self._limits.max_handlers
            or self._bytes >= self._limits.max_handled_bytes
        )

    def start(self, handler: Coroutine[object, object, None], size: int) -> None:
        """Run the handler of a frame of ``size`` bytes as a task."""
        task = asyncio.get_running_loop().create_task(handler)
        self._tasks.add(task)
        self._bytes += size

        def finished(task: asyncio.Task[None]) -> None:
            was_full = self.full
            self._tasks.discard(task)
            self._bytes -= size
            if was_full and not self.full:
                self._resume()

        task.add_done_callback(finished)

    async def settle(self) -> None:
        """Wait for all that run, at most ``close_grace`` seconds, then cancel them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._limits.close_grace)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
