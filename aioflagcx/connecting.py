"""One attempt to connect rails of a native session with the peer's: ask the peer, then connect."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from . import _native
from .errors import (
    ConnectError,
    ConnectRefused,
    ConnectTimeout,
    HostUnreachable,
    PeerLost,
    ProtocolError,
)
from .handshake import ControlConnection
from .handshake.fields import printable
from .handshake.messages import Connect, ConnectReply, Devices
from .remote_table import RemoteTable
from .runtime import Runtime

__all__ = ["Connecting"]

_KINDS: dict[int, type[ConnectError]] = {
    errno.ETIMEDOUT: ConnectTimeout,
    errno.ECONNREFUSED: ConnectRefused,
    errno.EHOSTUNREACH: HostUnreachable,
    errno.ENETUNREACH: HostUnreachable,
    errno.EPROTO: ProtocolError,
}


class Connecting:
    """What the attempts of one session have in common. Deadlines are in the loop's time."""

    def __init__(
        self,
        runtime: Runtime,
        connection: ControlConnection,
        native: _native.Session,
        table: RemoteTable,
    ) -> None:
        self._runtime = runtime
        self._connection = connection
        self._native = native
        self._table = table

    async def meet(self, deadline: float) -> None:
        """Have the native session make rails of our devices and the peer's. Comes first.

        Raises a :class:`~aioflagcx.errors.ConnectError`.
        """
        timeout = max(deadline - self._runtime.loop.time(), 0.0)
        try:
            reply = await self._connection.request(Devices(), timeout)
            self._native.meet([dict(device) for device in reply.devices])
        except PeerLost as error:
            raise self._closed(error) from error
        except ProtocolError as error:
            if error.cause != "error code unsupported":
                raise
            # A peer that does not know the question gives each device of ours one of its own.
        except _native.NativeError as error:
            peer = self._connection.peer
            raise ProtocolError(f"{peer}: {error.detail}", peer=peer, cause=error) from error

    async def ask(
        self, attempt: int, rails: Sequence[int], deadline: float
    ) -> tuple[ConnectReply | None, dict[int, list[_native.Attributes] | ConnectError]]:
        """The peer's reply, and for each rail its queue pairs or why there are none.

        The reply is None when none of our devices takes part. Raises a
        :class:`~aioflagcx.errors.ConnectError` that is about all of them.
        """
        peer, loop = self._connection.peer, self._runtime.loop
        offers: dict[int, list[_native.Attributes]] = {}
        answers: dict[int, list[_native.Attributes] | ConnectError] = {}
        for rail in rails:
            try:
                offers[rail] = await self._runtime.threads.run(self._native.prepare, attempt, rail)
            except _native.NativeError as error:
                answers[rail] = self._failure(rail, error)
        if not offers:
            return None, answers
        config = self._runtime.config
        request = Connect(
            attempt=attempt,
            rails=tuple(queue_pair for offer in offers.values() for queue_pair in offer),
            since=self._native.generation,
            keepalive_interval=config.keepalive_interval,
            keepalive_timeout=config.keepalive_timeout,
        )
        try:
            reply = await self._connection.request(request, max(deadline - loop.time(), 0.0))
        except PeerLost as error:
            raise self._closed(error) from error
        if reply.attempt != attempt or len(reply.rails) != len(request.rails):
            raise ProtocolError(
                f"{peer} answered attempt {attempt} of {len(request.rails)} queue pairs with "
                f"attempt {reply.attempt} of {len(reply.rails)}",
                peer=peer,
            )
        if reply.table:
            await self._table.replace(reply.generation, reply.table)
        elif reply.generation != request.since:
            raise ProtocolError(f"{peer} did not send its region table", peer=peer)
        theirs = iter(reply.rails)
        for rail, offer in offers.items():
            answers[rail] = [dict(next(theirs)) for _ in offer]
        return reply, answers

    async def establish(
        self, attempt: int, rail: int, theirs: list[_native.Attributes], deadline: float
    ) -> str:
        """Connect the rail with what the peer answered; the path that it takes."""
        left = deadline - self._runtime.loop.time()
        if left <= 0:
            peer = self._connection.peer
            raise ConnectTimeout(f"{peer} answered too late to connect to it", peer=peer)
        try:
            return await self._runtime.connecting.run(
                self._native.establish, attempt, rail, theirs, left
            )
        except _native.NativeError as error:
            raise self._failure(rail, error) from error

    def _failure(self, rail: int, error: _native.NativeError) -> ConnectError:
        peer = self._connection.peer
        if self._connection.is_closed:  # then the native session is gone, too, and knows no reason
            return self._closed(error)
        name = printable(self._native.rail_name(rail))
        kind = _KINDS.get(error.errno, ConnectError)
        return kind(
            f"the data path to {peer} by {name} could not be set up: "
            f"{error.call}: {printable(error.detail)}",
            peer=peer,
            rail=name,
            cause=error,
        )

    def _closed(self, cause: BaseException) -> ConnectError:
        peer = self._connection.peer
        return ConnectError(
            f"{peer} closed the connection during the handshake", peer=peer, cause=cause
        )
