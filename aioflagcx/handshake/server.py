"""The responder's end: accepts connections, and keeps strangers cheap."""

from __future__ import annotations

import asyncio
import logging
import socket

from ..errors import ConfigError
from .addresses import format_address
from .authentication import Identity, Responder
from .connection import ControlConnection
from .handler import CloseReason, Handler
from .limits import Limits
from .resolving import resolve

__all__ = ["HandshakeServer"]

logger = logging.getLogger("aioflagcx.handshake")


class HandshakeServer:
    """Listens at one address; ``handler`` gets every connection that authenticates.

    ``port`` 0 takes a free one. Whatever a connection sends costs at most that connection.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        identity: Identity,
        secret: str | None,
        limits: Limits,
        handler: Handler,
    ) -> None:
        self._host = host
        self._port = port
        self._secret = secret
        self._limits = limits
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._stopped = False
        self._connections: set[ControlConnection] = set()
        # In order of arrival, with the timer of each one's deadline.
        self._unauthenticated: dict[ControlConnection, asyncio.TimerHandle] = {}
        self.identity = identity
        """Who answers; may be replaced between :meth:`bind` and :meth:`start`."""

    @property
    def port(self) -> int:
        """The TCP port, known once bound."""
        return self._port

    @property
    def connections(self) -> frozenset[ControlConnection]:
        """All connections there are, authenticated or not."""
        return frozenset(self._connections)

    async def bind(self) -> None:
        """Take the port without listening yet.

        Raises :class:`~aioflagcx.errors.ConfigError` when the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        try:
            # One address only: with port 0, each of several would get a port of its own.
            family, address = (await resolve(self._host, self._port, flags=socket.AI_PASSIVE))[0]
            listener = _bound_socket(family, address, self._port)
            try:
                self._server = await loop.create_server(
                    self._new_connection, sock=listener, backlog=1024, start_serving=False
                )
            except BaseException:
                listener.close()
                raise
        except (OSError, UnicodeError) as error:
            where = format_address(self._host, self._port)
            raise ConfigError(
                f"cannot listen on {where}: correct host or port of the engine", cause=error
            ) from error
        self._port = self._server.sockets[0].getsockname()[1]

    async def start(self) -> None:
        """Listen, after :meth:`bind` if that was not called before."""
        if self._server is None:
            await self.bind()
        assert self._server is not None
        await self._server.start_serving()

    def stop(self) -> None:
        """Stop listening; the connections there are go on."""
        self._stopped = True
        if self._server is not None:
            self._server.close()

    async def close(self, reason: str = "engine closed") -> None:
        """Stop listening, say goodbye on every connection and wait for their end."""
        self.stop()
        if self._server is None:
            return
        server, self._server = self._server, None
        connections = list(self._connections)
        for connection in connections:
            connection.close(reason)
        await asyncio.gather(*(connection.wait_closed() for connection in connections))
        await server.wait_closed()

    def _new_connection(self) -> ControlConnection:
        loop = asyncio.get_running_loop()
        responder = Responder(self.identity, self._secret)
        connection = ControlConnection(responder, self._handler, self._limits)
        self._connections.add(connection)
        deadline = self._limits.authentication_timeout
        self._unauthenticated[connection] = loop.call_later(
            deadline,
            connection.abort,
            CloseReason("timeout", f"not authenticated within {deadline:g} s"),
        )
        connection.established.add_done_callback(lambda _: self._decided(connection))
        connection.closed.add_done_callback(lambda _: self._ended(connection))
        if self._stopped:  # accepted just before the listener was closed
            connection.abort(CloseReason("local", "closed here: the server is closing"))
        if len(self._unauthenticated) > self._limits.max_unauthenticated:
            oldest = next(iter(self._unauthenticated))
            self._decided(oldest)
            oldest.abort(CloseReason("timeout", "not authenticated while too many others wait"))
        return connection

    def _decided(self, connection: ControlConnection) -> None:
        """The connection has authenticated, or never will."""
        deadline = self._unauthenticated.pop(connection, None)
        if deadline is not None:
            deadline.cancel()

    def _ended(self, connection: ControlConnection) -> None:
        self._connections.discard(connection)
        reason = connection.closed.result()
        if connection.established.exception() is not None or reason.kind in ("protocol", "unread"):
            logger.info("%s: connection ended: %s", connection.peer, reason)


def _bound_socket(family: int, address: str, port: int) -> socket.socket:
    """As the loop's create_server() would make it, which resolves numeric addresses, too."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
    except BaseException:
        listener.close()
        raise
    return listener
