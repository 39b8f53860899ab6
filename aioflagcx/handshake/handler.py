"""What the owner of control connections implements, and what it is told."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, Protocol

from .messages import Message

if TYPE_CHECKING:
    from .connection import ControlConnection

__all__ = ["CloseReason", "Handler"]


@dataclasses.dataclass(frozen=True)
class CloseReason:
    """Why a connection ended."""

    kind: Literal["local", "goodbye", "lost", "protocol", "handshake", "timeout", "unread"]
    """"local": closed here; "goodbye": closed by the peer on purpose; "lost": TCP ended;
    "protocol": broken bytes or an error of the whole connection; "handshake": version or
    authentication; "timeout": not authenticated in time; "unread": the peer does not read."""

    detail: str
    """More about it, for a human."""

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
